// The prefill form's product: rows in lanes, tokens broadcast. A tile of weights (64 rows or so, one block of columns) is converted once and meets all
// tokens of the call, while the next one is fetched. The skeleton; what a tile holds and how it is multiplied is the form's (gemm_bf16.h, gemm_f32.h,
// gemm_blocks.h, gemm_tiles.h).
//
// Order of sums of a (row, token): columns ascending within a 128-column block, in one lane (two at a time with VDPBF16PS); the block's sum times its
// scale (1 without FP8) is added to the total, blocks ascending. Block formats: gemm_blocks.h. It depends on nothing else, whatever the tile, the tokens and the rows of the call.
// Included by the files of this folder only; see isa_local.h.
//
// A form G: vector type V; kVectors of rows a tile; kAtOnce, the tokens whose sums are in registers; Tile; and
//   Fill<P>(tile, v, data, stride, rows, begin, cols): the tile's vector `v` from up to 16 or 8 rows, the first at `data`, and `cols` of their columns
//     from `begin` on; what is missing is zero
//   Step<N, T>(acc, tile, p, x, ldx): acc[v][t] += the tile's pair of columns p, for its first N vectors, times x's next two columns of T tokens
// and, where a tile's columns are scaled in parts (gemm_blocks.h):
//   kParts; Prepare(tile, x, ldx, count): once for each tile, with its first column of all tokens
//   AddPart(total, sum, tile, part, v, token): the total with the sum over one part added
// or, instead of kAtOnce and Step, for a form with a way of its own (gemm_tiles.h):
//   Multiply(step, vectors, x, count, totals): totals of `count` tokens and the tile's first vectors, as MultiplyTile has them
//   kTokensRead: rows of x that it may read though `count` is less, where the skeleton has copied them
// A policy P says how weights are read: kElementBytes or a block's sizes, kScaled, kFactor (see linear.h), and what the form wants.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"

namespace hearth {
namespace {

constexpr int kGemmPairs = kScaleBlock / 2;  // of columns in a tile
constexpr int64_t kGemmTokens = 512;         // whose totals take an eighth of L2
constexpr int64_t kGemmTailTokens = 24;

template <class G>
constexpr int kGemmRows = G::kVectors* G::V::kLanes;

template <class G>
concept MultipliesItself = requires {
  G::kTokensRead;
};

template <class G>
concept ScalesParts = requires {
  G::kParts;
};

template <class G>
constexpr int PartsOf() {
  if constexpr (ScalesParts<G>) {
    return G::kParts;
  } else {
    return 1;
  }
}

// What a tile is multiplied with.
template <class G>
struct GemmStep {
  const typename G::Tile* tile;
  typename G::V::F scales[G::kVectors];
  bool first;  // totals hold nothing yet
  int64_t ldx;
  // The next tile is fetched while this one is multiplied, two lines of a row with each pair of columns: filling would otherwise wait for memory,
  // and nothing else could happen meanwhile.
  const uint8_t* next;
  int64_t next_stride;
  int64_t next_bytes;  // of a row; 0: there is none
};

// totals[t][row] (+)= scale * sum over the tile's columns, for T tokens from `token` on and the tile's first N vectors of rows.
//   x: the tile's first column of that token; totals: that token's; fetch: 128 bytes of each of the next tile's rows
template <class G, int N, int T>
__attribute__((noinline)) void MultiplyTile(const GemmStep<G>& step, int64_t token, const bf16* x, float (*totals)[kGemmRows<G>],
                                            const uint8_t* fetch, int64_t fetch_stride) {
  using V = typename G::V;
  constexpr int kPairs = kGemmPairs / PartsOf<G>();
  for (int part = 0; part < PartsOf<G>(); ++part) {
    typename V::F acc[N][T];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) acc[v][t] = V::Zero();
    }
    for (int p = part * kPairs; p < (part + 1) * kPairs; ++p) {
      _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(fetch + 64), _MM_HINT_T0);
      fetch += fetch_stride;
      G::template Step<N, T>(acc, *step.tile, p, x + 2 * p, step.ldx);
    }
    const bool first = step.first && part == 0;
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        float* to = totals[t] + v * V::kLanes;
        const typename V::F total = first ? V::Zero() : V::Load(to);
        if constexpr (ScalesParts<G>) {
          V::Store(to, G::AddPart(total, acc[v][t], *step.tile, part, v, token + t));
        } else {
          V::Store(to, V::Fma(acc[v][t], step.scales[v], total));
        }
      }
    }
  }
}

