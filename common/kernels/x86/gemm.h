// The prefill form's product: rows in lanes, tokens broadcast. A tile of weights (64 rows or so, one block of columns) is converted once and meets all
// tokens of the call, while the next ones are brought (gemm_ahead.h). The skeleton; what a tile holds and how it is multiplied is the form's
// (gemm_bf16.h, gemm_f32.h, gemm_blocks.h, gemm_tiles.h).
//
// Order of sums of a (row, token): columns ascending within a 128-column block, in one lane (two at a time with VDPBF16PS); the block's sum times its
// scale (1 without FP8) is added to the total, blocks ascending. Block formats: gemm_blocks.h. It depends on nothing else, whatever the tile, the tokens and the rows of the call.
// Included by the files of this folder only; see isa_local.h.
//
// A form G: vector type V; kVectors of rows a tile; kAtOnce, the tokens whose sums are in registers; Tile; and
//   Fill<P>(tile, v, data, stride, rows, begin, cols): the tile's vector `v` from up to 16 or 8 rows, the first at `data`, and `cols` of their columns
//     from `begin` on; what is missing is zero
//   Step<N, T>(acc, tile, p, x, ldx): acc[v][t] += the tile's pair of columns p, for its first N vectors, times x's next two columns of T tokens
//   CopyLine(to, from, bytes): at most 64 bytes, where plain weights are to be filled from a copy (gemm_ahead.h)
// and, where a tile's columns are scaled in parts (gemm_blocks.h):
//   kParts; Prepare(tile, x, ldx, count): once for each tile, with its first column of all tokens
//   AddPart(total, sum, tile, part, v, token): the total with the sum over one part added
// or, instead of kAtOnce and Step, for a form with a way of its own (gemm_tiles.h):
//   Multiply(step, vectors, x, count, totals, ahead): totals of `count` tokens and the tile's first vectors, as MultiplyTile has them
//   kTokensRead: rows of x that it may read though `count` is less, where the skeleton has copied them
// A policy P says how weights are read: kElementBytes or a block's sizes, kScaled, kFactor (see linear.h), and what the form wants.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/gemm_ahead.h"
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
  float* y;  // after the last block of columns, where the sums go; else null
  int64_t ldy;
};

// totals[t][row] (+)= scale * sum over the tile's columns, for T tokens from `token` on and the tile's first N vectors of rows.
//   x: the tile's first column of that token; totals: that token's; ahead: the GemmAhead of this tile, moved a step with every kAheadPairs
template <class G, int N, int T, class Ahead>
__attribute__((noinline)) void MultiplyTile(const GemmStep<G>& step, int64_t token, const bf16* x, float (*totals)[kGemmRows<G>], Ahead& ahead) {
  using V = typename G::V;
  constexpr int kPairs = kGemmPairs / PartsOf<G>();
  for (int part = 0; part < PartsOf<G>(); ++part) {
    typename V::F acc[N][T];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) acc[v][t] = V::Zero();
    }
    for (int p = part * kPairs; p < (part + 1) * kPairs; p += kAheadPairs) {
      ahead.Step();
#pragma GCC unroll 2
      for (int i = 0; i < kAheadPairs; ++i) G::template Step<N, T>(acc, *step.tile, p + i, x + 2 * (p + i), step.ldx);
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

template <class G, int N, class Ahead, int... T>
HEARTH_INLINE void MultiplyPart(std::integer_sequence<int, T...>, const GemmStep<G>& step, int64_t token, const bf16* x, int64_t count,
                                float (*totals)[kGemmRows<G>], Ahead& ahead) {
  static constexpr decltype(&MultiplyTile<G, N, 1, Ahead>) kKernels[] = {MultiplyTile<G, N, T + 1, Ahead>...};
  kKernels[count - 1](step, token, x, totals, ahead);
}

template <class G>
HEARTH_INLINE int64_t GemmParts(int64_t tokens) {
  return (tokens + G::kAtOnce - 1) / G::kAtOnce;
}
// In even parts of at most kAtOnce tokens: a rest of one or two would wait for its own sums most of the time.
template <class G, int N, class Ahead>
void MultiplyTokens(const GemmStep<G>& step, const bf16* x, int64_t m_count, float (*totals)[kGemmRows<G>], Ahead& ahead) {
  const int64_t parts = GemmParts<G>(m_count);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * m_count / parts;
    const int64_t count = (part + 1) * m_count / parts - begin;
    // The next part's activations are short pieces of rows, on which hardware prefetchers hardly get going.
    const bf16* next_x = part + 1 < parts ? x + (begin + count) * step.ldx : x + kScaleBlock;
    for (int t = 0; t < G::kAtOnce; ++t) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) _mm_prefetch(reinterpret_cast<const char*>(next_x + t * step.ldx + 32 * line), _MM_HINT_T0);
    }
    // So are the rows of y, of which each tile's rows are some lines.
    if (step.y != nullptr) {
      for (int64_t t = begin; t < begin + count; ++t) {
        for (int64_t line = 0; line <= kGemmRows<G>; line += 16) __builtin_prefetch(step.y + t * step.ldy + line, 1);
      }
    }
    ahead.BeginPart(part);
    MultiplyPart<G, N, Ahead>(std::make_integer_sequence<int, G::kAtOnce>(), step, begin, x + begin * step.ldx, count, totals + begin, ahead);
  }
}

