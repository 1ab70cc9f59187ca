#include "common/experts/cpu_expert_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>

#include "common/experts/expert_source.h"

namespace hearth {
namespace {

constexpr int64_t kHidden = 1100;  // more than one step of the sum, no multiple of a block
constexpr int64_t kExperts = 10;   // quarters of 2, 3, 2, 3
constexpr int64_t kTopK = 3;

// Experts with random FP8 weights, each shard with rows of its own, as an image holds them.
class FakeSource : public ExpertSource {
 public:
  explicit FakeSource(std::vector<int64_t> shard_rows) : shard_rows_(std::move(shard_rows)) {
    std::mt19937 random(7);
    for (int64_t e = 0; e < kExperts; ++e) {
      for (const int64_t rows : shard_rows_) {
        Record record;
        for (auto* matrix : {&record.gate, &record.up, &record.down}) {
          matrix->resize(static_cast<size_t>(rows * kHidden));
          for (uint8_t& code : *matrix) code = FloatToF8E4M3(static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 0.01f);
        }
        record.scales.resize(static_cast<size_t>((kHidden / 128 + 1) * (rows / 128 + 1)));
        for (float& scale : record.scales) scale = 0.002f + 0.00001f * static_cast<float>(random() % 100);
        records_.push_back(std::move(record));
      }
    }
  }
  int64_t num_shards() const override { return static_cast<int64_t>(shard_rows_.size()); }
  ExpertView Acquire(int64_t, int64_t expert, int64_t shard) override {
    ++held_;
    const Record& record = records_[static_cast<size_t>(expert * num_shards() + shard)];
    const int64_t rows = shard_rows_[static_cast<size_t>(shard)];
    auto view = [&](const std::vector<uint8_t>& data, int64_t r, int64_t c) {
      return WeightView{.data = data.data(),
                        .dtype = DType::kF8E4M3,
                        .rows = r,
                        .cols = c,
                        .row_stride = c,
                        .scales = record.scales.data(),
                        .scale_stride = (c + 127) / 128};
    };
    return {.count = rows, .gate = view(record.gate, rows, kHidden), .up = view(record.up, rows, kHidden), .down = view(record.down, kHidden, rows)};
  }
  void Release(int64_t, int64_t, int64_t) override { --held_; }
  int64_t held() const { return held_.load(); }

