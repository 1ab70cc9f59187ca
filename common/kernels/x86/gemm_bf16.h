// The prefill form's product on the avx512bf16 path: rows in lanes, tokens broadcast. A tile of weights is converted once, into pairs that
// VDPBF16PS takes, and meets all tokens of the call, while the next one is fetched.
//
// Order of sums of a (row, token): pairs of columns ascending within a 128-column block, in one lane; the block's sum times its scale (1 without FP8)
// is added to the total, blocks ascending. It depends on nothing else, whatever the tile, the tokens and the rows of the call.
// Included by avx512bf16.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/bf16_dots.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

constexpr int kGemmLanes = 16;
constexpr int kGemmVectors = 4;  // of rows in a tile
constexpr int kGemmRows = kGemmVectors * kGemmLanes;
constexpr int kGemmPairs = kScaleBlock / 2;  // of columns in a tile
// Tokens whose sums are in registers. 4 x 6 is as many products as 2 x 12, with ten loads for 24 of them instead of fourteen, and six rows of
// activations to stream instead of twelve.
constexpr int kGemmAtOnce = 6;
constexpr int64_t kGemmTokens = 256;  // whose totals fit L2 beside their activations in a few blocks of columns
constexpr int64_t kGemmTailTokens = 24;

// One block of columns, [pair of columns][vector of rows][row]: two BF16 numbers each. 16 KiB: stays in L1 beside the activations of a few tokens.
struct GemmTile {
  alignas(64) uint32_t pairs[kGemmPairs][kGemmVectors][kGemmLanes];
};

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
    const __m512i upper_low = _mm512_load_si512(kF8Tables.upper), upper_high = _mm512_load_si512(kF8Tables.upper + 64);
    const __m512i lower_low = _mm512_load_si512(kF8Tables.lower), lower_high = _mm512_load_si512(kF8Tables.lower + 64);
    // The look-up ignores bit 7 of the index.
    const __m512i magnitude = _mm512_permutex2var_epi8(upper_low, columns, upper_high);
    const __m512i lower = _mm512_permutex2var_epi8(lower_low, columns, lower_high);
    const __m512i upper = _mm512_ternarylogic_epi32(magnitude, columns, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    _mm512_store_si512(out + 2 * j * kGemmRows, _mm512_unpacklo_epi8(lower, upper));
    _mm512_store_si512(out + (2 * j + 1) * kGemmRows, _mm512_unpackhi_epi8(lower, upper));
  }
};

struct Bf16Pairs {
  static constexpr int kElementBytes = 2;
  static constexpr bool kScaled = false;

  // Each lane of out[j]: its columns 2 j and 2 j + 1 of the four rows.
  static HEARTH_INLINE void TransposeRows(__m512i r0, __m512i r1, __m512i r2, __m512i r3, __m512i* out) {
    const __m512i low01 = _mm512_unpacklo_epi32(r0, r1), high01 = _mm512_unpackhi_epi32(r0, r1);
    const __m512i low23 = _mm512_unpacklo_epi32(r2, r3), high23 = _mm512_unpackhi_epi32(r2, r3);
    out[0] = _mm512_unpacklo_epi64(low01, low23);
    out[1] = _mm512_unpackhi_epi64(low01, low23);
    out[2] = _mm512_unpacklo_epi64(high01, high23);
    out[3] = _mm512_unpackhi_epi64(high01, high23);
  }
  static HEARTH_INLINE void Store(__m512i columns, int j, uint32_t* out) { _mm512_store_si512(out + j * kGemmRows, columns); }
};

