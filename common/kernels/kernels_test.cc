// Every path against F64 references, and the rule that a sum's order depends on K and the path alone, bit for bit.
// Buffers end before an unmapped page (GuardedArray), so a tail that reads too far crashes here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>

#include "common/kernels/cpu_features.h"
#include "common/kernels/kernels.h"
#include "common/kernels/kernels_cases.h"

namespace hearth {

void PrintTo(Isa isa, std::ostream* out) { *out << IsaName(isa); }

namespace {

using ::testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kEpsilon = 0x1p-23;

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

// A form of the product: `linear` with so many terms a token, or `gemm`.   x [m_count, terms, cols]
struct Product {
  const KernelTable* kernels;
  bool prefill;
  int terms;
  void operator()(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t begin, int64_t end) const {
    if (prefill) return kernels->gemm(w, x, ldx, m_count, y, ldy, begin, end);
    kernels->linear(w, x, ldx, m_count, terms, y, ldy, begin, end);
  }
};

// Runs once per path; those that this CPU lacks are skipped by name.
class KernelsTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    const std::vector<Isa> isas = SupportedIsas(Numerics::kFast);
    if (std::find(isas.begin(), isas.end(), GetParam()) == isas.end()) {
      GTEST_SKIP() << "this CPU (or its OS) cannot run path " << IsaName(GetParam());
    }
  }
  const KernelTable& k() const { return Kernels(GetParam()); }
  bool FlushesSubnormals() const { return GetParam() >= Isa::kAvx512Bf16; }
  std::vector<Product> Forms() const { return {{&k(), false, 1}, {&k(), false, 2}, {&k(), true, 1}}; }
  // All forms of the product, over every dtype.
  std::vector<std::pair<Product, DType>> Products() const {
    std::vector<std::pair<Product, DType>> products;
    for (const Product& product : Forms()) {
      for (DType dtype : kAllDTypes) products.emplace_back(product, dtype);
    }
    return products;
  }
  std::mt19937 rng_{20240229};
};

INSTANTIATE_TEST_SUITE_P(Paths, KernelsTest, testing::Values(Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx),
                         [](const auto& info) { return std::string(IsaName(info.param)); });

// The room for rounding in a sum of n products whose magnitudes add up to `magnitude`: errors of random sign grow like
// sqrt(n).
double SumTolerance(int64_t n, double magnitude) { return kEpsilon * (4 + 2 * std::sqrt(static_cast<double>(n))) * magnitude; }

// ---- conversions and elementwise ----

TEST_P(KernelsTest, ToBf16IsBitEqualForEveryKindOfValue) {
  // Every upper half (all signs, exponents, NaNs, subnormals) with lower halves below, at and above the tie.
  for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    std::vector<float> src(65536);
    for (uint32_t high = 0; high < 65536; ++high) {
      const uint32_t bits = (high << 16) | low;
      std::memcpy(&src[high], &bits, sizeof(bits));
    }
    std::vector<bf16> dst(src.size());
    k().to_bf16(src.data(), dst.data(), static_cast<int64_t>(src.size()));
    for (size_t i = 0; i < src.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &src[i], sizeof(bits));
      ASSERT_EQ(dst[i].bits, ToBf16(std::bit_cast<float>(bits)).bits) << std::hex << bits;
    }
  }
}

