// Sixteen F32 lanes: the vector type of the two AVX-512 paths (F, BW, VL, DQ). Same members as Vec256 of avx2.cc.
// Included by avx512.cc, avx512bf16.cc and amx.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

struct Vec512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kBytes = 64;

  // Masks of the first n of 16, 32, 64; any n.
  static HEARTH_INLINE __mmask16 First16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }
  static HEARTH_INLINE __mmask64 First64(int64_t n) { return n >= 64 ? ~0ull : n <= 0 ? 0 : (1ull << n) - 1; }

  static HEARTH_INLINE F Zero() { return _mm512_setzero_ps(); }
  static HEARTH_INLINE F Set(float x) { return _mm512_set1_ps(x); }
  static HEARTH_INLINE I SetInt(int32_t x) { return _mm512_set1_epi32(x); }
  static HEARTH_INLINE F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static HEARTH_INLINE F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static HEARTH_INLINE F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static HEARTH_INLINE F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static HEARTH_INLINE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
  static HEARTH_INLINE F Fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  // The second operand if either is NaN.
  static HEARTH_INLINE F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static HEARTH_INLINE F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static HEARTH_INLINE F Round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  // p * 2^n for integral n, rounded once: subnormal results and overflow come out right.
  static HEARTH_INLINE F TimesPow2(F p, F n) { return _mm512_scalef_ps(p, n); }

  // Lane i + 8 is added to lane i, then 4, 2, 1.
  static HEARTH_INLINE float ReduceAdd(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
  }
  // The sums of four vectors' lanes, in one order: lane i + 8 is added to lane i, neighbours twice, then the halves.
  static HEARTH_INLINE __m128 ReduceFour(F a, F b, F c, F d) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(Fold(a), Fold(b)), _mm256_hadd_ps(Fold(c), Fold(d)));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
  }
  static HEARTH_INLINE float ReduceMax(F x) {
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
  }
  static HEARTH_INLINE float Lane0(F x) { return _mm512_cvtss_f32(x); }

  // rows[i][j] and rows[j][i] change places.
  static HEARTH_INLINE void Transpose(F (&rows)[kLanes]) {
    F quads[4][4];  // [group of four rows][j]: of each four columns the j-th, row after row
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const F* r = rows + 4 * q;
      const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])), high01 = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
      const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3])), high23 = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
      quads[q][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
      quads[q][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
      quads[q][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
      quads[q][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F low01 = _mm512_shuffle_f32x4(quads[0][j], quads[1][j], 0x44), high01 = _mm512_shuffle_f32x4(quads[0][j], quads[1][j], 0xee);
      const F low23 = _mm512_shuffle_f32x4(quads[2][j], quads[3][j], 0x44), high23 = _mm512_shuffle_f32x4(quads[2][j], quads[3][j], 0xee);
      rows[j] = _mm512_shuffle_f32x4(low01, low23, 0x88);
      rows[4 + j] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
      rows[8 + j] = _mm512_shuffle_f32x4(high01, high23, 0x88);
      rows[12 + j] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
  }

  // Loads take any alignment. Those that end in N take the first n lanes (any n: clamped to what there is), the rest is
  // zero.
  static HEARTH_INLINE F Load(const void* p) { return _mm512_loadu_ps(p); }
  static HEARTH_INLINE F LoadN(const void* p, int64_t n) { return _mm512_maskz_loadu_ps(First16(n), p); }
  static HEARTH_INLINE void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static HEARTH_INLINE void StoreN(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, First16(n), x); }

  static HEARTH_INLINE I LoadBytes(const void* p) { return _mm512_loadu_si512(p); }
  static HEARTH_INLINE I LoadBytesN(const void* p, int64_t n) { return _mm512_maskz_loadu_epi8(First64(n), p); }

  // BF16 is the upper half of F32: the even and the odd elements of 32, each as 16 floats.
  static HEARTH_INLINE F EvenBf16(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
  static HEARTH_INLINE F OddBf16(I x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
  static HEARTH_INLINE F LoadBf16(const void* p) { return WidenBf16(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static HEARTH_INLINE F LoadBf16N(const void* p, int64_t n) { return WidenBf16(_mm256_maskz_loadu_epi16(First16(n), p)); }
  static HEARTH_INLINE F LoadF16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static HEARTH_INLINE F LoadF16N(const void* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(First16(n), p)); }

  // E4M3 codes as F16 numbers 2^-8 times their value: the layouts differ in the exponent's width and bias alone, and
  // F16's subnormals take E4M3's. From 64 codes: the 32 even and the 32 odd ones; then halves of those as floats.
  static HEARTH_INLINE I EvenF8(I codes) { return OddF8(_mm512_slli_epi16(codes, 8)); }
  static HEARTH_INLINE I OddF8(I codes) { return _mm512_and_si512(_mm512_srai_epi16(codes, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80))); }
  static HEARTH_INLINE F LowF16(I x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x)); }
  static HEARTH_INLINE F HighF16(I x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }
  static HEARTH_INLINE F LoadF8(const void* p) { return WidenF8(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static HEARTH_INLINE F LoadF8N(const void* p, int64_t n) { return WidenF8(_mm_maskz_loadu_epi8(First16(n), p)); }

  // 32 signed bytes, in order, as floats.
  static HEARTH_INLINE void WidenI8(__m256i q, F (&out)[2]) {
    out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
    out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
  }

  static HEARTH_INLINE void StoreBf16(bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), RoundBf16(x)); }
  static HEARTH_INLINE void StoreBf16N(bf16* p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, First16(n), RoundBf16(x)); }

 private:
  static HEARTH_INLINE __m256 Fold(F x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
  static HEARTH_INLINE F WidenBf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static HEARTH_INLINE F WidenF8(__m128i codes) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
  }
  // ToBf16 in lanes. Not VCVTNEPS2BF16, which flushes subnormals.
  static HEARTH_INLINE __m256i RoundBf16(F x) {
    const I u = _mm512_castps_si512(x);
    const I upper = _mm512_srli_epi32(u, 16);
    const I odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const I rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40)));
  }
};

}  // namespace
}  // namespace hearth
