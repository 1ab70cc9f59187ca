// Steps in each order of their work: the same logits and the same KV to the bit, an error stays in its half, and on a device that only records the two
// halves really take turns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "common/formats/model_config.h"
#include "common/model/step_runner.h"
#include "tests/model_harness.h"
#include "tests/recording_device.h"

namespace hearth {
namespace {

std::string Fable() { return SourceDir() + "/deploy/models/fable-moe"; }

struct Batch {
  ForwardBatch batch;
  std::vector<TestStream> streams;
};

// `count` streams, each with one new token behind a context that it has or lacks: the values of KV do not matter here.
Batch OneTokenEach(ModelHarness& harness, int count) {
  Batch b;
  for (int i = 0; i < count; ++i) b.streams.push_back(harness.NewStream(4));
  for (int i = 0; i < count; ++i) {
    b.batch.sequences.push_back({.first_row = i, .num_rows = 1, .pages = b.streams[static_cast<size_t>(i)].pages.data()});
    b.batch.token_ids.push_back(10 + i);
    b.batch.logit_rows.push_back(i);
  }
  return b;
}

TEST(StepRunner, AnErrorOfOneHalfLeavesTheOtherHalfsResults) {
  auto harness = ModelHarness::Make(Fable(), {.device = {.num_threads = 2}});
  ASSERT_TRUE(harness.ok()) << harness.status();
  ModelHarness& h = **harness;
  const size_t vocab = static_cast<size_t>(h.vocab());
  const auto stream = h.device().MakeStream("first");
  for (const StepOrder order : {StepOrder::kPlain, StepOrder::kAlternate}) {
    auto runner = StepRunner::Make(h.device(), h.model(), {.max_rows = 8, .max_logit_rows = 8, .order = order});
    ASSERT_TRUE(runner.ok()) << runner.status();
    h.Reset();
    Batch good = OneTokenEach(h, 4);
    std::vector<float> expected(4 * vocab);
    for (const absl::Status& status : (*runner)->Run(*stream, h.kv(), good.batch, expected.data(), nullptr)) ASSERT_TRUE(status.ok()) << status;
    for (const size_t bad_row : {0, 3}) {
      Batch bad = OneTokenEach(h, 4);
      bad.batch.token_ids[bad_row] = static_cast<int32_t>(vocab);
      std::vector<float> logits(4 * vocab);
      const std::vector<absl::Status> statuses = (*runner)->Run(*stream, h.kv(), bad.batch, logits.data(), nullptr);
      ASSERT_EQ(statuses.size(), 4u);
      for (size_t i = 0; i < 4; ++i) {
        if (i / 2 == bad_row / 2) {
          EXPECT_TRUE(absl::IsInvalidArgument(statuses[i])) << StepOrderName(order) << ", row " << i << ": " << statuses[i];
        } else {
          EXPECT_TRUE(statuses[i].ok()) << StepOrderName(order) << ", row " << i << ": " << statuses[i];
          EXPECT_EQ(std::memcmp(&logits[i * vocab], &expected[i * vocab], vocab * sizeof(float)), 0) << StepOrderName(order) << ", row " << i;
        }
      }
      // And the runner goes on.
      for (const absl::Status& status : (*runner)->Run(*stream, h.kv(), good.batch, logits.data(), nullptr)) EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(std::memcmp(logits.data(), expected.data(), expected.size() * sizeof(float)), 0);
    }
  }
}

// A hook that ends a pass ends that half's alone, wherever the other is at that moment.
TEST(StepRunner, APassThatAHookEndsLetsTheOtherFinish) {
  auto harness = ModelHarness::Make(Fable(), {.device = {.num_threads = 2}});
  ASSERT_TRUE(harness.ok()) << harness.status();
  ModelHarness& h = **harness;
  auto runner = StepRunner::Make(h.device(), h.model(), {.max_rows = 8, .max_logit_rows = 8, .order = StepOrder::kAlternate});
  ASSERT_TRUE(runner.ok()) << runner.status();
  const auto stream = h.device().MakeStream("first");
  Batch b = OneTokenEach(h, 5);
  std::vector<float> logits(static_cast<size_t>(5 * h.vocab()));
  for (int end_at = 0; end_at < 2 * static_cast<int>(h.model().config().num_hidden_layers); ++end_at) {
    int layers = 0;  // no lock: hooks never run at the same time
    ForwardHooks hooks;
    hooks.on_layer_done = [&](int64_t) { return layers++ != end_at; };
    const auto statuses = (*runner)->Run(*stream, h.kv(), b.batch, logits.data(), &hooks);
    const auto cancelled = std::count_if(statuses.begin(), statuses.end(), [](const absl::Status& s) { return absl::IsCancelled(s); });
    const auto well = std::count_if(statuses.begin(), statuses.end(), [](const absl::Status& s) { return s.ok(); });
    EXPECT_TRUE(cancelled == 2 || cancelled == 3) << end_at << ": " << cancelled;
    EXPECT_EQ(cancelled + well, 5);
  }
}

// The recorder runs one actor at a time on a virtual clock: which op comes behind which is the schedule itself.
TEST(StepRunner, HalvesAlternateBetweenAttentionAndExperts) {
  auto config = ReadModelConfig(Fable());
  auto image = ImageOf(Fable(), 1);
  ASSERT_TRUE(config.ok() && image.ok()) << config.status() << image.status();
  std::vector<std::string> first_lines;
  for (int run = 0; run < 2; ++run) {
    auto device = RecordingDevice::Make({});
    auto model = Model::Bind(*config, *image, *device);
    ASSERT_TRUE(model.ok()) << model.status();
    KvGeometry geometry = (*model)->kv_geometry();
    geometry.num_pages = 4;
    auto kv = KvPool::InMemory(geometry);
    std::vector<std::string> experts;
    {
      auto runner = StepRunner::Make(*device, **model, {.max_rows = 4, .max_logit_rows = 4, .order = StepOrder::kAlternate});
      ASSERT_TRUE(runner.ok()) << runner.status();
      const auto stream = device->MakeStream("first micro-batch");
      ForwardBatch batch;
      const std::vector<int32_t> pages = {0, 1, 2, 3};
      for (int i = 0; i < 4; ++i) {
        batch.sequences.push_back({.first_row = i, .num_rows = 1, .pages = &pages[static_cast<size_t>(i)]});
        batch.token_ids.push_back(i);
        batch.logit_rows.push_back(i);
      }
      std::vector<float> logits(static_cast<size_t>(4 * config->vocab_size));
      for (const absl::Status& status : (*runner)->Run(*stream, *kv, batch, logits.data(), nullptr)) ASSERT_TRUE(status.ok()) << status;
    }
    for (const std::string& line : device->Lines()) {
      if (line.find(" experts decode ") != std::string::npos)
        experts.push_back(line.find("first micro-batch") != std::string::npos ? "first" : "second");
    }
    ASSERT_EQ(static_cast<int64_t>(experts.size()), 2 * (config->num_hidden_layers - config->first_k_dense_replace));
    for (size_t i = 0; i < experts.size(); ++i) EXPECT_EQ(experts[i], i % 2 == 0 ? "first" : "second") << i;
    if (run == 0) {
      first_lines = device->Lines();
    } else {
      EXPECT_EQ(first_lines, device->Lines()) << "two runs are equal to the byte";
    }
  }
}

}  // namespace
}  // namespace hearth
