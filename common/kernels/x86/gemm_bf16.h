// The prefill form's product on the avx512bf16 path: rows in lanes, tokens broadcast. A tile of weights is converted once, into pairs that
// VDPBF16PS takes, and meets all tokens of the call.
//
// Order of sums of a (row, token): pairs of columns ascending within a 128-column block, in one lane; the block's sum times its scale (1 without FP8)
// is added to the total, blocks ascending. It depends on nothing else, whatever the tile, the tokens and the rows of the call.
// Included by avx512bf16.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/bf16_dots.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

constexpr int kGemmLanes = 16;
constexpr int kGemmVectors = 2;  // of rows in a tile
constexpr int kGemmRows = kGemmVectors * kGemmLanes;
constexpr int kGemmBlocks = 4;                               // 128-column blocks of a tile
constexpr int kGemmPairs = kGemmBlocks * (kScaleBlock / 2);  // of columns in a tile
constexpr int64_t kGemmCols = int64_t{kGemmBlocks} * kScaleBlock;
constexpr int64_t kGemmTokens = 504;  // whose totals fit L2 beside the tile
constexpr int64_t kGemmTailTokens = 24;

// [pair of columns][vector of rows][row]: two BF16 numbers each. 32 KiB: comes from L2 while a few tokens' activations stay in L1.
struct GemmTile {
  alignas(64) uint32_t pairs[kGemmPairs][kGemmVectors][kGemmLanes];
};

// Lane r of out[j] = dword j of in[r].
HEARTH_INLINE void Transpose16x16(__m512i (&v)[16]) {
  __m512i a[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
  // Now 4x4 blocks within each 128-bit lane: b[4 q + j] holds, in lane l, dword 4 l + j of rows 4 q .. 4 q + 3.
  __m512i b[16];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    b[4 * q] = _mm512_unpacklo_epi64(a[4 * q], a[4 * q + 2]);
    b[4 * q + 1] = _mm512_unpackhi_epi64(a[4 * q], a[4 * q + 2]);
    b[4 * q + 2] = _mm512_unpacklo_epi64(a[4 * q + 1], a[4 * q + 3]);
    b[4 * q + 3] = _mm512_unpackhi_epi64(a[4 * q + 1], a[4 * q + 3]);
  }
  // Then 128-bit lanes as elements of a 4x4 transpose.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i low01 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xee);
    v[j] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    v[4 + j] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    v[8 + j] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    v[12 + j] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
}

// How 64 bytes of each of 16 rows become pairs in a tile.
struct F8Pairs {
  static constexpr int kElementBytes = 1;
  static constexpr int kStep = 64;  // columns of 64 bytes
  static constexpr bool kScaled = true;

  // rows: dword j holds columns 4 j .. 4 j + 3 of its row, the middle two swapped by Order.
  static HEARTH_INLINE __m512i Order(__m512i row) {
    return _mm512_shuffle_epi8(row, _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200));
  }
  static HEARTH_INLINE void Store(const __m512i (&columns)[16], uint32_t* out) {
    const __m512i upper_low = _mm512_load_si512(kF8Tables.upper), upper_high = _mm512_load_si512(kF8Tables.upper + 64);
    const __m512i lower_low = _mm512_load_si512(kF8Tables.lower), lower_high = _mm512_load_si512(kF8Tables.lower + 64);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      // The look-up ignores bit 7 of the index.
      const __m512i magnitude = _mm512_permutex2var_epi8(upper_low, columns[j], upper_high);
      const __m512i lower = _mm512_permutex2var_epi8(lower_low, columns[j], lower_high);
      const __m512i upper = _mm512_ternarylogic_epi32(magnitude, columns[j], sign, 0xf8);
      // Even bytes are columns 4 j and 4 j + 1, odd ones 4 j + 2 and 4 j + 3.
      const __m512i even = _mm512_ternarylogic_epi32(_mm512_slli_epi16(upper, 8), lower, _mm512_set1_epi16(0x00ff), 0xf8);
      const __m512i odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(lower, 8), upper, _mm512_set1_epi16(static_cast<int16_t>(0xff00)), 0xf8);
      _mm512_store_si512(out + 2 * j * kGemmRows, even);
      _mm512_store_si512(out + (2 * j + 1) * kGemmRows, odd);
    }
  }
};

