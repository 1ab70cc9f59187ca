// Block formats in pieces that every x86 path works with: 32 columns of integers as signed bytes in order, and a block's scales as floats. Layouts:
// common/base/quant_blocks.h. All of it is AVX2, so that the paths share it. Included by the files of this folder only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

HEARTH_INLINE uint16_t Bits16(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bits;
}
HEARTH_INLINE uint32_t Bits32(const uint8_t* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return bits;
}
HEARTH_INLINE float HalfAt(const uint8_t* p) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(Bits16(p)))); }
HEARTH_INLINE float Bf16At(const uint8_t* p) { return __builtin_bit_cast(float, static_cast<uint32_t>(Bits16(p)) << 16); }
HEARTH_INLINE __m256i Load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Each: kBlock, kBlockBytes; kPart columns under one scale; Unit(block, u): integers of columns [32 u, 32 u + 32);
// Scales(block, scale, min): of all parts, `min` of Q4_K and Q5_K only, negated.
template <DType kDType>
struct BlockUnits;

template <DType kDType>
struct BlockSizes {
  static constexpr int kBlock = static_cast<int>(BlockOf(kDType).elements);
  static constexpr int kBlockBytes = static_cast<int>(BlockOf(kDType).bytes);
  static constexpr bool kHasMin = kDType == DType::kQ4_K || kDType == DType::kQ5_K;
  static constexpr bool kScaled = false;  // by blocks of 128 columns
};

template <>
struct BlockUnits<DType::kQ8_0> : BlockSizes<DType::kQ8_0> {
  static constexpr int kPart = 32;
  static HEARTH_INLINE __m256i Unit(const uint8_t* block, int) { return Load32(block + 2); }
  static HEARTH_INLINE void Scales(const uint8_t* block, float* scale, float*) { scale[0] = HalfAt(block); }
};

template <>
struct BlockUnits<DType::kI4G32> : BlockSizes<DType::kI4G32> {
  static constexpr int kPart = 32;
  static HEARTH_INLINE __m256i Unit(const uint8_t* block, int) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 2)));
    const __m256i nibbles = _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
    return _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8));
  }
  static HEARTH_INLINE void Scales(const uint8_t* block, float* scale, float*) { scale[0] = Bf16At(block); }
};

template <>
struct BlockUnits<DType::kQ4_K> : BlockSizes<DType::kQ4_K> {
  static constexpr int kPart = 32;
  static HEARTH_INLINE __m256i Unit(const uint8_t* block, int u) {
    __m256i bytes = Load32(block + 16 + u / 2 * 32);
    if (u % 2 != 0) bytes = _mm256_srli_epi16(bytes, 4);
    return _mm256_and_si256(bytes, _mm256_set1_epi8(15));
  }
  // Eight six-bit numbers at a time, a byte each: the lower four from bytes 0-3 and 4-7, the upper four's low halves from bytes 8-11 and their
  // two upper bits from the top of bytes 0-7.
  static HEARTH_INLINE void Scales(const uint8_t* block, float* scale, float* min) {
    const uint32_t a = Bits32(block + 4), b = Bits32(block + 8), c = Bits32(block + 12);
    const uint64_t scales = (a & 0x3f3f3f3f) | static_cast<uint64_t>((c & 0x0f0f0f0f) | ((a >> 2) & 0x30303030)) << 32;
    const uint64_t mins = (b & 0x3f3f3f3f) | static_cast<uint64_t>(((c >> 4) & 0x0f0f0f0f) | ((b >> 2) & 0x30303030)) << 32;
    Store8(scales, HalfAt(block), scale);
    Store8(mins, -HalfAt(block + 2), min);
  }

 private:
  static HEARTH_INLINE void Store8(uint64_t bytes, float factor, float* out) {
    const __m256 numbers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
    _mm256_storeu_ps(out, _mm256_mul_ps(numbers, _mm256_set1_ps(factor)));
  }
};

// Bit `from` of each byte, moved to bit `to`; the other bits are of no use.
HEARTH_INLINE __m256i MoveBit(__m256i bytes, int from, int to) {
  return from < to ? _mm256_slli_epi16(bytes, to - from) : _mm256_srli_epi16(bytes, from - to);
}

