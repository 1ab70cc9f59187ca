// The row-dot skeleton: R rows times T tokens over K, for any dot policy (f32_dots.h, bf16_dots.h), and `linear`
// on top.
//
// Every (row, token) has accumulators of its own, filled in the same order whatever R, T and the tile's place are: that
// is the whole of the order-of-sums rule. FP8: the lanes of a 128-column block are summed, scaled, and added to the
// row's total lanes; lanes are added up once per row. Block formats (block_bf16_dots.h): each step's lanes are scaled and added to the total.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

// What a tile fetches while it computes: its part of the next group of rows, a line for each of its own, in the order of addresses. A group is some short
// streams, on which hardware prefetchers hardly get going; one ascending walk ahead of it they follow. Without this, FP8 out of DRAM stops at two
// thirds to three quarters of what a plain read reaches; fetching in the order of the computation, row by row of a column, costs 5 to 10% of it.
struct FetchAhead {
  const uint8_t* next;
  int64_t step;  // bytes; 0 asks for one line again and again, which costs less than a branch
  HEARTH_INLINE void Line() {
    _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
    next += step;
  }
};
struct NoFetch {
  HEARTH_INLINE void Line() {}
};

// acc[r][t] += w[r] . x[t] over n columns.   w: rows w_stride bytes apart; x: tokens ldx elements apart
template <class D, int R, int T, class Fetch>
HEARTH_INLINE void DotTile(typename D::Acc (&acc)[R][T], const uint8_t* w, int64_t w_stride, const bf16* x, int64_t ldx, int64_t n, Fetch& fetch) {
  constexpr int kStepBytes = D::kStep * D::kElementBytes;
  int64_t c = 0;
  for (; c + D::kStep <= n; c += D::kStep) {
    typename D::X xs[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) xs[t] = D::LoadX(x + t * ldx + c);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint8_t* p = w + r * w_stride + c * D::kElementBytes;
#pragma GCC unroll 4
      for (int line = 0; line < kStepBytes; line += 64) fetch.Line();
      const typename D::W ws = D::Load(p);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) D::Dot(acc[r][t], ws, xs[t]);
    }
  }
  if (c == n) return;
  typename D::X xs[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) xs[t] = D::LoadXN(x + t * ldx + c, n - c);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename D::W ws = D::LoadN(w + r * w_stride + c * D::kElementBytes, n - c);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) D::Dot(acc[r][t], ws, xs[t]);
  }
}

// The policies of block formats.
template <class D>
concept BlockPolicy = requires {
  D::kBlock;
};

// Bytes of `columns` of a row, whole blocks.
template <class D>
HEARTH_INLINE int64_t ColumnBytes(int64_t columns) {
  if constexpr (BlockPolicy<D>) {
    return columns / D::kBlock * D::kBlockBytes;
  } else {
    return columns * D::kElementBytes;
  }
}

template <class D>
constexpr int kSpanBytes = D::kSpan / D::kBlock* D::kBlockBytes;

// total[r][t] += w[r] . x[t] over n columns of a block format, spans of whole blocks ascending, steps of a span ascending.
//   x: arranged, tokens ldx numbers apart
template <class D, int R, int T, class Fetch>
HEARTH_INLINE void BlockDotTile(typename D::Acc (&total)[R][T], const uint8_t* w, int64_t w_stride, const bf16* x, int64_t ldx, int64_t n,
                                Fetch& fetch) {
  const auto add_span = [&](int r, const uint8_t* p) __attribute__((always_inline)) {
    typename D::Scales scales;
    D::LoadScales(p, scales);
#pragma GCC unroll 8
    for (int step = 0; step < D::kSpan / D::kStep; ++step) {
      const typename D::W ws = D::Load(p, scales, step);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) D::Add(total[r][t], ws, scales, step, x + t * ldx);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) D::Finish(total[r][t], scales, x + t * ldx);
  };
  int64_t c = 0;
  for (; c + D::kSpan <= n; c += D::kSpan, w += kSpanBytes<D>, x += D::kSpanX) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int line = 0; line < kSpanBytes<D>; line += 64) fetch.Line();
      add_span(r, w + r * w_stride);
    }
  }
  if constexpr (D::kSpan > D::kBlock) {
    if (c == n) return;
    // Blocks that are missing are zeros.
    uint8_t rest[kSpanBytes<D>] = {};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(rest, w + r * w_stride, static_cast<size_t>((n - c) / D::kBlock * D::kBlockBytes));
      add_span(r, rest);
    }
  }
}

