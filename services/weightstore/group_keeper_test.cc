#include "services/weightstore/group_keeper.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

namespace hearth {
namespace {

// Processes that only wait, to be ranks.
class Ranks {
 public:
  explicit Ranks(int count) {
    for (int i = 0; i < count; ++i) {
      const pid_t pid = fork();
      if (pid == 0) {
        while (true) pause();
      }
      pids_.push_back(pid);
    }
  }
  ~Ranks() {
    for (size_t i = 0; i < pids_.size(); ++i) Kill(i);
  }
  ProcessId process(size_t i) const { return *ProcessOf(pids_[i]); }
  void Kill(size_t i) {
    if (pids_[i] == 0) return;
    kill(pids_[i], SIGKILL);
    waitpid(pids_[i], nullptr, 0);
    pids_[i] = 0;
  }

 private:
  std::vector<pid_t> pids_;
};

class GroupKeeperTest : public ::testing::Test {
 protected:
  ~GroupKeeperTest() override { std::filesystem::remove_all(place_.dir); }
  GroupKeeper::Request Request(size_t rank, uint64_t lease, uint32_t size = 2) const {
    return {.generation = generation_,
            .member = {.lease_id = lease, .process = ranks_.process(rank)},
            .worker = "prefill." + std::to_string(rank),
            .rank = static_cast<uint32_t>(rank),
            .size = size,
            .exchange_bytes = 4096};
  }
  uint64_t Together(GroupKeeper& keeper) const {
    EXPECT_TRUE(absl::IsUnavailable(keeper.Join(Request(0, 10)).status()));
    const absl::StatusOr<uint64_t> id = keeper.Join(Request(1, 11));
    EXPECT_TRUE(id.ok()) << id.status();
    EXPECT_EQ(*keeper.Join(Request(0, 10)), *id) << "who asks again hears the same";
    return *id;
  }
  std::unique_ptr<GroupRegion> Opened(uint64_t id) const { return *GroupRegion::Open(place_, generation_, id); }
  size_t files() const { return ListRegionFiles(place_).size(); }

  static std::string MakeDir() {
    std::string dir = testing::TempDir() + "/group_keeper_XXXXXX";
    return mkdtemp(dir.data());
  }
  const RegionPlace place_ = {MakeDir(), "test"};
  const Hash128 generation_{.low = 3, .high = 4};
  Ranks ranks_{2};
};

TEST_F(GroupKeeperTest, RanksComeTogetherAndEndWithTheFirst) {
  GroupKeeper keeper(place_);
  EXPECT_TRUE(absl::IsInvalidArgument(keeper.Join(Request(1, 11, 1)).status()));
  const uint64_t id = Together(keeper);
  EXPECT_EQ(files(), 1u);
  ASSERT_EQ(keeper.Look().size(), 1u);
  EXPECT_EQ(keeper.Look()[0].workers, (std::vector<std::string>{"prefill.0", "prefill.1"}));
  keeper.End(11);
  EXPECT_EQ(files(), 0u);
  // The one that is left waits for the next, under whatever lease that has.
  EXPECT_EQ(keeper.Join(Request(0, 10)).status().message(), "the group waits for rank 1");
  EXPECT_EQ(keeper.Look()[0].workers, (std::vector<std::string>{"prefill.0", ""}));
  const absl::StatusOr<uint64_t> next = keeper.Join(Request(1, 12));
  ASSERT_TRUE(next.ok());
  EXPECT_NE(*next, id);
}

TEST_F(GroupKeeperTest, ARestartedRankThatWaitedIsNotTakenForItself) {
  GroupKeeper keeper(place_);
  EXPECT_FALSE(keeper.Join(Request(1, 11)).ok());
  EXPECT_FALSE(keeper.Join(Request(1, 12)).ok());
  const absl::StatusOr<uint64_t> id = keeper.Join(Request(0, 10));
  ASSERT_TRUE(id.ok());
  EXPECT_EQ(Opened(*id)->spec().members[1].lease_id, 12u);
  // Other options, another generation: no group.
  GroupKeeper::Request other = Request(0, 20);
  other.exchange_bytes = 8192;
  EXPECT_FALSE(keeper.Join(other).ok());
  EXPECT_FALSE(keeper.Join(Request(1, 21)).ok());
}

TEST_F(GroupKeeperTest, WhoComputesHoldsThePagesOfADeadLeader) {
  GroupKeeper keeper(place_);
  const std::unique_ptr<GroupRegion> group = Opened(Together(keeper));
  EXPECT_TRUE(keeper.WritersInto(10).empty());
  group->SetState(0, RankState::kComputing);
  EXPECT_TRUE(keeper.WritersInto(10).empty()) << "its own word says nothing";
  group->SetState(1, RankState::kComputing);
  EXPECT_EQ(keeper.WritersInto(10), std::vector<uint64_t>{11});
  EXPECT_TRUE(keeper.WritersInto(11).empty()) << "nobody writes into a member's pages";
  const ProcessId leader = ranks_.process(0);
  ranks_.Kill(0);
  EXPECT_EQ(keeper.WritersInto(10), std::vector<uint64_t>{11});
  keeper.End(10);
  EXPECT_EQ(files(), 1u) << "its words are still needed";
  EXPECT_TRUE(keeper.Look()[0].over);

  // A store that starts now finds the same.
  GroupKeeper next(place_);
  next.Open(generation_);
  EXPECT_TRUE(next.HasWritersInto(leader));
  next.Settle([](uint64_t lease) { return lease == 11; });
  EXPECT_EQ(next.WritersInto(10), std::vector<uint64_t>{11});

  group->SetState(1, RankState::kIdle);
  EXPECT_FALSE(next.HasWritersInto(leader));
  next.Sweep();
  EXPECT_EQ(files(), 0u);
}

TEST_F(GroupKeeperTest, TheWordOfADeadMemberCountsForNothing) {
  GroupKeeper keeper(place_);
  const std::unique_ptr<GroupRegion> group = Opened(Together(keeper));
  group->SetState(1, RankState::kComputing);
  ranks_.Kill(1);
  EXPECT_TRUE(keeper.WritersInto(10).empty());
  keeper.End(11);
  EXPECT_EQ(files(), 0u);
}

TEST_F(GroupKeeperTest, TheNextStoreTakesAWholeGroupOverAndRemovesWhatItCantRead) {
  uint64_t id = 0;
  {
    GroupKeeper keeper(place_);
    id = Together(keeper);
  }
  const auto half = GroupRegion::Create(place_, generation_, {.id = 99, .members = Opened(id)->spec().members, .exchange_bytes = 0});
  ASSERT_TRUE(half.ok());
  (*half)->region().SetState(RegionState::kLoading);
  GroupKeeper next(place_);
  next.Open(generation_);
  next.Settle([](uint64_t) { return true; });
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(*next.Join(Request(1, 11)), id);
}

}  // namespace
}  // namespace hearth
