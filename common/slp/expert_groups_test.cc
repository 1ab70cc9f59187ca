#include "common/slp/expert_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hearth {
namespace {

using ::testing::ElementsAre;

TEST(ExpertGroups, RowsAscendWithinAnExpertAndKeepTheirWeights) {
  const int32_t ids[] = {0, 3, 1, 3, 0, 1};  // three rows, two choices each, of five experts
  const float weights[] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f};
  ExpertGroups groups;
  GroupByExpert(ids, weights, 3, 2, 5, groups);
  EXPECT_THAT(groups.begin, ElementsAre(0, 2, 4, 4, 6, 6));
  EXPECT_THAT(groups.rows, ElementsAre(0, 2, 1, 2, 0, 1));
  EXPECT_THAT(groups.weights, ElementsAre(0.1f, 0.5f, 0.3f, 0.6f, 0.2f, 0.4f));
  EXPECT_EQ(groups.count(3), 2);
  EXPECT_EQ(groups.count(4), 0);
}

TEST(ExpertGroups, TheNextLayersAreSmaller) {
  ExpertGroups groups;
  const int32_t many[] = {1, 1, 1};
  const float weights[] = {1, 2, 3};
  GroupByExpert(many, weights, 3, 1, 2, groups);
  GroupByExpert(many, weights, 1, 1, 2, groups);
  EXPECT_THAT(groups.begin, ElementsAre(0, 0, 1));
  EXPECT_THAT(groups.rows, ElementsAre(0));
  EXPECT_THAT(groups.weights, ElementsAre(1.0f));
}

}  // namespace
}  // namespace hearth
