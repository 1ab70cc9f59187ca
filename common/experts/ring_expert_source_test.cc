// Experts through rings have the image's bytes, whatever is left out, held, given up, and whatever becomes of the store; and no wait lasts.
#include "common/experts/ring_expert_source.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <filesystem>
#include <random>
#include <thread>

#include "common/base/time.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLayers = 4, kExperts = 9, kShards = 2;
constexpr uint64_t kLease = 77;
constexpr Hash128 kGeneration{3, 4};
constexpr int64_t kMs = 1'000'000;

// Records of random bytes; the second shard's are smaller, and expert 5 has none there.
class FakeImage : public ExpertSource {
 public:
  FakeImage() {
    std::mt19937 random(5);
    for (int64_t i = 0; i < kLayers * kExperts * kShards; ++i) {
      const int64_t shard = i % kShards, expert = i / kShards % kExperts;
      std::vector<uint8_t>& record = records_.emplace_back(shard == 1 && expert == 5 ? 0 : shard == 1 ? 5000 : 12000);
      for (uint8_t& byte : record) byte = static_cast<uint8_t>(random());
    }
  }
  int64_t num_shards() const override { return kShards; }
  ExpertView Acquire(int64_t layer, int64_t expert, int64_t shard) override {
    const std::vector<uint8_t>& record = Record(layer, expert, shard);
    ExpertView view;
    if (record.empty()) return view;
    view.count = 1;
    view.record = At(record, 0);
    view.record_bytes = record.size();
    view.gate.data = At(record, 0);
    view.up.data = At(record, 64);
    view.down.data = At(record, 128);
    view.down.scales = reinterpret_cast<const float*>(At(record, 256));
    return view;
  }
  void Release(int64_t, int64_t, int64_t) override {}
  const std::vector<uint8_t>& Record(int64_t layer, int64_t expert, int64_t shard) const {
    return records_[static_cast<size_t>((layer * kExperts + expert) * kShards + shard)];
  }

 private:
  static const uint8_t* At(const std::vector<uint8_t>& record, size_t offset) { return record.data() + offset; }
  std::vector<std::vector<uint8_t>> records_;
};

std::vector<ExpertId> WholeWalk() {
  std::vector<ExpertId> order;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    for (int64_t expert = 0; expert < kExperts; ++expert) order.push_back({layer, expert});
  }
  return order;
}

class RingExpertSourceTest : public testing::Test {
 protected:
  static constexpr uint32_t kSlots = 4;