TEST_P(KernelsTest, ToBf16TailsOfEveryLength) {
  for (int64_t n = 0; n <= 70; ++n) {
    GuardedArray<float> src(n);
    FillGaussian(rng_, {src.data(), static_cast<size_t>(n)});
    GuardedArray<bf16> dst(n);
    k().to_bf16(src.data(), dst.data(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(dst[i], ToBf16(src[i])) << n << " " << i;
  }
}

// Neighbours in BF16 count as one apart.
int Bf16Distance(bf16 a, bf16 b) {
  const auto order = [](bf16 x) { return (x.bits & 0x8000) ? -static_cast<int>(x.bits & 0x7fff) : static_cast<int>(x.bits); };
  return std::abs(order(a) - order(b));
}

TEST_P(KernelsTest, RmsNorm) {
  for (int64_t n : {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 1000, 7168}) {
    GuardedArray<float> x(n), weight(n);
    FillGaussian(rng_, {x.data(), static_cast<size_t>(n)}, 3.0f);
    FillGaussian(rng_, {weight.data(), static_cast<size_t>(n)});
    GuardedArray<bf16> out(n);
    k().rms_norm(x.data(), weight.data(), 1e-6f, out.data(), n);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    const double inverse = 1 / std::sqrt(sum / static_cast<double>(n) + 1e-6);
    for (int64_t i = 0; i < n; ++i) {
      const bf16 want = ToBf16(static_cast<float>(x[i] * inverse * weight[i]));
      ASSERT_LE(Bf16Distance(out[i], want), 1) << "n " << n << " i " << i;
    }
  }
}

TEST_P(KernelsTest, RmsNormOfZerosIsZero) {
  GuardedArray<float> x(37), weight(37, 1.0f);
  GuardedArray<bf16> out(37, bf16{1});
  k().rms_norm(x.data(), weight.data(), 1e-6f, out.data(), 37);
  for (int64_t i = 0; i < 37; ++i) EXPECT_EQ(out[i].bits, 0);
}

TEST_P(KernelsTest, SiluMul) {
  for (int64_t n : {0, 1, 5, 8, 9, 16, 17, 40, 2048}) {
    GuardedArray<float> gate(n), up(n);
    FillGaussian(rng_, {gate.data(), static_cast<size_t>(n)}, 20.0f);
    FillGaussian(rng_, {up.data(), static_cast<size_t>(n)});
    GuardedArray<bf16> out(n);
    k().silu_mul(gate.data(), up.data(), out.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const double g = gate[i];
      const float want = static_cast<float>(g / (1 + std::exp(-g)) * up[i]);
      // Where exp(-g) passes F32's range the quotient is 0 instead of a number below 1e-37.
      if (std::fabs(want) < 1e-36f) {
        ASSERT_LE(std::fabs(ToFloat(out[i])), 1e-36f);
      } else {
        ASSERT_LE(Bf16Distance(out[i], ToBf16(want)), 1) << g << " " << up[i];
      }
    }
  }
}

TEST_P(KernelsTest, SiluMulOfSpecialValues) {
  const float gate[] = {0.0f, -0.0f, kInf, -200.0f, 200.0f, kNan, 1e-40f};
  const float up[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  bf16 out[7];
  k().silu_mul(gate, up, out, 7);
  EXPECT_EQ(ToFloat(out[0]), 0.0f);
  EXPECT_EQ(ToFloat(out[1]), 0.0f);
  EXPECT_EQ(ToFloat(out[2]), kInf);
  EXPECT_EQ(ToFloat(out[3]), 0.0f);
  EXPECT_EQ(ToFloat(out[4]), 200.0f);
  EXPECT_TRUE(std::isnan(ToFloat(out[5])));
  EXPECT_EQ(out[6], ToBf16(0.5e-40f));
}

TEST_P(KernelsTest, Axpy) {
  for (int64_t n : {0, 1, 7, 8, 9, 15, 16, 17, 33, 1000}) {
    GuardedArray<float> x(n), y(n);
    FillGaussian(rng_, {x.data(), static_cast<size_t>(n)});
    FillGaussian(rng_, {y.data(), static_cast<size_t>(n)});
    const std::vector<float> before = y.Copy();
    k().axpy(1.7f, x.data(), y.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      const double want = before[static_cast<size_t>(i)] + 1.7f * static_cast<double>(x[i]);
      ASSERT_NEAR(y[i], want, kEpsilon * (std::fabs(before[static_cast<size_t>(i)]) + 1.7 * std::fabs(x[i])));
    }
  }
}

// ---- linear ----

struct Shape {
  int64_t rows;
  int64_t cols;
};
constexpr Shape kShapes[] = {{1, 1}, {3, 7}, {5, 31}, {5, 64}, {7, 127}, {9, 128}, {13, 129}, {11, 200}, {17, 257}, {140, 96}, {6, 1000}, {4, 7300}};

TEST_P(KernelsTest, LinearAgreesWithTheF64Sum) {
  for (const auto& [product, dtype] : Products()) {
    for (const auto& [rows, some_cols] : kShapes) {
      const MatrixCase w(rng_, dtype, rows, some_cols, some_cols + 3, 101);
      const int64_t cols = w.view().cols;
      const int64_t m_count = 3, terms = product.terms;
      GuardedArray<bf16> x(m_count * terms * cols);
      FillGaussian(rng_, {x.data(), static_cast<size_t>(x.size())});
      GuardedArray<float> y(m_count * rows, kNan);
      product(w.view(), x.data(), cols, m_count, y.data(), rows, 0, rows);
      for (int64_t m = 0; m < m_count; ++m) {
        for (int64_t r = 0; r < rows; ++r) {
          double sum = 0;
          double magnitude = 0;
          for (int64_t c = 0; c < cols; ++c) {
            for (int64_t term = 0; term < terms; ++term) {
              const double value = ToFloat(x[(m * terms + term) * cols + c]);
              sum += static_cast<double>(w.Element(r, c)) * w.Scale(r, c) * value;
              magnitude += w.Magnitude(r, c) * std::fabs(value);
            }
          }
          ASSERT_NEAR(y[m * rows + r], sum, SumTolerance(cols * terms, magnitude))
              << DTypeName(dtype) << " terms " << terms << " " << rows << "x" << cols << " token " << m << " row " << r;
        }
      }
    }
  }
}

// The rule: a (row, token)'s bits are the same for every batch, row range and layout of x and y, and no other place is
// written.
TEST_P(KernelsTest, LinearBitsDependOnRowAndTokenAlone) {
  constexpr int64_t kTokensMax = 40;
  for (const auto& [product, dtype] : Products()) {
    for (const auto& [rows, some_cols] : kShapes) {
      const MatrixCase w(rng_, dtype, rows, some_cols, some_cols + (rows % 2), 77);
      const int64_t cols = w.view().cols;
      const int64_t terms = product.terms;
      std::vector<bf16> x(static_cast<size_t>(kTokensMax * terms * cols));
      FillGaussian(rng_, x);
      std::vector<float> want(static_cast<size_t>(kTokensMax * rows));
      for (int64_t m = 0; m < kTokensMax; ++m) {
        product(w.view(), &x[static_cast<size_t>(m * terms * cols)], cols, 1, &want[static_cast<size_t>(m * rows)], rows, 0, rows);
      }
      for (int64_t m_count : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 19, 40}) {
        for (int tries = 0; tries < 3; ++tries) {
          const int64_t begin = static_cast<int64_t>(rng_() % static_cast<uint32_t>(rows));
          const int64_t end = tries == 0 ? begin : begin + 1 + static_cast<int64_t>(rng_() % static_cast<uint32_t>(rows - begin));
          const int64_t ldx = cols + static_cast<int64_t>(rng_() % 5);
          const int64_t ldy = rows + static_cast<int64_t>(rng_() % 5);
          GuardedArray<bf16> xs(m_count * terms * ldx);
          for (int64_t m = 0; m < m_count * terms; ++m) std::copy_n(&x[static_cast<size_t>(m * cols)], cols, xs.data() + m * ldx);
          GuardedArray<float> y(m_count * ldy, 12345.0f);
          product(w.view(), xs.data(), ldx, m_count, y.data(), ldy, begin, end);
          for (int64_t m = 0; m < m_count; ++m) {
            for (int64_t r = 0; r < ldy; ++r) {
              const bool inside = r >= begin && r < end;
              const float expected = inside ? want[static_cast<size_t>(m * rows + r)] : 12345.0f;
              ASSERT_EQ(Bits(y[m * ldy + r]), Bits(expected)) << DTypeName(dtype) << " terms " << terms << " " << rows << "x" << cols << " tokens "
                                                              << m_count << " rows [" << begin << ", " << end << ") token " << m << " row " << r;
            }
          }
        }
      }
    }
  }
}

// Two terms that split an F32 number give its product, but for what two terms lack of 24 bits: the low one counts in full.
TEST_P(KernelsTest, TwoTermsAreOneNumber) {
  const int64_t cols = 200;
  for (DType dtype : kAllDTypes) {
    const MatrixCase w(rng_, dtype, 5, cols, cols, 0);
    const int64_t rows = w.view().rows, width = w.view().cols;
    std::vector<float> numbers(static_cast<size_t>(width));
    FillGaussian(rng_, numbers);
    std::vector<bf16> x(static_cast<size_t>(2 * width));
    for (int64_t c = 0; c < width; ++c) {
      const size_t at = static_cast<size_t>(c);
      x[at] = ToBf16(numbers[at]);
      x[static_cast<size_t>(width + c)] = ToBf16(numbers[at] - ToFloat(x[at]));
    }
    std::vector<float> y(static_cast<size_t>(rows));
    k().linear(w.view(), x.data(), width, 1, 2, y.data(), rows, 0, rows);
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0, magnitude = 0;
      for (int64_t c = 0; c < width; ++c) {
        sum += static_cast<double>(w.Element(r, c)) * w.Scale(r, c) * numbers[static_cast<size_t>(c)];
        magnitude += w.Magnitude(r, c) * std::fabs(numbers[static_cast<size_t>(c)]);
      }
      ASSERT_NEAR(y[static_cast<size_t>(r)], sum, SumTolerance(2 * width, magnitude) + 0x1p-16 * magnitude) << DTypeName(dtype) << " row " << r;
    }
  }
}

// A view of some rows, whose first lies inside a scale block, gives the rows of the whole.
TEST_P(KernelsTest, LinearOfAViewOfRows) {
  const int64_t rows = 300;
  for (const auto& [product, dtype] : Products()) {
    const MatrixCase w(rng_, dtype, rows, 260, 260, 60);
    const int64_t cols = w.view().cols;
    std::vector<bf16> x(static_cast<size_t>(product.terms * cols));
    FillGaussian(rng_, x);
    std::vector<float> whole(static_cast<size_t>(rows));
    product(w.view(), x.data(), cols, 1, whole.data(), rows, 0, rows);
    for (int64_t begin : {0, 1, 67, 68, 69, 131, 299}) {
      const int64_t count = std::min<int64_t>(150, rows - begin);
      std::vector<float> part(static_cast<size_t>(count));
      product(w.view().Rows(begin, count), x.data(), cols, 1, part.data(), count, 0, count);
      for (int64_t r = 0; r < count; ++r) {
        ASSERT_EQ(Bits(part[static_cast<size_t>(r)]), Bits(whole[static_cast<size_t>(begin + r)])) << DTypeName(dtype) << begin;
      }
    }
  }
}

// Checkpoints promise no alignment, not even the element's own.
TEST_P(KernelsTest, WeightsAtAnyAddress) {
  for (const auto& [product, dtype] : Products()) {
    const int64_t rows = 9;
    const MatrixCase w(rng_, dtype, rows, 301, 301, 0);
    const int64_t cols = w.view().cols;
    const size_t bytes = DTypeBytes(dtype, static_cast<uint64_t>(rows * cols));
    std::vector<bf16> x(static_cast<size_t>(product.terms * cols));
    FillGaussian(rng_, x);
    std::vector<float> of_rows(static_cast<size_t>(rows));
    FillGaussian(rng_, of_rows);
    std::vector<float> want(static_cast<size_t>(rows)), want_transposed(static_cast<size_t>(cols));
    product(w.view(), x.data(), cols, 1, want.data(), rows, 0, rows);
    k().linear_transposed(w.view(), of_rows.data(), want_transposed.data(), 0, cols);
    for (size_t offset : {1u, 2u, 3u, 31u, 63u}) {
      std::vector<uint8_t> data(bytes + offset);
      std::memcpy(data.data() + offset, w.view().data, bytes);
      WeightView moved = w.view();
      moved.data = data.data() + offset;
      std::vector<float> y(static_cast<size_t>(rows)), y_transposed(static_cast<size_t>(cols));
      product(moved, x.data(), cols, 1, y.data(), rows, 0, rows);
      k().linear_transposed(moved, of_rows.data(), y_transposed.data(), 0, cols);
      ASSERT_EQ(y, want) << DTypeName(dtype) << " offset " << offset;
      ASSERT_EQ(y_transposed, want_transposed) << DTypeName(dtype) << " offset " << offset;
    }
  }
}

// Every code in every lane: x is a multiple of a basis vector, so each y is one product and must be exact.
TEST_P(KernelsTest, F8IsConvertedExactly) {
  const int64_t cols = 205;  // one block and a tail that fills no vector
  const AllF8Codes codes(cols);
  const WeightView w = codes.view();
  const int64_t rows = w.rows;
  // The last is a subnormal BF16 number: taken as zero by VDPBF16PS, counted by the paths that work in F32.
  for (float value : {1.0f, -3.0f, 0x1.fcp100f, 0x1p-100f, 0x1p-126f * 512, 0x1p-130f}) {
    const bool flushed = FlushesSubnormals() && value < 0x1p-126f && value > 0;
    for (int64_t c = 0; c < cols; ++c) {
      std::vector<bf16> x(static_cast<size_t>(kTermsMax * cols));
      x[static_cast<size_t>(c)] = ToBf16(value);
      std::vector<float> y(static_cast<size_t>(rows));
      for (const Product& product : Forms()) {
        product(w, x.data(), cols, 1, y.data(), rows, 0, rows);
        for (int64_t r = 0; r < rows; ++r) {
          const float want = flushed ? 0.0f : F8E4M3ToFloat(codes.code(r, c)) * value * codes.Scale(r, c);
          ASSERT_EQ(y[static_cast<size_t>(r)], want) << "code " << int{codes.code(r, c)} << " x " << value << " column " << c;
        }
      }
    }
  }
}

// Every code of every block format in every column: x is a multiple of a basis vector, so each y is one product with a power of two and exact,
// but for the minimum of Q4_K and Q5_K, whose difference is rounded once.
TEST_P(KernelsTest, BlockFormatsAreConvertedExactly) {
  for (const DType dtype : kAllDTypes) {
    if (!IsBlockFormat(dtype)) continue;
    const MatrixCase w(rng_, dtype, 300, 300, 300, 0);  // 32-column blocks: an even number and then one more row of blocks than pairs
    const int64_t rows = w.view().rows, cols = w.view().cols;
    std::vector<bf16> x(static_cast<size_t>(kTermsMax * cols));
    std::vector<float> y(static_cast<size_t>(rows));
    for (int64_t c = 0; c < cols; ++c) {
      for (const Product& product : Forms()) {
        x[static_cast<size_t>(c)] = ToBf16(0.25f);
        product(w.view(), x.data(), cols, 1, y.data(), rows, 0, rows);
        for (int64_t r = 0; r < rows; ++r) ASSERT_EQ(y[static_cast<size_t>(r)], 0.25f * w.Element(r, c)) << DTypeName(dtype) << " " << r << "," << c;
      }
      x[static_cast<size_t>(c)] = bf16{};
    }
  }
}

// The same for the transposed product, where the weight is scaled first.
TEST_P(KernelsTest, F8IsConvertedExactlyInTheTransposedProduct) {
  std::vector<uint8_t> codes(256 * 3);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = (i & 0x7f) == 0x7f ? 0 : static_cast<uint8_t>(i);
  const float scales[] = {0.3f, 0.7f, 1.1f, 1.3f, 1.7f, 1.9f};
  const WeightView w = {
      .data = codes.data(), .dtype = DType::kF8E4M3, .rows = 1, .cols = 768, .row_stride = 768, .scales = scales, .scale_stride = 6};
  const float x = 1.0f;
  std::vector<float> y(768);
  k().linear_transposed(w, &x, y.data(), 0, 768);
  for (size_t c = 0; c < 768; ++c) ASSERT_EQ(y[c], F8E4M3ToFloat(codes[c]) * scales[c / 128]) << c;
}

// ---- linear_transposed ----

TEST_P(KernelsTest, LinearTransposed) {
  for (DType dtype : kAllDTypes) {
    for (const auto& [rows, some_cols] : kShapes) {
      const MatrixCase w(rng_, dtype, rows, some_cols, some_cols + 1, 125);
      const int64_t cols = w.view().cols;
      GuardedArray<float> x(rows);
      FillGaussian(rng_, {x.data(), static_cast<size_t>(rows)});
      GuardedArray<float> y(cols, kNan);
      k().linear_transposed(w.view(), x.data(), y.data(), 0, cols);
      for (int64_t c = 0; c < cols; ++c) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const double value = x[r];
          sum += static_cast<double>(w.Element(r, c)) * w.Scale(r, c) * value;
          magnitude += w.Magnitude(r, c) * std::fabs(value);
        }
        ASSERT_NEAR(y[c], sum, SumTolerance(rows, magnitude)) << DTypeName(dtype) << " " << rows << "x" << cols << " column " << c;
      }
      // Any split of the columns: the same bits, and nothing outside the range.
      for (int tries = 0; tries < 6; ++tries) {
        const int64_t begin = static_cast<int64_t>(rng_() % static_cast<uint32_t>(cols));
        const int64_t end = tries == 0 ? begin : begin + 1 + static_cast<int64_t>(rng_() % static_cast<uint32_t>(cols - begin));
        GuardedArray<float> part(cols, 12345.0f);
        k().linear_transposed(w.view(), x.data(), part.data(), begin, end);
        for (int64_t c = 0; c < cols; ++c) {
          ASSERT_EQ(Bits(part[c]), Bits(c >= begin && c < end ? y[c] : 12345.0f)) << DTypeName(dtype) << " column " << c;
        }
      }
    }
  }
}