// Fills the tile's vector `v` with up to 16 rows and `cols` columns; what is missing is zero.
template <class P>
__attribute__((noinline)) void FillTile(GemmTile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t cols) {
  constexpr int64_t kStep = 64 / P::kElementBytes;
  for (int64_t c = 0; c < kScaleBlock; c += kStep) {
    const uint8_t* p = data + c * P::kElementBytes;
    const int64_t left = (cols - c) * P::kElementBytes;
    __m512i groups[4][4];
    if (rows >= kGemmLanes && left >= 64) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const auto load = [&](int r) __attribute__((always_inline)) { return _mm512_loadu_si512(p + (4 * q + r) * stride); };
        P::TransposeRows(load(0), load(1), load(2), load(3), groups[q]);
      }
    } else {
      for (int q = 0; q < 4; ++q) {
        const auto load = [&](int r) {
          return 4 * q + r < rows && left > 0 ? Vec512::LoadBytesN(p + (4 * q + r) * stride, left) : _mm512_setzero_si512();
        };
        P::TransposeRows(load(0), load(1), load(2), load(3), groups[q]);
      }
    }
    uint32_t* out = &tile.pairs[c / 2][v][0];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i columns[4];
      TransposeLanes(groups[0][j], groups[1][j], groups[2][j], groups[3][j], columns);
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) P::Store(columns[l], 4 * l + j, out);
    }
  }
}

// What a tile is multiplied with.
struct GemmStep {
  const GemmTile* tile;
  __m512 scales[kGemmVectors];
  bool first;  // totals hold nothing yet
  int64_t ldx;
  // The next tile is fetched while this one is multiplied, two lines of a row with each pair of columns: filling would otherwise wait for memory,
  // and nothing else could happen meanwhile.
  const uint8_t* next;
  int64_t next_stride;
  int64_t next_bytes;  // of a row; 0: there is none
};

// totals[t][row] (+)= scale * sum over the tile's columns, for T tokens and the tile's first 16 V rows.
//   x: the tile's first column of token 0; fetch: 128 bytes of each of the next tile's rows
template <int V, int T>
__attribute__((noinline)) void MultiplyTile(const GemmStep& step, const bf16* x, float (*totals)[kGemmRows], const uint8_t* fetch,
                                            int64_t fetch_stride) {
  __m512 acc[V][T];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) acc[v][t] = _mm512_setzero_ps();
  }
  for (int p = 0; p < kGemmPairs; ++p) {
    _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(fetch + 64), _MM_HINT_T0);
    fetch += fetch_stride;
    __m512bh w[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] = (__m512bh)_mm512_load_si512(step.tile->pairs[p][v]);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      int32_t pair;
      std::memcpy(&pair, x + t * step.ldx + 2 * p, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[v][t] = _mm512_dpbf16_ps(acc[v][t], w[v], both);
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* total = totals[t] + v * kGemmLanes;
      _mm512_store_ps(total, _mm512_fmadd_ps(acc[v][t], step.scales[v], step.first ? _mm512_setzero_ps() : _mm512_load_ps(total)));
    }
  }
}

template <int V, int... T>
HEARTH_INLINE void MultiplyPart(std::integer_sequence<int, T...>, const GemmStep& step, const bf16* x, int64_t count, float (*totals)[kGemmRows],
                                const uint8_t* fetch, int64_t fetch_stride) {
  static constexpr decltype(&MultiplyTile<V, 1>) kKernels[] = {MultiplyTile<V, T + 1>...};
  kKernels[count - 1](step, x, totals, fetch, fetch_stride);
}

// In even parts of at most kGemmAtOnce tokens: a rest of one or two would wait for its own sums most of the time.
template <int V>
void MultiplyTokens(const GemmStep& step, const bf16* x, int64_t m_count, float (*totals)[kGemmRows]) {
  constexpr int64_t kFetched = 128;  // bytes of a row that a part fetches; parts behind the last of them read what is there
  const int64_t parts = (m_count + kGemmAtOnce - 1) / kGemmAtOnce;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * m_count / parts;
    const int64_t count = (part + 1) * m_count / parts - begin;
    const bool fetches = part * kFetched < step.next_bytes;
    MultiplyPart<V>(std::make_integer_sequence<int, kGemmAtOnce>(), step, x + begin * step.ldx, count, totals + begin,
                    fetches ? step.next + part * kFetched : reinterpret_cast<const uint8_t*>(step.tile), fetches ? step.next_stride : 0);
  }
}

