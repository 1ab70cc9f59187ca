#include "common/experts/expert_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hearth {
namespace {

using ::testing::ElementsAre;

TEST(ExpertGroups, RowsAscendWithinAnExpertAndPairsAreFoundAgain) {
  const int32_t ids[] = {0, 3, 1, 3, 0, 1};  // three rows, two choices each, of five experts
  ExpertGroups groups;
  GroupByExpert(ids, 3, 2, 5, groups);
  EXPECT_THAT(groups.begin, ElementsAre(0, 2, 4, 4, 6, 6));
  EXPECT_THAT(groups.rows, ElementsAre(0, 2, 1, 2, 0, 1));
  EXPECT_THAT(groups.pair_of, ElementsAre(0, 4, 2, 5, 1, 3));
  EXPECT_EQ(groups.count(3), 2);
  EXPECT_EQ(groups.count(4), 0);
}

TEST(ExpertGroups, TheNextLayersAreSmaller) {
  ExpertGroups groups;
  const int32_t many[] = {1, 1, 1};
  GroupByExpert(many, 3, 1, 2, groups);
  GroupByExpert(many, 1, 1, 2, groups);
  EXPECT_THAT(groups.begin, ElementsAre(0, 0, 1));
  EXPECT_THAT(groups.rows, ElementsAre(0));
  EXPECT_THAT(groups.pair_of, ElementsAre(0));
}

}  // namespace
}  // namespace hearth
