// The choice of depth, with times made up: it finds what pays, falls to 0 where drafts lose, notices when that changes, and looks around at little cost.
#include "services/decode/draft_depth.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>

namespace hearth {
namespace {

struct World {
  std::function<int64_t(int64_t streams, int64_t depth)> step_ns;
  double rate;  // at which any draft holds
};

struct Outcome {
  std::array<int64_t, DraftDepth::kMax + 1> chosen{};  // how often
  double ns_per_token = 0;
  int64_t usual() const { return std::max_element(chosen.begin(), chosen.end()) - chosen.begin(); }
};

Outcome Play(DraftDepth& policy, const World& world, int64_t streams, int64_t steps) {
  std::mt19937 random(7);
  Outcome out;
  double ns = 0, tokens = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t depth = policy.Choose(streams);
    ++out.chosen[static_cast<size_t>(depth)];
    for (int64_t s = 0; s < streams; ++s) {
      ++tokens;
      for (int64_t i = 0; i < depth; ++i) {
        const bool holds = std::uniform_real_distribution<>(0, 1)(random) < world.rate;
        policy.ObserveDraft(i, holds);
        if (!holds) break;
        ++tokens;
      }
    }
    int64_t taken = world.step_ns(streams, depth);
    if (random() % 10 == 0) taken *= 3;  // something else held it up
    policy.Observe(streams, depth, taken);
    ns += static_cast<double>(taken);
  }
  out.ns_per_token = ns / tokens;
  return out;
}

// Each draft adds a part of a plain step.
World Costs(double part, double rate) {
  return {[part](int64_t, int64_t depth) { return static_cast<int64_t>(1e7 * (1 + part * static_cast<double>(depth))); }, rate};
}

TEST(DraftDepth, GoesDeepWhereDraftsAreCheapAndHold) {
  DraftDepth policy(std::nullopt);
  const Outcome out = Play(policy, Costs(0.1, 0.9), 1, 2000);
  EXPECT_EQ(out.usual(), 3);
  EXPECT_GT(out.chosen[3], 1900);
}

TEST(DraftDepth, OneDraftWhereTheSecondRarelyPays) {
  DraftDepth policy(std::nullopt);
  EXPECT_EQ(Play(policy, Costs(0.4, 0.6), 1, 2000).usual(), 1);  // 1.6/1.4 beats 1.96/1.8 and 2.18/2.2
}

TEST(DraftDepth, FallsToNoneWhereDraftsLoseAndLooksAroundAtLittleCost) {
  DraftDepth policy(std::nullopt);
  const Outcome out = Play(policy, Costs(0.9, 0.2), 4, 4000);
  EXPECT_EQ(out.usual(), 0);
  EXPECT_GT(out.chosen[0], 3900);
  DraftDepth off(0);
  EXPECT_LT(out.ns_per_token, 1.03 * Play(off, Costs(0.9, 0.2), 4, 4000).ns_per_token);
}

TEST(DraftDepth, EachBatchSizeHasItsOwn) {
  DraftDepth policy(std::nullopt);
  const World world = {
      [](int64_t streams, int64_t depth) { return static_cast<int64_t>(1e7 * (1 + (streams == 1 ? 0.1 : 0.9) * static_cast<double>(depth))); }, 0.7};
  EXPECT_GT(Play(policy, world, 1, 1000).usual(), 0);
  EXPECT_EQ(Play(policy, world, 6, 1000).usual(), 0);
  EXPECT_GT(Play(policy, world, 1, 1000).usual(), 0);
}

TEST(DraftDepth, NoticesThatTheTextChanged) {
  DraftDepth policy(std::nullopt);
  EXPECT_EQ(Play(policy, Costs(0.5, 0.1), 1, 1000).usual(), 0);
  EXPECT_GT(Play(policy, Costs(0.5, 0.95), 1, 8000).usual(), 0) << "by looking around";
  EXPECT_EQ(Play(policy, Costs(0.5, 0.1), 1, 1000).usual(), 0);
}

TEST(DraftDepth, PinnedIsPinned) {
  DraftDepth policy(2);
  const Outcome out = Play(policy, Costs(2.0, 0.0), 3, 100);
  EXPECT_EQ(out.chosen[2], 100);
}

}  // namespace
}  // namespace hearth
