#include "common/device/host/host_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "common/device/ops.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<HostDevice> MakeDevice(Isa isa, int threads) {
  auto device = HostDevice::Create({.isa = isa, .num_threads = threads, .parallel_work_min = 0});
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

// Random numbers that BF16 holds exactly, so that a reference in double starts from the same inputs.
class Numbers {
 public:
  explicit Numbers(uint32_t seed) : random_(seed) {}
  std::vector<bf16> Bf16(size_t n, float sigma) {
    std::vector<bf16> out(n);
    for (bf16& x : out) x = hearth::ToBf16(normal_(random_) * sigma);
    return out;
  }
  std::vector<float> F32(size_t n, float sigma) {
    std::vector<float> out(n);
    for (float& x : out) x = normal_(random_) * sigma;
    return out;
  }

 private:
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
};

WeightView View(const std::vector<bf16>& data, int64_t rows, int64_t cols) {
  return {.data = data.data(), .dtype = DType::kBF16, .rows = rows, .cols = cols, .row_stride = cols};
}

TEST(HostDevice, AFullBudgetIsAnErrorWithNumbersAndFreedBytesComeBack) {
  auto device = HostDevice::Create({.num_threads = 1, .memory_budget_bytes = 1'000'000});
  ASSERT_TRUE(device.ok()) << device.status();
  auto first = (*device)->Allocate(600'000);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->as<uint8_t>()[599'999], 0);
  auto second = (*device)->Allocate(600'000);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("left"));
  *first = Buffer();
  EXPECT_TRUE((*device)->Allocate(600'000).ok());
}

TEST(HostDevice, AccountsForItsMemory) {
  auto made = HostDevice::Create({.num_threads = 1, .memory_budget_bytes = 1 << 20});
  ASSERT_TRUE(made.ok()) << made.status();
  HostDevice* device = made->get();
  EXPECT_EQ(device->memory().budget_bytes, 1u << 20);
  auto first = device->Allocate(1000);
  {
    auto second = device->Allocate(5000);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_EQ(device->memory().used_bytes, 1024u + 5056u) << "whole cache lines";
  }
  EXPECT_EQ(device->memory().used_bytes, 1024u);
  EXPECT_EQ(device->memory().peak_bytes, 1024u + 5056u);
}

// 3 MB at 50 MB/s last 60 ms; two streams share that; a stop ends a copy that would last an hour.
TEST(HostDevice, TheLinkHoldsItsPaceAndStops) {
  auto made = HostDevice::Create({.num_threads = 1, .link_bytes_per_s = 50'000'000});
  ASSERT_TRUE(made.ok()) << made.status();
  HostDevice* device = made->get();
  const std::vector<uint8_t> from(1'500'000, 7);
  std::vector<uint8_t> to(from.size()), other(from.size());
  const int64_t begin_ns = device->Now();
  auto actor = device->Spawn("copy", [&] {
    auto stream = device->MakeStream("second");
    device->ops().ToDevice(*stream, {.host = from.data(), .device = other.data(), .bytes = from.size()});
  });
  auto stream = device->MakeStream("first");
  device->ops().ToDevice(*stream, {.host = from.data(), .device = to.data(), .bytes = from.size()});
  actor.reset();
  EXPECT_GE(device->Now() - begin_ns, 50'000'000);
  EXPECT_EQ(to, from);
  EXPECT_EQ(other, from);

  auto made_slow = HostDevice::Create({.num_threads = 1, .link_bytes_per_s = 400});
  ASSERT_TRUE(made_slow.ok()) << made_slow.status();
  HostDevice* slow = made_slow->get();
  StopToken stop;
  auto stopper = slow->Spawn("stop", [&] { stop.Stop(); });
  auto slow_stream = slow->MakeStream("s");
  slow->ops().ToDevice(*slow_stream, {.host = from.data(), .device = to.data(), .bytes = from.size(), .stop = &stop});
  EXPECT_TRUE(slow_stream->Synchronize().ok());
}

TEST(HostDevice, NamesItsNumerics) {
  for (const Isa isa : SupportedIsas()) {
    EXPECT_EQ(MakeDevice(isa, 2)->caps().numerics, "host/" + std::string(IsaName(isa)) + "/exact/8");
  }
  EXPECT_EQ(HostNumerics(Isa::kAvx512Bf16, 2, DType::kF8E4M3), "host/avx512bf16/exact2/kv8/8");
  EXPECT_EQ(HostNumerics(Isa::kAmx, 1, DType::kBF16), "host/amx/fast/8");
}

TEST(HostDevice, TilesNeedFastNumericsOnAnyCpu) {
  const absl::Status refused = HostDevice::Create({.isa = Isa::kAmx}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("node.numerics = \"fast\""));
  // Without a path's name fast numerics take the best there is, and say what it is.
  auto device = HostDevice::Create({.numerics = Numerics::kFast, .num_threads = 1});
  ASSERT_TRUE(device.ok()) << device.status();
  const bool tiles = SupportedIsas(Numerics::kFast).back() == Isa::kAmx;
  EXPECT_THAT((*device)->caps().numerics, HasSubstr(tiles ? "host/amx/fast/" : "/exact/"));
  EXPECT_EQ((*device)->caps().description.find("numerics fast") != std::string::npos, tiles);
}

TEST(HostDevice, OptionsThatContradictThemselvesAreRefused) {
  EXPECT_EQ(HostDevice::Create({.num_threads = -1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostDevice::Create({.num_threads = 2, .num_pools = 2, .cpus = {{0}}}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(HostDevice, ExpertsWithoutAnEngineKillTheStream) {
  auto device = MakeDevice(Isa::kScalar, 1);
  auto stream = device->MakeStream("s");
  device->ops().Experts(*stream, {});
  EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(HostDevice, WaitEndsForEachOfItsReasons) {
  auto device = MakeDevice(Isa::kScalar, 1);
  auto signal = device->MakeSignal();
  StopToken stop;

  const uint64_t seen = signal->Current();
  auto actor = device->Spawn("notifier", [&] { signal->Notify(); });
  EXPECT_EQ(device->HostWait(*signal, seen, {.stop = &stop}), WaitResult::kSignalled);
  actor.reset();

  EXPECT_EQ(device->HostWait(*signal, seen, {}), WaitResult::kSignalled) << "a Notify before the wait is not lost";
  EXPECT_EQ(device->HostWait(*signal, signal->Current(), {.deadline_ns = device->Now() + 1'000'000}), WaitResult::kDeadline);
  EXPECT_EQ(device->HostWait(*signal, signal->Current(), {.peer_gone = [] { return true; }}), WaitResult::kPeerGone);
  actor = device->Spawn("stopper", [&] { stop.Stop(); });
  EXPECT_EQ(device->HostWait(*signal, signal->Current(), {.stop = &stop}), WaitResult::kStopped) << "seen without a Notify";
}

TEST(HostOps, LinearIsTheSameForAnyThreadsAndBatch) {
  Numbers numbers(1);
  const int64_t rows = 77, cols = 130, m = 37;
  const auto w = numbers.Bf16(static_cast<size_t>(rows * cols), 0.1f);
  const auto x = numbers.Bf16(static_cast<size_t>(m * cols), 1.0f);
  for (const Isa isa : SupportedIsas()) {
    std::vector<float> alone(static_cast<size_t>(m * rows));
    auto single = MakeDevice(isa, 1);
    auto stream = single->MakeStream("s");
    for (int64_t i = 0; i < m; ++i) {
      single->ops().Linear(*stream,
                           {.w = View(w, rows, cols), .x = x.data() + i * cols, .ldx = cols, .m = 1, .y = alone.data() + i * rows, .ldy = rows});
    }
    for (int threads = 1; threads <= 3; ++threads) {
      auto device = MakeDevice(isa, threads);
      std::vector<float> together(alone.size());
      device->ops().Linear(*stream, {.w = View(w, rows, cols), .x = x.data(), .ldx = cols, .m = m, .y = together.data(), .ldy = rows});
      EXPECT_EQ(alone, together) << IsaName(isa) << ", " << threads << " threads";
    }
    double expected = 0;
    for (int64_t c = 0; c < cols; ++c)
      expected += static_cast<double>(ToFloat(x[static_cast<size_t>(5 * cols + c)])) * ToFloat(w[static_cast<size_t>(9 * cols + c)]);
    EXPECT_NEAR(alone[5 * rows + 9], expected, 1e-4);
  }
}

TEST(HostOps, GateWorksInF32OnTheResidual) {
  Numbers numbers(2);
  const int64_t hidden = 300, experts = 16, m = 5, top_k = 4;
  const auto x = numbers.F32(static_cast<size_t>(m * hidden), 3.0f);
  const auto norm = numbers.F32(static_cast<size_t>(hidden), 1.0f);
  const auto w = numbers.Bf16(static_cast<size_t>(experts * hidden), 0.05f);
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeDevice(isa, 2);
    auto stream = device->MakeStream("s");
    std::vector<int32_t> ids(static_cast<size_t>(m * top_k));
    std::vector<float> weights(ids.size());
    GateArgs args{.x = x.data(), .norm_weight = norm.data(), .eps = 1e-6f, .w = View(w, experts, hidden)};
    args.params = {.num_experts = experts, .top_k = top_k, .sigmoid = true, .normalize = false};
    args.m = m;
    args.hidden = hidden;
    args.ids = ids.data();
    args.weights = weights.data();
    device->ops().Gate(*stream, args);
    ASSERT_TRUE(stream->Synchronize().ok());
    for (int64_t token = 0; token < m; ++token) {
      double squares = 0;
      for (int64_t i = 0; i < hidden; ++i) squares += std::pow(static_cast<double>(x[static_cast<size_t>(token * hidden + i)]), 2);
      const double scale = 1.0 / std::sqrt(squares / hidden + 1e-6);
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t e = ids[static_cast<size_t>(token * top_k + j)];
        double logit = 0;
        for (int64_t i = 0; i < hidden; ++i) {
          logit +=
              x[static_cast<size_t>(token * hidden + i)] * scale * norm[static_cast<size_t>(i)] * ToFloat(w[static_cast<size_t>(e * hidden + i)]);
        }
        // BF16 activations would be off by about 1e-3 here.
        EXPECT_NEAR(weights[static_cast<size_t>(token * top_k + j)], 1.0 / (1.0 + std::exp(-logit)), 1e-5) << IsaName(isa);
      }
    }
    // Alone, a token has the same bits.
    std::vector<int32_t> ids_alone(ids.size());
    std::vector<float> weights_alone(ids.size());
    for (int64_t token = 0; token < m; ++token) {
      args.m = 1;
      args.x = x.data() + token * hidden;
      args.ids = ids_alone.data() + token * top_k;
      args.weights = weights_alone.data() + token * top_k;
      device->ops().Gate(*stream, args);
    }
    EXPECT_EQ(ids, ids_alone);
    EXPECT_EQ(weights, weights_alone);
  }
}

// One sequence of 150 positions in three pages that lie out of order.
class MlaTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHeads = 6, kNope = 24, kRope = 8, kV = 20, kRank = 40, kLength = 150;
  static constexpr int64_t kHeadDim = kNope + kRope;

  MlaTest() {
    Numbers numbers(3);
    kv_a_ = numbers.F32(kLength * (kRank + kRope), 1.0f);
    norm_ = numbers.F32(kRank, 1.0f);
    q_ = numbers.Bf16(kLength * kHeads * kHeadDim, 1.0f);
    kv_b_ = numbers.Bf16(kHeads * (kNope + kV) * kRank, 0.2f);
    for (int64_t position = 0; position < kLength; ++position) {
      for (int64_t i = 0; i < kRope / 2; ++i) {
        cos_.push_back(static_cast<float>(std::cos(static_cast<double>(position) * std::pow(100.0, -2.0 * static_cast<double>(i) / kRope))));
        sin_.push_back(static_cast<float>(std::sin(static_cast<double>(position) * std::pow(100.0, -2.0 * static_cast<double>(i) / kRope))));
      }
    }
  }

  std::shared_ptr<KvPool> WriteKv(HostDevice& device, Stream& stream, int64_t chunk) {
    auto kv = KvPool::InMemory({.layers = 2, .row_elements = kRank + kRope, .num_pages = 4});
    for (int64_t begin = 0; begin < kLength; begin += chunk) {
      const KvSequence sequence{.first_row = 0, .num_rows = std::min(chunk, kLength - begin), .start_position = begin, .pages = pages_};
      device.ops().MlaWriteKv(stream, {.kv_a = kv_a_.data() + begin * (kRank + kRope),
                                       .norm_weight = norm_.data(),
                                       .eps = 1e-6f,
                                       .rope = {.cos = cos_.data(), .sin = sin_.data(), .half = kRope / 2, .max_positions = kLength},
                                       .rank = kRank,
                                       .layer = 1,
                                       .kv = kv.get(),
                                       .sequences = &sequence,
                                       .num_sequences = 1});
    }
    return kv;
  }

  std::vector<bf16> Attend(HostDevice& device, Stream& stream, const KvPool& kv, Form form, int64_t chunk, int64_t skip = 0) {
    std::vector<bf16> out(static_cast<size_t>(kLength * kHeads * kV));
    for (int64_t begin = skip; begin < kLength; begin += chunk) {
      const KvSequence sequence{.first_row = 0, .num_rows = std::min(chunk, kLength - begin), .start_position = begin, .pages = pages_};
      device.ops().MlaAttention(stream, {.form = form,
                                         .q = q_.data() + begin * kHeads * kHeadDim,
                                         .kv_b = View(kv_b_, kHeads * (kNope + kV), kRank),
                                         .heads = kHeads,
                                         .nope = kNope,
                                         .rope_dim = kRope,
                                         .v_dim = kV,
                                         .rank = kRank,
                                         .softmax_scale = 0.17f,
                                         .layer = 1,
                                         .skip = skip,
                                         .kv = &kv,
                                         .sequences = &sequence,
                                         .num_sequences = 1,
                                         .out = out.data() + begin * kHeads * kV});
    }
    return out;
  }

  // Attention of one query by its definition, in double, from the cached rows.
  std::vector<double> Reference(const KvPool& kv, int64_t position, int64_t head, int64_t skip = 0) {
    auto cached = [&](int64_t j, int64_t i) {
      return static_cast<double>(ToFloat(reinterpret_cast<const bf16*>(kv.layer(pages_[j / 64], 1))[j % 64 * (kRank + kRope) + i]));
    };
    auto expanded = [&](int64_t j, int64_t row) {
      double sum = 0;
      for (int64_t i = 0; i < kRank; ++i) sum += cached(j, i) * ToFloat(kv_b_[static_cast<size_t>((head * (kNope + kV) + row) * kRank + i)]);
      return sum;
    };
    const bf16* q = q_.data() + (position * kHeads + head) * kHeadDim;
    std::vector<double> out(kV, 0.0);
    double total = 0;
    for (int64_t j = skip; j <= position; ++j) {
      double score = 0;
      for (int64_t i = 0; i < kNope; ++i) score += ToFloat(q[i]) * expanded(j, i);
      for (int64_t i = 0; i < kRope; ++i) score += ToFloat(q[kNope + i]) * cached(j, kRank + i);
      const double weight = std::exp(0.17 * score);
      total += weight;
      for (int64_t i = 0; i < kV; ++i) out[static_cast<size_t>(i)] += weight * expanded(j, kNope + i);
    }
    for (double& x : out) x /= total;
    return out;
  }

  const int32_t pages_[3] = {3, 0, 2};
  std::vector<float> kv_a_, norm_, cos_, sin_;
  std::vector<bf16> q_, kv_b_;
};

TEST_F(MlaTest, WrittenRowsDoNotDependOnChunksAndValidOnesStay) {
  auto device = MakeDevice(SupportedIsas().back(), 2);
  auto stream = device->MakeStream("s");
  auto whole = WriteKv(*device, *stream, kLength);
  auto chunked = WriteKv(*device, *stream, 7);
  const size_t bytes = static_cast<size_t>(whole->geometry().num_pages * whole->geometry().page_bytes());
  EXPECT_EQ(std::memcmp(whole->pages(), chunked->pages(), bytes), 0);

  // A row below write_from is queried, never rewritten.
  std::fill_n(kv_a_.begin(), 10 * (kRank + kRope), 5.0f);
  const KvSequence sequence{.first_row = 0, .num_rows = 10, .start_position = 0, .write_from = 10, .pages = pages_};
  device->ops().MlaWriteKv(*stream, {.kv_a = kv_a_.data(),
                                     .norm_weight = norm_.data(),
                                     .eps = 1e-6f,
                                     .rope = {.cos = cos_.data(), .sin = sin_.data(), .half = kRope / 2, .max_positions = kLength},
                                     .rank = kRank,
                                     .layer = 1,
                                     .kv = whole.get(),
                                     .sequences = &sequence,
                                     .num_sequences = 1});
  EXPECT_EQ(std::memcmp(whole->pages(), chunked->pages(), bytes), 0);
}

TEST_F(MlaTest, BothFormsAreAttentionAndBitEqualInAnyChunking) {
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeDevice(isa, 1);
    auto stream = device->MakeStream("s");
    auto kv = WriteKv(*device, *stream, kLength);
    for (const Form form : {Form::kPrefill, Form::kDecode}) {
      const std::vector<bf16> whole = Attend(*device, *stream, *kv, form, kLength);
      for (int threads = 1; threads <= 3; ++threads) {
        auto other = MakeDevice(isa, threads);
        EXPECT_TRUE(whole == Attend(*other, *stream, *kv, form, 7)) << IsaName(isa) << ", " << threads << " threads";
      }
      double difference = 0;
      int64_t count = 0;
      for (const int64_t position : {0, 1, 63, 64, 149}) {
        for (int64_t head = 0; head < kHeads; ++head) {
          const std::vector<double> expected = Reference(*kv, position, head);
          for (int64_t i = 0; i < kV; ++i, ++count) {
            const double got = ToFloat(whole[static_cast<size_t>((position * kHeads + head) * kV + i)]);
            difference += std::abs(got - expected[static_cast<size_t>(i)]);
            // Keys, values and probabilities pass through BF16 (2^-9) on values of about 1.
            EXPECT_NEAR(got, expected[static_cast<size_t>(i)], 0.05) << IsaName(isa) << " position " << position << " head " << head;
          }
        }
      }
      EXPECT_LT(difference / static_cast<double>(count), 0.008) << IsaName(isa);
    }
  }
}

TEST_F(MlaTest, SkippedPositionsAreNotAttended) {
  constexpr int64_t kSkip = 1;
  for (const Isa isa : SupportedIsas()) {
    auto device = MakeDevice(isa, 2);
    auto stream = device->MakeStream("s");
    auto kv = WriteKv(*device, *stream, kLength);
    // What lies there must not be looked at, be it what it may.
    std::fill_n(reinterpret_cast<uint16_t*>(kv->layer(pages_[0], 1)), kRank + kRope, static_cast<uint16_t>(0x7fc0));
    for (const Form form : {Form::kPrefill, Form::kDecode}) {
      const std::vector<bf16> whole = Attend(*device, *stream, *kv, form, kLength, kSkip);
      EXPECT_TRUE(std::equal(whole.begin() + kSkip * kHeads * kV, whole.end(),
                             Attend(*device, *stream, *kv, form, 9, kSkip).begin() + kSkip * kHeads * kV,
                             [](bf16 a, bf16 b) { return a.bits == b.bits; }));
      for (const int64_t position : {1, 2, 63, 64, 149}) {
        const std::vector<double> expected = Reference(*kv, position, 1, kSkip);
        for (int64_t i = 0; i < kV; ++i) {
          EXPECT_NEAR(ToFloat(whole[static_cast<size_t>((position * kHeads + 1) * kV + i)]), expected[static_cast<size_t>(i)], 0.05) << position;
        }
      }
    }
  }
}

// The two places an RMSNorm can leave its result: side by side with another one's, and unrounded.
TEST(HostOps, RmsNormWritesBesideAnotherAndUnrounded) {
  constexpr int64_t kRows = 3, kN = 37, kWidth = 80;
  for (const int terms : {1, 2}) {
    auto made = HostDevice::Create({.num_threads = 2, .activation_terms = terms, .parallel_work_min = 0});
    ASSERT_TRUE(made.ok()) << made.status();
    auto stream = (*made)->MakeStream("s");
    std::vector<float> x(kRows * kN), weight(kN), f32(kRows * kN);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i) * 0.7f);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = 0.5f + 0.01f * static_cast<float>(i);
    std::vector<bf16> dense(static_cast<size_t>(kRows * terms * kN)), wide(static_cast<size_t>(kRows * terms * kWidth), ToBf16(9.0f));
    RmsNormArgs args{.x = x.data(), .ldx = kN, .weight = weight.data(), .eps = 1e-6f, .m = kRows, .n = kN, .terms = terms, .out = dense.data()};
    (*made)->ops().RmsNorm(*stream, args);
    args.out = wide.data() + 40;
    args.ldo = kWidth;
    (*made)->ops().RmsNorm(*stream, args);
    args.f32 = f32.data();
    (*made)->ops().RmsNorm(*stream, args);
    for (int64_t row = 0; row < kRows; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < kN; ++i) squares += std::pow(static_cast<double>(x[static_cast<size_t>(row * kN + i)]), 2);
      for (int64_t i = 0; i < kN; ++i) {
        const size_t at = static_cast<size_t>(row * kN + i);
        EXPECT_NEAR(f32[at], x[at] / std::sqrt(squares / kN + 1e-6) * weight[static_cast<size_t>(i)], 1e-6);
        for (int64_t term = 0; term < terms; ++term) {
          EXPECT_EQ(wide[static_cast<size_t>((row * terms + term) * kWidth + 40 + i)].bits,
                    dense[static_cast<size_t>((row * terms + term) * kN + i)].bits);
        }
      }
      EXPECT_EQ(ToFloat(wide[static_cast<size_t>(row * terms * kWidth + 39)]), 9.0f);
    }
  }
}

}  // namespace
}  // namespace hearth