  RingExpertSourceTest() {
    char dir[] = "/dev/shm/hearth_ring_source_XXXXXX";
    place_ = {mkdtemp(dir), "n1"};
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      EXPECT_TRUE(ExpertRing::Create(place_, kGeneration, {.lease_id = kLease, .shard = shard, .num_slots = kSlots, .slot_bytes = 12288}).ok());
    }
  }
  ~RingExpertSourceTest() override {
    StopStore();
    fs::remove_all(place_.dir);
  }

  std::unique_ptr<RingExpertSource> Source(int64_t patience_ns = 20'000 * kMs) {
    std::vector<std::unique_ptr<ExpertRingReader>> rings;
    for (uint32_t shard = 0; shard < kShards; ++shard) rings.push_back(*ExpertRingReader::Make(*Ring(shard)));
    return std::make_unique<RingExpertSource>(image_, std::move(rings), patience_ns);
  }
  absl::StatusOr<std::unique_ptr<ExpertRing>> Ring(uint32_t shard) { return ExpertRing::Open(place_, kGeneration, kLease, shard); }

  // A store: a thread a ring, each now and then slow.
  void StartStore(bool refuses = false) {
    stop_store_ = false;
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      store_.emplace_back([this, shard, refuses] {
        ExpertRingFiller filler(*Ring(shard));
        std::mt19937 random(shard);
        while (!stop_store_) {
          const auto request = filler.AwaitRequest(5 * kMs, &stop_store_);
          ASSERT_TRUE(request.ok());
          if (!request->has_value()) continue;
          if (random() % 16 == 0) usleep(500);
          const std::vector<uint8_t>& record = image_.Record((*request)->layer, (*request)->expert, shard);
          if (!(*request)->wanted) ++unwanted_;
          if ((*request)->wanted && !refuses && !record.empty()) memcpy((*request)->record, record.data(), record.size());
          filler.Filled(refuses ? FillOutcome::kRefused : (*request)->wanted ? FillOutcome::kRecord : FillOutcome::kUnwanted);
        }
      });
    }
  }
  void StopStore() {
    stop_store_ = true;
    for (std::thread& thread : store_) thread.join();
    store_.clear();
  }
  // What the rings' header says when the store has died.
  void SetOwner(const ProcessId& owner) {
    for (uint32_t shard = 0; shard < kShards; ++shard) (*Ring(shard))->region().SetOwner(owner);
  }

  // All shards; true when each is what the image has. Whether a view is still right is asked again at its release.
  struct Held {
    ExpertId id;
    std::vector<ExpertView> views;
  };
  Held Acquire(RingExpertSource& source, const ExpertId& id) {
    Held held{.id = id, .views = {}};
    for (int64_t shard = 0; shard < kShards; ++shard) held.views.push_back(source.Acquire(id.layer, id.expert, shard));
    Check(held);
    return held;
  }
  void Check(const Held& held) {
    for (int64_t shard = 0; shard < kShards; ++shard) {
      const std::vector<uint8_t>& expected = image_.Record(held.id.layer, held.id.expert, shard);
      const ExpertView& view = held.views[static_cast<size_t>(shard)];
      ASSERT_EQ(view.record_bytes, expected.size());
      if (expected.empty()) continue;
      ASSERT_EQ(memcmp(view.record, expected.data(), expected.size()), 0) << held.id.layer << " " << held.id.expert << " " << shard;
      ASSERT_EQ(view.gate.data, view.record);
      ASSERT_EQ(view.up.data, view.record + 64);
      ASSERT_EQ(view.down.data, view.record + 128);
      ASSERT_EQ(reinterpret_cast<const uint8_t*>(view.down.scales), view.record + 256);
    }
  }
  void Release(RingExpertSource& source, const Held& held) {
    Check(held);
    for (int64_t shard = 0; shard < kShards; ++shard) source.Release(held.id.layer, held.id.expert, shard);
  }
  void Use(RingExpertSource& source, const ExpertId& id) { Release(source, Acquire(source, id)); }

  RegionPlace place_;
  FakeImage image_;
  std::atomic<bool> stop_store_{false};
  std::atomic<int64_t> unwanted_{0};
  std::vector<std::thread> store_;
};

TEST_F(RingExpertSourceTest, AWholeWalkComesThroughTheRings) {
  StartStore();
  const auto source = Source();
  EXPECT_EQ(source->max_held(), kSlots - 1);
  for (int pass = 0; pass < 3; ++pass) {
    source->Expect(WholeWalk(), nullptr);
    for (const ExpertId& id : WholeWalk()) Use(*source, id);
  }
  // Expert 5 has no second shard.
  EXPECT_EQ(source->counts().from_rings, 3 * kLayers * (kExperts * kShards - 1));
  EXPECT_EQ(source->counts().from_image, 0);
}

TEST_F(RingExpertSourceTest, WhatIsLeftOutHeldOrBrokenOffChangesNoByte) {
  StartStore();
  const auto source = Source();
  std::mt19937 random(11);
  int64_t used = 0;
  for (int pass = 0; pass < 60; ++pass) {
    const StopToken stop;
    source->Expect(WholeWalk(), &stop);
    std::deque<Held> held;
    const int64_t held_max = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(source->max_held()));
    const int64_t from_image = source->counts().from_image;
    const uint64_t left_out = random() % 4, until = random() % 3 == 0 ? random() % WholeWalk().size() : WholeWalk().size();
    for (uint64_t i = 0; i < until; ++i) {
      if (random() % 4 < left_out) continue;
      if (static_cast<int64_t>(held.size()) == held_max) {
        Release(*source, held.front());
        held.pop_front();
      }
      held.push_back(Acquire(*source, WholeWalk()[i]));
      ++used;
      if (random() % 8 == 0) usleep(200);
    }
    for (const Held& h : held) Release(*source, h);
    source->Expect({}, nullptr);
    if (HasFatalFailure()) return;
    // What is left out between two that are held takes slots as well.
    if (held_max == 1 || left_out == 0) {
      EXPECT_EQ(source->counts().from_image, from_image);
    }
  }
  EXPECT_GT(source->counts().from_rings, used);
  EXPECT_GT(unwanted_.load(), 0) << "what nobody reads need not be copied";
}