template <>
struct BlockUnits<DType::kQ5_K> : BlockSizes<DType::kQ5_K> {
  static constexpr int kPart = 32;
  static HEARTH_INLINE __m256i Unit(const uint8_t* block, int u) {
    __m256i nibbles = Load32(block + 48 + u / 2 * 32);
    if (u % 2 != 0) nibbles = _mm256_srli_epi16(nibbles, 4);
    const __m256i fifth = MoveBit(Load32(block + 16), u, 4);
    return _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)), _mm256_and_si256(fifth, _mm256_set1_epi8(16)));
  }
  static HEARTH_INLINE void Scales(const uint8_t* block, float* scale, float* min) { BlockUnits<DType::kQ4_K>::Scales(block, scale, min); }
};

template <>
struct BlockUnits<DType::kQ3_K> : BlockSizes<DType::kQ3_K> {
  static constexpr int kPart = 16;
  static HEARTH_INLINE __m256i Unit(const uint8_t* block, int u) {
    const __m256i lower = _mm256_srli_epi16(Load32(block + 32 + u / 4 * 32), u % 4 * 2);
    const __m256i third = MoveBit(Load32(block), u, 2);
    const __m256i q = _mm256_or_si256(_mm256_and_si256(lower, _mm256_set1_epi8(3)), _mm256_and_si256(third, _mm256_set1_epi8(4)));
    return _mm256_sub_epi8(q, _mm256_set1_epi8(4));
  }
  // The sixteen scales as signed bytes.
  static HEARTH_INLINE __m128i ScaleBytes(const uint8_t* block) {
    const uint64_t nibbles = Bits32(block + 96) | static_cast<uint64_t>(Bits32(block + 100)) << 32;
    const __m128i lower =
        _mm_set_epi64x(static_cast<int64_t>(nibbles >> 4 & 0x0f0f0f0f0f0f0f0full), static_cast<int64_t>(nibbles & 0x0f0f0f0f0f0f0f0full));
    const __m128i pairs = _mm_srlv_epi32(_mm_set1_epi32(static_cast<int32_t>(Bits32(block + 104))), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i upper = _mm_slli_epi32(_mm_and_si128(pairs, _mm_set1_epi8(3)), 4);
    return _mm_sub_epi8(_mm_or_si128(lower, upper), _mm_set1_epi8(32));
  }
  static HEARTH_INLINE void Scales(const uint8_t* block, float* scale, float*) {
    const __m256 d = _mm256_set1_ps(HalfAt(block + 108));
    const __m128i bytes = ScaleBytes(block);
    _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), d));
    _mm256_storeu_ps(scale + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))), d));
  }
};

template <>
struct BlockUnits<DType::kQ6_K> : BlockSizes<DType::kQ6_K> {
  static constexpr int kPart = 16;
  static HEARTH_INLINE __m256i Unit(const uint8_t* block, int u) {
    const int half = u / 4, run = u % 4;
    __m256i low = Load32(block + 64 * half + run % 2 * 32);
    if (run >= 2) low = _mm256_srli_epi16(low, 4);
    __m256i upper = Load32(block + 128 + 32 * half);  // its two bits move to 4 and 5
    if (run == 0) upper = _mm256_slli_epi16(upper, 4);
    if (run == 1) upper = _mm256_slli_epi16(upper, 2);
    if (run == 3) upper = _mm256_srli_epi16(upper, 2);
    const __m256i q = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), _mm256_and_si256(upper, _mm256_set1_epi8(0x30)));
    return _mm256_sub_epi8(q, _mm256_set1_epi8(32));
  }
  static HEARTH_INLINE void Scales(const uint8_t* block, float* scale, float*) {
    const __m256 d = _mm256_set1_ps(HalfAt(block + 208));
    for (int i = 0; i < 16; i += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + 192 + i));
      _mm256_storeu_ps(scale + i, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), d));
    }
  }
};

// A block's weights as floats, as DequantizeRow has them.   out [kBlock]
template <class V, DType kDType>
HEARTH_INLINE void DequantizeBlock(const uint8_t* block, float* out) {
  using U = BlockUnits<kDType>;
  constexpr int kVectors = 32 / V::kLanes;
  float scale[U::kBlock / U::kPart];
  float min[U::kBlock / U::kPart];
  U::Scales(block, scale, min);
#pragma GCC unroll 8
  for (int u = 0; u < U::kBlock / 32; ++u) {
    typename V::F q[kVectors];
    V::WidenI8(U::Unit(block, u), q);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int part = (32 * u + v * V::kLanes) / U::kPart;
      typename V::F weight = V::Mul(q[v], V::Set(scale[part]));
      if constexpr (U::kHasMin) weight = V::Add(weight, V::Set(min[part]));
      V::Store(out + 32 * u + v * V::kLanes, weight);
    }
  }
}

}  // namespace
}  // namespace hearth
