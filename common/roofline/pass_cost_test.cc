#include "common/roofline/pass_cost.h"

#include <gtest/gtest.h>

#include <random>

namespace hearth {
namespace {

constexpr PassCost kTrue{.fixed_s = 0.2, .per_token_s = 3e-4, .per_position_s = 5e-9};

TimedPass Timed(int64_t before, int64_t tokens, double factor = 1) {
  const PassWork work = WorkOf(before, tokens);
  return {work, kTrue.Seconds(work) * factor};
}

TEST(PassWork, CountsWhatTokensAttendTo) {
  EXPECT_EQ(WorkOf(0, 1).positions, 1);
  EXPECT_EQ(WorkOf(0, 4).positions, 1 + 2 + 3 + 4);
  EXPECT_EQ(WorkOf(100, 3).positions, 101 + 102 + 103);
  PassWork cut = WorkOf(0, 300);
  cut += WorkOf(300, 700);
  EXPECT_EQ(cut.positions, WorkOf(0, 1000).positions);
  EXPECT_EQ(WorkOf(7, -3).tokens, 0);
}

TEST(PassFit, KnowsNothingBeforeItIsTold) {
  PassFit fit;
  EXPECT_FALSE(fit.cost().has_value());
  fit.Add({WorkOf(0, 100), 0});  // a clock that stood still
  fit.Add({WorkOf(0, 0), 1});
  EXPECT_FALSE(fit.cost().has_value());
}

TEST(PassFit, FindsTheTermsOfPassesOfManySizes) {
  PassFit fit;
  for (const int64_t tokens : {64, 200, 1000, 5000, 30000}) {
    for (const int64_t before : {0, 2000, 40000}) fit.Add(Timed(before, tokens));
  }
  const PassCost cost = *fit.cost();
  EXPECT_NEAR(cost.fixed_s, kTrue.fixed_s, 0.01 * kTrue.fixed_s);
  EXPECT_NEAR(cost.per_token_s, kTrue.per_token_s, 0.01 * kTrue.per_token_s);
  EXPECT_NEAR(cost.per_position_s, kTrue.per_position_s, 0.01 * kTrue.per_position_s);
}

TEST(PassFit, APassThatFitsBadlyHardlyCounts) {
  PassFit fit;
  std::mt19937 random(7);
  std::uniform_real_distribution<double> noise(0.95, 1.05);
  for (int i = 0; i < 200; ++i) {
    const int64_t tokens = 64 << (i % 9);
    fit.Add(Timed(i % 2 == 0 ? 0 : 3000, tokens, i % 10 == 3 ? 6.0 : noise(random)));
  }
  for (const int64_t tokens : {100, 2000, 20000}) {
    EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, tokens)) / kTrue.Seconds(WorkOf(0, tokens)), 1, 0.15) << tokens;
  }
}

TEST(PassFit, EqualPassesDoNotPushOutTheRareLongOne) {
  PassFit fit;
  fit.Add(Timed(0, 20000));
  for (int i = 0; i < 5000; ++i) fit.Add(Timed(0, 64));
  EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, 20000)) / kTrue.Seconds(WorkOf(0, 20000)), 1, 0.05);
  EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, 64)) / kTrue.Seconds(WorkOf(0, 64)), 1, 0.05);
  EXPECT_EQ(fit.passes_seen(), 5001);
}

TEST(PassFit, FollowsAMachineThatHasChanged) {
  PassFit fit;
  for (int i = 0; i < 20; ++i) fit.Add(Timed(0, 500));
  for (int i = 0; i < 4; ++i) fit.Add(Timed(0, 500, 3));
  EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, 500)) / kTrue.Seconds(WorkOf(0, 500)), 3, 0.1);
}

TEST(PassFit, OneSizeSaysNothingOfTheTermsAndNoneIsNegative) {
  PassFit fit;
  for (int i = 0; i < 10; ++i) fit.Add(Timed(0, 512));
  const PassCost cost = *fit.cost();
  EXPECT_NEAR(cost.Seconds(WorkOf(0, 512)), kTrue.Seconds(WorkOf(0, 512)), 1e-3);
  EXPECT_GT(cost.fixed_s, 0);
  EXPECT_GT(cost.per_token_s, 0);
  EXPECT_GE(cost.per_position_s, 0);
  // Longer passes that took less (others had the machine before): still no negative term.
  fit.Add({WorkOf(0, 4096), 0.01});
  EXPECT_GE(fit.cost()->fixed_s, 0);
  EXPECT_GE(fit.cost()->per_token_s, 0);
  EXPECT_GE(fit.cost()->per_position_s, 0);
}

TEST(PassFit, KeepsTheShapeThatItWasStartedFrom) {
  PassFit fit;
  fit.StartFrom(kTrue);
  EXPECT_EQ(fit.cost()->fixed_s, kTrue.fixed_s);
  // Passes of one size on a machine three times slower: how a longer one compares is what it was started from, how fast all are is what was measured.
  for (int i = 0; i < 4; ++i) fit.Add(Timed(0, 1000, 3));
  for (const int64_t tokens : {64, 1000, 8000, 30000}) {
    EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, tokens)) / kTrue.Seconds(WorkOf(0, tokens)), 3, 0.1) << tokens;
  }
  // What is measured of longer ones counts more.
  for (int i = 0; i < 4; ++i) fit.Add(Timed(0, 30000, 6));
  EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, 30000)) / kTrue.Seconds(WorkOf(0, 30000)), 6, 0.6);
}

TEST(PassFit, OfAnotherMachineOnlyTheShapeIsBelieved) {
  PassFit fit;
  fit.StartFrom(kTrue, /*shape_only=*/true);
  EXPECT_FALSE(fit.cost().has_value());
  fit.Add(Timed(0, 64, 10));
  EXPECT_NEAR(fit.cost()->Seconds(WorkOf(0, 8000)) / kTrue.Seconds(WorkOf(0, 8000)), 10, 0.3);
}

TEST(PassFit, TakesSeveralPassesTimedTogether) {
  PassFit fit;
  for (const int64_t tokens : {64, 512, 4096}) {
    for (const int64_t chunks : {1, 4, 16}) {
      const PassWork work = WorkOf(0, chunks * tokens);
      fit.Add({work, kTrue.Seconds(work, static_cast<double>(chunks)), static_cast<double>(chunks)});
    }
  }
  EXPECT_NEAR(fit.cost()->fixed_s, kTrue.fixed_s, 0.02 * kTrue.fixed_s);
}

}  // namespace
}  // namespace hearth
