// A model of which a part lies on disk computes the bits of one that is all in memory: in both forms through the image's mapping, and streamed, with experts
// read directly or through the store's rings. And what a disk may answer instead of bytes ends a pass with the file's name, and never a process.
#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "common/base/time.h"
#include "common/disk/testing.h"
#include "common/experts/disk_expert_source.h"
#include "common/slp/slp_engine.h"
#include "tests/model_harness.h"
#include "tests/served_rings.h"
#include "tests/synthetic_models.h"

namespace hearth {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kLength = 150;

std::vector<int32_t> Prompt(const ModelHarness& harness) { return Ids(kLength, 13, harness.vocab()); }

std::unique_ptr<ModelHarness> MakeHarness(const std::string& dir, int shards, double on_disk) {
  auto made = ModelHarness::Make(dir, {.device = {.num_threads = 2, .num_pools = shards, .parallel_work_min = 0},
                                       .num_shards = shards,
                                       .on_disk = on_disk,
                                       .max_rows = kLength,
                                       .num_pages = 8});
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : nullptr;
}

// What a prompt and some tokens behind it leave.
struct Outcome {
  std::vector<float> logits;
  std::vector<uint8_t> pages;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome Plain(ModelHarness& harness, int64_t chunk) {
  harness.Reset();
  TestStream stream = harness.NewStream(kLength + 4);
  auto logits = harness.Feed(Form::kPrefill, stream, Prompt(harness), chunk, true);
  EXPECT_TRUE(logits.ok()) << logits.status();
  auto decoded = harness.Feed(Form::kDecode, stream, {5, 6, 7, 8}, 1, true);
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  Outcome outcome{*std::move(logits), PageBytes(harness)};
  outcome.logits.insert(outcome.logits.end(), decoded->begin(), decoded->end());
  return outcome;
}

absl::StatusOr<Outcome> Streamed(ModelHarness& harness, SlpEngine& engine, const SlpHooks& hooks = {}) {
  harness.Reset();
  TestStream stream = harness.NewStream(kLength);
  const ForwardBatch batch = ModelHarness::BatchOf(Form::kPrefill, {{&stream, Prompt(harness)}}, /*all_logits=*/true);
  std::vector<float> logits(static_cast<size_t>(kLength * harness.vocab()));
  RETURN_IF_ERROR(engine.Run(harness.kv(), batch, logits.data(), hooks));
  return Outcome{std::move(logits), PageBytes(harness)};
}

Outcome PlainPrompt(ModelHarness& harness) {
  harness.Reset();
  TestStream stream = harness.NewStream(kLength);
  auto logits = harness.Feed(Form::kPrefill, stream, Prompt(harness), kLength, true);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return {*std::move(logits), PageBytes(harness)};
}

std::unique_ptr<SlpEngine> Engine(ModelHarness& harness, std::shared_ptr<ExpertSource> experts, int64_t slots = 0) {
  auto engine = SlpEngine::Make(harness.device(), harness.model(),
                                {.chunk_rows = 64, .max_rows = kLength, .with_logits = true, .expert_slots = slots, .experts = std::move(experts)});
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

std::unique_ptr<DiskExpertSource> Source(ModelHarness& harness, int64_t buffers, std::unique_ptr<ReadQueue> queue = nullptr,
                                         int64_t patience_ns = DiskExpertSource::kPatienceNs) {
  auto source = DiskExpertSource::Make(*harness.model().weights().experts, harness.shared_image(), buffers, std::move(queue), patience_ns);
  EXPECT_TRUE(source.ok()) << source.status();
  return source.ok() ? *std::move(source) : nullptr;
}

struct Case {
  const char* name;
  const char* model;
  int shards = 1;
};

class Disk : public testing::TestWithParam<Case> {
 protected:
  static std::string Dir() {
    const std::string model = GetParam().model;
    return model == "fable" ? SourceDir() + "/deploy/models/fable-moe" : SyntheticModelDir(model);
  }
  static std::unique_ptr<ModelHarness> Make(double on_disk) { return MakeHarness(Dir(), GetParam().shards, on_disk); }
};

TEST_P(Disk, BothFormsAreThoseOfAModelInMemory) {
  const auto whole = Make(0);
  ASSERT_NE(whole, nullptr);
  const Outcome expected = Plain(*whole, 64);
  for (const double on_disk : {0.5, 1.0}) {
    const auto harness = Make(on_disk);
    ASSERT_NE(harness, nullptr);
    ASSERT_GT(harness->image().disk_bytes(), 0u);
    EXPECT_TRUE(expected == Plain(*harness, 64)) << on_disk;
    EXPECT_TRUE(expected == Plain(*harness, 17)) << on_disk;
  }
}

TEST_P(Disk, AStreamedPassIsThePlainOne) {
  const auto whole = Make(0);
  ASSERT_NE(whole, nullptr);
  const Outcome expected = PlainPrompt(*whole);
  for (const double on_disk : {0.5, 1.0}) {
    const auto harness = Make(on_disk);
    ASSERT_NE(harness, nullptr);
    for (const bool threads : {false, true}) {
      for (const int64_t buffers : {2, 5}) {
        SCOPED_TRACE(absl::StrCat(on_disk, threads ? ", threads, " : ", ", buffers));
        std::shared_ptr<DiskExpertSource> source = Source(*harness, buffers, threads ? MakeThreadQueue(4) : nullptr);
        ASSERT_NE(source, nullptr);
        const auto engine = Engine(*harness, source, buffers == 2 ? 0 : 2);
        ASSERT_NE(engine, nullptr);
        for (const int64_t experts : {0, 1, 3}) {  // ended early; the next is whole
          int64_t left = experts;
          EXPECT_TRUE(absl::IsCancelled(Streamed(*harness, *engine, {.wanted = [&] { return left-- > 0; }}).status()));
        }
        for (int pass = 0; pass < 2; ++pass) {
          const auto outcome = Streamed(*harness, *engine);
          ASSERT_TRUE(outcome.ok()) << outcome.status();
          EXPECT_TRUE(expected == *outcome);
        }
        const DiskExpertSource::View view = source->Look();
        EXPECT_GT(view.reader.records, 0u);
        EXPECT_EQ(view.through_mapping, 0u);
        EXPECT_EQ(view.reader.errors, 0u);
      }
    }
  }
}

TEST_P(Disk, AStreamedPassThroughRingsIsThePlainOne) {
  const auto whole = Make(0), harness = Make(0.5);
  ASSERT_TRUE(whole != nullptr && harness != nullptr);
  ServedRings rings(harness->image(), harness->model(), 3);
  const auto engine = Engine(*harness, rings.source());
  const auto outcome = Streamed(*harness, *engine);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(PlainPrompt(*whole) == *outcome);
}

INSTANTIATE_TEST_SUITE_P(All, Disk,
                         testing::Values(Case{"FableMoe", "fable"}, Case{"LatentTwoShards", "synth", 2}, Case{"GroupedTwoShards", "gqa", 2}),
                         [](const auto& info) { return std::string(info.param.name); });

class DiskFault : public testing::Test {
 protected:
  void SetUp() override {
    harness_ = MakeHarness(SourceDir() + "/deploy/models/fable-moe", 1, 0.5);
    ASSERT_NE(harness_, nullptr);
    path_ = harness_->image().disk_parts()[0].path;
    expected_ = PlainPrompt(*harness_);
  }
  std::shared_ptr<DiskExpertSource> Faulty(std::function<ReadFault(const QueuedRead&)> fault, int64_t patience_ns = DiskExpertSource::kPatienceNs) {
    return Source(*harness_, 4, std::make_unique<FaultyQueue>(MakeThreadQueue(4), std::move(fault)), patience_ns);
  }
  // The experts of the first layer that has some, on disk or not, in order.
  std::vector<int64_t> Experts(bool on_disk) {
    const ModelConfig& c = harness_->model().config();
    while (!c.IsMoeLayer(layer_)) ++layer_;
    std::vector<int64_t> experts;
    for (int64_t e = 0; e < c.n_routed_experts; ++e) {
      if (harness_->image().Expert(layer_, e, 0)->disk_offset.has_value() == on_disk) experts.push_back(e);
    }
    return experts;
  }
  bool Whole(const ExpertView& view, int64_t expert) {
    return std::memcmp(view.record, harness_->image().Expert(layer_, expert, 0)->record, view.record_bytes) == 0;
  }

  std::unique_ptr<ModelHarness> harness_;
  std::string path_;
  Outcome expected_;
  int64_t layer_ = 0;
};

TEST_F(DiskFault, AnErrorEndsThePassByNameAndTheNextIsWhole) {
  std::atomic<int> left{7};
  const auto source = Faulty([&](const QueuedRead&) -> ReadFault { return {.error = --left == 0 ? -EIO : 0}; });
  const auto engine = Engine(*harness_, source);
  const absl::Status status = Streamed(*harness_, *engine).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path_), HasSubstr("Input/output error"), HasSubstr("loading experts")));
  const auto outcome = Streamed(*harness_, *engine);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(expected_ == *outcome);
}