 private:
  struct Record {
    std::vector<uint8_t> gate, up, down;
    std::vector<float> scales;
  };
  std::vector<int64_t> shard_rows_;
  std::vector<Record> records_;
  std::atomic<int64_t> held_{0};
};

struct Tokens {
  explicit Tokens(int64_t m) : m(m), x(static_cast<size_t>(m * kHidden)), ids(static_cast<size_t>(m * kTopK)), weights(ids.size()) {
    std::mt19937 random(static_cast<uint32_t>(m));
    std::normal_distribution<float> normal;
    for (bf16& v : x) v = ToBf16(normal(random));
    for (int64_t t = 0; t < m; ++t) {
      std::vector<int32_t> all(kExperts);
      for (int32_t e = 0; e < kExperts; ++e) all[static_cast<size_t>(e)] = e;
      std::shuffle(all.begin(), all.end(), random);
      if (t % 3 == 0) all[0] = 4, all[1] = 0, all[2] = 9;  // a hot set, one per outer quarter
      std::sort(all.begin(), all.begin() + kTopK);
      std::copy_n(all.begin(), kTopK, ids.begin() + t * kTopK);
      for (int64_t j = 0; j < kTopK; ++j) weights[static_cast<size_t>(t * kTopK + j)] = 0.1f + 0.01f * static_cast<float>(random() % 100);
    }
  }
  int64_t m;
  std::vector<bf16> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

ExpertsArgs Args(Form form, FakeSource& source, const Tokens& tokens, int64_t begin, int64_t count, float* out) {
  return {.form = form,
          .source = &source,
          .layer = 0,
          .num_experts = kExperts,
          .top_k = kTopK,
          .hidden = kHidden,
          .intermediate = 384,
          .num_shards = source.num_shards(),
          .weight_dtypes = DType::kF8E4M3,
          .x = tokens.x.data() + begin * kHidden,
          .ids = tokens.ids.data() + begin * kTopK,
          .weights = tokens.weights.data() + begin * kTopK,
          .m = count,
          .out = out};
}

// The order of DESIGN section 7, spelled out for one token with the kernels of one path.
std::vector<float> InOrder(const KernelTable& kernels, Form form, FakeSource& source, const Tokens& tokens, int64_t token) {
  const int64_t num_shards = source.num_shards();
  auto down = [&](int64_t expert, int64_t shard) {
    const ExpertView view = source.Acquire(0, expert, shard);
    std::vector<float> gate(static_cast<size_t>(view.count)), up(gate), y(kHidden);
    std::vector<bf16> act(gate.size());
    const bf16* x = tokens.x.data() + token * kHidden;
    LinearKernel* product = form == Form::kPrefill ? kernels.gemm : kernels.linear;
    product(view.gate, x, kHidden, 1, gate.data(), view.count, 0, view.count);
    product(view.up, x, kHidden, 1, up.data(), view.count, 0, view.count);
    kernels.silu_mul(gate.data(), up.data(), act.data(), view.count);
    product(view.down, act.data(), view.count, 1, y.data(), kHidden, 0, kHidden);
    source.Release(0, expert, shard);
    return y;
  };
  auto quarter = [](int64_t id) { return id < 2 ? 0 : id < 5 ? 1 : id < 7 ? 2 : 3; };  // [0, 10/4), [10/4, 20/4), [20/4, 30/4), [30/4, 10)
  using Quarters = std::vector<std::vector<float>>;
  auto joined = [](const Quarters& q, int64_t i) {
    const size_t s = static_cast<size_t>(i);
    return (q[0][s] + q[1][s]) + (q[2][s] + q[3][s]);
  };
  const int32_t* ids = tokens.ids.data() + token * kTopK;
  const float* weights = tokens.weights.data() + token * kTopK;
  std::vector<float> out(kHidden, 0.0f);
  if (form == Form::kPrefill) {
    Quarters q(4, std::vector<float>(kHidden, 0.0f));
    for (int64_t j = 0; j < kTopK; ++j) {
      std::vector<float> sum(kHidden, 0.0f);
      for (int64_t s = 0; s < num_shards; ++s) {
        const std::vector<float> y = down(ids[j], s);
        for (size_t i = 0; i < kHidden; ++i) sum[i] += y[i];
      }
      kernels.axpy(weights[j], sum.data(), q[static_cast<size_t>(quarter(ids[j]))].data(), kHidden);
    }
    for (int64_t i = 0; i < kHidden; ++i) out[static_cast<size_t>(i)] = joined(q, i);
    return out;
  }
  for (int64_t s = 0; s < num_shards; ++s) {
    Quarters q(4, std::vector<float>(kHidden, 0.0f));
    for (int64_t j = 0; j < kTopK; ++j) kernels.axpy(weights[j], down(ids[j], s).data(), q[static_cast<size_t>(quarter(ids[j]))].data(), kHidden);
    for (int64_t i = 0; i < kHidden; ++i) out[static_cast<size_t>(i)] += joined(q, i);
  }
  return out;
}

class ExpertEngine : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(ExpertEngine, SumsInTheFixedOrderWhateverThreadsAndBatch) {
  FakeSource source(GetParam());
  for (const Isa isa : SupportedIsas()) {
    for (const int64_t m : {1, 2, 6, 40}) {
      if (isa == Isa::kScalar && m == 40) continue;  // slow, and nothing that 6 does not show
      const Tokens tokens(m);
      for (const Form form : {Form::kPrefill, Form::kDecode}) {
        std::vector<std::vector<float>> expected;
        for (int64_t t = 0; t < m; t += 3) expected.push_back(InOrder(Kernels(isa), form, source, tokens, t));
        std::vector<float> first;
        for (const int threads : {1, 2, 3}) {
          auto device = MakeHostDevice({.isa = isa, .num_threads = threads, .num_pools = 2, .parallel_work_min = 0});
          ASSERT_TRUE(device.ok()) << device.status();
          auto stream = (*device)->MakeStream("s");
          std::vector<float> out(static_cast<size_t>(m * kHidden), -1.0f);
          (*device)->ops().Experts(*stream, Args(form, source, tokens, 0, m, out.data()));
          ASSERT_TRUE(stream->Synchronize().ok()) << stream->Synchronize();
          for (int64_t t = 0; t < m; t += 3) {
            const std::vector<float> got(out.begin() + t * kHidden, out.begin() + (t + 1) * kHidden);
            ASSERT_EQ(got, expected[static_cast<size_t>(t / 3)]) << IsaName(isa) << " m=" << m << " token " << t << " threads " << threads;
          }
          if (first.empty()) first = out;
          ASSERT_EQ(first, out);
        }
      }
      ASSERT_EQ(source.held(), 0) << "every Acquire has its Release";
    }
  }
}

// An expert at a time over the rows that chose it, quarter by quarter, as a pass that streams experts does it: the bits of the Experts op. A workspace of
// five rows cuts the hot experts' rows in parts.
TEST_P(ExpertEngine, RowsOfOneExpertAtATimeAddUpToTheSameBits) {
  FakeSource source(GetParam());
  constexpr int64_t kTokens = 40;
  const Tokens tokens(kTokens);
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeHostDevice({.isa = isa, .num_threads = 3, .num_pools = 2, .parallel_work_min = 0});
    ASSERT_TRUE(device.ok()) << device.status();
    Ops& ops = (*device)->ops();
    auto stream = (*device)->MakeStream("s");
    std::vector<float> whole(kTokens * kHidden);
    ops.Experts(*stream, Args(Form::kPrefill, source, tokens, 0, kTokens, whole.data()));
    for (const int64_t room : {kTokens, int64_t{5}}) {
      std::vector<uint8_t> workspace(ExpertRowsWorkspaceBytes(room, kHidden, 384, source.num_shards(), 1));
      std::vector<std::vector<float>> quarters(4, std::vector<float>(kTokens * kHidden, -1.0f));
      for (auto& quarter : quarters) ops.Clear(*stream, {.x = quarter.data(), .n = kTokens * kHidden});
      for (int32_t expert = 0; expert < kExperts; ++expert) {
        std::vector<int32_t> rows;
        std::vector<float> weights;
        for (size_t i = 0; i < tokens.ids.size(); ++i) {
          if (tokens.ids[i] != expert) continue;
          rows.push_back(static_cast<int32_t>(i / kTopK));
          weights.push_back(tokens.weights[i]);
        }
        std::vector<ExpertView> views;
        for (int64_t s = 0; s < source.num_shards(); ++s) views.push_back(source.Acquire(0, expert, s));
        ops.ExpertRows(*stream, {.shards = views.data(),
                                 .num_shards = source.num_shards(),
                                 .hidden = kHidden,
                                 .intermediate = 384,
                                 .x = tokens.x.data(),
                                 .rows = rows.data(),
                                 .weights = weights.data(),
                                 .n = static_cast<int64_t>(rows.size()),
                                 .sum = quarters[expert < 2   ? 0
                                                 : expert < 5 ? 1
                                                 : expert < 7 ? 2
                                                              : 3]
                                            .data(),
                                 .workspace = workspace.data(),
                                 .workspace_bytes = workspace.size()});
      }
      ASSERT_TRUE(stream->Synchronize().ok()) << stream->Synchronize();
      for (const auto& [from, to] : {std::pair(1, 0), std::pair(3, 2), std::pair(2, 0)}) {
        ops.Add(*stream, {.x = quarters[static_cast<size_t>(from)].data(), .y = quarters[static_cast<size_t>(to)].data(), .n = kTokens * kHidden});
      }
      EXPECT_EQ(quarters[0], whole) << IsaName(isa) << ", room for " << room;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, ExpertEngine,
                         ::testing::Values(std::vector<int64_t>{384}, std::vector<int64_t>{128, 256}, std::vector<int64_t>{0, 200}),
                         [](const auto& info) {
                           return "Rows" + std::to_string(info.param[0]) + (info.param.size() > 1 ? "And" + std::to_string(info.param[1]) : "");
                         });

// Each pool serves its own shards alone, so the caller's has to wait for threads that are late to wake: more threads than cores, pauses in which
// they fall asleep, more shards than pools and more pools than shards.
TEST(CpuExpertEngine, APoolWaitsForTheOthersAndNeverForGood) {
  const Tokens tokens(1);
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{128, 128}, {128, 0, 64, 128}, {128}}) {
    FakeSource source(rows);
    std::vector<float> first;
    for (const auto& [threads, pools] : {std::pair(1, 1), std::pair(2, 2), std::pair(5, 2), std::pair(8, 4), std::pair(3, 3)}) {
      auto device = MakeHostDevice({.num_threads = threads, .num_pools = pools, .parallel_work_min = 0, .spin_ns = 0});
      ASSERT_TRUE(device.ok()) << device.status();
      auto stream = (*device)->MakeStream("s");
      for (int round = 0; round < 100; ++round) {
        std::vector<float> out(kHidden, -1.0f);
        (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, 1, out.data()));
        if (first.empty()) first = out;
        ASSERT_EQ(out, first) << threads << " threads in " << pools << " pools, " << rows.size() << " shards";
      }
    }
  }
}

TEST(CpuExpertEngine, StreamsOfTwoActorsTakeTurns) {
  FakeSource source({128, 128});
  auto device = MakeHostDevice({.num_threads = 3, .num_pools = 2, .parallel_work_min = 0});
  ASSERT_TRUE(device.ok());
  const auto run = [&](const Tokens& tokens) {
    auto stream = (*device)->MakeStream("s");
    std::vector<float> out(static_cast<size_t>(tokens.m * kHidden));
    (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, tokens.m, out.data()));
    return out;
  };
  const Tokens six(6), two(2);
  const std::vector<float> of_six = run(six), of_two = run(two);
  auto other = (*device)->Spawn("other", [&] {
    for (int round = 0; round < 50; ++round) EXPECT_EQ(run(two), of_two);
  });
  for (int round = 0; round < 50; ++round) EXPECT_EQ(run(six), of_six);
}

