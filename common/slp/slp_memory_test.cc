#include "common/slp/slp_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hearth {
namespace {

using ::testing::HasSubstr;

// 1000 fixed, rows of 10, slots of 100; 8 experts, 50 to 200 rows.
SlpRoom Room(uint64_t left) {
  return {.left = left, .fixed = 1000, .row_bytes = 10, .slot_bytes = 100, .rows_min = 50, .rows_max = 200, .slots_max = 8};
}

TEST(SlpSizes, RowsComeFirstThenSlots) {
  const auto all = ChooseSlpSizes(Room(1'000'000));
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->rows, 200);
  EXPECT_EQ(all->shared_bytes, 2000u + 800u) << "a layer's experts, and no more";
  const auto some = ChooseSlpSizes(Room(1000 + 2000 + 450));
  ASSERT_TRUE(some.ok());
  EXPECT_EQ(some->rows, 200);
  EXPECT_EQ(some->shared_bytes, 2000u + 450u);
  const auto few = ChooseSlpSizes(Room(1000 + 200 + 999));
  ASSERT_TRUE(few.ok());
  EXPECT_EQ(few->rows, 99);
  EXPECT_EQ(few->shared_bytes, 200u + 999u);
}

TEST(SlpSizes, ABudgetTooSmallNamesWhatWouldDo) {
  EXPECT_TRUE(ChooseSlpSizes(Room(1000 + 200 + 500)).ok());
  const absl::Status status = ChooseSlpSizes(Room(1000 + 200 + 499)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("prefill.device_memory_bytes"));
}

TEST(SlpSizes, AModelWithoutExpertsHasNoRing) {
  SlpRoom room = Room(1000 + 600);
  room.slot_bytes = 0;
  const auto sizes = ChooseSlpSizes(room);
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->rows, 60);
  EXPECT_EQ(sizes->shared_bytes, 600u);
}

}  // namespace
}  // namespace hearth
