#include "common/device/op_cost.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace hearth {
namespace {

WeightView Fp8(int64_t rows, int64_t cols) {
  return {.data = nullptr,
          .dtype = DType::kF8E4M3,
          .rows = rows,
          .cols = cols,
          .row_stride = cols,
          .scales = nullptr,
          .scale_stride = (cols + 127) / 128};
}

TEST(OpCost, LinearOfDeepSeekR1Down) {
  // down_proj [7168, 2048] FP8, one token: 14,680,064 weight bytes + 56 * 16 scales.
  const OpCost cost = CostOf(LinearArgs{.w = Fp8(7168, 2048), .m = 1});
  EXPECT_EQ(cost.flops, 2.0 * 7168 * 2048);
  EXPECT_EQ(cost.weight_bytes, 7168.0 * 2048 + 56 * 16 * 4);
  EXPECT_EQ(cost.activation_bytes, 2048 * 2 + 7168 * 4);
  EXPECT_EQ(cost.kv_bytes, 0);
}

TEST(OpCost, ScalesOfAViewInsideABlockCountTheBlocksItTouches) {
  EXPECT_EQ(WeightViewBytes(Fp8(512, 128).Rows(100, 56)), 56 * 128 + 2 * 4);  // rows 100..155 touch blocks 0 and 1
  EXPECT_EQ(WeightViewBytes(Fp8(512, 128).Rows(128, 128)), 128 * 128 + 4);
}

TEST(OpCost, DistinctExpertsAtTheEnds) {
  EXPECT_DOUBLE_EQ(ExpectedDistinctExperts(256, 8, 0), 0);
  EXPECT_DOUBLE_EQ(ExpectedDistinctExperts(256, 8, 1), 8);
  EXPECT_NEAR(ExpectedDistinctExperts(256, 8, 100000), 256, 1e-9);
  EXPECT_DOUBLE_EQ(ExpectedDistinctExperts(4, 4, 1), 4);
}

TEST(OpCost, DistinctExpertsIsTheMeanOfADrawing) {
  std::mt19937 random(5);
  const int64_t experts = 32, top_k = 4, tokens = 6;
  double total = 0;
  constexpr int kDraws = 20000;
  for (int draw = 0; draw < kDraws; ++draw) {
    std::set<int> awake;
    for (int64_t token = 0; token < tokens; ++token) {
      std::set<int> chosen;
      while (static_cast<int64_t>(chosen.size()) < top_k) chosen.insert(static_cast<int>(random() % experts));
      awake.insert(chosen.begin(), chosen.end());
    }
    total += static_cast<double>(awake.size());
  }
  EXPECT_NEAR(total / kDraws, ExpectedDistinctExperts(experts, top_k, tokens), 0.05);
}

TEST(OpCost, DecodeAttentionCountsWhatEachRowSees) {
  // Two rows at positions 10 and 11 see 11 and 12 positions; a third stream's row at position 0 sees one.
  const KvSequence sequences[] = {{.first_row = 0, .num_rows = 2, .start_position = 10}, {.first_row = 2, .num_rows = 1, .start_position = 0}};
  MlaAttentionArgs args{.form = Form::kDecode, .kv_b = Fp8(2 * 24, 64), .heads = 2, .nope = 16, .rope_dim = 4, .v_dim = 8, .rank = 64};
  args.sequences = sequences;
  args.num_sequences = 2;
  const OpCost cost = CostOf(args);
  EXPECT_EQ(cost.kv_bytes, (11 + 12 + 1) * (64 + 4) * 2);
  EXPECT_EQ(cost.flops, 2.0 * 2 * (3 * 64 * (16 + 8) + 24 * (2 * 64 + 4)));
}

TEST(OpCost, PrefillAttentionExpandsEachPositionOnce) {
  const KvSequence sequence{.first_row = 0, .num_rows = 3, .start_position = 64};
  MlaAttentionArgs args{.form = Form::kPrefill, .kv_b = Fp8(2 * 24, 64), .heads = 2, .nope = 16, .rope_dim = 4, .v_dim = 8, .rank = 64};
  args.sequences = &sequence;
  args.num_sequences = 1;
  const OpCost cost = CostOf(args);
  EXPECT_EQ(cost.kv_bytes, 67 * (64 + 4) * 2);
  EXPECT_EQ(cost.flops, 2.0 * 2 * (67 * 64 * (16 + 8) + (65 + 66 + 67) * (16 + 4 + 8)));
}

TEST(OpCost, GroupedQueriesReadASequencesKvOnce) {
  // Rows at positions 10 and 11 see 11 and 12 positions; the cached 12 are read once for both and for all six heads.
  const KvSequence sequence{.first_row = 0, .num_rows = 2, .start_position = 10};
  GqaAttentionArgs args{.heads = 6, .kv_heads = 2, .head_dim = 16, .sequences = &sequence, .num_sequences = 1, .terms = 2};
  const OpCost cost = CostOf(args);
  EXPECT_EQ(cost.kv_bytes, 12 * 2 * 2 * 16 * 2 * 2);
  EXPECT_EQ(cost.flops, 4.0 * 6 * 16 * (11 + 12));
  args.kv_dtype = DType::kF8E4M3;
  EXPECT_EQ(CostOf(args).kv_bytes, 12 * 2 * 2 * (16 + 4));
}

TEST(OpCost, RowsThatAreValidAlreadyWriteNoKv) {
  const KvSequence sequence{.first_row = 0, .num_rows = 5, .start_position = 10, .write_from = 13};
  MlaWriteKvArgs args{.rope = {.half = 8}, .rank = 64};
  args.sequences = &sequence;
  args.num_sequences = 1;
  EXPECT_EQ(CostOf(args).kv_bytes, 2 * (64 + 16) * 2);
  args.kv_dtype = DType::kF8E4M3;
  EXPECT_EQ(CostOf(args).kv_bytes, 2 * (64 + 2 * 16 + 4)) << "the rotary part stays in BF16";
}

// All the rows of one expert cost what the Experts op says of its one expert; loading it moves 44 MB.
TEST(OpCost, AnExpertsRowsReadItsRecordOnce) {
  const ExpertRowsArgs rows{.hidden = 7168, .intermediate = 2048, .terms = 2, .n = 1000};
  const OpCost cost = CostOf(rows);
  EXPECT_EQ(cost.flops, 2.0 * 1000 * 2 * 3 * 7168 * 2048);
  EXPECT_EQ(cost.weight_bytes, 3.0 * (7168 * 2048 + 56 * 16 * 4));
  EXPECT_EQ(cost.activation_bytes, 1000.0 * (7168 * (2 * 2 + 8) + 8));
  EXPECT_EQ(CostOf(ExpertRowsArgs{.hidden = 7168, .intermediate = 2048}).bytes(), 0) << "nobody chose it";
  EXPECT_EQ(CostOf(ToDeviceArgs{.bytes = 44'000'000}).weight_bytes, 44e6);
  EXPECT_EQ(CostOf(ClearArgs{.n = 7168}).bytes(), 7168 * 4);
  EXPECT_EQ(CostOf(AddRowsArgs{.m = 1000, .n = 7168}).activation_bytes, 1000.0 * (7168 * 12 + 8))
      << "a row, its sum read and written, where and how much";
}

TEST(OpCost, ExpertsOfDeepSeekR1AtBatchOne) {
  const OpCost cost = CostOf(ExpertsArgs{.num_experts = 256, .top_k = 8, .hidden = 7168, .intermediate = 2048, .m = 1});
  EXPECT_EQ(cost.flops, 2.0 * 8 * 3 * 7168 * 2048);
  EXPECT_NEAR(cost.weight_bytes, 8 * (3.0 * 7168 * 2048 + 3 * 56 * 16 * 4), 1.0);
}

}  // namespace
}  // namespace hearth