// A hint moves no bit.
TEST(CpuExpertEngine, FetchingAheadOrNotIsTheSame) {
  FakeSource source({384});
  const Tokens tokens(3);
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeHostDevice({.isa = isa, .num_threads = 2});
    ASSERT_TRUE(device.ok());
    auto stream = (*device)->MakeStream("s");
    std::vector<float> with(3 * kHidden), without(with.size());
    (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, 3, with.data()));
    (*device)->SetFetchAhead(false);
    (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, 3, without.data()));
    EXPECT_EQ(with, without) << IsaName(isa);
  }
}

TEST(CpuExpertEngine, LongPromptsGoInPartsOfTheSameBits) {
  FakeSource source({128});
  const Isa isa = SupportedIsas().back();
  const Tokens tokens(600);  // past the 512 tokens of one walk
  auto device = MakeHostDevice({.isa = isa, .num_threads = 2});
  ASSERT_TRUE(device.ok());
  auto stream = (*device)->MakeStream("s");
  std::vector<float> whole(600 * kHidden), parts(whole.size());
  (*device)->ops().Experts(*stream, Args(Form::kPrefill, source, tokens, 0, 600, whole.data()));
  for (int64_t begin = 0; begin < 600; begin += 7) {
    (*device)->ops().Experts(*stream, Args(Form::kPrefill, source, tokens, begin, std::min<int64_t>(7, 600 - begin), parts.data() + begin * kHidden));
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(whole, parts);
}

TEST(CpuExpertEngine, AWorkspacePastTheBudgetEndsTheStream) {
  FakeSource source({128});
  const Tokens tokens(40);
  auto device = MakeHostDevice({.num_threads = 1, .memory_budget_bytes = 10'000});
  ASSERT_TRUE(device.ok());
  auto stream = (*device)->MakeStream("s");
  std::vector<float> out(40 * kHidden);
  (*device)->ops().Experts(*stream, Args(Form::kPrefill, source, tokens, 0, 40, out.data()));
  EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(source.held(), 0);
}

TEST(CpuExpertEngine, AWorkspaceWithoutRoomForARowEndsTheStream) {
  FakeSource source({128});
  const Tokens tokens(1);
  auto device = MakeHostDevice({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  auto stream = (*device)->MakeStream("s");
  const ExpertView view = source.Acquire(0, 0, 0);
  const int32_t row = 0;
  std::vector<float> sum(kHidden);
  (*device)->ops().ExpertRows(*stream, {.shards = &view,
                                        .hidden = kHidden,
                                        .intermediate = 128,
                                        .x = tokens.x.data(),
                                        .rows = &row,
                                        .weights = sum.data(),
                                        .n = 1,
                                        .sum = sum.data()});
  EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace hearth