template <class V, class D, int R, int T>
HEARTH_INLINE void ZeroTile(typename D::Acc (&acc)[R][T]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] = V::Zero();
  }
}

// y[t, r] for rows [row, row + R) and tokens [0, T) of x and y.
template <class V, class D, int R, int T>
__attribute__((noinline)) void LinearTile(const WeightView& w, int64_t row, const bf16* x, int64_t ldx, float* y, int64_t ldy, FetchAhead fetch) {
  const int64_t stride = ColumnBytes<D>(w.row_stride);
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  typename D::Acc acc[R][T];
  ZeroTile<V, D, R, T>(acc);

  if constexpr (!D::kScaled) {
    if constexpr (BlockPolicy<D>) {
      BlockDotTile<D, R, T>(acc, data, stride, x, ldx, w.cols, fetch);
    } else {
      DotTile<D, R, T>(acc, data, stride, x, ldx, w.cols, fetch);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) y[t * ldy + row + r] = V::ReduceAdd(acc[r][t]);
    }
  } else {
    static_assert(kScaleBlock % D::kStep == 0);
    typename V::F total[R][T];
    const float* scales[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      scales[r] = w.scales + (w.scale_row0 + row + r) / kScaleBlock * w.scale_stride;
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) total[r][t] = V::Zero();
    }
    const auto add_block = [&](int64_t block) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const typename V::F scale = V::Set(scales[r][block] * D::kFactor);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          total[r][t] = V::Fma(acc[r][t], scale, total[r][t]);
          acc[r][t] = V::Zero();
        }
      }
    };
    const int64_t full_blocks = w.cols / kScaleBlock;
    for (int64_t block = 0; block < full_blocks; ++block) {
      const int64_t c = block * kScaleBlock;
      DotTile<D, R, T>(acc, data + c, stride, x + c, ldx, kScaleBlock, fetch);
      add_block(block);
    }
    if (const int64_t c = full_blocks * kScaleBlock; c < w.cols) {
      DotTile<D, R, T>(acc, data + c, stride, x + c, ldx, w.cols - c, fetch);
      add_block(full_blocks);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) y[t * ldy + row + r] = V::ReduceAdd(total[r][t]);
    }
  }
}

struct TileShape {
  int rows, tokens;
};
// What a tile of one token is, of fewer than many.tokens, and of more.
struct TileShapes {
  TileShape one, few, many;
};

constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Bytes of a row that a tile reads for each line it fetches.
template <class D>
constexpr int LineBytes() {
  if constexpr (BlockPolicy<D>) {
    return CeilDiv(kSpanBytes<D>, CeilDiv(kSpanBytes<D>, 64));
  } else {
    return D::kStep * D::kElementBytes < 64 ? D::kStep * D::kElementBytes : 64;
  }
}

// R rows times all tokens in tiles of kTokens, 2 and 1; the weights come from memory for the first tile and from L1 for
// the others. `next`: the next group of rows, null if there is none; the tiles share its fetching evenly.
template <class V, class D, int R, int kTokens>
HEARTH_INLINE void LinearRows(const WeightView& w, int64_t row, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy,
                              const uint8_t* next) {
  const int tiles = static_cast<int>(m_count / kTokens + (kTokens > 2 ? (m_count % kTokens + 1) / 2 : m_count % kTokens));
  const int64_t step = CeilDiv(LineBytes<D>(), tiles);
  const int64_t share = R * ColumnBytes<D>(w.row_stride) / tiles;
  FetchAhead fetch =
      next != nullptr ? FetchAhead{next, step} : FetchAhead{static_cast<const uint8_t*>(w.data) + row * ColumnBytes<D>(w.row_stride), 0};
  const auto tile = [&]<int T>(int64_t m) __attribute__((always_inline)) {
    LinearTile<V, D, R, T>(w, row, x + m * ldx, ldx, y + m * ldy, ldy, fetch);
    if (fetch.step != 0) fetch.next += share;
  };
  int64_t m = 0;
  for (; m + kTokens <= m_count; m += kTokens) tile.template operator()<kTokens>(m);
  if constexpr (kTokens > 2) {
    for (; m + 2 <= m_count; m += 2) tile.template operator()<2>(m);
  }
  for (; m < m_count; ++m) tile.template operator()<1>(m);
}

