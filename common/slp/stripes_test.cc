#include "common/slp/stripes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace hearth {
namespace {

using ::testing::ElementsAre;

std::vector<KvSequence> Sequences(const std::vector<int64_t>& lengths) {
  std::vector<KvSequence> sequences;
  int64_t first = 0;
  for (const int64_t length : lengths) {
    sequences.push_back({.first_row = first, .num_rows = length});
    first += length;
  }
  return sequences;
}

TEST(Stripes, ARankTakesOneFromTheFrontAndItsMirror) {
  const Stripes stripes = CutIntoStripes(Sequences({80}), 2);
  ASSERT_EQ(stripes.all.size(), 4u);
  std::vector<int64_t> ranks, begins;
  for (const Stripe& stripe : stripes.all) {
    ranks.push_back(stripe.rank);
    begins.push_back(stripe.first_row);
  }
  EXPECT_THAT(ranks, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(begins, ElementsAre(0, 20, 40, 60));
  EXPECT_THAT(stripes.rank_rows, ElementsAre(40, 40));
}

TEST(Stripes, OneRankHasWholeSequences) {
  const Stripes stripes = CutIntoStripes(Sequences({3, 1}), 1);
  ASSERT_EQ(stripes.all.size(), 2u);
  EXPECT_EQ(stripes.all[0].num_rows, 3);
  EXPECT_EQ(stripes.all[1].first_row, 3);
}

// Every row once, in order; rows and pairs of attention even among the ranks, however ragged the lengths.
TEST(Stripes, RaggedLengthsAreSharedEvenly) {
  const std::vector<std::vector<int64_t>> batches = {
      {1}, {63}, {700}, {1, 1, 1, 1, 1, 1, 1, 1}, {1, 4, 1, 4, 1, 4}, {4096, 3, 65, 1}, {5, 5, 5, 5, 5, 5, 5}, {7, 2, 9, 1, 1000}};
  for (const int64_t ranks : {2, 4}) {
    for (const std::vector<int64_t>& lengths : batches) {
      const std::vector<KvSequence> sequences = Sequences(lengths);
      const Stripes stripes = CutIntoStripes(sequences, ranks);
      int64_t next = 0;
      std::vector<int64_t> rows(static_cast<size_t>(ranks)), pairs(rows);
      for (const Stripe& stripe : stripes.all) {
        EXPECT_EQ(stripe.first_row, next);
        EXPECT_GE(stripe.num_rows, 1);
        next += stripe.num_rows;
        rows[static_cast<size_t>(stripe.rank)] += stripe.num_rows;
        const int64_t begin = stripe.first_row - sequences[static_cast<size_t>(stripe.sequence)].first_row;
        for (int64_t i = begin; i < begin + stripe.num_rows; ++i) pairs[static_cast<size_t>(stripe.rank)] += i + 1;
      }
      EXPECT_EQ(next, sequences.back().first_row + sequences.back().num_rows);
      EXPECT_EQ(rows, stripes.rank_rows);
      const auto [row_least, row_most] = std::minmax_element(rows.begin(), rows.end());
      EXPECT_LE(*row_most - *row_least, 2 * ranks) << ranks << " ranks, " << ::testing::PrintToString(lengths);
      if (next < 700) continue;
      const auto [pair_least, pair_most] = std::minmax_element(pairs.begin(), pairs.end());
      EXPECT_LE(static_cast<double>(*pair_most), 1.02 * static_cast<double>(*pair_least)) << ranks << " ranks, " << ::testing::PrintToString(lengths);
    }
  }
}

}  // namespace
}  // namespace hearth
