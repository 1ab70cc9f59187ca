// Contexts of several spans: attention by its definition, and the same bits for one thread that takes all spans, many that share them, and any batch.
#include "common/device/host/attention_spans.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "common/device/host/host_device.h"
#include "common/device/ops.h"

namespace hearth {
namespace {

TEST(AttentionSpans, PartsCoverAllSpansOnce) {
  for (const int64_t positions : {int64_t{1}, kSpanTokens, kSpanTokens + 1, 7 * kSpanTokens + 5}) {
    for (int64_t parts = 1; parts <= 9; ++parts) {
      int64_t next = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const Spans spans = SpansOf(positions, part, parts);
        EXPECT_EQ(spans.begin, next);
        next = spans.end;
      }
      EXPECT_EQ(next, NumSpans(positions));
    }
  }
  EXPECT_EQ(SpanParts(10 * kSpanTokens, 4, 24), 6);
  EXPECT_EQ(SpanParts(3 * kSpanTokens, 4, 24), 3);
  EXPECT_EQ(SpanParts(3 * kSpanTokens, 100, 24), 1);
  EXPECT_EQ(SpanParts(0, 0, 24), 1);
}

TEST(AttentionSpans, FoldingIsTheSoftmaxOverBoth) {
  // One value a position, summed with weights exp(score - max).
  const auto walk = [](const std::vector<float>& scores, const std::vector<float>& values) {
    std::pair<SoftmaxState, float> sums{};
    for (size_t i = 0; i < scores.size(); ++i) sums.first.max = std::max(sums.first.max, scores[i]);
    for (size_t i = 0; i < scores.size(); ++i) {
      sums.first.sum += std::exp(scores[i] - sums.first.max);
      sums.second += std::exp(scores[i] - sums.first.max) * values[i];
    }
    return sums;
  };
  for (const float shift : {-3.0f, 0.0f, 3.0f, 200.0f}) {
    auto total = walk({1, 2, -1}, {4, 5, 6});
    auto span = walk({shift, shift + 1}, {-7, 8});
    const auto both = walk({1, 2, -1, shift, shift + 1}, {4, 5, 6, -7, 8});
    FoldSpan({&span.first, &span.second}, 1, 1, {&total.first, &total.second});
    EXPECT_FLOAT_EQ(total.first.max, both.first.max);
    EXPECT_NEAR(total.first.sum, both.first.sum, 1e-5);
    EXPECT_NEAR(total.second, both.second, 1e-4);
  }
  // A span without positions changes nothing, and into nothing a span goes as it is.
  auto total = walk({1, 2}, {3, 4});
  const auto before = total;
  std::pair<SoftmaxState, float> empty{};
  FoldSpan({&empty.first, &empty.second}, 1, 1, {&total.first, &total.second});
  EXPECT_EQ(total.second, before.second);
  FoldSpan({&total.first, &total.second}, 1, 1, {&empty.first, &empty.second});
  EXPECT_EQ(empty.second, before.second);
  EXPECT_EQ(empty.first.sum, before.first.sum);
}

constexpr int64_t kLength = 2 * kSpanTokens + 77;
constexpr int64_t kRows = 5;  // the last ones of the sequence

struct KvKind {
  DType dtype;
  int terms;
};
constexpr KvKind kKinds[] = {{DType::kBF16, 1}, {DType::kBF16, 2}, {DType::kF8E4M3, 1}, {DType::kF8E4M3, 2}};

class LongAttention : public ::testing::TestWithParam<KvKind> {
 protected:
  static std::unique_ptr<HostDevice> MakeDevice(Isa isa, int threads) {
    auto device = HostDevice::Create(
        {.isa = isa, .num_threads = threads, .activation_terms = GetParam().terms, .kv_dtype = GetParam().dtype, .parallel_work_min = 0});
    EXPECT_TRUE(device.ok()) << device.status();
    return *std::move(device);
  }
  std::vector<float> Floats(int64_t n, float sigma) {
    std::normal_distribution<float> normal(0, sigma);
    std::vector<float> out(static_cast<size_t>(n));
    for (float& x : out) x = normal(random_);
    return out;
  }
  std::vector<bf16> Terms(const std::vector<float>& x, int64_t rows, int terms) {
    const int64_t n = static_cast<int64_t>(x.size()) / rows;
    std::vector<bf16> out(static_cast<size_t>(rows * terms * n));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        const float value = x[static_cast<size_t>(r * n + i)];
        bf16* high = &out[static_cast<size_t>(r * terms * n + i)];
        *high = ToBf16(value);
        if (terms > 1) high[n] = ToBf16(value - ToFloat(*high));
      }
    }
    return out;
  }
  std::vector<int32_t> Pages() {
    std::vector<int32_t> pages;
    for (int64_t i = 0; i <= kLength / kPageTokens; ++i) pages.push_back(static_cast<int32_t>((7 * i + 3) % 37));
    return pages;
  }

  std::mt19937 random_{11};
};

