// Element types of tensors, in the checkpoint's own precision, and the bit-exact conversions that everything agrees on.
// Room: common/base.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hearth {

// Stable numbers: they are written into weight images and KV pools.
enum class DType : uint32_t { kInvalid = 0, kF32 = 1, kF16 = 2, kBF16 = 3, kF8E4M3 = 4 };

size_t DTypeBytes(DType dtype);
// The safetensors spelling: "F32", "F16", "BF16", "F8_E4M3".
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
