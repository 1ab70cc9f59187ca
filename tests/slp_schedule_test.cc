// The pass's schedule on a device that only writes it down: what is loaded when, what an error in any actor leaves, the same listing each time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/formats/model_config.h"
#include "common/slp/slp_engine.h"
#include "tests/model_harness.h"
#include "tests/recording_device.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

// fable-moe on a recording device, a stream of 100 tokens.
class Schedule {
 public:
  explicit Schedule(const RecordingOptions& options, int64_t expert_slots = 4) : device_(RecordingDevice::Make(options)) {
    const std::string dir = SourceDir() + "/deploy/models/fable-moe";
    auto config = ReadModelConfig(dir);
    auto image = ImageOf(dir, 1);
    EXPECT_TRUE(config.ok() && image.ok()) << config.status() << image.status();
    record_bytes_ = (*image)->Expert(1, 0, 0)->record_bytes;
    model_ = *Model::Bind(*config, *image, *device_);
    KvGeometry geometry = model_->kv_geometry();
    geometry.num_pages = 2;
    kv_ = KvPool::InMemory(geometry);
    auto engine = SlpEngine::Make(*device_, *model_, {.chunk_rows = 40, .max_rows = 100, .expert_slots = expert_slots});
    EXPECT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  absl::Status Run(const SlpHooks& hooks = {}) {
    ForwardBatch batch{
        .form = Form::kPrefill, .token_ids = std::vector<int32_t>(100, 7), .sequences = {}, .logit_rows = {}, .prior_hidden = {nullptr}};
    batch.sequences = {{.first_row = 0, .num_rows = 100, .pages = pages_}};
    return engine_->Run(*kv_, batch, nullptr, hooks);
  }
  const SlpEngine& engine() const { return *engine_; }
  uint64_t record_bytes() const { return record_bytes_; }
  std::vector<std::string> Lines() const { return device_->Lines(); }
  int64_t Count(const std::string& what) const {
    const std::vector<std::string> lines = Lines();
    return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) { return line.find(what) != std::string::npos; });
  }

 private:
  const int32_t pages_[2] = {0, 1};
  uint64_t record_bytes_ = 0;
  std::unique_ptr<RecordingDevice> device_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<KvPool> kv_;
  std::unique_ptr<SlpEngine> engine_;
};

TEST(SlpSchedule, EachWeightCrossesTheLinkOnceAPass) {
  Schedule schedule({});
  ASSERT_TRUE(schedule.Run().ok());
  EXPECT_EQ(schedule.Count(" slp compute mla_attention prefill layer=3 "), 3) << "a chunk each: 40, 40 and 20 rows";
  EXPECT_EQ(schedule.Count(" slp compute expert_rows "), 5 * 32) << "all experts of five layers, each once for all its rows";
  EXPECT_EQ(schedule.Count(" slp compute mla_write_kv layer=6 "), 3) << "the MTP module's slots";
  EXPECT_EQ(schedule.engine().last_pass().experts_loaded, 5 * 32);
  uint64_t copied = 0;
  for (const std::string& line : schedule.Lines()) {
    if (line.find(" slp copy to_device ") == std::string::npos) continue;
    const std::vector<std::string> halves = absl::StrSplit(line, "bytes=");
    copied += std::stoull(halves[1]);
  }
  EXPECT_EQ(copied, schedule.engine().last_pass().bytes_loaded);
  // The same pass again: nothing stays from one to the next.
  const int64_t lines = static_cast<int64_t>(schedule.Lines().size());
  ASSERT_TRUE(schedule.Run().ok());
  EXPECT_EQ(static_cast<int64_t>(schedule.Lines().size()), 2 * lines);
}

// With a ring of two the loader is never more than two experts ahead of the model, with a layer's ring it has the layer's before the gate speaks.
TEST(SlpSchedule, TheRingIsHowFarTheLoaderRunsAhead) {
  for (const int64_t slots : {2, 32}) {
    Schedule schedule({}, slots);
    ASSERT_TRUE(schedule.Run().ok());
    const std::string copy = absl::StrCat(" slp copy to_device bytes=", schedule.record_bytes(), " ");
    int64_t loaded = 0, computed = 0, ahead_max = 0;
    for (const std::string& line : schedule.Lines()) {
      if (line.find(copy) != std::string::npos) ++loaded;
      if (line.find(" expert_rows ") != std::string::npos) ++computed;
      ahead_max = std::max(ahead_max, loaded - computed);
    }
    EXPECT_EQ(loaded, computed);
    EXPECT_EQ(ahead_max, slots);
  }
}

TEST(SlpSchedule, TwoRunsGiveTheSameListingToTheByte) {
  const auto listing = [] {
    Schedule schedule({.seed = 5});
    EXPECT_TRUE(schedule.Run().ok());
    return schedule.Lines();
  };
  EXPECT_EQ(listing(), listing());
}

// An error on any stream, at the start, on the way and at the end, ends the pass with that error; the next pass is whole.
TEST(SlpSchedule, AnErrorInAnyActorEndsThePassAndTheNextIsWhole) {
  Schedule whole({});
  ASSERT_TRUE(whole.Run().ok());
  const int64_t copies = whole.Count(" slp copy to_device ");
  const std::vector<std::pair<std::string, std::vector<int64_t>>> errors = {
      {"to_device", {0, 1, copies / 2, copies - 1}}, {"expert_rows", {0, 80, 159}}, {"mla_attention", {0, 5, 17}}, {"gate", {0, 14}}};
  for (const auto& [op, ats] : errors) {
    for (const int64_t at : ats) {
      SCOPED_TRACE(absl::StrCat(op, " ", at));
      Schedule schedule({.failing_op = op, .failing_at = at});
      const absl::Status status = schedule.Run();
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(op, " fails as it was told to")));
      const int64_t before = schedule.Count(" expert_rows ");
      EXPECT_TRUE(schedule.Run().ok());
      EXPECT_EQ(schedule.Count(" expert_rows ") - before, 5 * 32);
    }
  }
}

}  // namespace
}  // namespace hearth
