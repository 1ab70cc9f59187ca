// The seam of DESIGN section 5: the same forward pass runs against a device that only writes down what it is asked to do.
#include "tests/recording_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/formats/model_config.h"
#include "common/model/forward.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two streams of fable-moe: one decodes at position 70, one at 3; a draft behind the first; then a prefill chunk of 5.
std::vector<std::string> ListingOfForward(uint64_t seed) {
  const std::string dir = SourceDir() + "/deploy/models/fable-moe";
  auto config = ReadModelConfig(dir);
  auto image = ImageOf(dir, 1);
  EXPECT_TRUE(config.ok() && image.ok()) << config.status() << image.status();
  auto device = RecordingDevice::Make({.seed = seed});
  auto model = Model::Bind(*config, *image, *device);
  EXPECT_TRUE(model.ok()) << model.status();
  KvGeometry geometry = (*model)->kv_geometry();
  geometry.num_pages = 4;
  auto kv = KvPool::InMemory(geometry);
  auto workspace = (*model)->MakeWorkspace(8, 2);
  EXPECT_TRUE(workspace.ok()) << workspace.status();
  auto stream = device->MakeStream("main");
  const int32_t pages[] = {0, 1, 2};
  std::vector<float> logits(2 * 4096);
  ForwardBatch decode{.form = Form::kDecode, .token_ids = {5, 6}, .sequences = {}, .logit_rows = {0, 1}};
  decode.sequences = {{.first_row = 0, .num_rows = 1, .start_position = 70, .pages = pages},
                      {.first_row = 1, .num_rows = 1, .start_position = 3, .pages = pages + 2}};
  const std::vector<float> hidden(256);
  decode.prior_hidden = {hidden.data(), hidden.data()};
  EXPECT_TRUE((*model)->Forward(*stream, **workspace, *kv, decode, logits.data(), nullptr).ok());
  ForwardBatch draft{.form = Form::kDecode, .token_ids = {7}, .sequences = {}, .logit_rows = {0}, .prior_hidden = {hidden.data()}};
  draft.sequences = {{.first_row = 0, .num_rows = 1, .start_position = 71, .pages = pages}};
  EXPECT_TRUE((*model)->Draft(*stream, **workspace, *kv, draft, logits.data()).ok());
  ForwardBatch prefill{.form = Form::kPrefill, .token_ids = {1, 2, 3, 4, 5}, .sequences = {}, .logit_rows = {}};
  prefill.sequences = {{.first_row = 0, .num_rows = 5, .start_position = 4, .pages = pages + 2}};
  prefill.prior_hidden = {hidden.data()};
  EXPECT_TRUE((*model)->Forward(*stream, **workspace, *kv, prefill, nullptr, nullptr).ok());
  return device->Lines();
}

int64_t CountOf(const std::vector<std::string>& lines, const std::string& what) {
  return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) { return line.find(what) != std::string::npos; });
}

TEST(RecordingDevice, ForwardListsItsOpsWithShapesAndCosts) {
  const std::vector<std::string> lines = ListingOfForward(1);
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines[0], AllOf(HasSubstr("0 main embed m=2 n=256"), HasSubstr("activations=2048")));
  EXPECT_EQ(CountOf(lines, " mla_attention decode "), 7) << "a layer each, and the draft's";
  EXPECT_EQ(CountOf(lines, " mla_attention prefill "), 6);
  EXPECT_EQ(CountOf(lines, " gate "), 11) << "five MoE layers in each of two passes, and the draft's";
  EXPECT_EQ(CountOf(lines, " experts decode "), 6);
  EXPECT_EQ(CountOf(lines, " to_host "), 2) << "logits of the decode pass and of the draft only";
  EXPECT_EQ(CountOf(lines, "mla_write_kv layer=6 "), 3) << "each pass leaves the MTP layer's KV, whose slot 0 is empty: the draft at 71 sees 71 rows";
  EXPECT_EQ(CountOf(lines, absl::StrCat("mla_attention decode layer=6 heads=4 rows=1@71")), 1);
  EXPECT_EQ(CountOf(lines, absl::StrCat(" kv=", 71 * 80 * 2)), 1);
  // Position 70 sees 71 rows of KV, position 3 sees 4; a row is 64 + 16 BF16 numbers.
  EXPECT_EQ(CountOf(lines, "mla_attention decode layer=0 heads=4 rows=1@70,1@3"), 1);
  EXPECT_EQ(CountOf(lines, absl::StrCat(" kv=", (71 + 4) * 80 * 2)), 6);
  // lm_head [4096, 256] BF16 on two rows.
  EXPECT_EQ(CountOf(lines, "linear m=2 n=4096 k=256 BF16 flops=4194304 weights=2097152"), 1);
}

TEST(RecordingDevice, TwoRunsGiveTheSameListingToTheByte) {
  EXPECT_EQ(ListingOfForward(7), ListingOfForward(7));
  EXPECT_NE(ListingOfForward(7), ListingOfForward(8)) << "the seed steers the gate";
}

// A loader and a consumer with a ring of two, as a prefill engine has them: the order of their steps is the device's, not the machine's.
std::vector<std::string> ListingOfActors() {
  auto device = RecordingDevice::Make({});
  auto loaded = device->MakeSignal();
  auto consumed = device->MakeSignal();
  std::vector<std::string> log;
  auto loader = device->Spawn("loader", [&] {
    auto stream = device->MakeStream("copy");
    for (uint64_t i = 0; i < 6; ++i) {
      while (i >= consumed->Current() + 2) device->HostWait(*consumed, consumed->Current(), {});
      device->ops().ToBf16(*stream, {.n = 1'000'000});
      log.push_back(absl::StrCat(device->Now(), " loaded ", i));
      loaded->Notify();
    }
  });
  auto stream = device->MakeStream("compute");
  for (uint64_t i = 0; i < 6; ++i) {
    while (loaded->Current() <= i) device->HostWait(*loaded, loaded->Current(), {});
    device->ops().Add(*stream, {.n = 3'000'000});
    log.push_back(absl::StrCat(device->Now(), " computed ", i));
    consumed->Notify();
  }
  loader.reset();
  log.push_back(absl::StrCat(device->Now(), " joined"));
  return log;
}

TEST(RecordingDevice, ActorsAreSteppedInOneOrder) {
  const std::vector<std::string> first = ListingOfActors();
  ASSERT_EQ(first.size(), 13u);
  for (int run = 0; run < 20; ++run) ASSERT_EQ(first, ListingOfActors());
}

TEST(RecordingDevice, TheClockIsVirtual) {
  auto device = RecordingDevice::Make({});
  auto signal = device->MakeSignal();
  EXPECT_EQ(device->HostWait(*signal, 0, {.deadline_ns = 3'600'000'000'000}), WaitResult::kDeadline);
  EXPECT_EQ(device->Now(), 3'600'000'000'000) << "an hour, at once";
  StopToken stop;
  auto stopper = device->Spawn("stopper", [&] {
    auto stream = device->MakeStream("s");
    device->ops().Add(*stream, {.n = 1'000'000});
    stop.Stop();
  });
  EXPECT_EQ(device->HostWait(*signal, 0, {.stop = &stop}), WaitResult::kStopped);
}

}  // namespace
}  // namespace hearth
