// The expert ring: order, credits, waits that end, and either end killed after each store that the other can see.
#include "common/shm/expert_ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "common/base/time.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr uint64_t kLease = 0xfedcba9876543210;
constexpr Hash128 kGeneration{7, 9};
constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kNow = 0;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// What the record of a request looks like, at every byte.
uint8_t ByteOf(int64_t layer, int64_t expert, uint64_t at) { return static_cast<uint8_t>(layer * 31 + expert * 7 + static_cast<int64_t>(at % 251)); }
void Write(const ExpertRingFiller::Request& request, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) request.record[i] = ByteOf(request.layer, request.expert, i);
}
bool Holds(const uint8_t* record, int64_t layer, int64_t expert, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (record[i] != ByteOf(layer, expert, i)) return false;
  }
  return true;
}
// Requests of a walk over all experts.
int64_t LayerOf(uint64_t number) { return static_cast<int64_t>(number / 11); }
int64_t ExpertOf(uint64_t number) { return static_cast<int64_t>(number % 11); }

class ExpertRingTest : public testing::Test {
 protected:
  ExpertRingTest() {
    char dir[] = "/dev/shm/hearth_ring_test_XXXXXX";
    place_ = {mkdtemp(dir), "n1"};
  }
  ~ExpertRingTest() override { fs::remove_all(place_.dir); }

  void Create(uint32_t slots, uint64_t slot_bytes = 8192) {
    geometry_ = {.lease_id = kLease, .shard = 1, .num_slots = slots, .slot_bytes = slot_bytes};
    const auto ring = ExpertRing::Create(place_, kGeneration, geometry_);
    ASSERT_TRUE(ring.ok()) << Message(ring.status());
  }
  absl::StatusOr<std::unique_ptr<ExpertRing>> Open(uint64_t lease = kLease, uint32_t shard = 1) {
    return ExpertRing::Open(place_, kGeneration, lease, shard);
  }
  std::unique_ptr<ExpertRingReader> Reader() { return *ExpertRingReader::Make(*Open()); }
  std::unique_ptr<ExpertRingFiller> Filler() { return std::make_unique<ExpertRingFiller>(*Open()); }
  // Deals with what is posted, from request `next` on; returns how many there were.
  uint64_t FillAll(ExpertRingFiller& filler, uint64_t next) {
    uint64_t count = 0;
    for (auto request = filler.AwaitRequest(kNow);; request = filler.AwaitRequest(kNow)) {
      EXPECT_TRUE(request.ok()) << Message(request.status());
      if (!request.ok() || !request->has_value()) return count;
      EXPECT_EQ((*request)->layer, LayerOf(next + count));
      EXPECT_EQ((*request)->expert, ExpertOf(next + count));
      Write(**request, geometry_.slot_bytes);
      filler.Filled(FillOutcome::kRecord);
      ++count;
    }
  }

  RegionPlace place_;
  ExpertRingGeometry geometry_;
};

TEST_F(ExpertRingTest, NamesSayWhoseItIs) {
  EXPECT_EQ(ExpertRingWhat(kLease, 3), "ring3-fedcba9876543210");
  EXPECT_EQ(LeaseOfExpertRing("ring3-fedcba9876543210"), kLease);
  EXPECT_EQ(LeaseOfExpertRing(ExpertRingWhat(1, 12)), 1u);
  for (const char* other : {"kv", "table", "segment0", "ring", "ring0", "ring0-", "ring0-12", "ring0-fedcba987654321x", "ring0-fedcba98765432100"}) {
    EXPECT_EQ(LeaseOfExpertRing(other), std::nullopt) << other;
  }
}

