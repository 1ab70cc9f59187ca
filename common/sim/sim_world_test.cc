#include "common/sim/sim_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/device/ops.h"
#include "common/roofline/op_time.h"
#include "common/sim/testing/round_machine.h"

namespace hearth {
namespace {

constexpr int64_t kMs = 1'000'000;

int64_t Synchronized(SimWorld& world, Stream& stream) {
  EXPECT_TRUE(stream.Synchronize().ok());
  return world.now_ns();
}

TEST(SimWorld, CopiesOfOneGpuShareItsLinkThoseOfTwoDoNot) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  const ToDeviceArgs copy = {.bytes = 10'000'000};  // 1 ms
  const auto a = world->gpu(0).MakeStream("a"), b = world->gpu(0).MakeStream("b"), c = world->gpu(1).MakeStream("c");
  world->gpu(0).ops().ToDevice(*a, copy);
  world->gpu(0).ops().ToDevice(*b, copy);
  world->gpu(1).ops().ToDevice(*c, copy);
  EXPECT_EQ(Synchronized(*world, *c), 1 * kMs);
  EXPECT_EQ(Synchronized(*world, *a), 2 * kMs);
  EXPECT_EQ(Synchronized(*world, *b), 2 * kMs);
}

TEST(SimWorld, TheTwoDirectionsOfALinkDoNotDisturbEachOther) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  auto buffer = world->gpu(0).Allocate(10'000'000);
  ASSERT_TRUE(buffer.ok());
  std::vector<uint8_t> host(10'000'000, 1);
  const auto in = world->gpu(0).MakeStream("in"), out = world->gpu(0).MakeStream("out");
  world->gpu(0).ops().ToDevice(*in, {.host = host.data(), .device = buffer->data(), .bytes = host.size()});
  world->gpu(0).ops().ToHost(*out, {.device = buffer->data(), .host = host.data(), .bytes = host.size()});
  EXPECT_EQ(Synchronized(*world, *in), 1 * kMs);
  EXPECT_EQ(Synchronized(*world, *out), 1 * kMs);
  EXPECT_EQ(host[0], 0) << "ToHost copies; what ToDevice would bring is nobody's business";
}

// Eight FP8 experts of 10 MB each, two tokens of the same choice.
struct SmallExperts {
  std::vector<bf16> x = std::vector<bf16>(2 * 1024);
  std::array<int32_t, 4> ids = {1, 5, 1, 5};
  std::array<float, 4> weights = {};
  std::vector<float> out = std::vector<float>(2 * 1024);
  ExpertsArgs Args() {
    return {.layer = 3,
            .num_experts = 8,
            .top_k = 2,
            .hidden = 1024,
            .intermediate = 1024,
            .weight_dtypes = DType::kBF16,
            .x = x.data(),
            .ids = ids.data(),
            .weights = weights.data(),
            .m = 2,
            .out = out.data()};
  }
};

TEST(SimWorld, ExpertsReadTheOnesThatWereChosenFromDram) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  const auto stream = world->cpu().MakeStream("s");
  SmallExperts experts;
  world->cpu().ops().Experts(*stream, experts.Args());
  // Two distinct of 3 * 1024 * 1024 BF16 numbers, and the activations, which no cache holds here.
  const double bytes = 2 * 3 * 1024 * 1024 * 2 + 2 * 1024 * (2 + 4) + 8 * 4;
  EXPECT_NEAR(static_cast<double>(Synchronized(*world, *stream)), bytes / 100e9 * 1e9, 2);
}

TEST(SimWorld, ExpertsThatAreNotSharedAreReadByEachRow) {
  const auto world = SimWorld::Make(RoundMachine(), {.experts_shared = false});
  const auto stream = world->cpu().MakeStream("s");
  SmallExperts experts;
  world->cpu().ops().Experts(*stream, experts.Args());
  const double a_row = 2 * 3 * 1024 * 1024 * 2 + 1024 * (2 + 4) + 8 * 2;
  const int64_t decode_ns = Synchronized(*world, *stream);
  EXPECT_NEAR(static_cast<double>(decode_ns), 2 * a_row / 100e9 * 1e9, 2);
  // A prompt's rows read them together all the same.
  ExpertsArgs prompt = experts.Args();
  prompt.form = Form::kPrefill;
  world->cpu().ops().Experts(*stream, prompt);
  EXPECT_NEAR(static_cast<double>(Synchronized(*world, *stream) - decode_ns), (a_row + 1024 * 6 + 16) / 100e9 * 1e9, 2);
}

