#include "services/decode/slack.h"

#include <gtest/gtest.h>

namespace hearth {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(SlackTest, AStepEarnsWhatItLeavesOfTheTarget) {
  Slack slack({.tpot_target_ns = 50 * kMs});
  EXPECT_EQ(slack.share(), 0);
  slack.AfterStep(2, 1, 20 * kMs);
  EXPECT_EQ(slack.available_ns(), 30 * kMs);
  EXPECT_DOUBLE_EQ(slack.share(), 0.6);
  slack.Spend(45 * kMs);
  slack.AfterStep(2, 1, 20 * kMs);
  EXPECT_EQ(slack.available_ns(), 15 * kMs);  // what was taken too much is paid back
}

TEST(SlackTest, DraftsThatHoldLeaveMoreOfThem) {
  Slack slack({.tpot_target_ns = 50 * kMs});
  slack.AfterStep(1, 2.5, 60 * kMs);
  EXPECT_EQ(slack.available_ns(), 65 * kMs);
}

TEST(SlackTest, WithoutATargetItIsAShareOfTheStepsOwnTime) {
  Slack slack({.rise = 0.2});
  for (int i = 0; i < 32; ++i) {
    slack.Keep(0);
    slack.AfterStep(3, 1, i % 2 == 0 ? 10 * kMs : 30 * kMs);  // half of them disturbed
  }
  slack.Spend(slack.available_ns());
  slack.AfterStep(3, 1, 10 * kMs);
  EXPECT_EQ(slack.available_ns(), 2 * kMs);
  slack.AfterStep(1, 1, 4 * kMs);  // another number of streams has a time of its own
  EXPECT_EQ(slack.available_ns(), 2 * kMs + 4 * kMs / 5);
}

TEST(SlackTest, TheShareIsThatOfManySteps) {
  Slack slack({.rise = 0.2});
  for (int i = 0; i < 500; ++i) slack.AfterStep(1, 1, 10 * kMs);
  EXPECT_NEAR(slack.share(), 1 - 1 / 1.2, 1e-9);
  slack.AfterStep(1, 1, 30 * kMs);  // one alone earns half as much in three times the time, and says little
  EXPECT_NEAR(slack.share(), 1 - 1 / 1.2, 0.02);
  for (int i = 0; i < 500; ++i) slack.AfterStep(1, 1, i % 2 == 0 ? 10 * kMs : 30 * kMs);
  EXPECT_NEAR(slack.share(), 1.5 / (1.5 + 20), 0.005);
}

TEST(SlackTest, AStepThatLeavesNothingEarnsTheLeastShare) {
  Slack slack({.tpot_target_ns = 10 * kMs, .share_min = 0.1});
  for (int i = 1; i <= 5; ++i) {
    slack.AfterStep(1, 1, 100 * kMs);
    EXPECT_EQ(slack.available_ns(), i * 10 * kMs);
  }
}

TEST(SlackTest, WhatNobodyNeedsLapses) {
  Slack slack({.tpot_target_ns = 30 * kMs});
  for (int i = 0; i < 100; ++i) {
    slack.AfterStep(1, 1, 10 * kMs);
    slack.Keep(0);
  }
  EXPECT_EQ(slack.available_ns(), 20 * kMs);
  for (int i = 0; i < 100; ++i) {
    slack.AfterStep(1, 1, 10 * kMs);
    slack.Keep(70 * kMs);
  }
  EXPECT_EQ(slack.available_ns(), 70 * kMs);
}

}  // namespace
}  // namespace hearth
