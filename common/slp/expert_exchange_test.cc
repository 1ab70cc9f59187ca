#include "common/slp/expert_exchange.h"

#include <gtest/gtest.h>

namespace hearth {
namespace {

// DeepSeek-R1's layer.
ExchangeShape Shape(int64_t ranks, int64_t top_k, int64_t rows = 8192) {
  return {.ranks = ranks, .rows = rows, .experts = 256, .top_k = top_k, .hidden = 7168, .terms = 1};
}

TEST(ExpertExchange, ExpertsBelongToRanksByWholeQuarters) {
  EXPECT_EQ(FirstExpertOf(1, 2, 256), 128);
  EXPECT_EQ(FirstExpertOf(3, 4, 10), 7) << "quarters 0-1, 2-4, 5-6, 7-9, as the order of sums has them";
  EXPECT_EQ(FirstExpertOf(1, 2, 10), 5);
  EXPECT_EQ(FirstExpertOf(1, 1, 10), 10);
  EXPECT_FALSE(RanksShareQuarters(3));
}

// A row reaches n - 1 others whole, or its k copies reach them with probability (n - 1) / n each: so SmallEP sends less where k > n.
TEST(ExpertExchange, ManyChoicesAndFewRanksAreForSmallEp) {
  EXPECT_NEAR(SmallEpBytes(Shape(2, 8)) / DispatchBytes(Shape(2, 8)), 2.0 / 8, 0.002);
  const ExchangeLink link{.bytes_per_s = 25e9, .latency_s = 20e-6};
  EXPECT_EQ(ChooseExchange(Shape(2, 8), link), ExpertExchange::kSmallEp);
  EXPECT_EQ(ChooseExchange(Shape(4, 8), link), ExpertExchange::kSmallEp);
  EXPECT_EQ(ChooseExchange(Shape(4, 2), link), ExpertExchange::kDispatch);
  EXPECT_EQ(ChooseExchange(Shape(2, 1), link), ExpertExchange::kDispatch);
}

TEST(ExpertExchange, ADedupDispatchSendsARowOnceARank) {
  const ExchangeShape shape{.ranks = 2, .experts = 8, .top_k = 3, .hidden = 100, .terms = 2};
  const int32_t ids[] = {0, 1, 2, 0, 4, 5, 5, 6, 7};
  const uint64_t row = 100 * (2 * 2 + 4);
  EXPECT_EQ(DedupDispatchBytes(ids, 3, 0, shape), 2 * row + (2 + 3) * 8) << "the first row stays";
  EXPECT_EQ(DedupDispatchBytes(ids, 3, 1, shape), 2 * row + (3 + 1) * 8);
}

}  // namespace
}  // namespace hearth
