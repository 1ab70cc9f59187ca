// Eight F32 lanes: the vector type of the AVX2 path (AVX2, FMA, F16C). Same members as Vec512, which has the comments.
// Included by avx2.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

struct Vec256 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kBytes = 32;

  static HEARTH_INLINE F Zero() { return _mm256_setzero_ps(); }
  static HEARTH_INLINE F Set(float x) { return _mm256_set1_ps(x); }
  static HEARTH_INLINE I SetInt(int32_t x) { return _mm256_set1_epi32(x); }
  static HEARTH_INLINE F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static HEARTH_INLINE F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static HEARTH_INLINE F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static HEARTH_INLINE F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static HEARTH_INLINE F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static HEARTH_INLINE F Fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static HEARTH_INLINE F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static HEARTH_INLINE F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static HEARTH_INLINE F Round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // Integral n in [-252, 252]; in two steps so that results beyond the normal range round or overflow rightly.
  static HEARTH_INLINE F TimesPow2(F p, F n) {
    const I exponent = _mm256_cvtps_epi32(n);
    const I half = _mm256_srai_epi32(exponent, 1);
    return Mul(Mul(p, Pow2(half)), Pow2(_mm256_sub_epi32(exponent, half)));
  }

  // Lane i + 4 is added to lane i, then 2, 1.
  static HEARTH_INLINE float ReduceAdd(F x) {
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
  }
  static HEARTH_INLINE __m128 ReduceFour(F a, F b, F c, F d) {
    const F sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
  }
  static HEARTH_INLINE float ReduceMax(F x) {
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
  }
  static HEARTH_INLINE float Lane0(F x) { return _mm256_cvtss_f32(x); }

  static HEARTH_INLINE void Transpose(F (&rows)[kLanes]) {
    F quads[2][4];
#pragma GCC unroll 2
    for (int q = 0; q < 2; ++q) {
      const F* r = rows + 4 * q;
      const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1])), high01 = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
      const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3])), high23 = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
      quads[q][0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low01, low23));
      quads[q][1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low01, low23));
      quads[q][2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high01, high23));
      quads[q][3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high01, high23));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      rows[j] = _mm256_permute2f128_ps(quads[0][j], quads[1][j], 0x20);
      rows[4 + j] = _mm256_permute2f128_ps(quads[0][j], quads[1][j], 0x31);
    }
  }

  static HEARTH_INLINE F Load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  static HEARTH_INLINE F LoadN(const void* p, int64_t n) { return _mm256_maskload_ps(static_cast<const float*>(p), First8(n)); }
  static HEARTH_INLINE void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static HEARTH_INLINE void StoreN(float* p, F x, int64_t n) { _mm256_maskstore_ps(p, First8(n), x); }

  // AVX2 masks no bytes, so tails pass through a buffer.
  static HEARTH_INLINE I LoadBytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static HEARTH_INLINE I LoadBytesN(const void* p, int64_t n) {
    alignas(32) uint8_t buffer[kBytes] = {};
    if (n > 0) __builtin_memcpy(buffer, p, static_cast<size_t>(n < kBytes ? n : kBytes));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
  }

  static HEARTH_INLINE F EvenBf16(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static HEARTH_INLINE F OddBf16(I x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
  static HEARTH_INLINE F LoadBf16(const void* p) { return WidenBf16(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static HEARTH_INLINE F LoadBf16N(const void* p, int64_t n) { return WidenBf16(Low(LoadBytesN(p, Clamp(n) * 2))); }
  static HEARTH_INLINE F LoadF16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static HEARTH_INLINE F LoadF16N(const void* p, int64_t n) { return _mm256_cvtph_ps(Low(LoadBytesN(p, Clamp(n) * 2))); }

  static HEARTH_INLINE I EvenF8(I codes) { return OddF8(_mm256_slli_epi16(codes, 8)); }
  static HEARTH_INLINE I OddF8(I codes) { return _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))); }
  static HEARTH_INLINE F LowF16(I x) { return _mm256_cvtph_ps(Low(x)); }
  static HEARTH_INLINE F HighF16(I x) { return _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)); }
  static HEARTH_INLINE F LoadF8(const void* p) { return WidenF8(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }
  static HEARTH_INLINE F LoadF8N(const void* p, int64_t n) { return WidenF8(Low(LoadBytesN(p, Clamp(n)))); }

  static HEARTH_INLINE void WidenI8(__m256i q, F (&out)[4]) {
    const __m128i low = Low(q), high = _mm256_extracti128_si256(q, 1);
    out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
    out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(low, low)));
    out[2] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
    out[3] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(high, high)));
  }

  static HEARTH_INLINE void StoreBf16(bf16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), RoundBf16(x)); }
  static HEARTH_INLINE void StoreBf16N(bf16* p, F x, int64_t n) {
    const __m128i rounded = RoundBf16(x);
    __builtin_memcpy(static_cast<void*>(p), &rounded, static_cast<size_t>(Clamp(n)) * sizeof(bf16));
  }

 private:
  static HEARTH_INLINE int64_t Clamp(int64_t n) { return n < 0 ? 0 : n < kLanes ? n : kLanes; }
  static HEARTH_INLINE __m128i Low(I x) { return _mm256_castsi256_si128(x); }
  static HEARTH_INLINE I First8(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(Clamp(n))), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static HEARTH_INLINE F Pow2(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
  static HEARTH_INLINE F WidenBf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static HEARTH_INLINE F WidenF8(__m128i codes) {
    const __m128i words = _mm_unpacklo_epi8(_mm_setzero_si128(), codes);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
  }
  static HEARTH_INLINE __m128i RoundBf16(F x) {
    const I u = _mm256_castps_si256(x);
    const I upper = _mm256_srli_epi32(u, 16);
    const I odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const I rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const I quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const I words = _mm256_blendv_epi8(rounded, quiet, nan);
    return Low(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
  }
};

}  // namespace
}  // namespace hearth
