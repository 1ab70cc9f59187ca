// Element types of tensors, in the checkpoint's own precision, and the bit-exact conversions that everything agrees on.
// Room: common/base.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hearth {

// Stable numbers: they are written into weight images and KV pools.
enum class DType : uint32_t {
  kInvalid = 0,
  kF32 = 1,
  kF16 = 2,
  kBF16 = 3,
  kF8E4M3 = 4,
  // Block formats: quantized integers beside their scales, quant_blocks.h.
  kQ8_0 = 5,
  kQ6_K = 6,
  kQ4_K = 7,
  kI4G32 = 8,
  kQ5_K = 9,
  kQ3_K = 10,
};
inline constexpr DType kAllDTypes[] = {DType::kF32,  DType::kF16,  DType::kBF16,  DType::kF8E4M3, DType::kQ8_0,
                                       DType::kQ6_K, DType::kQ4_K, DType::kI4G32, DType::kQ5_K,   DType::kQ3_K};

// The smallest run of a row's elements that has bytes of its own: one element, or a block of a block format.
struct DTypeBlock {
  int64_t elements = 0;
  int64_t bytes = 0;
};
constexpr DTypeBlock BlockOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return {1, 4};
    case DType::kF16:
    case DType::kBF16: return {1, 2};
    case DType::kF8E4M3: return {1, 1};
    case DType::kQ8_0: return {32, 34};
    case DType::kQ6_K: return {256, 210};
    case DType::kQ4_K: return {256, 144};
    case DType::kI4G32: return {32, 18};
    case DType::kQ5_K: return {256, 176};
    case DType::kQ3_K: return {256, 110};
    case DType::kInvalid: break;
  }
  return {1, 0};
}
// Rows of these are whole blocks: their length is a multiple of BlockOf(dtype).elements.
constexpr bool IsBlockFormat(DType dtype) { return BlockOf(dtype).elements > 1; }
// Bytes of `n` elements, a multiple of the block.
constexpr uint64_t DTypeBytes(DType dtype, uint64_t n) {
  const DTypeBlock block = BlockOf(dtype);
  return n / static_cast<uint64_t>(block.elements) * static_cast<uint64_t>(block.bytes);
}
// "F32", "F16", "BF16", "F8_E4M3" as safetensors spells them, "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K" as GGUF does, "I4_G32".
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);

// A BF16 number as its 16 bits. Arithmetic happens in float.
struct bf16 {
  uint16_t bits = 0;
  friend bool operator==(bf16 a, bf16 b) = default;
};

inline float ToFloat(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest even; NaN stays NaN. Every SIMD path rounds the same way, so KV pages are bit-equal.
inline bf16 ToBf16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

// FP8 E4M3 (OCP "fn": no infinities, 0x7f and 0xff are NaN), subnormals included.
float F8E4M3ToFloat(uint8_t code);
// Nearest even, saturating at 448.
uint8_t FloatToF8E4M3(float x);
// The checkpoints' block scaling: one F32 scale for each kScaleBlock x kScaleBlock weights, blocks at the far edges cut short.
inline constexpr int64_t kScaleBlock = 128;
constexpr int64_t ScaleBlocks(int64_t n) { return (n + kScaleBlock - 1) / kScaleBlock; }
float F16ToFloat(uint16_t bits);
uint16_t FloatToF16(float x);

}  // namespace hearth
