// The product in tiles (x86/gemm_tiles.h) over a tile unit in plain C++, on any CPU: the arithmetic of indices, tails and orders that the AMX path has,
// without its instructions. What the unit does with numbers is the processor manual's word (TDPBF16PS, Intel SDM volume 2).
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/base/check.h"
#include "common/kernels/kernels.h"
#include "common/kernels/kernels_cases.h"
#include "common/kernels/x86/gemm_tiles.h"

namespace hearth {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

// DAZ and FTZ: the same rule for what goes in and what comes out.
float Flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float FlushedFma(float a, float b, float c) { return Flushed(std::fma(Flushed(a), Flushed(b), c)); }

struct PlainVector {
  struct F {
    float lanes[16];
  };
  static constexpr int kLanes = 16;
  static F Set(float x) {
    F v;
    for (float& lane : v.lanes) lane = x;
    return v;
  }
  static F Zero() { return Set(0.0f); }
  static F Load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(float* p, const F& v) { std::memcpy(p, &v, sizeof(v)); }
  static F Fma(const F& a, const F& b, const F& c) {
    F v;
    for (int i = 0; i < kLanes; ++i) v.lanes[i] = std::fma(a.lanes[i], b.lanes[i], c.lanes[i]);
    return v;
  }
};

struct PlainF8 {
  static constexpr int kElementBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 1.0f;
  static bf16 Element(const uint8_t* p) { return ToBf16(F8E4M3ToFloat(*p)); }
};
struct PlainBf16 {
  static constexpr int kElementBytes = 2;
  static constexpr bool kScaled = false;
  static constexpr float kFactor = 1.0f;
  static bf16 Element(const uint8_t* p) {
    bf16 x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
};

// A thread's tile registers. What raises an exception on a processor ends the test here.
struct TwinUnit {
  using V = PlainVector;
  struct Tile {
    uint32_t pairs[kGemmPairs][4][kTileRows];
  };
  static constexpr int64_t kPairsStride = sizeof(Tile::pairs[0]);

  template <class P>
  static void Fill(Tile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t begin, int64_t cols) {
    const auto bits = [&](int64_t r, int64_t c) -> uint32_t {
      return r < rows && c < cols ? P::Element(data + r * stride + (begin + c) * P::kElementBytes).bits : 0;
    };
    for (int64_t p = 0; p < kGemmPairs; ++p) {
      for (int64_t r = 0; r < kTileRows; ++r) tile.pairs[p][v][r] = bits(r, 2 * p) | bits(r, 2 * p + 1) << 16;
    }
  }

  static void Configure(const TileConfig& config) {
    HEARTH_CHECK(config.palette == 1 && config.start_row == 0);
    for (uint8_t byte : config.reserved) HEARTH_CHECK(byte == 0);
    for (int i = 0; i < 16; ++i) {
      HEARTH_CHECK(i < 8 ? config.rows[i] >= 1 && config.rows[i] <= 16 : config.rows[i] == 0);
      HEARTH_CHECK(i < 8 ? config.row_bytes[i] >= 1 && config.row_bytes[i] <= 64 : config.row_bytes[i] == 0);
    }
    registers.config = config;
    registers.configured = true;
    std::memset(registers.data, 0, sizeof(registers.data));
    ++configured_calls;
  }
  static void Release() { registers.configured = false; }

  template <int T>
  static void Zero() {
    HEARTH_CHECK(registers.configured);
    std::memset(registers.data[T], 0, sizeof(registers.data[T]));
  }
  template <int T>
  static void Load(const void* from, int64_t stride) {
    Zero<T>();
    for (int r = 0; r < Rows(T); ++r) std::memcpy(registers.data[T][r], static_cast<const uint8_t*>(from) + r * stride, RowBytes(T));
  }
  template <int T>
  static void Store(float* to, int64_t stride) {
    HEARTH_CHECK(registers.configured);
    for (int r = 0; r < Rows(T); ++r) std::memcpy(reinterpret_cast<uint8_t*>(to) + r * stride, registers.data[T][r], RowBytes(T));
  }
  template <int C, int A, int B>
  static void Dot() {
    HEARTH_CHECK(registers.configured);
    HEARTH_CHECK(Rows(C) == Rows(A) && RowBytes(C) == RowBytes(B) && RowBytes(A) == 4u * static_cast<size_t>(Rows(B)));
    for (int m = 0; m < Rows(C); ++m) {
      for (int n = 0; n < static_cast<int>(RowBytes(C) / 4); ++n) {
        float chains[2] = {0.0f, 0.0f};
        for (int k = 0; k < Rows(B); ++k) {
          for (int i = 0; i < 2; ++i) {
            chains[i] = FlushedFma(ToFloat(At<bf16>(A, m, 2 * k + i)), ToFloat(At<bf16>(B, k, 2 * n + i)), chains[i]);
          }
        }
        const float sum = Flushed(Flushed(At<float>(C, m, n)) + Flushed(chains[0] + chains[1]));
        std::memcpy(registers.data[C][m] + 4 * n, &sum, sizeof(sum));
      }
    }
  }