TEST_F(RingExpertSourceTest, WhatNobodyExpectedOrIsHeldTooLongOrIsRefusedComesFromTheImage) {
  StartStore();
  auto source = Source();
  Use(*source, {0, 1});
  EXPECT_EQ(source->counts().from_image, 2);
  source->Expect(WholeWalk(), nullptr);
  Use(*source, {3, 8});  // all before it are given up
  Use(*source, {3, 7});
  EXPECT_EQ(source->counts().from_rings, 2);
  EXPECT_EQ(source->counts().from_image, 4);
  // More than there are slots.
  source->Expect(WholeWalk(), nullptr);
  std::vector<Held> held;
  for (int64_t expert = 0; expert < 5; ++expert) held.push_back(Acquire(*source, {0, expert}));
  EXPECT_EQ(source->counts().from_rings, 2 + 2 * kSlots);
  EXPECT_EQ(source->counts().from_image, 6);
  for (const Held& h : held) Release(*source, h);
  Use(*source, {0, 6});
  EXPECT_EQ(source->counts().from_rings, 4 + 2 * kSlots);
  source->Expect({}, nullptr);
  source.reset();
  StopStore();
  const absl::Status again = RingExpertSource::Open(image_, place_, kGeneration, kLease).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition) << again;
}

TEST_F(RingExpertSourceTest, WhatTheStoreRefusesComesFromTheImage) {
  StartStore(true);
  const auto source = Source();
  source->Expect(WholeWalk(), nullptr);
  for (const ExpertId& id : WholeWalk()) Use(*source, id);
  EXPECT_EQ(source->counts().from_rings, 0);
}

TEST_F(RingExpertSourceTest, AStoreThatFillsNothingCostsOnePatienceAndIsWelcomeAgain) {
  const auto source = Source(150 * kMs);
  source->Expect(WholeWalk(), nullptr);
  int64_t begin = MonotonicNowNs();
  Use(*source, {0, 0});
  EXPECT_GE(MonotonicNowNs() - begin, 150 * kMs);
  begin = MonotonicNowNs();
  for (int64_t expert = 1; expert < kExperts; ++expert) Use(*source, {0, expert});
  EXPECT_LT(MonotonicNowNs() - begin, 150 * kMs);
  EXPECT_EQ(source->counts().from_rings, 0);
  StartStore();
  source->Expect({}, nullptr);
  for (int64_t pass = 0; pass < 1000 && source->counts().from_rings == 0; ++pass) {
    usleep(1000);
    source->Expect(WholeWalk(), nullptr);
    for (const ExpertId& id : WholeWalk()) Use(*source, id);
  }
  const int64_t from_image = source->counts().from_image;
  source->Expect(WholeWalk(), nullptr);
  for (const ExpertId& id : WholeWalk()) Use(*source, id);
  EXPECT_EQ(source->counts().from_image, from_image);
}

TEST_F(RingExpertSourceTest, ADeadStoreIsNoticedLongBeforePatienceEndsAndTheNextOneGoesOn) {
  const pid_t child = fork();
  if (child == 0) pause();
  const ProcessId dead = *ProcessOf(child);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  StartStore();
  const auto source = Source();
  source->Expect(WholeWalk(), nullptr);
  for (int64_t expert = 0; expert < kExperts; ++expert) Use(*source, {0, expert});
  StopStore();
  SetOwner(dead);
  const int64_t begin = MonotonicNowNs();
  for (int64_t expert = 0; expert < kExperts; ++expert) Use(*source, {1, expert});
  EXPECT_LT(MonotonicNowNs() - begin, 2000 * kMs);
  EXPECT_GT(source->counts().from_image, 0);
  SetOwner(SelfProcess());
  StartStore();
  usleep(200'000);
  const int64_t from_image = source->counts().from_image;
  for (int64_t layer = 2; layer < kLayers; ++layer) {
    for (int64_t expert = 0; expert < kExperts; ++expert) Use(*source, {layer, expert});
  }
  EXPECT_EQ(source->counts().from_image, from_image);
}

TEST_F(RingExpertSourceTest, AStopEndsAWait) {
  const auto source = Source();
  StopToken stop;
  source->Expect(WholeWalk(), &stop);
  std::thread stopper([&] {
    usleep(50'000);
    stop.Stop();
  });
  const int64_t begin = MonotonicNowNs();
  Use(*source, {0, 0});
  EXPECT_LT(MonotonicNowNs() - begin, 2000 * kMs);
  stopper.join();
}

}  // namespace
}  // namespace hearth