TEST_P(KernelsTest, LinearTransposedOfNoRowsIsZero) {
  std::mt19937 rng;
  const MatrixCase w(rng, DType::kBF16, 0, 20, 20, 0);
  std::vector<float> y(20, 3.0f);
  k().linear_transposed(w.view(), nullptr, y.data(), 2, 20);
  for (size_t c = 0; c < 20; ++c) EXPECT_EQ(y[c], c < 2 ? 3.0f : 0.0f);
}

// ---- attention ----

// softmax(scores) V in F64, with the magnitudes that bound the rounding.
struct AttentionReference {
  std::vector<double> out;
  std::vector<double> magnitude;
  AttentionReference(const std::vector<double>& scores, const bf16* v, int64_t ldv, int64_t n)
      : out(static_cast<size_t>(n)), magnitude(static_cast<size_t>(n)) {
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double s : scores) sum += std::exp(s - max);
    for (size_t j = 0; j < scores.size(); ++j) {
      const double p = std::exp(scores[j] - max) / sum;
      for (int64_t i = 0; i < n; ++i) {
        const double value = ToFloat(v[static_cast<int64_t>(j) * ldv + i]);
        out[static_cast<size_t>(i)] += p * value;
        magnitude[static_cast<size_t>(i)] += p * std::fabs(value);
      }
    }
  }
};

