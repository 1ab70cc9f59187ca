// Rows of the KV cache in FP8: tiny, in F32, the same bits everywhere.
#include <bit>

#include "common/kernels/kernels.h"

namespace hearth {
namespace {

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kTooLarge = (127 + 120) << 23;  // 2^120

// FloatToF8E4M3 for magnitudes of at most 448, written without branches.
inline uint8_t CodeOf(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & ~kSign;
  // Three bits of mantissa stay; a carry runs into the exponent, as it should. E4M3's exponent is biased by 7, F32's by 127.
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - ((127 - 7) << 3);
  // Below 2^-6 codes are multiples of 2^-9: that is the last bit of a float of 2^14.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t code = magnitude < ((127 - 6) << 23) ? subnormal : normal;
  return static_cast<uint8_t>(code | (bits >> 31 << 7));
}

}  // namespace

float QuantizeF8(const float* x, int64_t n, uint8_t* codes) {
  uint32_t largest = 0;  // magnitudes order as their bits do
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & ~kSign;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest >= kTooLarge) {
    for (int64_t i = 0; i < n; ++i) codes[i] = 0;
    return __builtin_nanf("");
  }
  // scale = 2^e with largest <= 448 * 2^e = 1.75 * 2^(8 + e), and at least 2^-100, so that its reciprocal is a normal number.
  const uint32_t exponent = (largest >> 23) + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  const uint32_t biased = exponent < 27 + 8 ? 27 : exponent - 8;
  const float scale = std::bit_cast<float>(biased << 23);
  const float reciprocal = std::bit_cast<float>((254 - biased) << 23);
  for (int64_t i = 0; i < n; ++i) codes[i] = CodeOf(x[i] * reciprocal);
  return scale;
}

}  // namespace hearth
