#include "common/slp/item_board.h"

#include <gtest/gtest.h>

#include "common/device/host/host_device.h"

namespace hearth {
namespace {

class ItemBoardTest : public ::testing::Test {
 protected:
  std::unique_ptr<HostDevice> device_ = *HostDevice::Create({.num_threads = 1});
  ItemBoard board_{*device_, 4};
};

TEST_F(ItemBoardTest, AnItemIsLoadedConsumedAndEnds) {
  ASSERT_TRUE(board_.Begin(0));
  board_.Loaded(0, 7);
  EXPECT_EQ(board_.AwaitLoaded(0), 7);
  board_.Consumed(0);
  const auto end = board_.AwaitEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->item, 0);
  EXPECT_EQ(end->slot, 7);
  EXPECT_TRUE(end->consumed);
}

// Skipped before its load begins: never loaded, and nothing for the unloader. While it is loaded: it ends when the copy is enqueued. After: at once.
TEST_F(ItemBoardTest, ASkippedItemEndsAsFarAsItHasCome) {
  ASSERT_TRUE(board_.Begin(1));
  ASSERT_TRUE(board_.Begin(2));
  board_.Loaded(2, 5);
  board_.Skip({0, 1, 2});
  EXPECT_FALSE(board_.Begin(0));
  auto end = board_.AwaitEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->item, 2);
  EXPECT_FALSE(end->consumed);
  board_.Loaded(1, 6);
  end = board_.AwaitEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->item, 1);
  EXPECT_EQ(end->slot, 6);
  board_.Skip({3});
  EXPECT_FALSE(board_.AwaitEnd().has_value()) << "all items have ended";
  EXPECT_TRUE(board_.status().ok());
}

// A shared expert outlasts the experts behind it in the plan.
TEST_F(ItemBoardTest, ItemsEndInTheOrderInWhichTheModelEndsThem) {
  for (int64_t item = 0; item < 4; ++item) {
    ASSERT_TRUE(board_.Begin(item));
    board_.Loaded(item, 10 + item);
  }
  for (const int64_t item : {2, 3, 0, 1}) board_.Consumed(item);
  for (const int64_t item : {2, 3, 0, 1}) EXPECT_EQ(board_.AwaitEnd()->item, item);
  EXPECT_FALSE(board_.AwaitEnd().has_value());
}

TEST_F(ItemBoardTest, AStopEndsEveryWaitAndTheFirstStatusCounts) {
  bool model_ended = false, unloader_ended = false;
  auto model = device_->Spawn("model", [&] { model_ended = !board_.AwaitLoaded(0).has_value(); });
  auto unloader = device_->Spawn("unloader", [&] { unloader_ended = !board_.AwaitEnd().has_value(); });
  board_.Stop(absl::DataLossError("the copy failed"));
  board_.Stop(absl::CancelledError("and so the model ended"));
  model.reset();
  unloader.reset();
  EXPECT_TRUE(model_ended && unloader_ended);
  EXPECT_TRUE(board_.stop().stopped());
  EXPECT_EQ(board_.status().code(), absl::StatusCode::kDataLoss);
}

// Three actors over many items, a third of which the model skips when it is half way before them.
TEST(ItemBoard, ThreeActorsAgreeAboutEveryItem) {
  constexpr int64_t kItems = 3000, kAhead = 4;
  auto device = *HostDevice::Create({.num_threads = 1});
  ItemBoard board(*device, kItems);
  int64_t begun = 0, consumed = 0, unused = 0;
  auto loader = device->Spawn("loader", [&] {
    for (int64_t item = 0; item < kItems; ++item) {
      if (!board.Begin(item)) continue;
      ++begun;
      board.Loaded(item, item);
    }
  });
  auto unloader = device->Spawn("unloader", [&] {
    for (auto end = board.AwaitEnd(); end.has_value(); end = board.AwaitEnd()) ++(end->consumed ? consumed : unused);
  });
  const auto skipped = [](int64_t item) { return item % 3 == 2; };
  for (int64_t item = 0; item < kItems; ++item) {
    if (item + kAhead < kItems && skipped(item + kAhead)) board.Skip({item + kAhead});
    if (item < kAhead && skipped(item)) board.Skip({item});
    if (skipped(item)) continue;
    ASSERT_EQ(board.AwaitLoaded(item), item);
    board.Consumed(item);
  }
  loader.reset();
  unloader.reset();
  EXPECT_EQ(consumed, kItems - kItems / 3);
  EXPECT_EQ(begun, consumed + unused);
}

}  // namespace
}  // namespace hearth