template <class G, int N, int... T>
HEARTH_INLINE void MultiplyPart(std::integer_sequence<int, T...>, const GemmStep<G>& step, int64_t token, const bf16* x, int64_t count,
                                float (*totals)[kGemmRows<G>], const uint8_t* fetch, int64_t fetch_stride) {
  static constexpr decltype(&MultiplyTile<G, N, 1>) kKernels[] = {MultiplyTile<G, N, T + 1>...};
  kKernels[count - 1](step, token, x, totals, fetch, fetch_stride);
}

// In even parts of at most kAtOnce tokens: a rest of one or two would wait for its own sums most of the time.
template <class G, int N>
void MultiplyTokens(const GemmStep<G>& step, const bf16* x, int64_t m_count, float (*totals)[kGemmRows<G>]) {
  constexpr int64_t kFetched = 128;  // bytes of a row that a part fetches; parts behind the last of them read what is there
  const int64_t parts = (m_count + G::kAtOnce - 1) / G::kAtOnce;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * m_count / parts;
    const int64_t count = (part + 1) * m_count / parts - begin;
    // The next part's activations are short pieces of rows, on which hardware prefetchers hardly get going.
    const bf16* next_x = part + 1 < parts ? x + (begin + count) * step.ldx : x + kScaleBlock;
    for (int t = 0; t < G::kAtOnce; ++t) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) _mm_prefetch(reinterpret_cast<const char*>(next_x + t * step.ldx + 32 * line), _MM_HINT_T0);
    }
    const bool fetches = part * kFetched < step.next_bytes;
    MultiplyPart<G, N>(std::make_integer_sequence<int, G::kAtOnce>(), step, begin, x + begin * step.ldx, count, totals + begin,
                       fetches ? step.next + part * kFetched : reinterpret_cast<const uint8_t*>(step.tile), fetches ? step.next_stride : 0);
  }
}

template <class G, int... N>
HEARTH_INLINE void MultiplyVectors(std::integer_sequence<int, N...>, const GemmStep<G>& step, int64_t vectors, const bf16* x, int64_t m_count,
                                   float (*totals)[kGemmRows<G>]) {
  static constexpr decltype(&MultiplyTokens<G, 1>) kKernels[] = {MultiplyTokens<G, N + 1>...};
  kKernels[vectors - 1](step, x, m_count, totals);
}

// The scales of a vector's rows in one block of columns: mostly one for all.
template <class V>
HEARTH_INLINE typename V::F RowScales(const WeightView& w, int64_t row, int64_t rows, int64_t block, float factor) {
  const float* scales = w.scales + block;
  const int64_t begin = w.scale_row0 + row;
  const int64_t last = begin + (rows < V::kLanes ? rows : V::kLanes) - 1;
  if (begin / kScaleBlock == last / kScaleBlock) return V::Set(scales[begin / kScaleBlock * w.scale_stride] * factor);
  alignas(64) float lanes[V::kLanes] = {};
  for (int64_t r = begin; r <= last; ++r) lanes[r - begin] = scales[r / kScaleBlock * w.scale_stride] * factor;
  return V::Load(lanes);
}

// Bytes of a row that are fetched before column c is: a block comes with its first column.
template <class P>
HEARTH_INLINE int64_t FetchedBytes(int64_t c) {
  if constexpr (BlockPolicy<P>) {
    return (c + P::kBlock - 1) / P::kBlock * P::kBlockBytes;
  } else {
    return ColumnBytes<P>(c);
  }
}