TEST_F(DiskFault, AFileThatEndsEarlyEndsThePassByName) {
  // Truncated for the reader alone, which opens what is there by this name: the mapping keeps the file that it has.
  const auto source = Faulty([&](const QueuedRead& read) -> ReadFault { return {.bytes_max = read.offset > 100'000 ? 0 : UINT64_MAX}; });
  const auto engine = Engine(*harness_, source);
  const absl::Status status = Streamed(*harness_, *engine).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path_), HasSubstr("truncated")));
}

TEST_F(DiskFault, ASlowDiskIsWaitedForNoLongerThanThePassIs) {
  const auto source = Faulty([](const QueuedRead&) -> ReadFault { return {.delay_ns = 400'000'000}; });
  const auto engine = Engine(*harness_, source);
  const int64_t begin_ns = MonotonicNowNs();
  bool once = false;
  EXPECT_TRUE(absl::IsCancelled(Streamed(*harness_, *engine, {.wanted = [&] { return !std::exchange(once, true); }}).status()));
  EXPECT_LT(MonotonicNowNs() - begin_ns, 2'000'000'000);
}

TEST_F(DiskFault, ADiskThatNeverAnswersFailsThePassInTime) {
  const auto source = Faulty([](const QueuedRead&) -> ReadFault { return {.delay_ns = 1'000'000'000}; }, 200'000'000);
  const auto engine = Engine(*harness_, source);
  const absl::Status status = Streamed(*harness_, *engine).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path_), HasSubstr("nothing for")));
}

// Experts are read ahead in order as far as the buffers reach, and a released buffer is read into for the next.
TEST_F(DiskFault, ReadsAheadAsFarAsTheBuffersReach) {
  std::atomic<int> begun{0};
  const auto source = Faulty([&](const QueuedRead&) -> ReadFault {
    ++begun;
    return {};
  });
  const std::vector<int64_t> experts = Experts(true);
  ASSERT_GT(experts.size(), 5u);
  std::vector<ExpertId> order;
  for (const int64_t expert : experts) order.push_back({layer_, expert});
  source->Expect(order, nullptr);
  EXPECT_EQ(begun, 4);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Whole(source->Acquire(layer_, experts[static_cast<size_t>(i)], 0), experts[static_cast<size_t>(i)]));
  EXPECT_EQ(begun, 4);
  source->Release(layer_, experts[0], 0);
  EXPECT_EQ(begun, 5);
  // The fourth is left out: its buffer goes to the sixth.
  EXPECT_TRUE(Whole(source->Acquire(layer_, experts[4], 0), experts[4]));
  // As soon as the read under way into it has ended.
  for (const int64_t until_ns = MonotonicNowNs() + 10'000'000'000; begun < 6 && MonotonicNowNs() < until_ns; std::this_thread::yield()) {
    source->Acquire(layer_, experts[4], 0);
  }
  EXPECT_EQ(begun, 6);
  EXPECT_EQ(source->Look().through_mapping, 0u);
}