double DotF64(const bf16* a, const bf16* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(ToFloat(a[i])) * ToFloat(b[i]);
  return sum;
}

TEST_P(KernelsTest, MlaAbsorbedOverPages) {
  struct Case {
    int64_t heads, rank, rope, positions;
  };
  for (const auto& [heads, rank, rope, positions] :
       {Case{1, 1, 1, 1}, Case{3, 7, 5, 3}, Case{4, 40, 0, 64}, Case{5, 64, 8, 65}, Case{16, 512, 64, 200}, Case{2, 100, 34, 129}}) {
    const int64_t ldkv = rank + rope;
    const float scale = 2.0f / std::sqrt(static_cast<float>(ldkv));
    GuardedArray<bf16> q_latent(heads * rank), q_rope(heads * rope), kv(positions * ldkv);
    for (const auto* a : {&q_latent, &q_rope, &kv}) FillGaussian(rng_, {a->data(), static_cast<size_t>(a->size())});
    std::vector<SoftmaxState> state(static_cast<size_t>(heads));
    GuardedArray<float> acc(heads * rank), scratch(heads * 64);
    for (int64_t j = 0; j < positions; j += 64) {
      k().mla_absorbed(q_latent.data(), q_rope.data(), kv.data() + j * ldkv, std::min<int64_t>(64, positions - j), heads, rank, rope, scale,
                       state.data(), acc.data(), scratch.data());
    }
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<double> scores;
      for (int64_t j = 0; j < positions; ++j) {
        const bf16* row = kv.data() + j * ldkv;
        scores.push_back(scale * (DotF64(q_latent.data() + h * rank, row, rank) + DotF64(q_rope.data() + h * rope, row + rank, rope)));
      }
      const AttentionReference want(scores, kv.data(), ldkv, rank);
      for (int64_t i = 0; i < rank; ++i) {
        const size_t at = static_cast<size_t>(i);
        ASSERT_NEAR(acc[h * rank + i] / state[static_cast<size_t>(h)].sum, want.out[at], 1e-5 * (want.magnitude[at] + 1e-3))
            << "heads " << heads << " rank " << rank << " positions " << positions << " head " << h;
      }
      // A head alone gives the bits it has among others.
      SoftmaxState alone;
      GuardedArray<float> acc_alone(rank), scratch_alone(64);
      for (int64_t j = 0; j < positions; j += 64) {
        k().mla_absorbed(q_latent.data() + h * rank, q_rope.data() + h * rope, kv.data() + j * ldkv, std::min<int64_t>(64, positions - j), 1, rank,
                         rope, scale, &alone, acc_alone.data(), scratch_alone.data());
      }
      ASSERT_EQ(Bits(alone.max), Bits(state[static_cast<size_t>(h)].max));
      ASSERT_EQ(Bits(alone.sum), Bits(state[static_cast<size_t>(h)].sum));
      for (int64_t i = 0; i < rank; ++i) ASSERT_EQ(Bits(acc_alone[i]), Bits(acc[h * rank + i]));
    }
  }
}

