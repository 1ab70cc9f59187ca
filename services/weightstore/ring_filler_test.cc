// A ring whose experts lie on disk, some or all: read as many at once as there are slots, handed over in the order in which they were asked for.
#include "services/weightstore/ring_filler.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/align.h"
#include "common/base/time.h"
#include "common/disk/testing.h"
#include "common/image/image_builder.h"
#include "common/image/image_plan.h"
#include "common/image/image_test_checkpoint.h"

namespace hearth {
namespace {

constexpr int64_t kExperts = 8;
constexpr uint64_t kLease = 7;
constexpr uint32_t kSlots = 4;

class RingFillerTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const int64_t layer : {1, 2}) {
      for (int64_t expert = 0; expert < kExperts; ++expert) order_.emplace_back(layer, expert);
    }
  }
  ~RingFillerTest() override {
    reader_.reset();
    filler_.reset();
  }

  // An image with so many of its experts on disk, more or less, and a ring of its that a filler fills from a disk with these faults.
  void Serve(double on_disk, std::function<ReadFault(const QueuedRead&)> fault) {
    const absl::StatusOr<ImagePlan> plan = PlanImage(files_.model_dir, 1);
    ASSERT_TRUE(plan.ok()) << plan.status();
    uint64_t most = 0;
    for (const ExpertRow& row : plan->manifest.experts) most = std::max(most, row.bytes);
    const uint64_t limit = plan->segment_bytes() - static_cast<uint64_t>(on_disk * static_cast<double>(plan->expert_bytes()));
    const auto built =
        BuildImage({.model_dir = files_.model_dir, .place = files_.regions, .image_bytes_max = limit, .num_shards = 1, .num_threads = 2});
    ASSERT_TRUE(built.ok()) << built.status();
    image_ = *WeightImage::Attach(files_.regions, built->generation);
    const ExpertRingGeometry geometry{.lease_id = kLease, .num_slots = kSlots, .slot_bytes = AlignUp(most, kRingSlotAlign)};
    auto disk = DiskReader::Open({image_->disk_parts()[0].path}, std::make_unique<FaultyQueue>(MakeThreadQueue(8), std::move(fault)));
    ASSERT_TRUE(disk.ok()) << disk.status();
    filler_ = std::make_unique<RingFiller>("prefill.0", *ExpertRing::Create(files_.regions, built->generation, geometry), image_, ShardHome{},
                                           *std::move(disk));
    reader_ = *ExpertRingReader::Make(*ExpertRing::Open(files_.regions, built->generation, kLease, 0));
  }
  bool Whole(uint64_t number, int64_t layer, int64_t expert) {
    const ImageExpert record = *image_->Expert(layer, expert, 0);
    const uint8_t* got = reader_->Record(number);
    return got != nullptr && std::memcmp(got, record.record, record.record_bytes) == 0;
  }

  const TestImagePlace files_{kExperts};
  std::shared_ptr<const WeightImage> image_;
  std::unique_ptr<RingFiller> filler_;
  std::unique_ptr<ExpertRingReader> reader_;
  std::vector<std::pair<int64_t, int64_t>> order_;  // all experts: layer, expert
};