TEST_F(DiskFault, OneThatNobodyExpectsIsReadAndOneTooManyComesThroughTheMapping) {
  const auto source = Source(*harness_, 2);
  const std::vector<int64_t> experts = Experts(true);
  source->Expect({}, nullptr);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Whole(source->Acquire(layer_, experts[static_cast<size_t>(i)], 0), experts[static_cast<size_t>(i)]));
  EXPECT_EQ(source->Look().reader.records, 2u);
  EXPECT_EQ(source->Look().through_mapping, 1u);
  for (int i = 0; i < 3; ++i) source->Release(layer_, experts[static_cast<size_t>(i)], 0);
  EXPECT_TRUE(Whole(source->Acquire(layer_, experts[3], 0), experts[3]));
  EXPECT_EQ(source->Look().reader.records, 3u);
  const int64_t resident = Experts(false)[0];
  EXPECT_EQ(source->Acquire(layer_, resident, 0).record, harness_->image().Expert(layer_, resident, 0)->record);
  EXPECT_TRUE(source->status().ok());
}

// The rings bring nothing (their store refuses what its disk does not give): the second source reads, and its error is the pass's.
TEST_F(DiskFault, RingsThatBringNothingHaveTheDiskBehindThem) {
  std::atomic<bool> fail{false};
  ServedRings rings(harness_->image(), harness_->model(), 3,
                    Source(*harness_, 4, std::make_unique<FaultyQueue>(MakeThreadQueue(4), [&](const QueuedRead&) -> ReadFault {
                      return {.error = fail ? -EIO : 0};
                    })));
  rings.Refuse();
  const auto engine = Engine(*harness_, rings.source());
  const auto outcome = Streamed(*harness_, *engine);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(expected_ == *outcome);
  EXPECT_EQ(rings.source()->counts().from_rings, 0);
  fail = true;
  EXPECT_EQ(Streamed(*harness_, *engine).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace hearth
