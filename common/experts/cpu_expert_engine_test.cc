#include "common/experts/cpu_expert_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <random>

#include "common/experts/expert_source.h"
#include "common/kernels/kernels_cases.h"

namespace hearth {
namespace {

constexpr int64_t kExperts = 10;  // quarters of 2, 3, 2, 3
constexpr int64_t kTopK = 3;

// What an expert is made of, and how many of its rows each shard has.
struct Weights {
  const char* name;
  ExpertDTypes dtypes;
  std::vector<int64_t> shard_rows;
};

Weights F8(std::vector<int64_t> shard_rows) { return {"F8", DType::kF8E4M3, std::move(shard_rows)}; }

// Experts with random weights, each shard with rows of its own, as an image holds them.
class FakeSource : public ExpertSource {
 public:
  explicit FakeSource(const Weights& weights) : shard_rows_(weights.shard_rows), hidden_(HiddenOf(weights.dtypes)), dtypes_(weights.dtypes) {
    std::mt19937 random(7);
    for (int64_t e = 0; e < kExperts; ++e) {
      for (const int64_t rows : shard_rows_) {
        records_.push_back({MatrixCase(random, dtypes_.gate, rows, hidden_, hidden_, 0), MatrixCase(random, dtypes_.up, rows, hidden_, hidden_, 0),
                            MatrixCase(random, dtypes_.down, hidden_, rows, rows, 0)});
      }
    }
  }
  int64_t num_shards() const override { return static_cast<int64_t>(shard_rows_.size()); }
  ExpertView Acquire(int64_t, int64_t expert, int64_t shard) override {
    ++held_;
    const Record& record = records_[static_cast<size_t>(expert * num_shards() + shard)];
    return {.count = shard_rows_[static_cast<size_t>(shard)], .gate = record.gate.view(), .up = record.up.view(), .down = record.down.view()};
  }
  void Release(int64_t, int64_t, int64_t) override { --held_; }
  int64_t held() const { return held_.load(); }
  int64_t hidden() const { return hidden_; }
  int64_t intermediate() const { return std::accumulate(shard_rows_.begin(), shard_rows_.end(), int64_t{0}); }
  const ExpertDTypes& dtypes() const { return dtypes_; }

 private:
  // More than one step of the sum; without blocks, no multiple of anything.
  static int64_t HiddenOf(const ExpertDTypes& dtypes) { return IsBlockFormat(dtypes.gate) ? 1280 : 1100; }