template <class G, class Ahead, int... N>
HEARTH_INLINE void MultiplyVectors(std::integer_sequence<int, N...>, const GemmStep<G>& step, int64_t vectors, const bf16* x, int64_t m_count,
                                   float (*totals)[kGemmRows<G>], Ahead& ahead) {
  static constexpr decltype(&MultiplyTokens<G, 1, Ahead>) kKernels[] = {MultiplyTokens<G, N + 1, Ahead>...};
  kKernels[vectors - 1](step, x, m_count, totals, ahead);
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

// Bytes of a row that lie before column c's: a block comes with its first column.
template <class P>
HEARTH_INLINE int64_t BytesBefore(int64_t c) {
  if constexpr (BlockPolicy<P>) {
    return (c + P::kBlock - 1) / P::kBlock * P::kBlockBytes;
  } else {
    return ColumnBytes<P>(c);
  }
}

// Forms that fill from copies of plain weights.
template <class G>
concept StagesPlain = requires(uint8_t* to) {
  G::CopyLine(to, to, 0);
};
// Bytes of a tile's row in a copy of it; 0: it is filled from where it lies.
template <class G, class P>
constexpr int StageRow() {
  if constexpr (StagesPlain<G> && !BlockPolicy<P>) {
    return kScaleBlock * P::kElementBytes;
  } else {
    return 0;
  }
}

// What a call works in, on its stack.
template <class G, class P>
struct GemmWork {
  typename G::Tile tile;
  // Side by side, and not in y, whose rows often lie a multiple of 4 KiB apart: they would share a few sets of each cache.
  alignas(64) float totals[kGemmTokens][kGemmRows<G>];
  alignas(64) uint8_t stage[StageRow<G, P>() > 0 ? kGemmRows<G>* StageRow<G, P>() : 128];
  bf16 tail[kGemmTailTokens * kScaleBlock];
};

// The tile at column c of the rows from `row` on, or the one so many `behind` it: columns first, then rows up to `row_end`.
template <class G, class P>
HEARTH_INLINE GemmTile TileAt(const WeightView& w, int64_t row, int64_t row_end, int64_t c, int64_t behind) {
  for (c += behind * kScaleBlock; c >= w.cols; c -= (w.cols + kScaleBlock - 1) / kScaleBlock * kScaleBlock) row += kGemmRows<G>;
  if (row >= row_end) return {};
  const int64_t stride = ColumnBytes<P>(w.row_stride);
  const int64_t end = c + kScaleBlock < w.cols ? c + kScaleBlock : w.cols;
  return {.data = static_cast<const uint8_t*>(w.data) + row * stride + BytesBefore<P>(c),
          .stride = stride,
          .row_bytes = BytesBefore<P>(end) - BytesBefore<P>(c),
          .rows = row_end - row < kGemmRows<G> ? row_end - row : kGemmRows<G>};
}

// A tile's rows, from `row` on, of a call's that end with `row_end`, over all columns, for at most kGemmTokens tokens. The first tile is fetched, and
// staged.
template <class G, class P>
void GemmTileRows(const WeightView& w, int64_t row, int64_t row_end, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy,
                  GemmWork<G, P>& work) {
  using V = typename G::V;
  using Ahead = GemmAhead<G, StageRow<G, P>()>;
  constexpr int64_t kStageRow = StageRow<G, P>();
  const int64_t rows = row_end - row < kGemmRows<G> ? row_end - row : kGemmRows<G>;
  const int64_t stride = ColumnBytes<P>(w.row_stride);
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  const int64_t vectors = (rows + V::kLanes - 1) / V::kLanes;
  const int64_t parts = [&]() -> int64_t {
    if constexpr (MultipliesItself<G>) {
      return 1;
    } else {
      return GemmParts<G>(m_count);
    }
  }();
  Ahead ahead;
  const auto multiply = [&](const GemmStep<G>& step, const bf16* from, int64_t count, float(*totals)[kGemmRows<G>]) {
    if constexpr (MultipliesItself<G>) {
      G::Multiply(step, vectors, from, count, totals, ahead);
    } else {
      if constexpr (ScalesParts<G>) G::Prepare(work.tile, from, step.ldx, count);
      MultiplyVectors<G, Ahead>(std::make_integer_sequence<int, G::kVectors>(), step, vectors, from, count, totals, ahead);
    }
  };
  for (int64_t c = 0; c < w.cols; c += kScaleBlock) {
    const int64_t cols = w.cols - c < kScaleBlock ? w.cols - c : kScaleBlock;
    GemmStep<G> step = {.tile = &work.tile, .scales = {}, .first = c == 0, .ldx = ldx, .y = c + cols == w.cols ? y + row : nullptr, .ldy = ldy};
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t first = v * V::kLanes;
      if constexpr (kStageRow > 0) {
        G::template Fill<P>(work.tile, v, work.stage + first * kStageRow, kStageRow, rows - first, 0, cols);
      } else {
        G::template Fill<P>(work.tile, v, data + first * stride, stride, rows - first, c, cols);
      }
      if constexpr (!ScalesParts<G>)
        step.scales[v] = P::kScaled ? RowScales<V>(w, row + first, rows - first, c / kScaleBlock, P::kFactor) : V::Set(1.0f);
    }
    ahead = Ahead(TileAt<G, P>(w, row, row_end, c, 1), TileAt<G, P>(w, row, row_end, c, 2), parts, work.stage);
    if (cols == kScaleBlock) {
      multiply(step, x + c, m_count, work.totals);
      ahead.Finish();
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
      step.y = y + m * ldy + row;
      multiply(step, work.tail, count, work.totals + m);
    }
    ahead.Finish();
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
  GemmWork<G, P> work;
  for (int64_t m = 0; m < m_count; m += kGemmTokens) {
    const int64_t count = m_count - m < kGemmTokens ? m_count - m : kGemmTokens;
    if (w.cols > 0) {
      const GemmTile first = TileAt<G, P>(w, row_begin, row_end, 0, 0);
      FetchTile(first);
      if constexpr (StageRow<G, P>() > 0) GemmAhead<G, StageRow<G, P>()>(first, TileAt<G, P>(w, row_begin, row_end, 0, 1), 1, work.stage).Finish();
    }
    for (int64_t row = row_begin; row < row_end; row += kGemmRows<G>) {
      GemmTileRows<G, P>(w, row, row_end, x + m * ldx, ldx, count, y + m * ldy, ldy, work);
    }
  }
}

}  // namespace
}  // namespace hearth
