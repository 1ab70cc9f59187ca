// The prefill form's product with VDPBF16PS (see gemm.h): FP8 and BF16 weights become pairs of BF16 numbers, which it multiplies two at a
// time. Included by avx512bf16.cc and amx.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/bf16_dots.h"
#include "common/kernels/x86/gemm.h"
#include "common/kernels/x86/gemm_f32.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

constexpr int kDotVectors = 4;
constexpr int kDotRows = kDotVectors * Vec512::kLanes;

// The last step of a 16 x 16 transpose of 4-byte pieces. For four groups of four rows and one j: out[l] holds lane l of all of them, a group a lane.
HEARTH_INLINE void TransposeLanes(__m512i q0, __m512i q1, __m512i q2, __m512i q3, __m512i* out) {
  const __m512i low01 = _mm512_shuffle_i32x4(q0, q1, 0x44), high01 = _mm512_shuffle_i32x4(q0, q1, 0xee);
  const __m512i low23 = _mm512_shuffle_i32x4(q2, q3, 0x44), high23 = _mm512_shuffle_i32x4(q2, q3, 0xee);
  out[0] = _mm512_shuffle_i32x4(low01, low23, 0x88);
  out[1] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
  out[2] = _mm512_shuffle_i32x4(high01, high23, 0x88);
  out[3] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
}

// How 64 bytes of each of 16 rows become pairs in a tile: TransposeRows for four rows at a time, TransposeLanes, Store. Interleaving within lanes
// runs on all vector units of a core, other shuffles on half of them: hence the order of bytes below.
struct F8Pairs {
  static constexpr int kElementBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 1.0f;

  // Each lane of out[j]: its columns 4 j and 4 j + 1 of the four rows, then 4 j + 2 and 4 j + 3 of them.
  static HEARTH_INLINE void TransposeRows(__m512i r0, __m512i r1, __m512i r2, __m512i r3, __m512i* out) {
    const __m512i low01 = _mm512_unpacklo_epi16(r0, r1), high01 = _mm512_unpackhi_epi16(r0, r1);
    const __m512i low23 = _mm512_unpacklo_epi16(r2, r3), high23 = _mm512_unpackhi_epi16(r2, r3);
    out[0] = _mm512_unpacklo_epi32(low01, low23);
    out[1] = _mm512_unpackhi_epi32(low01, low23);
    out[2] = _mm512_unpacklo_epi32(high01, high23);
    out[3] = _mm512_unpackhi_epi32(high01, high23);
  }
  // Column group j (of 16): pairs 2 j and 2 j + 1.
  static HEARTH_INLINE void Store(__m512i columns, int j, uint32_t* out) {
    const Bf16Bytes bytes = LookUpF8(columns);
    _mm512_store_si512(out + 2 * j * kDotRows, _mm512_unpacklo_epi8(bytes.lower, bytes.upper));
    _mm512_store_si512(out + (2 * j + 1) * kDotRows, _mm512_unpackhi_epi8(bytes.lower, bytes.upper));
  }
};

struct Bf16Pairs {
  static constexpr int kElementBytes = 2;
  static constexpr bool kScaled = false;
  static constexpr float kFactor = 1.0f;

  // Each lane of out[j]: its columns 2 j and 2 j + 1 of the four rows.
  static HEARTH_INLINE void TransposeRows(__m512i r0, __m512i r1, __m512i r2, __m512i r3, __m512i* out) {
    const __m512i low01 = _mm512_unpacklo_epi32(r0, r1), high01 = _mm512_unpackhi_epi32(r0, r1);
    const __m512i low23 = _mm512_unpacklo_epi32(r2, r3), high23 = _mm512_unpackhi_epi32(r2, r3);
    out[0] = _mm512_unpacklo_epi64(low01, low23);
    out[1] = _mm512_unpackhi_epi64(low01, low23);
    out[2] = _mm512_unpacklo_epi64(high01, high23);
    out[3] = _mm512_unpackhi_epi64(high01, high23);
  }
  static HEARTH_INLINE void Store(__m512i columns, int j, uint32_t* out) { _mm512_store_si512(out + j * kDotRows, columns); }
};

struct DotForm {
  using V = Vec512;
  static constexpr int kVectors = kDotVectors;
  // 4 x 6 sums are as many as 2 x 12, with ten loads for 24 products instead of fourteen, and six rows of activations to stream instead of twelve.
  static constexpr int kAtOnce = 6;

  // [pair of columns][vector of rows][row]: two BF16 numbers each. 16 KiB: stays in L1 beside the activations of a few tokens.
  struct Tile {
    alignas(64) uint32_t pairs[kGemmPairs][kVectors][V::kLanes];
  };

  static HEARTH_INLINE void CopyLine(uint8_t* to, const uint8_t* from, int64_t bytes) {
    _mm512_store_si512(to, bytes >= 64 ? _mm512_loadu_si512(from) : Vec512::LoadBytesN(from, bytes));
  }

  // 64 bytes of each of 16 rows, load(r) of row r, on their way into the tile's vector `v` from its column c on.
  template <class P, class Load>
  static HEARTH_INLINE void Transpose(const Load& load, __m512i (&groups)[4][4]) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) P::TransposeRows(load(4 * q), load(4 * q + 1), load(4 * q + 2), load(4 * q + 3), groups[q]);
  }
  template <class P>
  static HEARTH_INLINE void StorePairs(Tile& tile, int64_t v, int64_t c, const __m512i (&groups)[4][4]) {
    uint32_t* out = &tile.pairs[c / 2][v][0];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i columns[4];
      TransposeLanes(groups[0][j], groups[1][j], groups[2][j], groups[3][j], columns);
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) P::Store(columns[l], 4 * l + j, out);
    }
  }

  template <class P>
  static __attribute__((noinline)) void Fill(Tile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t begin, int64_t cols) {
    constexpr int64_t kStep = 64 / P::kElementBytes;
    for (int64_t c = 0; c < kScaleBlock; c += kStep) {
      const uint8_t* p = data + (begin + c) * P::kElementBytes;
      const int64_t left = (cols - c) * P::kElementBytes;
      __m512i groups[4][4];
      if (rows >= V::kLanes && left >= 64) {
        Transpose<P>(
            [&](int r) __attribute__((always_inline)) { return _mm512_loadu_si512(p + r * stride); }, groups);
      } else {
        Transpose<P>([&](int r) { return r < rows && left > 0 ? Vec512::LoadBytesN(p + r * stride, left) : _mm512_setzero_si512(); }, groups);
      }
      StorePairs<P>(tile, v, c, groups);
    }
  }

  template <int N, int T>
  static HEARTH_INLINE void Step(V::F (&acc)[N][T], const Tile& tile, int p, const bf16* x, int64_t ldx) {
    __m512bh w[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) w[v] = (__m512bh)_mm512_load_si512(tile.pairs[p][v]);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      int32_t pair;
      std::memcpy(&pair, x + t * ldx, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) acc[v][t] = _mm512_dpbf16_ps(acc[v][t], w[v], both);
    }
  }
};

template <class Path>
void Gemm(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  switch (w.dtype) {
    case DType::kF8E4M3: return GemmOf<DotForm, F8Pairs>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kBF16: return GemmOf<DotForm, Bf16Pairs>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    default: return GemmInF32<Path>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  }
}

}  // namespace
}  // namespace hearth