TEST(SimWorld, ACopyBesideExpertsWaitsInTheirQueue) {
  // Cores ask for 200 GB/s and the link for 10, of DRAM's 100: each gets 100 / 210 of that. Afterwards the copy has its link.
  const auto world = SimWorld::Make(RoundMachine(), {});
  const auto cpu = world->cpu().MakeStream("cpu"), copy = world->gpu(0).MakeStream("copy");
  SmallExperts experts;
  world->cpu().ops().Experts(*cpu, experts.Args());
  world->gpu(0).ops().ToDevice(*copy, {.bytes = 1'000'000});  // 0.1 ms alone
  const double expert_bytes = 2 * 3 * 1024 * 1024 * 2 + 2 * 1024 * (2 + 4) + 8 * 4;
  const double experts_ns = expert_bytes / (200e9 * 100 / 210) * 1e9;
  EXPECT_NEAR(static_cast<double>(Synchronized(*world, *cpu)), experts_ns, 2);
  EXPECT_NEAR(static_cast<double>(Synchronized(*world, *copy)), experts_ns + 1e5 - experts_ns * 100 / 210, 2);
}

TEST(SimWorld, OnAGpuExpertsRunBesideTheStreamUntilTheirOutputIsNamed) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  Device& gpu = world->gpu(0);
  const auto stream = gpu.MakeStream("s");
  SmallExperts experts;
  gpu.ops().Experts(*stream, experts.Args());
  std::vector<float> other(1 << 20), sum(2 * 1024);
  // 12 MB at 1 TB/s: done long before the experts, whose weights take 0.126 ms and whose copies 2.5 us.
  gpu.ops().Add(*stream, {.x = other.data(), .y = other.data(), .n = 1 << 20});
  const auto beside = gpu.MakeEvent();
  gpu.ops().Add(*stream, {.x = experts.out.data(), .y = sum.data(), .n = 2 * 1024});
  beside->Record(*stream);
  EXPECT_FALSE(beside->Query());
  const int64_t end_ns = Synchronized(*world, *stream);
  EXPECT_TRUE(beside->Query());
  EXPECT_GT(end_ns, 126'000);
  EXPECT_LT(end_ns, 131'000) << "the first sum ran meanwhile, the second one after";
}

TEST(SimWorld, EventsOrderStreamsOfDifferentDevices) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  const auto a = world->gpu(0).MakeStream("a"), b = world->gpu(1).MakeStream("b");
  const auto event = world->gpu(0).MakeEvent();
  EXPECT_TRUE(event->Query()) << "true before any Record";
  world->gpu(0).ops().ToDevice(*a, {.bytes = 10'000'000});
  event->Record(*a);
  event->Wait(*b);
  world->gpu(1).ops().ToDevice(*b, {.bytes = 10'000'000});
  EXPECT_EQ(Synchronized(*world, *b), 2 * kMs);
}

