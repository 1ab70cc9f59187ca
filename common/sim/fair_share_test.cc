#include "common/sim/fair_share.h"

#include <gtest/gtest.h>

#include <random>

namespace hearth {
namespace {

std::vector<double> Rates(const std::vector<Claim>& claims, const std::vector<Division>& divisions) {
  std::vector<const Claim*> pointers;
  for (const Claim& claim : claims) pointers.push_back(&claim);
  return FairRates(pointers, divisions);
}

// Of so many resources, all divided evenly.
std::vector<double> Rates(const std::vector<Claim>& claims, int num_resources) {
  return Rates(claims, std::vector<Division>(static_cast<size_t>(num_resources), Division::kEvenly));
}

TEST(FairRates, NobodyAndOneAlone) {
  EXPECT_TRUE(Rates({}, 2).empty());
  const auto rates = Rates({{{0, 2.0}, {1, 0.5}}}, 2);
  EXPECT_DOUBLE_EQ(rates[0], 0.5) << "as fast as the resource it needs longest";
}

TEST(FairRates, EqualsShareALinkEqually) {
  for (const double rate : Rates({{{0, 1.0}}, {{0, 1.0}}, {{0, 1.0}}}, 1)) EXPECT_DOUBLE_EQ(rate, 1.0 / 3);
}

TEST(FairRates, WhoWantsLittleGetsIt) {
  // Experts that fill DRAM, and a copy whose link lets it take a tenth of that: the copy runs at full speed, the experts have the rest.
  const auto rates = Rates({{{0, 1.0}}, {{0, 0.1}, {1, 1.0}}}, 2);
  EXPECT_DOUBLE_EQ(rates[1], 1.0);
  EXPECT_DOUBLE_EQ(rates[0], 0.9);
}

TEST(FairRates, ByDemandAllGetTheSameShareOfWhatTheyAskFor) {
  // DRAM (0) has half of what is asked for: cores (1) ask for 1.75 times all of it, a link (2) for a quarter.
  const std::vector<Division> divisions = {Division::kByDemand, Division::kEvenly, Division::kEvenly};
  const auto rates = Rates({{{0, 1.75}, {1, 1.0}}, {{0, 0.25}, {2, 1.0}}}, divisions);
  EXPECT_DOUBLE_EQ(rates[0], 0.5);
  EXPECT_DOUBLE_EQ(rates[1], 0.5);
  // Alone, each has what it can take: the cores as much as there is, the link all that it asks for.
  EXPECT_DOUBLE_EQ(Rates({{{0, 1.75}, {1, 1.0}}}, divisions)[0], 1 / 1.75);
  EXPECT_DOUBLE_EQ(Rates({{{0, 0.25}, {2, 1.0}}}, divisions)[0], 1.0);
  // While there is enough, nobody is slowed.
  for (const double rate : Rates({{{0, 0.5}, {1, 1.0}}, {{0, 0.25}, {2, 1.0}}}, divisions)) EXPECT_DOUBLE_EQ(rate, 1.0);
}

TEST(FairRates, TwoOnOneLinkAskForWhatTheLinkLeavesThem) {
  // Two copies on one link (1) ask for a quarter of DRAM (0) together; cores (2) ask for three quarters more than there is.
  const auto rates =
      Rates({{{0, 0.25}, {1, 1.0}}, {{0, 0.25}, {1, 1.0}}, {{0, 1.75}, {2, 1.0}}}, {Division::kByDemand, Division::kEvenly, Division::kEvenly});
  EXPECT_DOUBLE_EQ(rates[0], 0.25);
  EXPECT_DOUBLE_EQ(rates[1], 0.25);
  EXPECT_DOUBLE_EQ(rates[2], 0.5);
}

TEST(FairRates, WhatOneCannotUseGoesToTheOthers) {
  // Claims 0 and 1 share resource 0; claim 1 is held back by its share of resource 1 with claim 2, and leaves part of resource 0 to claim 0.
  const auto rates = Rates({{{0, 1.0}}, {{0, 0.5}, {1, 1.0}}, {{1, 1.0}}}, 2);
  EXPECT_NEAR(rates[1], 0.5, 1e-9);
  EXPECT_NEAR(rates[2], 0.5, 1e-9);
  EXPECT_NEAR(rates[0], 0.75, 1e-9);
}

TEST(FairRates, NoResourceIsOverusedAndNoRateCouldRise) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 500; ++round) {
    const int num_resources = 1 + static_cast<int>(random() % 5);
    std::vector<Division> divisions;
    for (int r = 0; r < num_resources; ++r) divisions.push_back(random() % 3 == 0 ? Division::kByDemand : Division::kEvenly);
    std::vector<Claim> claims(1 + random() % 6);
    for (Claim& claim : claims) {
      for (int r = 0; r < num_resources; ++r) {
        if (r == 0 || random() % 2 == 0) claim.emplace_back(r, 0.01 + static_cast<double>(random() % 1000) * 1e-3);
      }
    }
    const auto rates = Rates(claims, divisions);
    std::vector<double> use(static_cast<size_t>(num_resources), 0);
    for (size_t i = 0; i < claims.size(); ++i) {
      EXPECT_GT(rates[i], 0);
      for (const auto& [r, seconds] : claims[i]) use[static_cast<size_t>(r)] += seconds * rates[i];
    }
    for (const double u : use) EXPECT_LE(u, 1 + 1e-9);
    for (size_t i = 0; i < claims.size(); ++i) {
      double fullest = 0, longest = 0;
      for (const auto& [r, seconds] : claims[i]) {
        fullest = std::max(fullest, use[static_cast<size_t>(r)]);
        longest = std::max(longest, seconds);
      }
      EXPECT_TRUE(fullest > 1 - 1e-6 || rates[i] > (1 - 1e-9) / longest) << "round " << round << ", claim " << i;
    }
  }
}

}  // namespace
}  // namespace hearth