// The rows together on one thread, each alone on one thread, and each alone on so many threads that its spans are shared out: `attend(device, first
// row, rows, out)`.
template <class Attend>
std::vector<bf16> TheSameInAnyCut(const std::function<std::unique_ptr<HostDevice>(int threads)>& make, int64_t row_elements, Attend attend) {
  std::vector<bf16> together(static_cast<size_t>(kRows * row_elements));
  attend(*make(1), 0, kRows, together.data());
  for (const int threads : {1, 2, 9}) {
    std::vector<bf16> alone(together.size());
    auto device = make(threads);
    for (int64_t row = 0; row < kRows; ++row) attend(*device, row, 1, alone.data() + row * row_elements);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin(), [](bf16 a, bf16 b) { return a.bits == b.bits; })) << threads << " threads";
  }
  return together;
}

TEST_P(LongAttention, AbsorbedLatent) {
  constexpr int64_t kHeads = 5, kNope = 16, kRope = 8, kV = 12, kRank = 40, kHeadDim = kNope + kRope, kRow = kHeads * kV;
  const auto [dtype, terms] = GetParam();
  const auto latents = Floats(kLength * (kRank + kRope), 1.0f), norm = std::vector<float>(kRank, 1.0f);
  const auto q = Floats(kRows * kHeads * kHeadDim, 1.5f);
  const auto q_terms = Terms(q, kRows, terms);
  const auto kv_b = Terms(Floats(kHeads * (kNope + kV) * kRank, 0.2f), 1, 1);
  const std::vector<float> cos(static_cast<size_t>(kLength * kRope / 2), 1.0f), sin(cos.size(), 0.0f);
  const auto pages = Pages();
  for (const Isa isa : SupportedIsas()) {
    auto writer = MakeDevice(isa, 1);
    auto stream = writer->MakeStream("s");
    const int64_t f8_row = kRank + 2 * kRope + 4;
    auto kv = KvPool::InMemory({.layers = 1,
                                .row_elements = static_cast<uint32_t>(dtype == DType::kF8E4M3 ? f8_row : terms * (kRank + kRope)),
                                .dtype = dtype,
                                .num_pages = 37});
    const KvSequence all{.num_rows = kLength, .pages = pages.data()};
    writer->ops().MlaWriteKv(*stream, {.kv_a = latents.data(),
                                       .norm_weight = norm.data(),
                                       .eps = 1e-6f,
                                       .rope = {.cos = cos.data(), .sin = sin.data(), .half = kRope / 2, .max_positions = kLength},
                                       .rank = kRank,
                                       .terms = terms,
                                       .layer = 0,
                                       .kv = kv.get(),
                                       .kv_dtype = dtype,
                                       .sequences = &all,
                                       .num_sequences = 1});
    const auto attend = [&](HostDevice& device, int64_t row, int64_t rows, bf16* out) {
      auto own = device.MakeStream("s");
      const KvSequence sequence{.num_rows = rows, .start_position = kLength - kRows + row, .pages = pages.data()};
      device.ops().MlaAttention(
          *own, {.form = Form::kDecode,
                 .q = q_terms.data() + row * terms * kHeads * kHeadDim,
                 .kv_b = {.data = kv_b.data(), .dtype = DType::kBF16, .rows = kHeads * (kNope + kV), .cols = kRank, .row_stride = kRank},
                 .heads = kHeads,
                 .nope = kNope,
                 .rope_dim = kRope,
                 .v_dim = kV,
                 .rank = kRank,
                 .softmax_scale = 0.3f,
                 .layer = 0,
                 .kv = kv.get(),
                 .kv_dtype = dtype,
                 .sequences = &sequence,
                 .num_sequences = 1,
                 .terms = terms,
                 .out = out});
      ASSERT_TRUE(own->Synchronize().ok());
    };
    const auto out = TheSameInAnyCut([&](int threads) { return MakeDevice(isa, threads); }, terms * kRow, attend);

    // By the definition, in double, from the latents before they were rounded.
    const int64_t row = 3, head = 2, position = kLength - kRows + row;
    std::vector<double> expected(kV, 0.0);
    double total = 0;
    for (int64_t j = 0; j <= position; ++j) {
      const float* cached = latents.data() + j * (kRank + kRope);
      double squares = 0;
      for (int64_t i = 0; i < kRank; ++i) squares += static_cast<double>(cached[i]) * cached[i];
      const double scale = 1.0 / std::sqrt(squares / kRank + 1e-6);
      const auto expand = [&](int64_t r) {
        double sum = 0;
        for (int64_t i = 0; i < kRank; ++i) sum += cached[i] * scale * ToFloat(kv_b[static_cast<size_t>((head * (kNope + kV) + r) * kRank + i)]);
        return sum;
      };
      double score = 0;
      const float* query = q.data() + (row * kHeads + head) * kHeadDim;
      for (int64_t i = 0; i < kNope; ++i) score += query[i] * expand(i);
      for (int64_t i = 0; i < kRope; ++i) score += static_cast<double>(query[kNope + i]) * cached[kRank + i];
      const double weight = std::exp(0.3 * score);
      total += weight;
      for (int64_t i = 0; i < kV; ++i) expected[static_cast<size_t>(i)] += weight * expand(kNope + i);
    }
    for (int64_t i = 0; i < kV; ++i) {
      EXPECT_NEAR(ToFloat(out[static_cast<size_t>(row * terms * kRow + head * kV + i)]), expected[static_cast<size_t>(i)] / total, 0.02)
          << IsaName(isa);
    }
  }
}

