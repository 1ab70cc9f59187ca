#include "common/experts/fetch_ahead_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/experts/cpu_expert_engine.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kSide = 1024;  // hidden and intermediate

// Experts that all have the same 1 MB of weights: what a probe walks can be large without being there.
class OneRecordSource : public ExpertSource {
 public:
  int64_t num_shards() const override { return 1; }
  ExpertView Acquire(int64_t, int64_t, int64_t) override {
    ++held;
    const WeightView view = {.data = codes_.data(),
                             .dtype = DType::kF8E4M3,
                             .rows = kSide,
                             .cols = kSide,
                             .row_stride = kSide,
                             .scales = scales_.data(),
                             .scale_stride = kSide / 128};
    return {.count = kSide, .gate = view, .up = view, .down = view};
  }
  void Release(int64_t, int64_t, int64_t) override { --held; }
  int64_t held = 0;

 private:
  const std::vector<uint8_t> codes_ = std::vector<uint8_t>(kSide * kSide, 0x30);
  const std::vector<float> scales_ = std::vector<float>(64, 0.01f);
};

ExpertsArgs Shape(int64_t num_experts) { return {.num_experts = num_experts, .top_k = 8, .hidden = kSide, .intermediate = kSide}; }

TEST(FetchAheadProbe, MeasuresBothAndSetsTheDeviceToTheFaster) {
  auto device = MakeHostDevice({.num_threads = 2});
  ASSERT_TRUE(device.ok()) << device.status();
  OneRecordSource source;
  const FetchAheadProbe probe = ProbeFetchAhead(**device, source, Shape(176), 1);
  EXPECT_EQ(probe.note, "");
  EXPECT_GT(probe.on_gb_per_s, 0);
  EXPECT_GT(probe.off_gb_per_s, 0);
  EXPECT_EQ(probe.on, probe.off_gb_per_s < probe.on_gb_per_s * 1.02);
  EXPECT_EQ((*device)->fetch_ahead(), probe.on);
  EXPECT_THAT(probe.ToString(), HasSubstr(" against "));
  EXPECT_EQ(source.held, 0);
}

TEST(FetchAheadProbe, ALayerThatCachesHoldIsNotMeasured) {
  auto device = MakeHostDevice({.num_threads = 1});
  ASSERT_TRUE(device.ok()) << device.status();
  OneRecordSource source;
  const FetchAheadProbe probe = ProbeFetchAhead(**device, source, Shape(16), 1'000'000'000);
  EXPECT_EQ(probe.ToString(), "on (not measured: a layer's experts have 50.3 MB, which caches may hold)");
  EXPECT_TRUE((*device)->fetch_ahead());
}

TEST(FetchAheadProbe, AnOpThatFailsIsANote) {
  auto device = MakeHostDevice({.num_threads = 1, .memory_budget_bytes = 1000});
  ASSERT_TRUE(device.ok()) << device.status();
  OneRecordSource source;
  const FetchAheadProbe probe = ProbeFetchAhead(**device, source, Shape(176), 1);
  EXPECT_THAT(probe.note, HasSubstr("device memory"));
  EXPECT_TRUE((*device)->fetch_ahead());
}

}  // namespace
}  // namespace hearth