// Keys and values of one head, and queries of the last positions, walked page by page.
class PagedAttention {
 public:
  struct Sizes {
    int64_t key_dim, value_dim;
    int terms;
    int64_t skip, first, queries;  // positions below skip aren't seen; the first query's position
  };
  PagedAttention(std::mt19937& rng, const Sizes& sizes)
      : sizes_(sizes),
        ld_(sizes.key_dim + sizes.terms * sizes.value_dim + 1),
        q_(static_cast<size_t>(sizes.queries * sizes.key_dim)),
        rows_(static_cast<size_t>((sizes.first + sizes.queries) * ld_)) {
    FillGaussian(rng, q_);
    FillGaussian(rng, rows_);
    if (sizes.terms == 1) return;
    for (int64_t j = 0; j < positions(); ++j) {
      bf16* low = Row(j) + sizes_.key_dim + sizes_.value_dim;
      for (int64_t i = 0; i < sizes_.value_dim; ++i) low[i] = ToBf16(ToFloat(low[i]) * 0x1p-9f);
    }
  }

  int64_t positions() const { return sizes_.first + sizes_.queries; }
  int64_t ldacc() const { return (sizes_.value_dim + 15) / 16 * 16; }
  float scale() const { return 2.0f / std::sqrt(static_cast<float>(sizes_.key_dim)); }

  // Queries [begin, end), as a pass that ends with them would have it.   state [end - begin]; acc [end - begin, ldacc]
  void Run(const KernelTable& kernels, int64_t begin, int64_t end, std::vector<SoftmaxState>* state, std::vector<float>* acc) {
    const int64_t count = end - begin, first = sizes_.first + begin;
    state->assign(static_cast<size_t>(count), SoftmaxState());
    acc->assign(static_cast<size_t>(count * ldacc()), 0.0f);
    const int64_t floats = AttendPageScratch(sizes_.key_dim, sizes_.value_dim);
    std::unique_ptr<float, decltype(&std::free)> scratch(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats) * sizeof(float))),
                                                         &std::free);
    for (int64_t at = 0; at < first + count; at += kAttendPositions) {
      const int64_t filled = std::min(kAttendPositions, first + count - at);
      const int64_t skip = std::clamp<int64_t>(sizes_.skip - at, 0, filled);
      GuardedArray<bf16> page(filled * ld_ - 1);
      std::copy_n(Row(at), page.size(), page.data());
      std::fill_n(page.data(), std::min(skip * ld_, page.size()), ToBf16(kNan));
      const int64_t from = std::max<int64_t>(0, at - first);
      kernels.attend_page({.keys = page.data(),
                           .values = page.data() + sizes_.key_dim,
                           .ld = ld_,
                           .count = filled,
                           .skip = skip,
                           .key_dim = sizes_.key_dim,
                           .value_dim = sizes_.value_dim,
                           .terms = sizes_.terms,
                           .scale = scale()},
                          q_.data() + (begin + from) * sizes_.key_dim, count - from, first + from - at + 1, state->data() + from,
                          acc->data() + from * ldacc(), ldacc(), scratch.get());
    }
  }

  // In F64, with the magnitudes that bound the rounding.
  void Reference(int64_t query, std::vector<double>* out, std::vector<double>* magnitude) {
    std::vector<double> scores;
    for (int64_t j = sizes_.skip; j <= sizes_.first + query; ++j) {
      scores.push_back(scale() * DotF64(q_.data() + query * sizes_.key_dim, Row(j), sizes_.key_dim));
    }
    const AttentionReference high(scores, Row(sizes_.skip) + sizes_.key_dim, ld_, sizes_.value_dim);
    *out = high.out;
    *magnitude = high.magnitude;
    if (sizes_.terms == 1) return;
    const AttentionReference low(scores, Row(sizes_.skip) + sizes_.key_dim + sizes_.value_dim, ld_, sizes_.value_dim);
    for (size_t i = 0; i < out->size(); ++i) (*out)[i] += low.out[i];
  }

 private:
  bf16* Row(int64_t position) { return rows_.data() + position * ld_; }

  const Sizes sizes_;
  const int64_t ld_;  // odd, so that rows lie at every alignment
  std::vector<bf16> q_, rows_;
};

TEST_P(KernelsTest, AttendPageOverPages) {
  for (const PagedAttention::Sizes& sizes :
       {PagedAttention::Sizes{2, 1, 1, 0, 0, 1}, PagedAttention::Sizes{10, 5, 1, 1, 2, 8}, PagedAttention::Sizes{192, 128, 1, 0, 0, 64},
        PagedAttention::Sizes{192, 128, 1, 0, 100, 91}, PagedAttention::Sizes{576, 128, 2, 0, 60, 30}, PagedAttention::Sizes{60, 33, 2, 1, 63, 7},
        PagedAttention::Sizes{130, 70, 1, 70, 128, 3}}) {
    PagedAttention attention(rng_, sizes);
    std::vector<SoftmaxState> state;
    std::vector<float> acc;
    attention.Run(k(), 0, sizes.queries, &state, &acc);
    // Weights enter the second product in one or two BF16 terms.
    const double tolerance = sizes.terms == 1 ? 0x1p-8 + 1e-5 : 2e-5;
    const int64_t ld = attention.ldacc();
    for (int64_t query = 0; query < sizes.queries; ++query) {
      std::vector<double> want, magnitude;
      attention.Reference(query, &want, &magnitude);
      for (int64_t i = 0; i < ld; ++i) {
        const float got = acc[static_cast<size_t>(query * ld + i)];
        if (i >= sizes.value_dim) {
          ASSERT_EQ(got, 0.0f);
          continue;
        }
        const size_t at = static_cast<size_t>(i);
        ASSERT_NEAR(got / state[static_cast<size_t>(query)].sum, want[at], tolerance * (magnitude[at] + 1e-3))
            << "key " << sizes.key_dim << " value " << sizes.value_dim << " terms " << sizes.terms << " query " << query << " column " << i;
      }
    }
    // In two passes, the first of which ends in the middle of a page: the same bits.
    for (const int64_t cut : {int64_t{1}, sizes.queries / 2, sizes.queries - 1}) {
      if (cut < 1 || cut >= sizes.queries) continue;
      std::vector<SoftmaxState> first_state, second_state;
      std::vector<float> first, second;
      attention.Run(k(), 0, cut, &first_state, &first);
      attention.Run(k(), cut, sizes.queries, &second_state, &second);
      first.insert(first.end(), second.begin(), second.end());
      first_state.insert(first_state.end(), second_state.begin(), second_state.end());
      for (size_t i = 0; i < acc.size(); ++i) ASSERT_EQ(Bits(first[i]), Bits(acc[i])) << "cut " << cut << " at " << i;
      for (size_t i = 0; i < state.size(); ++i) {
        ASSERT_EQ(Bits(first_state[i].max), Bits(state[i].max));
        ASSERT_EQ(Bits(first_state[i].sum), Bits(state[i].sum));
      }
    }
  }
}

