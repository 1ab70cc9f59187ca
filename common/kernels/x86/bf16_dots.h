// FP8 and BF16 weights times BF16 activations by VDPBF16PS: the dot policies (see f32_dots.h) of the avx512bf16 path.
//
// VDPBF16PS takes subnormal BF16 inputs as zero and flushes subnormal sums, whatever MXCSR says. No E4M3 value is a
// subnormal BF16 number, so FP8 weights are exact; activations and BF16 weights below 2^-126 in magnitude count as zero
// on this path. Included by avx512bf16.cc and amx.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

// The upper and lower bytes of |code| as BF16, for the 128 codes without sign.
struct F8Tables {
  alignas(64) uint8_t upper[128] = {};
  alignas(64) uint8_t lower[128] = {};

  constexpr F8Tables() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3;
      int mantissa = code & 7;
      if (exponent == 0 && mantissa != 0) {  // m * 2^-9: shift the leading one to the hidden place
        exponent = 1;
        while (mantissa < 8) {
          mantissa *= 2;
          --exponent;
        }
        mantissa -= 8;
      }
      const int bits = code == 0 ? 0 : ((exponent + 127 - 7) << 7) | (mantissa << 4);
      upper[code] = static_cast<uint8_t>(bits >> 8);
      lower[code] = static_cast<uint8_t>(bits & 0xff);
    }
  }
};
constexpr F8Tables kF8Tables;

// 64 numbers as BF16, in two bytes each.
struct Bf16Bytes {
  __m512i upper, lower;
};
HEARTH_INLINE Bf16Bytes LookUpF8(__m512i codes) {
  const __m512i upper_low = _mm512_load_si512(kF8Tables.upper);
  const __m512i upper_high = _mm512_load_si512(kF8Tables.upper + 64);
  const __m512i lower_low = _mm512_load_si512(kF8Tables.lower);
  const __m512i lower_high = _mm512_load_si512(kF8Tables.lower + 64);
  // The look-up ignores bit 7 of the index.
  const __m512i magnitude = _mm512_permutex2var_epi8(upper_low, codes, upper_high);
  const __m512i lower = _mm512_permutex2var_epi8(lower_low, codes, lower_high);
  // magnitude | (codes & 0x80)
  return {_mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8), lower};
}

struct F8InBf16 {
  using V = Vec512;
  using Acc = V::F;
  using Vector = __m512bh;
  static constexpr bool kScaled = true;
  static constexpr bool kSumsTerms = false;
  static constexpr float kFactor = 1.0f;
  static constexpr int kElementBytes = 1;
  static constexpr int kStep = 64;

  static constexpr int kVectors = 2;

  // Byte interleaving works within 128-bit lanes, so the first holds elements 0-7, 16-23, 32-39, 48-55 of 64 and the second the
  // others; the activations follow by moving whole lanes.
  struct W {
    Vector v[kVectors];
  };
  using X = W;

  static HEARTH_INLINE W Load(const uint8_t* p) { return Widen(_mm512_loadu_si512(p)); }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return Widen(V::LoadBytesN(p, n)); }
  static HEARTH_INLINE X LoadX(const bf16* p) { return Arrange(V::LoadBytes(p), V::LoadBytes(p + 32)); }
  static HEARTH_INLINE X LoadXN(const bf16* p, int64_t n) { return Arrange(V::LoadBytesN(p, 2 * n), V::LoadBytesN(p + 32, 2 * n - 64)); }
  static HEARTH_INLINE void Dot(Acc& acc, Vector w, Vector x) { acc = _mm512_dpbf16_ps(acc, w, x); }

 private:
  static HEARTH_INLINE W Widen(__m512i codes) {
    asm("" : "+v"(codes));  // In a register, or GCC reads the line for each of its three uses, and each waits for memory.
    const Bf16Bytes bytes = LookUpF8(codes);
    return {{(__m512bh)_mm512_unpacklo_epi8(bytes.lower, bytes.upper), (__m512bh)_mm512_unpackhi_epi8(bytes.lower, bytes.upper)}};
  }
  static HEARTH_INLINE X Arrange(__m512i low, __m512i high) {
    return {{(__m512bh)_mm512_shuffle_i64x2(low, high, 0x88), (__m512bh)_mm512_shuffle_i64x2(low, high, 0xdd)}};
  }
};

struct Bf16InBf16 {
  using V = Vec512;
  using Acc = V::F;
  using Vector = __m512bh;
  static constexpr bool kScaled = false;
  static constexpr bool kSumsTerms = false;
  static constexpr float kFactor = 1.0f;
  static constexpr int kElementBytes = 2;
  static constexpr int kStep = 64;
  static constexpr int kVectors = 2;

  struct W {
    Vector v[kVectors];
  };
  using X = W;

  static HEARTH_INLINE W Load(const uint8_t* p) { return {{(__m512bh)V::LoadBytes(p), (__m512bh)V::LoadBytes(p + 64)}}; }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) {
    return {{(__m512bh)V::LoadBytesN(p, 2 * n), (__m512bh)V::LoadBytesN(p + 64, 2 * n - 64)}};
  }
  static HEARTH_INLINE X LoadX(const bf16* p) { return Load(reinterpret_cast<const uint8_t*>(p)); }
  static HEARTH_INLINE X LoadXN(const bf16* p, int64_t n) { return LoadN(reinterpret_cast<const uint8_t*>(p), n); }
  static HEARTH_INLINE void Dot(Acc& acc, Vector w, Vector x) { acc = _mm512_dpbf16_ps(acc, w, x); }
};

}  // namespace
}  // namespace hearth