TEST_F(ExpertRingTest, GeometryIsCheckedWhenMadeAndWhenOpened) {
  const auto make = [&](ExpertRingGeometry g) { return ExpertRing::Create(place_, kGeneration, g).status().code(); };
  EXPECT_EQ(make({.lease_id = 1, .num_slots = 1, .slot_bytes = 4096}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(make({.lease_id = 1, .num_slots = kRingSlotsMax + 1, .slot_bytes = 4096}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(make({.lease_id = 1, .num_slots = 4, .slot_bytes = 4097}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(make({.lease_id = 1, .num_slots = 4, .slot_bytes = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(fs::is_empty(place_.dir));
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kNotFound);
  Create(5);
  EXPECT_EQ(fs::file_size(place_.Path(ExpertRingWhat(kLease, 1), kGeneration)), kRegionHeaderBytes + 4096 + 5 * 8192);
  EXPECT_EQ(make(geometry_), absl::StatusCode::kAlreadyExists);
  {
    const auto ring = *Open();
    for (uint64_t n = 0; n < 12; ++n) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(ring->record(n)) % kRingSlotAlign, 0u);
      EXPECT_EQ(ring->record(n), ring->record(n % 5));
    }
    EXPECT_EQ(ring->record(4) + 8192, ring->region().base() + ring->region().bytes());
    ++ring->header().geometry.num_slots;
    EXPECT_EQ(Open().status().code(), absl::StatusCode::kDataLoss);
    --ring->header().geometry.num_slots;
    EXPECT_TRUE(Open().ok());
    ring->region().SetState(RegionState::kLoading);
    EXPECT_EQ(Open().status().code(), absl::StatusCode::kFailedPrecondition);
  }
  fs::rename(place_.Path(ExpertRingWhat(kLease, 1), kGeneration), place_.Path(ExpertRingWhat(kLease, 0), kGeneration));
  auto moved = Open(kLease, 0);
  EXPECT_EQ(moved.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ExpertRingTest, RecordsComeInTheOrderOfRequestsHoweverOftenTheRingGoesRound) {
  Create(3);
  constexpr uint64_t kRequests = 2000;
  const auto filler = Filler();
  std::atomic<bool> stop{false};
  std::thread store([&] {
    std::mt19937 random(1);
    uint64_t next = 0;
    while (!stop) {
      const auto request = filler->AwaitRequest(kSecond / 50, &stop);
      ASSERT_TRUE(request.ok()) << Message(request.status());
      if (!request->has_value()) continue;
      ASSERT_EQ((*request)->layer, LayerOf(next));
      ASSERT_EQ((*request)->expert, ExpertOf(next));
      ASSERT_TRUE((*request)->wanted);
      if (random() % 64 == 0) usleep(300);  // a slow one
      Write(**request, geometry_.slot_bytes);
      filler->Filled(FillOutcome::kRecord);
      ++next;
    }
  });
  const auto reader = Reader();
  std::mt19937 random(2);
  for (uint64_t read = 0; read < kRequests; ++read) {
    while (reader->posted() < std::min(kRequests, read + 3) && reader->CanPost()) {
      const uint64_t number = reader->posted();
      EXPECT_EQ(reader->Post(LayerOf(number), ExpertOf(number)), number);
    }
    ASSERT_TRUE(reader->AwaitFilled(read, 10 * kSecond));
    if (random() % 64 == 0) usleep(300);  // a slow reader
    const uint8_t* record = reader->Record(read);
    ASSERT_NE(record, nullptr);
    ASSERT_TRUE(Holds(record, LayerOf(read), ExpertOf(read), geometry_.slot_bytes)) << read;
  }
  stop = true;
  filler->Wake();
  store.join();
}

TEST_F(ExpertRingTest, AFullRingTakesNoMoreAndAStarvedOneMakesNobodyWaitForEver) {
  Create(4);
  const auto reader = Reader();
  const auto filler = Filler();
  int64_t begin = MonotonicNowNs();
  auto nothing = filler->AwaitRequest(kSecond / 20);
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing->has_value());
  EXPECT_GE(MonotonicNowNs() - begin, kSecond / 20);
  for (uint64_t n = 0; n < 4; ++n) {
    ASSERT_TRUE(reader->CanPost());
    reader->Post(LayerOf(n), ExpertOf(n));
  }
  EXPECT_FALSE(reader->CanPost());
  begin = MonotonicNowNs();
  EXPECT_FALSE(reader->AwaitFilled(0, kSecond / 20));
  EXPECT_GE(MonotonicNowNs() - begin, kSecond / 20);
  // One is filled: its slot may be asked for again, whether or not the others are.
  ASSERT_TRUE(filler->AwaitRequest(kNow)->has_value());
  filler->Filled(FillOutcome::kRecord);
  EXPECT_TRUE(reader->Filled(0));
  EXPECT_FALSE(reader->Filled(1));
  ASSERT_TRUE(reader->CanPost());
  reader->Post(LayerOf(4), ExpertOf(4));
  EXPECT_FALSE(reader->CanPost());
  EXPECT_FALSE(reader->Filled(4));
  EXPECT_EQ(FillAll(*filler, 1), 4u);
  EXPECT_TRUE(reader->Filled(4));
  EXPECT_TRUE(Holds(reader->Record(4), LayerOf(4), ExpertOf(4), geometry_.slot_bytes));
}

TEST_F(ExpertRingTest, WhatIsGivenUpOrRefusedHasNoRecord) {
  Create(4);
  const auto reader = Reader();
  const auto filler = Filler();
  for (uint64_t n = 0; n < 4; ++n) reader->Post(LayerOf(n), ExpertOf(n));
  reader->GiveUpBefore(2);
  reader->GiveUpBefore(1);  // it never falls
  EXPECT_FALSE((*filler->AwaitRequest(kNow))->wanted);
  filler->Filled(FillOutcome::kUnwanted);
  EXPECT_FALSE((*filler->AwaitRequest(kNow))->wanted);
  filler->Filled(FillOutcome::kUnwanted);
  EXPECT_TRUE((*filler->AwaitRequest(kNow))->wanted);
  filler->Filled(FillOutcome::kRefused);
  for (uint64_t n = 0; n < 3; ++n) {
    EXPECT_TRUE(reader->Filled(n));
    EXPECT_EQ(reader->Record(n), nullptr);
  }
  EXPECT_TRUE(reader->CanPost());
}

TEST_F(ExpertRingTest, ABrokenWorkerIsToldApart) {
  Create(2);
  const auto ring = *Open();
  const auto filler = Filler();
  ring->header().posted.store(3);
  EXPECT_EQ(filler->AwaitRequest(kNow).status().code(), absl::StatusCode::kDataLoss);
  ring->header().posted.store(1);
  EXPECT_EQ(FillAll(*filler, 0), 1u);
  ring->header().posted.store(0);
  EXPECT_EQ(filler->AwaitRequest(kNow).status().code(), absl::StatusCode::kDataLoss);
  ring->header().posted.store(2);
  const auto used = ExpertRingReader::Make(*Open());
  EXPECT_EQ(used.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(used.status()), HasSubstr("2 requests have been posted"));
}

TEST_F(ExpertRingTest, TheNextStoreGoesOnWhereTheLastOneEnded) {
  Create(3);
  const auto reader = Reader();
  for (uint64_t posted = 0, filled = 0, round = 0; round < 40; ++round) {
    const auto filler = Filler();
    for (; posted < filled + 3; ++posted) reader->Post(LayerOf(posted), ExpertOf(posted));
    for (uint64_t fills = round % 4; fills > 0; --fills, ++filled) {
      const auto request = filler->AwaitRequest(kNow);
      ASSERT_TRUE(request.ok() && request->has_value());
      ASSERT_EQ((*request)->layer * 11 + (*request)->expert, static_cast<int64_t>(filled)) << round;
      Write(**request, geometry_.slot_bytes);
      filler->Filled(FillOutcome::kRecord);
      ASSERT_TRUE(Holds(reader->Record(filled), LayerOf(filled), ExpertOf(filled), geometry_.slot_bytes));
    }
    EXPECT_EQ(reader->Filled(filled), false);
  }
}

// Runs in a process of its own, until it dies.
struct RingChild : public testing::Test {
  static std::unique_ptr<ExpertRing> Ring() {
    const char* dir = getenv("HEARTH_TEST_RING_DIR");
    return dir == nullptr ? nullptr : *ExpertRing::Open({dir, "n1"}, kGeneration, kLease, 1);
  }
};

TEST_F(RingChild, Reads) {
  std::unique_ptr<ExpertRing> ring = Ring();
  if (ring == nullptr) GTEST_SKIP() << "a part of other tests";
  const uint64_t bytes = ring->geometry().slot_bytes, slots = ring->geometry().num_slots;
  const auto reader = *ExpertRingReader::Make(std::move(ring));
  for (uint64_t read = 0; read < 400; ++read) {
    if (read % 7 == 3) reader->GiveUpBefore(read);
    while (reader->posted() < read + slots && reader->CanPost()) reader->Post(LayerOf(reader->posted()), ExpertOf(reader->posted()));
    ASSERT_TRUE(reader->AwaitFilled(read, 10 * kSecond));
    ASSERT_TRUE(Holds(reader->Record(read), LayerOf(read), ExpertOf(read), bytes));
  }
}

TEST_F(RingChild, Fills) {
  std::unique_ptr<ExpertRing> ring = Ring();
  if (ring == nullptr) GTEST_SKIP() << "a part of other tests";
  ring->region().SetOwner(SelfProcess());
  const uint64_t bytes = ring->geometry().slot_bytes;
  ExpertRingFiller filler(std::move(ring));
  while (true) {
    const auto request = filler.AwaitRequest(kSecond);
    ASSERT_TRUE(request.ok());
    if (!request->has_value()) continue;
    Write(**request, bytes);
    filler.Filled(FillOutcome::kRecord);
  }
}

class ExpertRingKillTest : public ExpertRingTest {
 protected:
  pid_t Start(const char* child, const std::string& point) {
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("HEARTH_TEST_RING_DIR", place_.dir.c_str(), 1);
      setenv("HEARTH_PUBLISH_POINT", point.c_str(), 1);
      execl("/proc/self/exe", "expert_ring_test", absl::StrCat("--gtest_filter=RingChild.", child).c_str(), "--gtest_brief=1", nullptr);
      _exit(127);
    }
    return pid;
  }
  static bool IsDead(pid_t pid, int* status) { return waitpid(pid, status, WNOHANG) == pid; }
  static bool WasKilled(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
};

TEST_F(ExpertRingKillTest, AWorkerKilledAtAnyPointLeavesWhatTheStoreCanFinish) {
  for (const char* name : {"ring.request", "ring.posted", "ring.posted_bell", "ring.unwanted"}) {
    for (const int nth : {1, 2, 5, 23}) {
      const std::string point = absl::StrCat(name, ":", nth, ":kill");
      SCOPED_TRACE(point);
      Create(3);
      auto filler = Filler();
      const pid_t worker = Start("Reads", point);
      uint64_t filled = 0;
      int status = 0;
      const int64_t deadline = MonotonicNowNs() + 20 * kSecond;
      while (!IsDead(worker, &status) && MonotonicNowNs() < deadline) filled += FillAll(*filler, filled);
      ASSERT_TRUE(WasKilled(status)) << status;
      // Whatever it asked for can be dealt with, by this store or the next; then nothing is left to do.
      const uint64_t left = FillAll(*filler, filled);
      filled += left;
      filler = Filler();
      EXPECT_EQ(FillAll(*filler, filled), 0u);
      EXPECT_EQ((*Open())->header().posted.load(), filled);
      fs::remove(place_.Path(ExpertRingWhat(kLease, 1), kGeneration));
    }
  }
}

TEST_F(ExpertRingKillTest, AStoreKilledAtAnyPointIsReplacedAndNoRecordIsLostOrTorn) {
  for (const char* name : {"ring.record", "ring.outcome", "ring.filled", "ring.filled_bell"}) {
    for (const int nth : {1, 2, 5, 23}) {
      const std::string point = absl::StrCat(name, ":", nth, ":kill");
      SCOPED_TRACE(point);
      Create(3);
      const auto reader = Reader();
      pid_t store = Start("Fills", point);
      bool replaced = false;
      for (uint64_t read = 0; read < 60; ++read) {
        while (reader->posted() < read + 3 && reader->CanPost()) reader->Post(LayerOf(reader->posted()), ExpertOf(reader->posted()));
        const int64_t deadline = MonotonicNowNs() + 20 * kSecond;
        while (!reader->AwaitFilled(read, kSecond / 50) && MonotonicNowNs() < deadline) {
          int status = 0;
          if (replaced || !IsDead(store, &status)) continue;
          ASSERT_TRUE(WasKilled(status)) << status;
          EXPECT_FALSE(reader->StoreAlive());
          store = Start("Fills", "none:1:kill");
          replaced = true;
        }
        ASSERT_TRUE(reader->Filled(read)) << read;
        ASSERT_TRUE(Holds(reader->Record(read), LayerOf(read), ExpertOf(read), geometry_.slot_bytes)) << read;
      }
      EXPECT_TRUE(replaced);
      EXPECT_TRUE(reader->StoreAlive());
      kill(store, SIGKILL);
      waitpid(store, nullptr, 0);
      fs::remove(place_.Path(ExpertRingWhat(kLease, 1), kGeneration));
    }
  }
}

TEST_F(ExpertRingKillTest, AStoreKilledWhileItMakesARingLeavesNoneThatIsBelieved) {
  for (const char* point : {"region.allocated", "region.owner_start", "region.magic", "region.fixed_hash", "region.loading", "ring.geometry"}) {
    const pid_t store = fork();
    if (store == 0) {
      setenv("HEARTH_PUBLISH_POINT", absl::StrCat(point, ":1:kill").c_str(), 1);
      setenv("HEARTH_TEST_RING_DIR", place_.dir.c_str(), 1);
      execl("/proc/self/exe", "expert_ring_test", "--gtest_filter=RingMaker.*", "--gtest_brief=1", nullptr);
      _exit(127);
    }
    int status = 0;
    waitpid(store, &status, 0);
    ASSERT_TRUE(WasKilled(status)) << point << " " << status;
    const auto files = ListRegionFiles(place_);
    ASSERT_EQ(files.size(), 1u) << point;
    EXPECT_EQ(LeaseOfExpertRing(files[0].what), kLease) << "by its name it can be removed, whatever is in it";
    const absl::Status opened = Open().status();
    EXPECT_FALSE(opened.ok()) << point;
    EXPECT_TRUE(TellsOfTheFile(opened)) << point << " " << Message(opened);
    fs::remove(files[0].path);
  }
}

TEST(RingMaker, Makes) {
  const char* dir = getenv("HEARTH_TEST_RING_DIR");
  if (dir == nullptr) GTEST_SKIP() << "a part of other tests";
  EXPECT_TRUE(ExpertRing::Create({dir, "n1"}, kGeneration, {.lease_id = kLease, .shard = 1, .num_slots = 3, .slot_bytes = 8192}).ok());
}

}  // namespace
}  // namespace hearth