TEST_P(KernelsTest, AttendPageOfNothingVisibleLeavesTheStateAsItBegan) {
  PagedAttention attention(rng_, {4, 3, 1, 5, 0, 3});  // positions 0 to 4 are not seen
  std::vector<SoftmaxState> state;
  std::vector<float> acc;
  attention.Run(k(), 0, 3, &state, &acc);
  for (const SoftmaxState& one : state) {
    EXPECT_EQ(one.max, -kInf);
    EXPECT_EQ(one.sum, 0.0f);
  }
  for (const float a : acc) EXPECT_EQ(a, 0.0f);
}

TEST_P(KernelsTest, MaxFiniteFindsTheLargestAndWhatIsNotFinite) {
  for (const int64_t n : {1, 2, 7, 15, 16, 17, 255, 256, 1000}) {
    GuardedArray<float> x(n);
    FillGaussian(rng_, {x.data(), static_cast<size_t>(n)});
    for (int64_t i = 0; i < n; ++i) x[i] -= 100.0f;  // below what an empty lane holds
    float best = x[0];
    for (int64_t i = 0; i < n; ++i) best = std::max(best, x[i]);
    EXPECT_EQ(k().max_finite(x.data(), n), best) << n;
    for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
      const float kept = x[at];
      for (const float bad : {INFINITY, -INFINITY, std::nanf("")}) {
        x[at] = bad;
        EXPECT_TRUE(std::isnan(k().max_finite(x.data(), n))) << bad << " at " << at << " of " << n;
      }
      x[at] = kept;
    }
  }
}

TEST_P(KernelsTest, ExpSumAddsWhatItShows) {
  for (const int64_t n : {1, 3, 15, 16, 17, 31, 256, 1000}) {
    GuardedArray<float> x(n), out(n);
    FillGaussian(rng_, {x.data(), static_cast<size_t>(n)});
    const float top = 4.0f, factor = 1.3f;
    const float sum = k().exp_sum(x.data(), n, top, factor, out.data());
    double want = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double addend = std::exp(static_cast<double>((x[i] - top) * factor));
      ASSERT_NEAR(out[i], addend, 2 * kEpsilon * addend);
      want += addend;
      float alone = 0;
      k().exp_sum(x.data() + i, 1, top, factor, &alone);
      ASSERT_EQ(Bits(alone), Bits(out[i])) << i << " of " << n;
    }
    EXPECT_NEAR(sum, want, 1e-6 * want) << n;
    EXPECT_EQ(Bits(k().exp_sum(x.data(), n, top, factor, nullptr)), Bits(sum));
  }
}

TEST_P(KernelsTest, WidenBf16IsExact) {
  for (const auto& [rows, n] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {64, 33}, {2, 128}}) {
    const int64_t ld = 2 * n + 1;
    GuardedArray<bf16> src((rows - 1) * ld + 2 * n);
    FillGaussian(rng_, {src.data(), static_cast<size_t>(src.size())});
    for (const int64_t low : {int64_t{0}, n}) {
      GuardedArray<float> dst((rows - 1) * (n + 2) + n, kNan);
      k().widen_bf16(src.data(), ld, low, rows, n, dst.data(), n + 2);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < n; ++i) {
          const float want = ToFloat(src[r * ld + i]) + (low > 0 ? ToFloat(src[r * ld + low + i]) : 0.0f);
          ASSERT_EQ(Bits(dst[r * (n + 2) + i]), Bits(want)) << r << ", " << i << ", low " << low;
        }
      }
    }
  }
}

TEST_P(KernelsTest, WidenF8IsExact) {
  for (const auto& [rows, n] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {64, 33}, {2, 300}}) {
    GuardedArray<uint8_t> codes((rows - 1) * (n + 3) + n);
    for (int64_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>((i & 0x7f) == 0x7f ? 0 : i);
    GuardedArray<float> scales(rows), dst((rows - 1) * (n + 2) + n, kNan);
    for (int64_t r = 0; r < rows; ++r) scales[r] = std::ldexp(1.0f, static_cast<int>(r % 5) - 12);
    k().widen_f8(codes.data(), n + 3, scales.data(), rows, n, dst.data(), n + 2);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(Bits(dst[r * (n + 2) + i]), Bits(F8E4M3ToFloat(codes[r * (n + 3) + i]) * scales[r])) << r << ", " << i;
      }
    }
  }
}

// Rounds to BF16, in place too.
GuardedArray<bf16> Narrowed(GuardedArray<float>* x) {
  GuardedArray<bf16> out(x->size());
  for (int64_t i = 0; i < x->size(); ++i) {
    out[i] = ToBf16((*x)[i]);
    (*x)[i] = ToFloat(out[i]);
  }
  return out;
}

// attend_bf16 over these rows leaves the bits of `state` and `acc`.
void ExpectBf16RowsGiveTheSame(const KernelTable& kernels, const float* q, int64_t queries, const GuardedArray<bf16>& keys, int64_t key_dim,
                               const GuardedArray<bf16>& values, int64_t ldv, int64_t value_dim, int64_t positions, float scale,
                               const std::vector<SoftmaxState>& state, const GuardedArray<float>& acc) {
  std::vector<SoftmaxState> states(state.size());
  GuardedArray<float> sums(acc.size()), scratch(queries * 64);
  for (int64_t j = 0; j < positions; j += 64) {
    kernels.attend_bf16(q, queries, keys.data() + j * key_dim, key_dim, values.data() + j * ldv, ldv, std::min<int64_t>(64, positions - j), key_dim,
                        value_dim, scale, states.data(), sums.data(), scratch.data(), {});
  }
  for (size_t h = 0; h < state.size(); ++h) {
    ASSERT_EQ(Bits(states[h].max), Bits(state[h].max));
    ASSERT_EQ(Bits(states[h].sum), Bits(state[h].sum));
  }
  for (int64_t i = 0; i < acc.size(); ++i) ASSERT_EQ(Bits(sums[i]), Bits(acc[i]));
}

