#include "common/model/step_order.h"

#include <gtest/gtest.h>

#include <map>

namespace hearth {
namespace {

// Runs `steps` steps of `streams` streams, a row each, whose times are given by order; how often each was taken.
std::map<StepOrder, int> Steps(StepOrderChooser& chooser, int64_t streams, int steps, std::map<StepOrder, int64_t> ns) {
  std::map<StepOrder, int> taken;
  for (int i = 0; i < steps; ++i) {
    const StepOrder order = chooser.Next(streams, streams);
    ++taken[order];
    chooser.Add(streams, streams, order, ns[order]);
  }
  return taken;
}

TEST(StepOrder, NamesGoBothWays) {
  for (const StepOrder order : {StepOrder::kJoint, StepOrder::kPlain, StepOrder::kAlternate})
    EXPECT_EQ(StepOrderFromName(StepOrderName(order)), order);
  EXPECT_EQ(StepOrderFromName("auto"), std::nullopt);
}

TEST(StepOrder, TheFastestIsTakenAfterEightRounds) {
  StepOrderChooser chooser(std::nullopt);
  const std::map<StepOrder, int64_t> ns = {{StepOrder::kJoint, 900}, {StepOrder::kPlain, 1000}, {StepOrder::kAlternate, 700}};
  auto taken = Steps(chooser, 4, 24, ns);
  for (const auto& [order, count] : taken) EXPECT_EQ(count, 8) << StepOrderName(order);
  taken = Steps(chooser, 4, 256, ns);
  EXPECT_EQ(taken[StepOrder::kAlternate], 256);
  const auto seen = chooser.Look();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].streams, 4);
  EXPECT_TRUE(seen[0].decided);
  EXPECT_EQ(seen[0].chosen, StepOrder::kAlternate);
  EXPECT_DOUBLE_EQ(seen[0].median_ms[static_cast<size_t>(StepOrder::kJoint)], 900e-6);
  EXPECT_DOUBLE_EQ(seen[0].median_ms[static_cast<size_t>(StepOrder::kPlain)], 1000e-6);
}

TEST(StepOrder, WithinTheNoiseOneBatchStays) {
  StepOrderChooser chooser(std::nullopt);
  Steps(chooser, 2, 24, {{StepOrder::kJoint, 1000}, {StepOrder::kPlain, 990}, {StepOrder::kAlternate, 980}});
  EXPECT_EQ(chooser.Next(2, 2), StepOrder::kJoint);
}

TEST(StepOrder, NumbersOfStreamsAreJudgedEachForItself) {
  StepOrderChooser chooser(std::nullopt);
  Steps(chooser, 2, 24, {{StepOrder::kJoint, 1000}, {StepOrder::kPlain, 2000}, {StepOrder::kAlternate, 1500}});
  Steps(chooser, 6, 24, {{StepOrder::kJoint, 3000}, {StepOrder::kPlain, 4000}, {StepOrder::kAlternate, 2000}});
  EXPECT_EQ(chooser.Next(2, 2), StepOrder::kJoint);
  EXPECT_EQ(chooser.Next(6, 6), StepOrder::kAlternate);
}

// A machine changes: another round comes every 256 steps, and after enough of them the choice follows.
TEST(StepOrder, TheChoiceFollowsTheMachine) {
  StepOrderChooser chooser(std::nullopt);
  Steps(chooser, 4, 24, {{StepOrder::kJoint, 1000}, {StepOrder::kPlain, 2000}, {StepOrder::kAlternate, 1500}});
  const auto taken = Steps(chooser, 4, 8 * 259, {{StepOrder::kJoint, 1000}, {StepOrder::kPlain, 2000}, {StepOrder::kAlternate, 500}});
  EXPECT_EQ(taken.at(StepOrder::kPlain), 8) << "one step a round";
  EXPECT_EQ(chooser.Next(4, 4), StepOrder::kAlternate);
}

TEST(StepOrder, OneSlowStepDecidesNothing) {
  StepOrderChooser chooser(std::nullopt);
  for (int round = 0; round < 8; ++round) {
    for (int order = 0; order < kNumStepOrders; ++order) {
      const StepOrder next = chooser.Next(3, 3);
      const bool disturbed = round == 5 && next == StepOrder::kAlternate;
      chooser.Add(3, 3, next, disturbed ? 1'000'000 : next == StepOrder::kAlternate ? 800 : 1000);
    }
  }
  EXPECT_EQ(chooser.Next(3, 3), StepOrder::kAlternate);
}

TEST(StepOrder, APinnedOrderIsNeverLeft) {
  StepOrderChooser chooser(StepOrder::kPlain);
  const auto taken = Steps(chooser, 4, 1000, {{StepOrder::kPlain, 5000}});
  EXPECT_EQ(taken.at(StepOrder::kPlain), 1000);
  const auto seen = chooser.Look();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_TRUE(seen[0].decided);
  EXPECT_EQ(seen[0].median_ms[static_cast<size_t>(StepOrder::kJoint)], 0) << "never measured";
}

TEST(StepOrder, DraftsCountAsTheirStreamsAndStreamsThatCatchUpRunInOneBatch) {
  StepOrderChooser chooser(std::nullopt);
  for (int i = 0; i < 24; ++i) {
    const int64_t rows = 2 + i % 7;  // up to three drafts each
    const StepOrder order = chooser.Next(2, rows);
    chooser.Add(2, rows, order, order == StepOrder::kPlain ? 500 : 1000);
  }
  ASSERT_EQ(chooser.Look().size(), 1u);
  EXPECT_EQ(chooser.Next(2, 8), StepOrder::kPlain);
  EXPECT_EQ(chooser.Next(2, 9), StepOrder::kJoint);
  chooser.Add(2, 9, StepOrder::kJoint, 1);
  EXPECT_DOUBLE_EQ(chooser.Look()[0].median_ms[static_cast<size_t>(StepOrder::kJoint)], 1000e-6);
}

}  // namespace
}  // namespace hearth