TEST_F(RingFillerTest, AllThatIsPostedIsReadAtOnce) {
  std::atomic<int> begun{0};
  Serve(1.0, [&](const QueuedRead&) -> ReadFault {
    ++begun;
    return {.delay_ns = 300'000'000};
  });
  if (HasFatalFailure()) return;
  const int64_t begin_ns = MonotonicNowNs();
  for (int64_t expert = 0; expert < 2; ++expert) reader_->Post(1, expert);
  while (begun < 2 && MonotonicNowNs() - begin_ns < 250'000'000) std::this_thread::yield();
  for (int64_t expert = 2; expert < kSlots; ++expert) reader_->Post(1, expert);  // while the first are waited for
  while (begun < static_cast<int>(kSlots) && MonotonicNowNs() - begin_ns < 250'000'000) std::this_thread::yield();
  EXPECT_EQ(begun, static_cast<int>(kSlots));
  EXPECT_FALSE(reader_->Filled(0));
  for (uint64_t number = 0; number < kSlots; ++number) {
    ASSERT_TRUE(reader_->AwaitFilled(number, 10'000'000'000));
    EXPECT_TRUE(Whole(number, 1, static_cast<int64_t>(number)));
  }
}

// Every third read ends late, so that most end before one that was asked for earlier; what lies in memory is there at once.
TEST_F(RingFillerTest, RecordsAreHandedOverInTheOrderInWhichTheyWereAskedFor) {
  std::atomic<int> reads{0};
  Serve(0.5, [&](const QueuedRead&) -> ReadFault { return {.delay_ns = reads++ % 3 == 0 ? 20'000'000 : 0}; });
  if (HasFatalFailure()) return;
  uint64_t from_disk = 0;
  for (uint64_t posted = 0, number = 0; number < order_.size(); ++number) {
    for (; posted < order_.size() && posted < number + kSlots; ++posted) {
      ASSERT_TRUE(reader_->CanPost());
      const auto [layer, expert] = order_[posted];
      reader_->Post(layer, expert);
      from_disk += image_->Expert(layer, expert, 0)->disk_offset.has_value() ? 1 : 0;
    }
    ASSERT_TRUE(reader_->AwaitFilled(number, 10'000'000'000));
    EXPECT_TRUE(Whole(number, order_[number].first, order_[number].second)) << number;
  }
  EXPECT_EQ(filler_->Look().records, order_.size());
  EXPECT_EQ(filler_->Look().disk->records, from_disk);
  EXPECT_GT(from_disk, 0u);
  EXPECT_LT(from_disk, order_.size());
}

TEST_F(RingFillerTest, AnErrorRefusesItsRequestAlone) {
  std::atomic<int> reads{0};
  Serve(1.0, [&](const QueuedRead&) -> ReadFault { return {.error = reads++ == 1 ? -EIO : 0}; });
  if (HasFatalFailure()) return;
  for (int64_t expert = 0; expert < kSlots; ++expert) reader_->Post(1, expert);
  for (uint64_t number = 0; number < kSlots; ++number) {
    ASSERT_TRUE(reader_->AwaitFilled(number, 10'000'000'000));
    if (number == 1) {
      EXPECT_EQ(reader_->Record(number), nullptr);
    } else {
      EXPECT_TRUE(Whole(number, 1, static_cast<int64_t>(number)));
    }
  }
}

// A slot is posted anew only once what is read into it has ended, wanted or not; and a filler that stops with reads under way waits for them.
TEST_F(RingFillerTest, WhatIsGivenUpWhileItIsReadHoldsItsSlotUntilItHasEnded) {
  std::atomic<int> begun{0};
  Serve(1.0, [&](const QueuedRead&) -> ReadFault {
    ++begun;
    return {.delay_ns = 200'000'000};
  });
  if (HasFatalFailure()) return;
  const int64_t begin_ns = MonotonicNowNs();
  for (int64_t expert = 0; expert < kSlots; ++expert) reader_->Post(1, expert);
  while (begun < static_cast<int>(kSlots)) std::this_thread::yield();
  reader_->GiveUpBefore(kSlots);
  EXPECT_FALSE(reader_->CanPost());
  ASSERT_TRUE(reader_->AwaitFilled(kSlots - 1, 10'000'000'000));
  EXPECT_GE(MonotonicNowNs() - begin_ns, 200'000'000);
  reader_->Post(2, 5);
  ASSERT_TRUE(reader_->AwaitFilled(kSlots, 10'000'000'000));
  EXPECT_TRUE(Whole(kSlots, 2, 5));
  reader_->Post(2, 6);
  while (begun < static_cast<int>(kSlots) + 2) std::this_thread::yield();
  const int64_t stop_ns = MonotonicNowNs();
  filler_.reset();
  EXPECT_GE(MonotonicNowNs() - stop_ns, 100'000'000);
  EXPECT_FALSE(reader_->Filled(kSlots + 1));
}

}  // namespace
}  // namespace hearth