struct Bf16Pairs {
  static constexpr int kElementBytes = 2;
  static constexpr int kStep = 32;
  static constexpr bool kScaled = false;

  static HEARTH_INLINE __m512i Order(__m512i row) { return row; }
  static HEARTH_INLINE void Store(const __m512i (&columns)[16], uint32_t* out) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) _mm512_store_si512(out + j * kGemmRows, columns[j]);
  }
};

// Fills the tile's vector `v` with up to 16 rows and `cols` columns; what is missing up to whole blocks is zero. Fetches `ahead` bytes further.
template <class P>
__attribute__((noinline)) void FillTile(GemmTile& tile, int v, const uint8_t* data, int64_t stride, int64_t rows, int64_t cols, int64_t ahead) {
  const int64_t padded = (cols + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
  for (int64_t c = 0; c < padded; c += P::kStep) {
    __m512i in[16];
    const uint8_t* p = data + c * P::kElementBytes;
    if (const int64_t left = (cols - c) * P::kElementBytes; rows >= 16 && left >= 64) {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        in[r] = P::Order(_mm512_loadu_si512(p + r * stride));
        _mm_prefetch(reinterpret_cast<const char*>(p + r * stride + ahead), _MM_HINT_T1);
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) in[r] = r < rows && left > 0 ? P::Order(Vec512::LoadBytesN(p + r * stride, left)) : _mm512_setzero_si512();
    }
    Transpose16x16(in);
    P::Store(in, &tile.pairs[c / 2][v][0]);
  }
}

// What a tile is multiplied with.
struct GemmStep {
  const GemmTile* tile;
  int64_t blocks;
  const __m512 (*scales)[kGemmVectors];  // [blocks][V]
  bool first;                            // totals hold nothing yet
  int64_t ldx;
};

// totals[t][row] (+)= scale * sum over each of the tile's blocks, for T tokens and the tile's first 16 V rows.   x: the tile's first column of token 0
template <int V, int T>
__attribute__((noinline)) void MultiplyTile(const GemmStep& step, const bf16* x, float (*totals)[kGemmRows]) {
  for (int64_t block = 0; block < step.blocks; ++block) {
    __m512 acc[V][T];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 12
      for (int t = 0; t < T; ++t) acc[v][t] = _mm512_setzero_ps();
    }
    const uint32_t(*pairs)[kGemmVectors][kGemmLanes] = step.tile->pairs + block * (kScaleBlock / 2);
    const bf16* xb = x + block * kScaleBlock;
    for (int p = 0; p < kScaleBlock / 2; ++p) {
      __m512bh w[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) w[v] = (__m512bh)_mm512_load_si512(pairs[p][v]);
#pragma GCC unroll 12
      for (int t = 0; t < T; ++t) {
        int32_t pair;
        std::memcpy(&pair, xb + t * step.ldx + 2 * p, sizeof(pair));
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) acc[v][t] = _mm512_dpbf16_ps(acc[v][t], w[v], both);
      }
    }
    const bool first = step.first && block == 0;
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        float* total = totals[t] + v * kGemmLanes;
        _mm512_store_ps(total, _mm512_fmadd_ps(acc[v][t], step.scales[block][v], first ? _mm512_setzero_ps() : _mm512_load_ps(total)));
      }
    }
  }
}

template <int V>
void MultiplyTokens(const GemmStep& step, const bf16* x, int64_t m_count, float (*totals)[kGemmRows]) {
  int64_t m = 0;
  const auto run = [&]<int T>() __attribute__((always_inline)) {
    for (; m + T <= m_count; m += T) MultiplyTile<V, T>(step, x + m * step.ldx, totals + m);
  };
  run.template operator()<12>();
  run.template operator()<8>();
  run.template operator()<4>();
  run.template operator()<2>();
  run.template operator()<1>();
}

// What a call works in, on its stack.
struct GemmWork {
  GemmTile tile;
  // Side by side, and not in y, whose rows often lie a multiple of 4 KiB apart: they would share a few sets of each cache.
  alignas(64) float totals[kGemmTokens][kGemmRows];
  bf16 tail[kGemmTailTokens * kGemmCols];
};