// All rows times m tokens, which are one panel.
template <class Path, class D>
HEARTH_INLINE void LinearPanel(const WeightView& w, const bf16* x, int64_t ldx, int64_t m, float* y, int64_t ldy, int64_t row_begin,
                               int64_t row_end) {
  using V = typename Path::V;
  constexpr TileShapes kShapes = Path::template kLinearTiles<D>;
  const int64_t row_bytes = ColumnBytes<D>(w.row_stride);
  const auto rows = [&]<TileShape kShape>() __attribute__((always_inline)) {
    int64_t row = row_begin;
    for (; row + kShape.rows <= row_end; row += kShape.rows) {
      const bool more = w.fetch_ahead && row + 2 * kShape.rows <= row_end;
      const uint8_t* next = more ? static_cast<const uint8_t*>(w.data) + (row + kShape.rows) * row_bytes : nullptr;
      LinearRows<V, D, kShape.rows, kShape.tokens>(w, row, x, ldx, m, y, ldy, next);
    }
    for (; row < row_end; ++row) LinearRows<V, D, 1, kShape.tokens>(w, row, x, ldx, m, y, ldy, nullptr);
  };
  if (m == 1) {
    rows.template operator()<kShapes.one>();
  } else if (m < kShapes.many.tokens) {
    rows.template operator()<kShapes.few>();
  } else {
    rows.template operator()<kShapes.many>();
  }
}

// Tokens that are multiplied before the weights are read again: their activations should stay in L2.
constexpr int64_t kPanelBytes = 256 << 10;

template <class Path, class D>
void LinearOf(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  constexpr int64_t kGroup = 8;
  const int64_t fitting = kPanelBytes / (w.cols > 0 ? 2 * w.cols : 2) / kGroup * kGroup;
  const int64_t panel = fitting < 2 * kGroup ? 2 * kGroup : fitting;
  for (int64_t m0 = 0; m0 < m_count; m0 += panel) {
    const int64_t m = m_count - m0 < panel ? m_count - m0 : panel;
    LinearPanel<Path, D>(w, x + m0 * ldx, ldx, m, y + m0 * ldy, ldy, row_begin, row_end);
  }
}

// The same for block formats, whose activations are put in the order of their weights first, once for all rows.
template <class Path, class D>
void BlockLinearOf(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  constexpr int64_t kPanel = kPanelBytes / static_cast<int64_t>(sizeof(bf16)), kRowMax = kBlockRowMax / D::kSpan * D::kSpanX;
  constexpr int64_t kArranged = kPanel > kRowMax ? kPanel : kRowMax;
  constexpr int64_t kTokens = Path::template kLinearTiles<D>.many.tokens;
  alignas(64) uint8_t bytes[kArranged * sizeof(bf16)];
  bf16* const arranged = reinterpret_cast<bf16*>(bytes);
  const int64_t ld = (w.cols + D::kSpan - 1) / D::kSpan * D::kSpanX;
  const int64_t fitting = ld > 0 ? kArranged / ld : m_count;
  const int64_t panel = fitting > kTokens ? fitting / kTokens * kTokens : fitting;
  for (int64_t m0 = 0; m0 < m_count; m0 += panel) {
    const int64_t m = m_count - m0 < panel ? m_count - m0 : panel;
    for (int64_t t = 0; t < m; ++t) {
      const bf16* from = x + (m0 + t) * ldx;
      bf16* to = arranged + t * ld;
      int64_t c = 0;
      for (; c + D::kSpan <= w.cols; c += D::kSpan, to += D::kSpanX) D::ArrangeX(from + c, to);
      if (c == w.cols) continue;
      alignas(64) uint8_t rest[D::kSpan * sizeof(bf16)] = {};
      __builtin_memcpy(rest, from + c, static_cast<size_t>(w.cols - c) * sizeof(bf16));
      D::ArrangeX(reinterpret_cast<const bf16*>(rest), to);
    }
    LinearPanel<Path, D>(w, arranged, ld, m, y + m0 * ldy, ldy, row_begin, row_end);
  }
}

template <class Path>
void Linear(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  switch (w.dtype) {
    case DType::kF8E4M3: return LinearOf<Path, typename Path::F8>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kBF16: return LinearOf<Path, typename Path::Bf16>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kF16: return LinearOf<Path, typename Path::F16>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kF32: return LinearOf<Path, typename Path::F32>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kQ8_0: return BlockLinearOf<Path, typename Path::template Block<DType::kQ8_0>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kQ6_K: return BlockLinearOf<Path, typename Path::template Block<DType::kQ6_K>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kQ4_K: return BlockLinearOf<Path, typename Path::template Block<DType::kQ4_K>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kI4G32: return BlockLinearOf<Path, typename Path::template Block<DType::kI4G32>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kInvalid: return;
  }
}

}  // namespace
}  // namespace hearth