TEST(SimWorld, MemoryIsCountedAndRefusedPastTheBudget) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  Device& gpu = world->gpu(0);
  auto most = gpu.Allocate(1'000'000'000);
  ASSERT_TRUE(most.ok());
  const auto refused = gpu.Allocate(100'000'000);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_NE(refused.status().message().find("gpu 0"), absl::string_view::npos);
  EXPECT_EQ(gpu.memory().budget_bytes, uint64_t{1} << 30);
  *most = Buffer();
  EXPECT_EQ(gpu.memory().used_bytes, 0u);
  EXPECT_GE(gpu.memory().peak_bytes, 1'000'000'000u);
  EXPECT_TRUE(gpu.Allocate(100'000'000).ok());
}

TEST(SimWorld, WaitsSeeSignalsStopsPeersAndDeadlines) {
  const auto world = SimWorld::Make(RoundMachine(), {});
  Device& device = world->cpu();
  const auto signal = device.MakeSignal();
  EXPECT_EQ(device.HostWait(*signal, signal->Current(), {.deadline_ns = 1000}), WaitResult::kDeadline);
  EXPECT_EQ(device.Now(), 1000);
  EXPECT_EQ(device.HostWait(*signal, signal->Current(), {.peer_gone = [] { return true; }}), WaitResult::kPeerGone);
  StopToken stop;
  {
    const auto actor = device.Spawn("other", [&] { signal->Notify(); });
    EXPECT_EQ(device.HostWait(*signal, signal->Current(), {.stop = &stop}), WaitResult::kSignalled);
  }
  stop.Stop();
  EXPECT_EQ(device.HostWait(*signal, signal->Current(), {.stop = &stop}), WaitResult::kStopped);
}

TEST(SimWorld, TheGateDrawsDifferentExpertsAscendingAndByItsSeed) {
  const auto draw = [](uint64_t seed, double skew) {
    const auto world = SimWorld::Make(RoundMachine(), {.seed = seed, .routing_skew = skew});
    const auto stream = world->gpu(0).MakeStream("s");
    std::vector<int32_t> ids(4000);
    std::vector<float> weights(4000), x(500 * 16);
    world->gpu(0).ops().Gate(
        *stream, {.x = x.data(), .params = {.num_experts = 64, .top_k = 8}, .m = 500, .hidden = 16, .ids = ids.data(), .weights = weights.data()});
    return ids;
  };
  const std::vector<int32_t> even = draw(1, 0);
  std::array<int, 64> counts{};
  for (size_t i = 0; i < even.size(); ++i) {
    ASSERT_TRUE(even[i] >= 0 && even[i] < 64);
    if (i % 8 != 0) {
      ASSERT_GT(even[i], even[i - 1]);
    }
    ++counts[static_cast<size_t>(even[i])];
  }
  // 4000 draws over 64: 62 each, give or take.
  for (const int count : counts) EXPECT_NEAR(count, 62, 35);
  EXPECT_EQ(draw(1, 0), even);
  EXPECT_NE(draw(2, 0), even);
  std::array<int, 64> skewed{};
  for (const int32_t id : draw(1, 1.0)) ++skewed[static_cast<size_t>(id)];
  EXPECT_GT(*std::max_element(skewed.begin(), skewed.end()), 300) << "the most popular one is in most choices";
}

TEST(SimWorld, TheSameProgramGivesTheSameTimelineToTheByte) {
  const auto run = [] {
    HardwareProfile hardware = RoundMachine();
    hardware.gpu.enqueue_us = 1;
    const auto world = SimWorld::Make(hardware, {.record = true});
    Device& gpu = world->gpu(0);
    const auto done = gpu.MakeSignal();
    const auto worker = [&](const char* name) {
      return [&gpu, &done, name] {
        const auto stream = gpu.MakeStream(name);
        for (int i = 1; i <= 20; ++i) {
          gpu.ops().ToDevice(*stream, {.bytes = static_cast<uint64_t>(i) * 100'000});
          if (i % 3 == 0) {
            EXPECT_TRUE(stream->Synchronize().ok());
          }
          done->Notify();
        }
        EXPECT_TRUE(stream->Synchronize().ok());
      };
    };
    {
      const auto a = gpu.Spawn("a", worker("a")), b = gpu.Spawn("b", worker("b"));
      while (done->Current() < 40) gpu.HostWait(*done, done->Current(), {});
    }
    const Timeline& timeline = world->timeline();
    EXPECT_EQ(timeline.spans().size(), 40u);
    return absl::StrCat(timeline.ToPerfettoJson(), timeline.ToSvg("two loaders", 0, world->now_ns()));
  };
  const std::string first = run();
  EXPECT_NE(first.find("\"name\":\"to_device\""), std::string::npos);
  EXPECT_NE(first.find("<svg"), std::string::npos);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(run(), first);
}

}  // namespace
}  // namespace hearth
