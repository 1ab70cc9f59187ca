#include "services/prefill/pass_message.h"

#include <gtest/gtest.h>

namespace hearth {
namespace {

std::vector<uint8_t> Example() {
  static const std::vector<int32_t> first = {7, 3}, second = {9};
  static const std::vector<float> hidden = {0.5f, -2, 3};
  ForwardBatch batch{
      .form = Form::kPrefill, .token_ids = {10, 11, 12, 13, 14, 15}, .sequences = {}, .logit_rows = {}, .prior_hidden = {hidden.data(), nullptr}};
  batch.sequences = {{.first_row = 0, .num_rows = 4, .start_position = 62, .write_from = 63, .pages = first.data()},
                     {.first_row = 4, .num_rows = 2, .start_position = 0, .write_from = 0, .pages = second.data()}};
  return EncodePass(batch, 3);
}

TEST(PassMessage, ComesOutAsItWentIn) {
  absl::StatusOr<PassMessage> decoded = DecodePass(Example(), 3);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const PassMessage message = *std::move(decoded);
  EXPECT_EQ(message.batch.token_ids, (std::vector<int32_t>{10, 11, 12, 13, 14, 15}));
  ASSERT_EQ(message.batch.sequences.size(), 2u);
  const KvSequence& first = message.batch.sequences[0];
  EXPECT_EQ(first.num_rows, 4);
  EXPECT_EQ(first.start_position, 62);
  EXPECT_EQ(first.write_from, 63);
  EXPECT_EQ(first.pages[1], 3);
  EXPECT_EQ(message.batch.sequences[1].first_row, 4);
  EXPECT_EQ(message.batch.sequences[1].pages[0], 9);
  ASSERT_EQ(message.batch.prior_hidden.size(), 2u);
  EXPECT_EQ(message.batch.prior_hidden[0][1], -2);
  EXPECT_EQ(message.batch.prior_hidden[1], nullptr);
}

TEST(PassMessage, WhateverIsCutOffOrDamagedIsRefusedAndNothingIsReadBehindIt) {
  const std::vector<uint8_t> whole = Example();
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_TRUE(absl::IsDataLoss(DecodePass({whole.begin(), whole.begin() + static_cast<int64_t>(length)}, 3).status())) << length;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::vector<uint8_t> bytes = whole;
    bytes[at] ^= 0xff;
    const absl::Status status = DecodePass(bytes, 3).status();
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << at << ": " << status;
  }
  EXPECT_TRUE(absl::IsDataLoss(DecodePass(whole, 4).status())) << "another model's";
}

}  // namespace
}  // namespace hearth