TEST_P(LongAttention, GroupedQueries) {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 16, kGroup = kHeads / kKvHeads, kRow = kHeads * kDim;
  const auto [dtype, terms] = GetParam();
  const auto k = Floats(kLength * kKvHeads * kDim, 1.0f), v = Floats(kLength * kKvHeads * kDim, 1.0f), q = Floats(kRows * kRow, 1.5f);
  const std::vector<float> cos(static_cast<size_t>(kLength * kDim / 2), 1.0f), sin(cos.size(), 0.0f);
  const auto pages = Pages();
  for (const Isa isa : SupportedIsas()) {
    auto writer = MakeDevice(isa, 1);
    auto stream = writer->MakeStream("s");
    const int64_t f8_row = 2 * kKvHeads * (kDim + 4);
    auto kv = KvPool::InMemory({.layers = 1,
                                .row_elements = static_cast<uint32_t>(dtype == DType::kF8E4M3 ? f8_row : 2 * kKvHeads * terms * kDim),
                                .dtype = dtype,
                                .num_pages = 37});
    const KvSequence all{.num_rows = kLength, .pages = pages.data()};
    auto k_written = k, v_written = v;
    writer->ops().GqaWriteKv(*stream, {.k = k_written.data(),
                                       .v = v_written.data(),
                                       .rope = {.cos = cos.data(), .sin = sin.data(), .half = kDim / 2, .max_positions = kLength},
                                       .kv_heads = kKvHeads,
                                       .head_dim = kDim,
                                       .terms = terms,
                                       .layer = 0,
                                       .kv = kv.get(),
                                       .kv_dtype = dtype,
                                       .sequences = &all,
                                       .num_sequences = 1});
    const auto attend = [&](HostDevice& device, int64_t row, int64_t rows, bf16* out) {
      auto own = device.MakeStream("s");
      const KvSequence sequence{.num_rows = rows, .start_position = kLength - kRows + row, .pages = pages.data()};
      device.ops().GqaAttention(*own, {.q = q.data() + row * kRow,
                                       .heads = kHeads,
                                       .kv_heads = kKvHeads,
                                       .head_dim = kDim,
                                       .softmax_scale = 0.3f,
                                       .layer = 0,
                                       .kv = kv.get(),
                                       .kv_dtype = dtype,
                                       .sequences = &sequence,
                                       .num_sequences = 1,
                                       .terms = terms,
                                       .out = out});
      ASSERT_TRUE(own->Synchronize().ok());
    };
    const auto out = TheSameInAnyCut([&](int threads) { return MakeDevice(isa, threads); }, terms * kRow, attend);

    const int64_t row = 1, head = 4, kv_head = head / kGroup, position = kLength - kRows + row;
    std::vector<double> expected(kDim, 0.0);
    double total = 0;
    for (int64_t j = 0; j <= position; ++j) {
      const int64_t at = (j * kKvHeads + kv_head) * kDim;
      double score = 0;
      for (int64_t i = 0; i < kDim; ++i)
        score += static_cast<double>(q[static_cast<size_t>(row * kRow + head * kDim + i)]) * k[static_cast<size_t>(at + i)];
      const double weight = std::exp(0.3 * score);
      total += weight;
      for (int64_t i = 0; i < kDim; ++i) expected[static_cast<size_t>(i)] += weight * v[static_cast<size_t>(at + i)];
    }
    for (int64_t i = 0; i < kDim; ++i) {
      EXPECT_NEAR(ToFloat(out[static_cast<size_t>(row * terms * kRow + head * kDim + i)]), expected[static_cast<size_t>(i)] / total, 0.02)
          << IsaName(isa);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kv, LongAttention, ::testing::ValuesIn(kKinds), [](const auto& info) {
  return std::string(info.param.dtype == DType::kBF16 ? "bf16" : "f8") + "_terms" + std::to_string(info.param.terms);
});

}  // namespace
}  // namespace hearth
