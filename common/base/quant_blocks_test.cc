// Block formats against what gguf-py 0.19 (quants.dequantize) made of the same bytes (tests/golden/quant_blocks.py), and INT4 against its rule.
#include "common/base/quant_blocks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

namespace hearth {
namespace {

// Bytes of a linear congruential sequence that begins with the block's length, F16 scales put in.
std::vector<uint8_t> MakeBlock(DType dtype, const std::vector<std::pair<size_t, uint16_t>>& halves) {
  std::vector<uint8_t> block(static_cast<size_t>(BlockOf(dtype).bytes));
  uint32_t state = static_cast<uint32_t>(block.size());
  for (uint8_t& byte : block) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  for (const auto& [at, bits] : halves) std::memcpy(&block[at], &bits, sizeof(bits));
  return block;
}

struct Golden {
  DType dtype;
  std::vector<std::pair<size_t, uint16_t>> halves;
  std::vector<std::pair<size_t, double>> values;
  double sum;
  double weighted_sum;  // element i times i + 1
};

TEST(QuantBlocks, GgufBlocksAreWhatGgufPyMakesOfThem) {
  const Golden goldens[] = {
      {DType::kQ8_0,
       {{0, 0x2c01}},
       {{0, 0x1.9064p+0}, {1, -0x1.304cp+0}, {15, -0x1.6058p+1}, {16, -0x1.dc77p+2}, {31, -0x1.004p-3}},
       -0x1.0c43p+3,
       0x1.ae2b7p+6},
      {DType::kQ6_K,
       {{208, 0x1403}},
       {{0, -0x1.255b6p+0},
        {16, 0x1.6108p-6},
        {31, -0x1.8d29p-4},
        {32, 0x1.a53bp-2},
        {63, 0x1.203788p+1},
        {64, -0x1.11cccp+1},
        {100, 0x1.8926p-1},
        {127, 0x1.8eaa2p+0},
        {128, -0x1.50fcp-2},
        {160, -0x1.9df59p+0},
        {200, 0x1.62892p+1},
        {255, -0x1.19123p+0}},
       0x1.9113eep+3,
       0x1.b7f357c2p+11},
      {DType::kQ4_K,
       {{0, 0x2007}, {2, 0x2805}},
       {{0, 0x1.09e6p-1},
        {31, 0x1.db52p-1},
        {32, 0x1.05p-3},
        {63, -0x1.00fp-1},
        {64, 0x1.e28a4p+1},
        {100, -0x1.1114p-1},
        {128, 0x1.a478p-1},
        {160, -0x1.687ep-1},
        {200, 0x1.4268p+0},
        {255, 0x1.89e04p+1}},
       0x1.5c989ap+6,
       0x1.5c4904f4p+13},
      {DType::kQ5_K,
       {{0, 0x1c0b}, {2, 0x2803}},
       {{0, 0x1.02e8p+2},
        {31, 0x1.a8d3p+1},
        {32, 0x1.cafp-1},
        {63, 0x1.0d9f8p+2},
        {64, -0x1.38eap+0},
        {100, 0x1.3f95p+0},
        {128, 0x1.4b7p-4},
        {160, -0x1.6313p-1},
        {200, -0x1.18d2p+0},
        {255, 0x1.9de2p+0}},
       0x1.94aca6p+8,
       0x1.3c6775648p+15},
      {DType::kQ3_K,
       {{108, 0x2405}},
       {{0, 0x1.61b8p-3},
        {16, -0x1.014p-2},
        {31, 0x1.81ep-1},
        {32, 0x1.317cp-2},
        {63, -0x1.419p-2},
        {64, -0x1.b21cp-2},
        {100, -0x1.419p-4},
        {127, -0x1.61b8p-1},
        {128, -0x1.2168p-1},
        {160, -0x1.c23p-2},
        {200, -0x1.2168p-2},
        {255, -0x1.c23p+0}},
       -0x1.0545p+2,
       -0x1.6803d5p+8},
  };
  for (const Golden& golden : goldens) {
    const std::vector<uint8_t> block = MakeBlock(golden.dtype, golden.halves);
    std::vector<float> out(static_cast<size_t>(BlockOf(golden.dtype).elements));
    DequantizeRow(golden.dtype, block.data(), static_cast<int64_t>(out.size()), out.data());
    for (const auto& [at, value] : golden.values) EXPECT_EQ(out[at], value) << DTypeName(golden.dtype) << " element " << at;
    double sum = 0, weighted = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      sum += out[i];
      weighted += out[i] * static_cast<double>(i + 1);
    }
    EXPECT_EQ(sum, golden.sum) << DTypeName(golden.dtype);
    EXPECT_EQ(weighted, golden.weighted_sum) << DTypeName(golden.dtype);
  }
}

TEST(QuantBlocks, Int4GroupsHoldEvenColumnsInLowNibbles) {
  std::vector<uint8_t> block(18);
  const uint16_t scale = ToBf16(0.75f).bits;
  std::memcpy(block.data(), &scale, sizeof(scale));
  for (size_t k = 0; k < 16; ++k) block[2 + k] = static_cast<uint8_t>(k | (15 - k) << 4);
  float out[32];
  DequantizeRow(DType::kI4G32, block.data(), 32, out);
  for (int k = 0; k < 16; ++k) {
    EXPECT_EQ(out[2 * k], 0.75f * static_cast<float>(k - 8));
    EXPECT_EQ(out[2 * k + 1], 0.75f * static_cast<float>(7 - k));
  }
}

TEST(QuantBlocks, RowsAreBlockAfterBlock) {
  std::vector<uint8_t> row;
  std::vector<float> want;
  for (const uint16_t d : {0x2c01, 0x3000, 0xb400}) {
    const std::vector<uint8_t> block = MakeBlock(DType::kQ8_0, {{0, d}});
    row.insert(row.end(), block.begin(), block.end());
    want.resize(want.size() + 32);
    DequantizeRow(DType::kQ8_0, block.data(), 32, &want[want.size() - 32]);
  }
  std::vector<float> out(96);
  DequantizeRow(DType::kQ8_0, row.data(), 96, out.data());
  EXPECT_EQ(out, want);
}

}  // namespace
}  // namespace hearth