TEST_P(KernelsTest, AttendOverPages) {
  struct Case {
    int64_t queries, key_dim, value_dim, positions;
    bool shared;  // values are the first columns of the keys, as in the latent of MLA
  };
  for (const auto& [queries, key_dim, value_dim, positions, shared] :
       {Case{1, 1, 1, 1, false}, Case{3, 7, 5, 3, false}, Case{8, 128, 128, 64, false}, Case{7, 80, 64, 65, true}, Case{16, 576, 512, 200, true},
        Case{5, 33, 34, 131, false}}) {
    const float scale = 2.0f / std::sqrt(static_cast<float>(key_dim));
    GuardedArray<float> q(queries * key_dim), keys(positions * key_dim), own_values(positions * value_dim);
    for (const auto* a : {&q, &keys, &own_values}) FillGaussian(rng_, {a->data(), static_cast<size_t>(a->size())});
    // Rows that BF16 holds.
    const GuardedArray<bf16> narrowed_keys = Narrowed(&keys), narrowed_values = Narrowed(&own_values);
    const float* values = shared ? keys.data() : own_values.data();
    const int64_t ldv = shared ? key_dim : value_dim;
    const auto run = [&, q = q.data(), key_dim = key_dim, value_dim = value_dim, positions = positions](int64_t first, int64_t count,
                                                                                                        SoftmaxState* state, float* acc) {
      GuardedArray<float> scratch(count * 64);
      for (int64_t j = 0; j < positions; j += 64) {
        k().attend(q + first * key_dim, count, keys.data() + j * key_dim, key_dim, values + j * ldv, ldv, std::min<int64_t>(64, positions - j),
                   key_dim, value_dim, scale, state, acc, scratch.data(), {.first = keys.data(), .bytes_per_position = key_dim});
      }
    };
    std::vector<SoftmaxState> state(static_cast<size_t>(queries));
    GuardedArray<float> acc(queries * value_dim);
    run(0, queries, state.data(), acc.data());
    ExpectBf16RowsGiveTheSame(k(), q.data(), queries, narrowed_keys, key_dim, shared ? narrowed_keys : narrowed_values, ldv, value_dim, positions,
                              scale, state, acc);
    for (int64_t h = 0; h < queries; ++h) {
      std::vector<double> scores;
      for (int64_t j = 0; j < positions; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < key_dim; ++i) sum += static_cast<double>(q[h * key_dim + i]) * keys[j * key_dim + i];
        scores.push_back(scale * sum);
      }
      const double max = *std::max_element(scores.begin(), scores.end());
      double weights = 0;
      for (const double score : scores) weights += std::exp(score - max);
      for (int64_t i = 0; i < value_dim; ++i) {
        double want = 0, magnitude = 1e-3;
        for (int64_t j = 0; j < positions; ++j) {
          const double product = std::exp(scores[static_cast<size_t>(j)] - max) / weights * values[j * ldv + i];
          want += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR(acc[h * value_dim + i] / state[static_cast<size_t>(h)].sum, want, 1e-5 * magnitude)
            << "queries " << queries << " key_dim " << key_dim << " positions " << positions << " query " << h;
      }
      // A query alone gives the bits it has among others.
      SoftmaxState alone;
      GuardedArray<float> acc_alone(value_dim);
      run(h, 1, &alone, acc_alone.data());
      ASSERT_EQ(Bits(alone.max), Bits(state[static_cast<size_t>(h)].max));
      ASSERT_EQ(Bits(alone.sum), Bits(state[static_cast<size_t>(h)].sum));
      for (int64_t i = 0; i < value_dim; ++i) ASSERT_EQ(Bits(acc_alone[i]), Bits(acc[h * value_dim + i]));
    }
  }
}

// One query of one element and values that are 1 at one position alone: acc is exp(score - max) itself.
struct TinyAttention {
  explicit TinyAttention(const KernelTable& kernels) : kernels(kernels) {}
  void Run(float q, const std::vector<float>& keys, float scale) {
    const int64_t count = static_cast<int64_t>(keys.size());
    std::vector<float> v(static_cast<size_t>(count * 64));
    for (int64_t j = 0; j < count; ++j) v[static_cast<size_t>(j * 64 + j)] = 1.0f;
    float scratch[64];
    kernels.attend(&q, 1, keys.data(), 1, v.data(), 64, count, 1, 64, scale, &state, acc.data(), scratch, {});
  }
  const KernelTable& kernels;
  SoftmaxState state;
  std::vector<float> acc = std::vector<float>(64);
};

TEST_P(KernelsTest, ExpIsWithinTwoUlp) {
  std::uniform_real_distribution<float> exponents(-6.0f, 6.6f);
  for (int round = 0; round < 300; ++round) {
    std::vector<float> keys = {0.0f};
    for (int j = 1; j < 64; ++j) keys.push_back(-std::exp2(exponents(rng_)));
    const float scale = 0.87f + 0.001f * static_cast<float>(round);
    TinyAttention attention(k());
    attention.Run(1.0f, keys, scale);
    EXPECT_EQ(attention.acc[0], 1.0f);
    for (size_t j = 1; j < 64; ++j) {
      const float score = scale * keys[j];
      const double want = std::exp(static_cast<double>(score));
      // Below the normal range one step is 2^-149, and the sum's unit here is an FMA onto zero.
      const double ulp = std::max(want * kEpsilon, 0x1p-149);
      ASSERT_NEAR(attention.acc[j], want, 2 * ulp) << score;
    }
  }
}

TEST_P(KernelsTest, ScoresOfMinusInfinityAddNothing) {
  TinyAttention attention(k());
  attention.Run(kInf, {-1.0f, -1.0f, -1.0f}, 1.0f);  // all -inf: the state stays as it began
  EXPECT_EQ(attention.state.max, -kInf);
  EXPECT_EQ(attention.state.sum, 0.0f);
  for (float a : attention.acc) EXPECT_EQ(a, 0.0f);

  attention.Run(1.0f, {2.0f, 1.0f}, 1.0f);
  EXPECT_EQ(attention.state.max, 2.0f);
  const float sum = attention.state.sum;
  EXPECT_NEAR(sum, 1 + std::exp(-1.0), 1e-6);
  const std::vector<float> acc = attention.acc;

  attention.Run(kInf, {-1.0f}, 1.0f);  // and again, now with a finite past
  EXPECT_EQ(attention.state.max, 2.0f);
  EXPECT_EQ(attention.state.sum, sum);
  EXPECT_EQ(attention.acc, acc);
}

TEST_P(KernelsTest, EmptyRunChangesNothing) {
  TinyAttention attention(k());
  attention.Run(1.0f, {0.5f}, 1.0f);
  const SoftmaxState state = attention.state;
  attention.Run(1.0f, {}, 1.0f);
  EXPECT_EQ(attention.state.max, state.max);
  EXPECT_EQ(attention.state.sum, state.sum);
  EXPECT_EQ(attention.acc[0], 1.0f);
}

