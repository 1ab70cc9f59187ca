// The gate against a plain restatement of the papers' rule, and its edges.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "common/kernels/kernels.h"
#include "common/kernels/portable_exp.h"

namespace hearth {
namespace {

using ::testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Choice Select(const GateParams& p, const std::vector<float>& logits, const std::vector<float>& bias = {}) {
  Choice choice;
  choice.ids.resize(static_cast<size_t>(p.top_k), -7);
  choice.weights.resize(static_cast<size_t>(p.top_k));
  std::vector<float> scratch(static_cast<size_t>(2 * p.num_experts + p.num_groups));
  GateSelect(p, logits.data(), bias.empty() ? nullptr : bias.data(), choice.ids.data(), choice.weights.data(), scratch.data());
  return choice;
}

// The indices of the k largest, ties to the lower one: a sort, where the gate scans.
std::vector<size_t> Largest(const std::vector<double>& values, size_t k) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// Logits and biases are multiples of 1/8, so that ties are common; sums of two scores are compared as the gate does, in
// F32.
Choice Reference(const GateParams& p, const std::vector<float>& logits, const std::vector<float>& bias) {
  const size_t n = logits.size();
  std::vector<float> score(n);
  if (p.sigmoid) {
    for (size_t e = 0; e < n; ++e) score[e] = 1.0f / (1.0f + PortableExp(-logits[e]));
  } else {
    const float max = *std::max_element(logits.begin(), logits.end());
    float sum = 0;
    for (size_t e = 0; e < n; ++e) sum += PortableExp(logits[e] - max);
    for (size_t e = 0; e < n; ++e) score[e] = PortableExp(logits[e] - max) / sum;
  }
  std::vector<double> biased(n);
  for (size_t e = 0; e < n; ++e) biased[e] = bias.empty() ? score[e] : score[e] + bias[e];
  if (p.num_groups > 1) {
    const size_t size = n / static_cast<size_t>(p.num_groups);
    std::vector<double> group_scores;
    for (size_t g = 0; g < static_cast<size_t>(p.num_groups); ++g) {
      std::vector<float> members;
      for (size_t i = 0; i < size; ++i) members.push_back(static_cast<float>(biased[g * size + i]));
      std::sort(members.rbegin(), members.rend());
      group_scores.push_back(p.group_score_top2 && size > 1 ? members[0] + members[1] : members[0]);
    }
    const std::vector<size_t> kept = Largest(group_scores, static_cast<size_t>(p.top_groups));
    for (size_t e = 0; e < n; ++e) {
      if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) biased[e] = -kInf;
    }
  }
  Choice choice;
  double sum = 0;
  for (size_t e : Largest(biased, static_cast<size_t>(p.top_k))) {
    choice.ids.push_back(static_cast<int32_t>(e));
    choice.weights.push_back(score[e]);
    sum += score[e];
  }
  for (float& w : choice.weights) w = static_cast<float>((p.normalize ? w / sum : w) * p.scaling);
  return choice;
}

TEST(GateSelectTest, AgreesWithTheReference) {
  std::mt19937 rng(7);
  std::uniform_int_distribution<int> eighths(-24, 24);
  const GateParams kinds[] = {
      {.num_experts = 256, .top_k = 8, .num_groups = 8, .top_groups = 4, .scaling = 2.5f},  // DeepSeek-V3
      {.num_experts = 384, .top_k = 8, .scaling = 2.827f},                                  // Kimi-K2
      {.num_experts = 64, .top_k = 6, .sigmoid = false, .normalize = false},                // DeepSeek-V2-Lite
      {.num_experts = 160,
       .top_k = 6,
       .sigmoid = false,
       .num_groups = 8,
       .top_groups = 3,
       .group_score_top2 = false,
       .normalize = false,
       .scaling = 16.0f},                                  // DeepSeek-V2
      {.num_experts = 128, .top_k = 8, .sigmoid = false},  // Qwen3
      {.num_experts = 6, .top_k = 2, .num_groups = 3, .top_groups = 1},
      {.num_experts = 4, .top_k = 4, .num_groups = 4, .top_groups = 4},  // groups of one
      {.num_experts = 1, .top_k = 1},
  };
  for (const GateParams& p : kinds) {
    for (int round = 0; round < 200; ++round) {
      std::vector<float> logits(static_cast<size_t>(p.num_experts));
      std::vector<float> bias(round % 2 ? logits.size() : 0);
      for (float& x : logits) x = static_cast<float>(eighths(rng)) / 8;
      for (float& x : bias) x = static_cast<float>(eighths(rng)) / 8;
      const Choice want = Reference(p, logits, bias);
      const Choice got = Select(p, logits, bias);
      ASSERT_EQ(got.ids, want.ids) << p.num_experts << " experts, round " << round;
      for (size_t i = 0; i < got.weights.size(); ++i) ASSERT_NEAR(got.weights[i], want.weights[i], 1e-6 * want.weights[i]);
    }
  }
}

TEST(GateSelectTest, TiesGoToTheLowerIdAndIdsAscend) {
  const Choice choice = Select({.num_experts = 6, .top_k = 3}, {1, 2, 1, 2, 1, 2});
  EXPECT_THAT(choice.ids, ElementsAre(1, 3, 5));
  EXPECT_THAT(Select({.num_experts = 6, .top_k = 4}, {1, 2, 1, 2, 1, 2}).ids, ElementsAre(0, 1, 3, 5));
  EXPECT_THAT(Select({.num_experts = 5, .top_k = 3}, {0, 0, 0, 0, 0}).ids, ElementsAre(0, 1, 2));
}

TEST(GateSelectTest, BiasChoosesButDoesNotWeigh) {
  const Choice choice = Select({.num_experts = 3, .top_k = 2, .normalize = false}, {0, 0, 0}, {-1, 5, 3});
  EXPECT_THAT(choice.ids, ElementsAre(1, 2));
  EXPECT_THAT(choice.weights, ElementsAre(0.5f, 0.5f));
}

TEST(GateSelectTest, WithoutNormalizationTheScalingHoldsToo) {
  const Choice choice = Select({.num_experts = 2, .top_k = 1, .sigmoid = false, .normalize = false, .scaling = 16}, {0, 0});
  EXPECT_THAT(choice.ids, ElementsAre(0));
  EXPECT_THAT(choice.weights, ElementsAre(8.0f));
}

TEST(GateSelectTest, NegativeBiasesDoNotLetExcludedGroupsIn) {
  // All choices are negative: an excluded expert must not win by counting as zero.
  const GateParams p = {.num_experts = 4, .top_k = 2, .num_groups = 2, .top_groups = 1};
  EXPECT_THAT(Select(p, {0, 0, 0, 0}, {-9, -9, -2, -3}).ids, ElementsAre(2, 3));
}

TEST(GateSelectTest, VanishingScoresStayFinite) {
  const Choice choice = Select({.num_experts = 3, .top_k = 2}, {-kInf, -kInf, -kInf});
  EXPECT_THAT(choice.ids, ElementsAre(0, 1));
  EXPECT_THAT(choice.weights, ElementsAre(0.0f, 0.0f));
}

TEST(GateSelectTest, NanLosesAgainstNumbersAndIdsStayValid) {
  EXPECT_THAT(Select({.num_experts = 4, .top_k = 2}, {kNan, 1, -5, kNan}).ids, ElementsAre(1, 2));
  for (bool sigmoid : {true, false}) {
    const GateParams p = {.num_experts = 8, .top_k = 3, .sigmoid = sigmoid, .num_groups = 4, .top_groups = 2};
    const Choice choice = Select(p, std::vector<float>(8, kNan));
    EXPECT_THAT(choice.ids, ElementsAre(0, 1, 2));
    for (float w : choice.weights) EXPECT_TRUE(std::isnan(w)) << "a poisoned token must stay visible";
  }
}

TEST(PortableExpTest, IsTheRoundedExponential) {
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> range(-104.0f, 89.0f);
  for (int i = 0; i < 200000; ++i) {
    const float x = range(rng);
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::max(want * 0x1p-23, 0x1p-149);
    if (want > 3.4028235e38) continue;
    ASSERT_NEAR(PortableExp(x), want, 0.51 * ulp) << x;
  }
  EXPECT_EQ(PortableExp(0.0f), 1.0f);
  EXPECT_EQ(PortableExp(-kInf), 0.0f);
  EXPECT_EQ(PortableExp(kInf), kInf);
  EXPECT_EQ(PortableExp(88.8f), kInf);
  EXPECT_TRUE(std::isnan(PortableExp(kNan)));
}

}  // namespace
}  // namespace hearth