// What a call works in, on its stack.
template <class G>
struct GemmWork {
  typename G::Tile tile;
  // Side by side, and not in y, whose rows often lie a multiple of 4 KiB apart: they would share a few sets of each cache.
  alignas(64) float totals[kGemmTokens][kGemmRows<G>];
  bf16 tail[kGemmTailTokens * kScaleBlock];
};

// Rows [row, row + rows), a tile's at most, over all columns, for at most kGemmTokens tokens. `more_rows`: of the call, behind these.
template <class G, class P>
void GemmTileRows(const WeightView& w, int64_t row, int64_t rows, int64_t more_rows, const bf16* x, int64_t ldx, int64_t m_count, float* y,
                  int64_t ldy, GemmWork<G>& work) {
  using V = typename G::V;
  const int64_t stride = ColumnBytes<P>(w.row_stride);
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  const int64_t vectors = (rows + V::kLanes - 1) / V::kLanes;
  const auto multiply = [&](const GemmStep<G>& step, const bf16* from, int64_t count, float(*totals)[kGemmRows<G>]) {
    if constexpr (MultipliesItself<G>) {
      G::Multiply(step, vectors, from, count, totals);
    } else {
      if constexpr (ScalesParts<G>) G::Prepare(work.tile, from, step.ldx, count);
      MultiplyVectors<G>(std::make_integer_sequence<int, G::kVectors>(), step, vectors, from, count, totals);
    }
  };
  for (int64_t c = 0; c < w.cols; c += kScaleBlock) {
    const int64_t cols = w.cols - c < kScaleBlock ? w.cols - c : kScaleBlock;
    GemmStep<G> step = {.tile = &work.tile, .scales = {}, .first = c == 0, .ldx = ldx, .next = nullptr, .next_stride = stride, .next_bytes = 0};
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t first = v * V::kLanes;
      G::template Fill<P>(work.tile, v, data + first * stride, stride, rows - first, c, cols);
      if constexpr (!ScalesParts<G>)
        step.scales[v] = P::kScaled ? RowScales<V>(w, row + first, rows - first, c / kScaleBlock, P::kFactor) : V::Set(1.0f);
    }
    // The next tile: of these rows, or the first of the rows that follow.
    const int64_t next = c + kScaleBlock < w.cols ? c + kScaleBlock : 0;
    if (next > 0 || more_rows > 0) {
      step.next = data + (next > 0 ? 0 : kGemmRows<G> * stride) + FetchedBytes<P>(next);
      step.next_bytes = FetchedBytes<P>(next + kScaleBlock) - FetchedBytes<P>(next);
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
      if constexpr (MultipliesItself<G>) {
        const int64_t missing = G::kTokensRead - count;
        const int64_t bytes = (missing > 0 ? missing : 0) * kScaleBlock * static_cast<int64_t>(sizeof(bf16));
        std::memset(static_cast<void*>(work.tail + count * kScaleBlock), 0, static_cast<size_t>(bytes));
      }
      multiply(step, work.tail, count, work.totals + m);
    }
  }
  for (int64_t m = 0; m < m_count; ++m) {
    float* out = y + m * ldy + row;
    if (w.cols == 0) {
      std::memset(out, 0, static_cast<size_t>(rows) * sizeof(float));
    } else if (rows == kGemmRows<G>) {
      for (int v = 0; v < G::kVectors; ++v) V::Store(out + v * V::kLanes, V::Load(work.totals[m] + v * V::kLanes));
    } else {
      std::memcpy(out, work.totals[m], static_cast<size_t>(rows) * sizeof(float));
    }
  }
}

template <class G, class P>
void GemmOf(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  GemmWork<G> work;
  for (int64_t m = 0; m < m_count; m += kGemmTokens) {
    const int64_t count = m_count - m < kGemmTokens ? m_count - m : kGemmTokens;
    for (int64_t row = row_begin; row < row_end; row += kGemmRows<G>) {
      const int64_t rows = row_end - row < kGemmRows<G> ? row_end - row : kGemmRows<G>;
      GemmTileRows<G, P>(w, row, rows, row_end - row - rows, x + m * ldx, ldx, count, y + m * ldy, ldy, work);
    }
  }
}

}  // namespace
}  // namespace hearth