  struct Registers {
    bool configured = false;
    TileConfig config;
    uint8_t data[8][16][64];
  };
  static thread_local Registers registers;
  static thread_local int configured_calls;

 private:
  static int Rows(int t) { return registers.config.rows[t]; }
  static size_t RowBytes(int t) { return registers.config.row_bytes[t]; }
  template <class T>
  static T At(int t, int row, int i) {
    T x;
    std::memcpy(&x, registers.data[t][row] + i * static_cast<int>(sizeof(T)), sizeof(x));
    return x;
  }
};
thread_local TwinUnit::Registers TwinUnit::registers;
thread_local int TwinUnit::configured_calls = 0;

void Product(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  if (w.dtype == DType::kF8E4M3) return GemmInTiles<TwinUnit, PlainF8>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  GemmInTiles<TwinUnit, PlainBf16>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
}

// One (row, token) in the order that gemm_tiles.h promises, written as the promise reads.
float OrderedSum(const MatrixCase& w, int64_t row, const bf16* x) {
  const int64_t cols = w.view().cols;
  float total = 0.0f;
  for (int64_t block = 0; block < cols; block += 128) {
    float sum = 0.0f;
    for (int64_t step = block; step < block + 128; step += 32) {
      float even = 0.0f, odd = 0.0f;
      for (int64_t c = step; c < step + 32 && c < cols; ++c) {
        float& chain = c % 2 == 0 ? even : odd;
        chain = FlushedFma(ToFloat(x[c]), w.Element(row, c), chain);
      }
      sum = Flushed(sum + Flushed(even + odd));
    }
    total = std::fma(sum, w.Scale(row, block), total);
  }
  return total;
}

class TileGemmTest : public testing::TestWithParam<DType> {
 protected:
  std::mt19937 rng_{20240301};
};

INSTANTIATE_TEST_SUITE_P(Weights, TileGemmTest, testing::Values(DType::kF8E4M3, DType::kBF16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

// Every count of tokens up to 70 (groups of 16, pairs of groups, tails of 24 tokens), and two panels; rows and columns around the tiles' sizes; inputs that end before an
// unmapped page, so that reading a token too many is a crash; the same bits for a token whatever is beside it, in the rows asked for and nowhere else.
TEST_P(TileGemmTest, EverySizeHasThePromisedOrderToTheBit) {
  struct Size {
    int64_t rows, cols, tokens_step, tokens_max;
  };
  for (const auto& [rows, cols, tokens_step, tokens_max] : {Size{35, 200, 1, 70},
                                                            {1, 1, 7, 70},
                                                            {15, 31, 7, 70},
                                                            {16, 128, 9, 70},
                                                            {17, 33, 11, 70},
                                                            {33, 257, 23, 70},
                                                            {64, 127, 31, 70},
                                                            {65, 129, 17, 70},
                                                            {131, 300, 33, 70},
                                                            {3, 140, kGemmTokens + 1, kGemmTokens + 44},
                                                            {2, 128, kGemmTokens + 15, kGemmTokens + 44}}) {
    const MatrixCase w(rng_, GetParam(), rows, cols, cols + 3, 101);
    std::vector<bf16> x(static_cast<size_t>(tokens_max * cols));
    FillGaussian(rng_, x);
    std::vector<float> want(static_cast<size_t>(tokens_max * rows));
    for (int64_t m = 0; m < tokens_max; ++m) {
      for (int64_t r = 0; r < rows; ++r) want[static_cast<size_t>(m * rows + r)] = OrderedSum(w, r, &x[static_cast<size_t>(m * cols)]);
    }
    for (int64_t m_count = 1; m_count <= tokens_max; m_count += tokens_step) {
      const int64_t ldx = cols + static_cast<int64_t>(rng_() % 5), ldy = rows + static_cast<int64_t>(rng_() % 5);
      const int64_t begin = m_count % 3 == 0 ? static_cast<int64_t>(rng_() % static_cast<uint32_t>(rows)) : 0;
      const int64_t end = m_count % 3 == 1 ? rows : begin + static_cast<int64_t>(rng_() % static_cast<uint32_t>(rows - begin + 1));
      GuardedArray<bf16> xs((m_count - 1) * ldx + cols);
      for (int64_t m = 0; m < m_count; ++m) std::copy_n(&x[static_cast<size_t>(m * cols)], cols, xs.data() + m * ldx);
      GuardedArray<float> y(m_count * ldy, 12345.0f);
      Product(w.view(), xs.data(), ldx, m_count, y.data(), ldy, begin, end);
      ASSERT_FALSE(TwinUnit::registers.configured) << "a thread keeps its tiles";
      for (int64_t m = 0; m < m_count; ++m) {
        for (int64_t r = 0; r < ldy; ++r) {
          const float expected = r >= begin && r < end ? want[static_cast<size_t>(m * rows + r)] : 12345.0f;
          ASSERT_EQ(Bits(y[m * ldy + r]), Bits(expected))
              << rows << "x" << cols << " tokens " << m_count << " rows [" << begin << ", " << end << ") token " << m << " row " << r;
        }
      }
    }
  }
}

// And the promised order is a good one: the same room for rounding as the other paths have against the scalar one.
TEST_P(TileGemmTest, AgreesWithTheScalarPath) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{5, 31}, {70, 1000}, {6, 7300}}) {
    constexpr int64_t kTokens = 19;
    const MatrixCase w(rng_, GetParam(), rows, cols, cols, 77);
    std::vector<bf16> x(static_cast<size_t>(kTokens * cols));
    FillGaussian(rng_, x);
    std::vector<float> y(static_cast<size_t>(kTokens * rows), kNan), scalar(y);
    Product(w.view(), x.data(), cols, kTokens, y.data(), rows, 0, rows);
    Kernels(Isa::kScalar).gemm(w.view(), x.data(), cols, kTokens, scalar.data(), rows, 0, rows);
    for (int64_t i = 0; i < kTokens * rows; ++i) {
      double magnitude = 0;
      for (int64_t c = 0; c < cols; ++c) magnitude += w.Magnitude(i % rows, c) * std::fabs(ToFloat(x[static_cast<size_t>(i / rows * cols + c)]));
      ASSERT_NEAR(y[static_cast<size_t>(i)], scalar[static_cast<size_t>(i)], 0x1p-22 * (4 + 2 * std::sqrt(static_cast<double>(cols))) * magnitude)
          << rows << "x" << cols << " row " << i % rows << " token " << i / rows;
    }
  }
}

// Every E4M3 code, the subnormal ones too, in both places of a pair and in the last block: one product each, so exact. What the unit takes as zero are
// activations below 2^-126.
TEST(TileGemmUnitTest, EveryF8CodeCountsAndSubnormalActivationsDoNot) {
  const AllF8Codes codes(130);
  const WeightView w = codes.view();
  const int64_t rows = w.rows, cols = w.cols;
  for (float value : {-3.0f, 0x1p-126f * 512, 0x1p-130f}) {
    for (int64_t c : {0, 1, 30, 63, 127, 128, 129}) {
      std::vector<bf16> x(static_cast<size_t>(cols));
      x[static_cast<size_t>(c)] = ToBf16(value);
      std::vector<float> y(static_cast<size_t>(rows), kNan);
      Product(w, x.data(), cols, 1, y.data(), rows, 0, rows);
      for (int64_t r = 0; r < rows; ++r) {
        const float code = F8E4M3ToFloat(codes.code(r, c));
        ASSERT_EQ(y[static_cast<size_t>(r)], value == 0x1p-130f ? 0.0f : code * value * codes.Scale(r, c))
            << "code " << code << " x " << value << " column " << c;
      }
    }
  }
}

TEST(TileGemmUnitTest, RegistersAreConfiguredOnceAPanelAndNotForNothing) {
  std::mt19937 rng(7);
  const MatrixCase w(rng, DType::kBF16, 150, 300, 300, 0);
  const std::vector<bf16> x(static_cast<size_t>((kGemmTokens + 1) * 300));
  std::vector<float> y(static_cast<size_t>((kGemmTokens + 1) * 150));
  const auto configured = [&](int64_t tokens) {
    const int before = TwinUnit::configured_calls;
    Product(w.view(), x.data(), 300, tokens, y.data(), 150, 0, 150);
    return TwinUnit::configured_calls - before;
  };
  EXPECT_EQ(configured(0), 0);
  EXPECT_EQ(configured(1), 1);
  EXPECT_EQ(configured(kGemmTokens), 1);
  EXPECT_EQ(configured(kGemmTokens + 1), 2);
}

}  // namespace
}  // namespace hearth
