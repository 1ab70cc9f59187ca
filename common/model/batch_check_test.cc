#include "common/model/batch_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hearth {
namespace {

using ::testing::HasSubstr;

class BatchCheck : public ::testing::Test {
 protected:
  BatchCheck() {
    config_.vocab_size = 100;
    config_.max_position_embeddings = 256;
    expected_ = {.layers = 3, .row_elements = 80};
    pool_ = {.layers = 3, .row_elements = 80, .num_pages = 4};
    batch_.token_ids = {1, 2, 3};
    batch_.sequences = {{.first_row = 0, .num_rows = 2, .start_position = 63, .pages = pages_},
                        {.first_row = 2, .num_rows = 1, .start_position = 0, .pages = pages_ + 2}};
    batch_.logit_rows = {1, 2};
  }
  std::string Error() const {
    const absl::Status status = CheckBatch(config_, expected_, pool_, 4, 2, batch_);
    if (status.ok()) return "";
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  const int32_t pages_[3] = {0, 3, 1};
  ModelConfig config_;
  KvGeometry expected_, pool_;
  ForwardBatch batch_;
};

TEST_F(BatchCheck, AGoodBatchPasses) { EXPECT_EQ(Error(), ""); }

TEST_F(BatchCheck, TokenOutsideTheVocabulary) {
  batch_.token_ids[1] = 100;
  EXPECT_THAT(Error(), HasSubstr("token id 100"));
}

TEST_F(BatchCheck, MoreRowsThanTheWorkspace) {
  batch_.token_ids.resize(5, 1);
  EXPECT_THAT(Error(), HasSubstr("5 rows"));
}

TEST_F(BatchCheck, RowsThatNoSequenceHas) {
  batch_.token_ids.push_back(1);
  EXPECT_THAT(Error(), HasSubstr("hold 3 rows, the batch 4"));
}

TEST_F(BatchCheck, AGapBetweenSequences) {
  batch_.sequences[1].first_row = 3;
  EXPECT_THAT(Error(), HasSubstr("begins at row 3, not 2"));
}

TEST_F(BatchCheck, APageOutsideThePool) {
  pool_.num_pages = 3;
  EXPECT_THAT(Error(), HasSubstr("KV page 3 of a pool of 3"));
}

TEST_F(BatchCheck, APositionBeyondTheModel) {
  batch_.sequences[1].start_position = 256;
  EXPECT_THAT(Error(), HasSubstr("position 256"));
}

TEST_F(BatchCheck, LogitsOfNoRow) {
  batch_.logit_rows = {3};
  EXPECT_THAT(Error(), HasSubstr("logits of row 3"));
}

TEST_F(BatchCheck, APoolOfAnotherModel) {
  pool_.row_elements = 96;
  EXPECT_THAT(Error(), HasSubstr("96"));
}

}  // namespace
}  // namespace hearth