  struct Record {
    MatrixCase gate, up, down;
  };
  std::vector<int64_t> shard_rows_;
  const int64_t hidden_;
  const ExpertDTypes dtypes_;
  std::vector<Record> records_;
  std::atomic<int64_t> held_{0};
};

struct Tokens {
  Tokens(int64_t m, int64_t hidden) : m(m), x(static_cast<size_t>(m * hidden)), ids(static_cast<size_t>(m * kTopK)), weights(ids.size()) {
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
          .hidden = source.hidden(),
          .intermediate = source.intermediate(),
          .num_shards = source.num_shards(),
          .weight_dtypes = source.dtypes(),
          .x = tokens.x.data() + begin * source.hidden(),
          .ids = tokens.ids.data() + begin * kTopK,
          .weights = tokens.weights.data() + begin * kTopK,
          .m = count,
          .out = out};
}

// The order of DESIGN section 7, spelled out for one token with the kernels of one path.
std::vector<float> InOrder(const KernelTable& kernels, Form form, FakeSource& source, const Tokens& tokens, int64_t token) {
  const int64_t num_shards = source.num_shards(), hidden = source.hidden();
  const size_t width = static_cast<size_t>(hidden);
  auto down = [&](int64_t expert, int64_t shard) {
    const ExpertView view = source.Acquire(0, expert, shard);
    std::vector<float> gate(static_cast<size_t>(view.count)), up(gate), y(width);
    std::vector<bf16> act(gate.size());
    const bf16* x = tokens.x.data() + token * hidden;
    const auto product = [&](const WeightView& w, const bf16* in, int64_t ldx, float* out, int64_t rows) {
      if (form == Form::kPrefill) return kernels.gemm(w, in, ldx, 1, out, rows, 0, rows);
      kernels.linear(w, in, ldx, 1, 1, out, rows, 0, rows);
    };
    product(view.gate, x, hidden, gate.data(), view.count);
    product(view.up, x, hidden, up.data(), view.count);
    kernels.silu_mul(gate.data(), up.data(), act.data(), view.count);
    product(view.down, act.data(), view.count, y.data(), hidden);
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
  std::vector<float> out(width, 0.0f);
  if (form == Form::kPrefill) {
    Quarters q(4, std::vector<float>(width, 0.0f));
    for (int64_t j = 0; j < kTopK; ++j) {
      std::vector<float> sum(width, 0.0f);
      for (int64_t s = 0; s < num_shards; ++s) {
        const std::vector<float> y = down(ids[j], s);
        for (size_t i = 0; i < width; ++i) sum[i] += y[i];
      }
      kernels.axpy(weights[j], sum.data(), q[static_cast<size_t>(quarter(ids[j]))].data(), hidden);
    }
    for (int64_t i = 0; i < hidden; ++i) out[static_cast<size_t>(i)] = joined(q, i);
    return out;
  }
  for (int64_t s = 0; s < num_shards; ++s) {
    Quarters q(4, std::vector<float>(width, 0.0f));
    for (int64_t j = 0; j < kTopK; ++j) kernels.axpy(weights[j], down(ids[j], s).data(), q[static_cast<size_t>(quarter(ids[j]))].data(), hidden);
    for (int64_t i = 0; i < hidden; ++i) out[static_cast<size_t>(i)] += joined(q, i);
  }
  return out;
}

class ExpertEngine : public ::testing::TestWithParam<Weights> {};

TEST_P(ExpertEngine, SumsInTheFixedOrderWhateverThreadsAndBatch) {
  FakeSource source(GetParam());
  const int64_t hidden = source.hidden();
  for (const Isa isa : SupportedIsas()) {
    for (const int64_t m : {1, 2, 6, 40}) {
      if (isa == Isa::kScalar && m == 40) continue;  // slow, and nothing that 6 does not show
      const Tokens tokens(m, hidden);
      for (const Form form : {Form::kPrefill, Form::kDecode}) {
        std::vector<std::vector<float>> expected;
        for (int64_t t = 0; t < m; t += 3) expected.push_back(InOrder(Kernels(isa), form, source, tokens, t));
        std::vector<float> first;
        for (const int threads : {1, 2, 3}) {
          auto device = MakeHostDevice({.isa = isa, .num_threads = threads, .num_pools = 2, .parallel_work_min = 0});
          ASSERT_TRUE(device.ok()) << device.status();
          auto stream = (*device)->MakeStream("s");
          std::vector<float> out(static_cast<size_t>(m * hidden), -1.0f);
          (*device)->ops().Experts(*stream, Args(form, source, tokens, 0, m, out.data()));
          ASSERT_TRUE(stream->Synchronize().ok()) << stream->Synchronize();
          for (int64_t t = 0; t < m; t += 3) {
            const std::vector<float> got(out.begin() + t * hidden, out.begin() + (t + 1) * hidden);
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

// In a workspace of a few tokens and columns, in many walks and slices: the bits of one walk.
TEST_P(ExpertEngine, ASmallWorkspaceMovesNoBit) {
  FakeSource source(GetParam());
  constexpr int64_t kTokens = 40;
  const int64_t hidden = source.hidden();
  const Tokens tokens(kTokens, hidden);
  for (const Form form : {Form::kPrefill, Form::kDecode}) {
    std::vector<float> whole;
    for (const int64_t workspace : {kExpertWorkspaceBytes, int64_t{200000}, int64_t{1}}) {
      auto device = HostDevice::Create({.num_threads = 3, .num_pools = 2, .parallel_work_min = 0});
      ASSERT_TRUE(device.ok()) << device.status();
      (*device)->SetExpertEngine(MakeCpuExpertEngine(**device, workspace));
      auto stream = (*device)->MakeStream("s");
      std::vector<float> out(static_cast<size_t>(kTokens * hidden), -1.0f);
      (*device)->ops().Experts(*stream, Args(form, source, tokens, 0, kTokens, out.data()));
      ASSERT_TRUE(stream->Synchronize().ok()) << stream->Synchronize();
      if (whole.empty()) whole = out;
      EXPECT_EQ(out, whole) << "workspace of " << workspace;
    }
  }
}

// An expert at a time over the rows that chose it, quarter by quarter, as a pass that streams experts does it: the bits of the Experts op. A workspace of
// five rows cuts the hot experts' rows in parts.
TEST_P(ExpertEngine, RowsOfOneExpertAtATimeAddUpToTheSameBits) {
  FakeSource source(GetParam());
  constexpr int64_t kTokens = 40;
  const int64_t hidden = source.hidden();
  const Tokens tokens(kTokens, hidden);
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeHostDevice({.isa = isa, .num_threads = 3, .num_pools = 2, .parallel_work_min = 0});
    ASSERT_TRUE(device.ok()) << device.status();
    Ops& ops = (*device)->ops();
    auto stream = (*device)->MakeStream("s");
    std::vector<float> whole(static_cast<size_t>(kTokens * hidden));
    ops.Experts(*stream, Args(Form::kPrefill, source, tokens, 0, kTokens, whole.data()));
    for (const int64_t room : {kTokens, int64_t{5}}) {
      std::vector<uint8_t> workspace(ExpertRowsWorkspaceBytes(room, hidden, source.intermediate(), source.num_shards(), 1));
      std::vector<std::vector<float>> quarters(4, std::vector<float>(whole.size(), -1.0f));
      for (auto& quarter : quarters) ops.Clear(*stream, {.x = quarter.data(), .n = kTokens * hidden});
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
                                 .hidden = hidden,
                                 .intermediate = source.intermediate(),
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
        ops.Add(*stream, {.x = quarters[static_cast<size_t>(from)].data(), .y = quarters[static_cast<size_t>(to)].data(), .n = kTokens * hidden});
      }
      EXPECT_EQ(quarters[0], whole) << IsaName(isa) << ", room for " << room;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shards, ExpertEngine,
                         ::testing::Values(F8({384}), F8({128, 256}), F8({0, 200}), Weights{"Q8_0", DType::kQ8_0, {128, 224}},
                                           Weights{"Q6_K", DType::kQ6_K, {256, 512}}, Weights{"Q4_K", DType::kQ4_K, {512}},
                                           Weights{"Q5_K", DType::kQ5_K, {256, 256}}, Weights{"Q3_K", DType::kQ3_K, {512}},
                                           Weights{"I4_G32", DType::kI4G32, {160, 0, 128}},
                                           Weights{"Mixed", {DType::kQ4_K, DType::kQ6_K, DType::kQ8_0}, {128, 160}}),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (const int64_t rows : info.param.shard_rows) name.append("_").append(std::to_string(rows));
                           return name;
                         });

// Each pool serves its own shards alone, so the caller's has to wait for threads that are late to wake: more threads than cores, pauses in which
// they fall asleep, more shards than pools and more pools than shards.
TEST(CpuExpertEngine, APoolWaitsForTheOthersAndNeverForGood) {
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{128, 128}, {128, 0, 64, 128}, {128}}) {
    FakeSource source(F8(rows));
    const Tokens tokens(1, source.hidden());
    std::vector<float> first;
    for (const auto& [threads, pools] : {std::pair(1, 1), std::pair(2, 2), std::pair(5, 2), std::pair(8, 4), std::pair(3, 3)}) {
      auto device = MakeHostDevice({.num_threads = threads, .num_pools = pools, .parallel_work_min = 0, .spin_ns = 0});
      ASSERT_TRUE(device.ok()) << device.status();
      auto stream = (*device)->MakeStream("s");
      for (int round = 0; round < 100; ++round) {
        std::vector<float> out(static_cast<size_t>(source.hidden()), -1.0f);
        (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, 1, out.data()));
        if (first.empty()) first = out;
        ASSERT_EQ(out, first) << threads << " threads in " << pools << " pools, " << rows.size() << " shards";
      }
    }
  }
}

TEST(CpuExpertEngine, StreamsOfTwoActorsTakeTurns) {
  FakeSource source(F8({128, 128}));
  auto device = MakeHostDevice({.num_threads = 3, .num_pools = 2, .parallel_work_min = 0});
  ASSERT_TRUE(device.ok());
  const auto run = [&](const Tokens& tokens) {
    auto stream = (*device)->MakeStream("s");
    std::vector<float> out(static_cast<size_t>(tokens.m * source.hidden()));
    (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, tokens.m, out.data()));
    return out;
  };
  const Tokens six(6, source.hidden()), two(2, source.hidden());
  const std::vector<float> of_six = run(six), of_two = run(two);
  auto other = (*device)->Spawn("other", [&] {
    for (int round = 0; round < 50; ++round) EXPECT_EQ(run(two), of_two);
  });
  for (int round = 0; round < 50; ++round) EXPECT_EQ(run(six), of_six);
}

// A hint moves no bit.
TEST(CpuExpertEngine, FetchingAheadOrNotIsTheSame) {
  FakeSource source(F8({384}));
  const Tokens tokens(3, source.hidden());
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeHostDevice({.isa = isa, .num_threads = 2});
    ASSERT_TRUE(device.ok());
    auto stream = (*device)->MakeStream("s");
    std::vector<float> with(static_cast<size_t>(3 * source.hidden())), without(with.size());
    (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, 3, with.data()));
    (*device)->SetFetchAhead(false);
    (*device)->ops().Experts(*stream, Args(Form::kDecode, source, tokens, 0, 3, without.data()));
    EXPECT_EQ(with, without) << IsaName(isa);
  }
}

TEST(CpuExpertEngine, LongPromptsGoInPartsOfTheSameBits) {
  FakeSource source(F8({128}));
  const int64_t hidden = source.hidden();
  const Isa isa = SupportedIsas().back();
  const Tokens tokens(600, hidden);  // past the 512 tokens of one walk
  auto device = MakeHostDevice({.isa = isa, .num_threads = 2});
  ASSERT_TRUE(device.ok());
  auto stream = (*device)->MakeStream("s");
  std::vector<float> whole(static_cast<size_t>(600 * hidden)), parts(whole.size());
  (*device)->ops().Experts(*stream, Args(Form::kPrefill, source, tokens, 0, 600, whole.data()));
  for (int64_t begin = 0; begin < 600; begin += 7) {
    (*device)->ops().Experts(*stream, Args(Form::kPrefill, source, tokens, begin, std::min<int64_t>(7, 600 - begin), parts.data() + begin * hidden));
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(whole, parts);
}

TEST(CpuExpertEngine, AWorkspacePastTheBudgetEndsTheStream) {
  FakeSource source(F8({128}));
  const Tokens tokens(40, source.hidden());
  auto device = MakeHostDevice({.num_threads = 1, .memory_budget_bytes = 10'000});
  ASSERT_TRUE(device.ok());
  auto stream = (*device)->MakeStream("s");
  std::vector<float> out(static_cast<size_t>(40 * source.hidden()));
  (*device)->ops().Experts(*stream, Args(Form::kPrefill, source, tokens, 0, 40, out.data()));
  EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(source.held(), 0);
}

TEST(CpuExpertEngine, AWorkspaceWithoutRoomForARowEndsTheStream) {
  FakeSource source(F8({128}));
  const Tokens tokens(1, source.hidden());
  auto device = MakeHostDevice({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  auto stream = (*device)->MakeStream("s");
  const ExpertView view = source.Acquire(0, 0, 0);
  const int32_t row = 0;
  std::vector<float> sum(static_cast<size_t>(source.hidden()));
  (*device)->ops().ExpertRows(*stream, {.shards = &view,
                                        .hidden = source.hidden(),
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