// The scales of a vector's rows in one block of columns: mostly one for all.
HEARTH_INLINE __m512 RowScales(const WeightView& w, int64_t row, int64_t rows, int64_t block) {
  const float* scales = w.scales + block;
  const int64_t begin = w.scale_row0 + row;
  const int64_t last = begin + (rows < kGemmLanes ? rows : kGemmLanes) - 1;
  if (begin / kScaleBlock == last / kScaleBlock) return _mm512_set1_ps(scales[begin / kScaleBlock * w.scale_stride]);
  alignas(64) float lanes[kGemmLanes] = {};
  for (int64_t r = begin; r <= last; ++r) lanes[r - begin] = scales[r / kScaleBlock * w.scale_stride];
  return _mm512_load_ps(lanes);
}

// What a call works in, on its stack.
struct GemmWork {
  GemmTile tile;
  // Side by side, and not in y, whose rows often lie a multiple of 4 KiB apart: they would share a few sets of each cache.
  alignas(64) float totals[kGemmTokens][kGemmRows];
  bf16 tail[kGemmTailTokens * kScaleBlock];
};

// Rows [row, row + rows), rows <= 64, over all columns, for at most kGemmTokens tokens. `more_rows`: of the call, behind these.
template <class P>
void GemmRows(const WeightView& w, int64_t row, int64_t rows, int64_t more_rows, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy,
              GemmWork& work) {
  static constexpr decltype(&MultiplyTokens<1>) kMultiply[] = {MultiplyTokens<1>, MultiplyTokens<2>, MultiplyTokens<3>, MultiplyTokens<4>};
  static_assert(sizeof(kMultiply) / sizeof(kMultiply[0]) == kGemmVectors);
  const int64_t stride = w.row_stride * P::kElementBytes;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  const int64_t vectors = (rows + kGemmLanes - 1) / kGemmLanes;
  const auto multiply = kMultiply[vectors - 1];
  for (int64_t c = 0; c < w.cols; c += kScaleBlock) {
    const int64_t cols = w.cols - c < kScaleBlock ? w.cols - c : kScaleBlock;
    GemmStep step = {.tile = &work.tile, .scales = {}, .first = c == 0, .ldx = ldx, .next = nullptr, .next_stride = stride, .next_bytes = 0};
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t first = v * kGemmLanes;
      FillTile<P>(work.tile, v, data + first * stride + c * P::kElementBytes, stride, rows - first, cols);
      step.scales[v] = P::kScaled ? RowScales(w, row + first, rows - first, c / kScaleBlock) : _mm512_set1_ps(1.0f);
    }
    // The next tile: of these rows, or the first of the rows that follow.
    if (c + kScaleBlock < w.cols) {
      step.next = data + (c + kScaleBlock) * P::kElementBytes;
      step.next_bytes = kScaleBlock * P::kElementBytes;
    } else if (more_rows > 0) {
      step.next = data + kGemmRows * stride;
      step.next_bytes = kScaleBlock * P::kElementBytes;
    }
    if (cols == kScaleBlock) {
      multiply(step, x + c, m_count, work.totals);
      continue;
    }
    // Activations end with the columns: those of the last block are copied where zeros may follow.
    step.ldx = kScaleBlock;
    for (int64_t m = 0; m < m_count; m += kGemmTailTokens) {
      const int64_t count = m_count - m < kGemmTailTokens ? m_count - m : kGemmTailTokens;
      for (int64_t t = 0; t < count; ++t) {
        bf16* to = work.tail + t * kScaleBlock;
        std::memcpy(to, x + (m + t) * ldx + c, static_cast<size_t>(cols) * sizeof(bf16));
        std::memset(static_cast<void*>(to + cols), 0, static_cast<size_t>(kScaleBlock - cols) * sizeof(bf16));
      }
      multiply(step, work.tail, count, work.totals + m);
    }
  }
  for (int64_t m = 0; m < m_count; ++m) {
    float* out = y + m * ldy + row;
    if (w.cols == 0) {
      std::memset(out, 0, static_cast<size_t>(rows) * sizeof(float));
    } else if (rows == kGemmRows) {
      for (int v = 0; v < kGemmVectors; ++v) _mm512_storeu_ps(out + v * kGemmLanes, _mm512_load_ps(work.totals[m] + v * kGemmLanes));
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