// ---- what needs no path ----

TEST(IsaTest, NamesGoBothWays) {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx}) EXPECT_EQ(IsaFromName(IsaName(isa)), isa);
  EXPECT_EQ(IsaFromName("avx1024"), std::nullopt);
}

TEST(IsaTest, APathNeedsAllItsFeaturesAndThoseBelow) {
  CpuFeatures f;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar));
  f.avx2 = f.fma = f.f16c = true;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar)) << "the OS does not save YMM";
  f.os_saves_ymm = true;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar, Isa::kAvx2));
  f.avx512f = f.avx512bw = f.avx512vl = f.avx512dq = f.avx512bf16 = f.avx512vbmi = true;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar, Isa::kAvx2)) << "the OS does not save ZMM";
  f.os_saves_zmm = true;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16));
  f.avx512vbmi = false;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar, Isa::kAvx2, Isa::kAvx512));
  f.fma = false;
  EXPECT_THAT(IsasFor(f), ElementsAre(Isa::kScalar));
}

TEST(IsaTest, TilesNeedFastNumericsBothFeaturesAndTheOs) {
  CpuFeatures f;
  f.avx2 = f.fma = f.f16c = f.os_saves_ymm = f.avx512f = f.avx512bw = f.avx512vl = f.avx512dq = f.os_saves_zmm = true;
  f.avx512bf16 = f.avx512vbmi = f.amx_tile = f.amx_bf16 = f.os_saves_tiles = true;
  EXPECT_THAT(IsasFor(f, Numerics::kFast), ElementsAre(Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx));
  EXPECT_EQ(IsasFor(f).back(), Isa::kAvx512Bf16) << "exact numerics have no tiles";
  for (bool CpuFeatures::*needed : {&CpuFeatures::amx_tile, &CpuFeatures::amx_bf16, &CpuFeatures::os_saves_tiles}) {
    CpuFeatures without = f;
    without.*needed = false;
    EXPECT_EQ(IsasFor(without, Numerics::kFast).back(), Isa::kAvx512Bf16);
  }
  f.avx512vbmi = false;
  EXPECT_EQ(IsasFor(f, Numerics::kFast).back(), Isa::kAvx512) << "the path converts FP8 with VBMI";
}

TEST(IsaTest, ThePathOfTilesDiffersInThePrefillProductAlone) {
  const KernelTable &tiles = Kernels(Isa::kAmx), &vectors = Kernels(Isa::kAvx512Bf16);
  EXPECT_NE(tiles.gemm, vectors.gemm);
  EXPECT_EQ(tiles.linear, vectors.linear);
  EXPECT_EQ(tiles.linear_transposed, vectors.linear_transposed);
  EXPECT_EQ(tiles.attend, vectors.attend);
  EXPECT_EQ(tiles.mla_absorbed, vectors.mla_absorbed);
}

TEST(IsaTest, ThisCpuRunsTheScalarPath) { EXPECT_EQ(SupportedIsas().front(), Isa::kScalar); }

TEST(RopeTest, RotatesPairs) {
  float x[] = {1, 0, 0, 2, 3, 4};
  const float cos[] = {0, 1, 0.6f};
  const float sin[] = {1, 0, 0.8f};
  RopeInterleaved(x, cos, sin, 3);
  EXPECT_THAT(x, ElementsAre(0, 1, 0, 2, 3 * 0.6f - 4 * 0.8f, 3 * 0.8f + 4 * 0.6f));
}

TEST(QuantizeF8Test, IsTheNearestCodeUnderTheLeastPowerOfTwo) {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 200; ++round) {
    std::vector<float> x(static_cast<size_t>(1 + round));
    const float spread = std::ldexp(1.0f, round % 40 - 20);
    for (float& value : x) value = normal(rng) * spread * std::exp(2 * normal(rng));
    if (round % 7 == 0) x[0] = spread * 448;  // just fits
    std::vector<uint8_t> codes(x.size());
    const float scale = QuantizeF8(x.data(), static_cast<int64_t>(x.size()), codes.data());
    int exponent;
    ASSERT_EQ(std::frexp(scale, &exponent), 0.5f) << "a power of two";
    float largest = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(codes[i], FloatToF8E4M3(x[i] / scale)) << x[i] << " / " << scale;
      largest = std::max(largest, std::fabs(x[i]));
    }
    EXPECT_LE(largest, 448 * scale);
    EXPECT_GT(largest, 224 * scale) << "no larger than it must be";
  }
}

TEST(QuantizeF8Test, EveryCodeComesBack) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    const float x[] = {448.0f, F8E4M3ToFloat(static_cast<uint8_t>(code))};
    uint8_t codes[2];
    EXPECT_EQ(QuantizeF8(x, 2, codes), 1.0f);
    EXPECT_EQ(codes[1], code);
  }
}

TEST(QuantizeF8Test, ZerosTinyHugeAndBadRows) {
  uint8_t codes[2];
  const float zeros[] = {0.0f, -0.0f};
  EXPECT_GT(QuantizeF8(zeros, 2, codes), 0.0f);
  EXPECT_EQ(codes[0], 0);
  const float tiny[] = {1e-44f, -1e-38f};
  EXPECT_GT(QuantizeF8(tiny, 2, codes), 0.0f);
  const float huge[] = {1e36f, 1.0f};
  const float scale = QuantizeF8(huge, 2, codes);
  EXPECT_NEAR(F8E4M3ToFloat(codes[0]) * scale, 1e36f, 1e36f / 16);
  for (const float bad : {kInf, -kInf, kNan, 3e38f}) {
    const float x[] = {1.0f, bad};
    EXPECT_TRUE(std::isnan(QuantizeF8(x, 2, codes))) << bad;
  }
}

TEST(RopeTest, RotatesHalves) {
  float x[] = {1, 2, 3, 4, 5};
  const float cos[] = {0.0f, 0.5f};
  const float sin[] = {1.0f, 0.25f};
  RopeHalves(x, cos, sin, 2);
  EXPECT_THAT(x, ElementsAre(-3, 2 * 0.5f - 4 * 0.25f, 1, 2 * 0.25f + 4 * 0.5f, 5));
}

TEST(FinishSoftmaxTest, DividesBySum) {
  const float acc[] = {1, -2, 3};
  bf16 out[3];
  FinishSoftmax({.max = 7, .sum = 4}, acc, out, 3);
  EXPECT_THAT(out, ElementsAre(ToBf16(0.25f), ToBf16(-0.5f), ToBf16(0.75f)));
}

}  // namespace
}  // namespace hearth