// Rows [row, row + rows), rows <= 32, over all columns, for at most kGemmTokens tokens. `more_rows`: of the call, behind these.
template <class P>
void GemmRows(const WeightView& w, int64_t row, int64_t rows, int64_t more_rows, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy,
              GemmWork& work) {
  const int64_t stride = w.row_stride * P::kElementBytes;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  const int vectors = rows > kGemmLanes ? 2 : 1;
  const auto multiply = vectors == 2 ? MultiplyTokens<2> : MultiplyTokens<1>;
  for (int64_t c = 0; c < w.cols; c += kGemmCols) {
    const int64_t cols = w.cols - c < kGemmCols ? w.cols - c : kGemmCols;
    const int64_t blocks = (cols + kScaleBlock - 1) / kScaleBlock;
    // The next tile: of these rows, or the first of the rows that follow.
    const int64_t ahead = c + kGemmCols < w.cols   ? kGemmCols * P::kElementBytes
                          : more_rows >= kGemmRows ? kGemmRows * stride - c * P::kElementBytes
                                                   : 0;
    __m512 scales[kGemmBlocks][kGemmVectors];
    for (int v = 0; v < vectors; ++v) {
      const int64_t first = int64_t{v} * kGemmLanes;
      FillTile<P>(work.tile, v, data + first * stride + c * P::kElementBytes, stride, rows - first, cols, ahead);
      for (int64_t block = 0; block < blocks; ++block) {
        alignas(64) float lanes[kGemmLanes] = {};
        for (int64_t r = 0; r < kGemmLanes && first + r < rows; ++r) {
          lanes[r] = P::kScaled ? w.scales[(w.scale_row0 + row + first + r) / kScaleBlock * w.scale_stride + c / kScaleBlock + block] : 1.0f;
        }
        scales[block][v] = _mm512_load_ps(lanes);
      }
    }
    GemmStep step = {.tile = &work.tile, .blocks = blocks, .scales = scales, .first = c == 0, .ldx = ldx};
    if (cols % kScaleBlock == 0) {
      multiply(step, x + c, m_count, work.totals);
      continue;
    }
    // Activations end with the columns: those of the last block are copied where zeros may follow.
    step.ldx = blocks * kScaleBlock;
    for (int64_t m = 0; m < m_count; m += kGemmTailTokens) {
      const int64_t count = m_count - m < kGemmTailTokens ? m_count - m : kGemmTailTokens;
      for (int64_t t = 0; t < count; ++t) {
        bf16* to = work.tail + t * step.ldx;
        std::memcpy(to, x + (m + t) * ldx + c, static_cast<size_t>(cols) * sizeof(bf16));
        std::memset(static_cast<void*>(to + cols), 0, static_cast<size_t>(step.ldx - cols) * sizeof(bf16));
      }
      multiply(step, work.tail, count, work.totals + m);
    }
  }
  for (int64_t m = 0; m < m_count; ++m) {
    float* out = y + m * ldy + row;
    if (w.cols == 0) {
      std::memset(out, 0, static_cast<size_t>(rows) * sizeof(float));
    } else {
      std::memcpy(out, work.totals[m], static_cast<size_t>(rows) * sizeof(float));
    }
  }
}

template <class P>
void GemmOf(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  GemmWork work;
  for (int64_t m = 0; m < m_count; m += kGemmTokens) {
    const int64_t count = m_count - m < kGemmTokens ? m_count - m : kGemmTokens;
    for (int64_t row = row_begin; row < row_end; row += kGemmRows) {
      const int64_t rows = row_end - row < kGemmRows ? row_end - row : kGemmRows;
      GemmRows<P>(w, row, rows, row_end - row - rows, x + m * ldx, ldx, count, y + m * ldy, ldy, work);
    }
  }
}

template <class Path>
void Gemm(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  switch (w.dtype) {
    case DType::kF8E4M3: return GemmOf<F8Pairs>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kBF16: return GemmOf<Bf16Pairs>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    default: return Linear<Path>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  }
}

}  // namespace
}  // namespace hearth
