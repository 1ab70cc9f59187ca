// The table's file: made zeroed and READY, opened only when it is what it says.
#include "common/shm/store_table.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace hearth {
namespace {

class StoreTableTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "/store_table_XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    place_ = {name, "test"};
  }
  void TearDown() override { std::filesystem::remove_all(place_.dir); }

  RegionPlace place_;
  const Hash128 generation_{1, 2};
};

TEST_F(StoreTableTest, CreateAndOpenSeeOneTable) {
  auto made = StoreTable::Create(place_, generation_, {.num_pages = 10, .num_rows = 30, .sequence = 7, .source_stamp = 8, .config_stamp = 9});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ((*made)->region().state(), RegionState::kReady);
  for (int i = 0; i < 10; ++i) EXPECT_EQ((*made)->pages()[i].state.load(), 0u);
  (*made)->rows()[29].index = 123;
  (*made)->leases()[kLeasesMax - 1].pid = 456;
  (*made)->pages()[9].flags = 789;

  auto opened = StoreTable::Open(place_, generation_, MapMode::kReadOnly);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->num_pages(), 10);
  EXPECT_EQ((*opened)->num_rows(), 30);
  EXPECT_EQ((*opened)->header().sequence, 7u);
  EXPECT_EQ((*opened)->header().source_stamp, 8u);
  EXPECT_EQ((*opened)->header().config_stamp, 9u);
  EXPECT_EQ((*opened)->rows()[29].index, 123);
  EXPECT_EQ((*opened)->leases()[kLeasesMax - 1].pid, 456);
  EXPECT_EQ((*opened)->pages()[9].flags, 789u);
  // The arrays end inside the region.
  EXPECT_LE(reinterpret_cast<uint8_t*>((*opened)->rows() + 30), (*opened)->region().base() + (*opened)->region().bytes());
}

TEST_F(StoreTableTest, SizesThatCannotBeAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(StoreTable::Create(place_, generation_, {.num_pages = 0, .num_rows = 1}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(StoreTable::Create(place_, generation_, {.num_pages = 1ull << 40, .num_rows = 1}).status()));
  EXPECT_TRUE(absl::IsNotFound(StoreTable::Open(place_, generation_, MapMode::kReadOnly).status()));
}

TEST_F(StoreTableTest, CountsBeyondTheFileAreDataLoss) {
  { ASSERT_TRUE(StoreTable::Create(place_, generation_, {.num_pages = 10, .num_rows = 30}).ok()); }
  auto table = StoreTable::Open(place_, generation_, MapMode::kReadWrite);
  ASSERT_TRUE(table.ok());
  for (const uint64_t pages : {uint64_t{0}, uint64_t{1000}, ~uint64_t{0}}) {
    (*table)->header().num_pages = pages;
    EXPECT_TRUE(absl::IsDataLoss(StoreTable::Open(place_, generation_, MapMode::kReadOnly).status())) << pages;
  }
  EXPECT_EQ((*table)->num_pages(), 10);  // its own copy
}

TEST_F(StoreTableTest, UnfinishedAndForeignTablesAreRefused) {
  auto table = StoreTable::Create(place_, generation_, {.num_pages = 10, .num_rows = 30});
  ASSERT_TRUE(table.ok());
  const Hash128 other{3, 4};
  std::filesystem::copy_file(place_.Path("table", generation_), place_.Path("table", other));
  EXPECT_TRUE(absl::IsDataLoss(StoreTable::Open(place_, other, MapMode::kReadOnly).status()));
  (*table)->region().SetState(RegionState::kLoading);
  EXPECT_TRUE(absl::IsFailedPrecondition(StoreTable::Open(place_, generation_, MapMode::kReadOnly).status()));
}

}  // namespace
}  // namespace hearth
