#include "common/shm/group_region.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

namespace hearth {
namespace {

class GroupRegionTest : public ::testing::Test {
 protected:
  ~GroupRegionTest() override { unlink(path().c_str()); }
  std::string path() const { return place_.Path(GroupWhat(spec_.id), generation_); }

  const RegionPlace place_ = {testing::TempDir(), "group" + std::to_string(getpid())};
  const Hash128 generation_{.low = 5, .high = 6};
  const GroupSpec spec_{
      .id = 0xabc,
      .members = {{.lease_id = 11, .process = {.pid = 1, .start_ticks = 7}}, {.lease_id = 12, .process = {.pid = 2, .start_ticks = 8}}},
      .exchange_bytes = 4096};
};

TEST_F(GroupRegionTest, WhoOpensItFindsItsRanksAndTheirStates) {
  const auto made = GroupRegion::Create(place_, generation_, spec_);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto opened = GroupRegion::Open(place_, generation_, spec_.id);
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_EQ((*opened)->spec().members.size(), 2u);
  EXPECT_EQ((*opened)->spec().members[1].lease_id, 12u);
  EXPECT_TRUE((*opened)->spec().members[1].process == spec_.members[1].process);
  EXPECT_EQ((*opened)->state(1), RankState::kIdle);
  (*made)->SetState(1, RankState::kComputing);
  EXPECT_EQ((*opened)->state(0), RankState::kIdle);
  EXPECT_EQ((*opened)->state(1), RankState::kComputing);
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*opened)->exchange()) % kGroupExchangeAlign, 0u);
  std::memset((*made)->exchange(), 3, 4096);
  EXPECT_EQ((*opened)->exchange()[4095], 3);
  EXPECT_TRUE(absl::IsAlreadyExists(GroupRegion::Create(place_, generation_, spec_).status()));
}

TEST_F(GroupRegionTest, DamageIsFoundAndAStateThatCantBeIsTheWorst) {
  auto made = GroupRegion::Create(place_, generation_, spec_);
  ASSERT_TRUE(made.ok()) << made.status();
  auto& header = *reinterpret_cast<GroupHeader*>((*made)->region().body());
  header.states[1].state = 77;
  EXPECT_EQ((*made)->state(1), RankState::kComputing);
  (*made)->region().SetState(RegionState::kLoading);
  EXPECT_TRUE(absl::IsFailedPrecondition(GroupRegion::Open(place_, generation_, spec_.id).status()));
  (*made)->region().SetState(RegionState::kReady);
  header.members[0].pid = 99;
  EXPECT_TRUE(absl::IsDataLoss(GroupRegion::Open(place_, generation_, spec_.id).status()));
}

TEST_F(GroupRegionTest, SpecsThatCantBeAreRefused) {
  for (GroupSpec bad :
       {GroupSpec{.id = 0, .members = spec_.members}, GroupSpec{.id = 1, .members = {{}}}, GroupSpec{.id = 1, .members = std::vector<GroupMember>(9)},
        GroupSpec{.id = 1, .members = spec_.members, .exchange_bytes = 1ull << 40}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(GroupRegion::Create(place_, generation_, bad).status()));
  }
}

TEST(GroupNameTest, GoesBothWays) {
  EXPECT_EQ(IdOfGroup(GroupWhat(0x12)), 0x12u);
  for (const char* other : {"kv", "group-", "group-00000000000000xy", "ring0-0000000000000012"}) EXPECT_FALSE(IdOfGroup(other).has_value()) << other;
}

}  // namespace
}  // namespace hearth
