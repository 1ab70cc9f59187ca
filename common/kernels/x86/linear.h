// The row-dot skeleton: R rows times T tokens over K, for any dot policy (f32_dots.h, bf16_dots.h), and `linear`
// on top.
//
// Every (row, token) has one accumulator, filled in the same order whatever R, T and the tile's place are: that
// is the whole of the order-of-sums rule. Both terms of a token go into it, step by step (policies that sum terms meet their sum). FP8: the lanes of a
// 128-column block are summed, scaled, and added to the row's total lanes; lanes are added up once per row. Block formats (block_bf16_dots.h): each
// step's lanes are scaled and added to the total.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include <utility>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/activation_panel.h"
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

// Some tokens of a panel.
struct PanelPart {
  const uint8_t* x;
  int64_t step;  // bytes between two pieces of a token's term
};

// Whether a tile widens a step of all its rows before it multiplies, so that each vector of activations is loaded once for them; where registers hold
// the sums and those weights. Below three tokens that is worth less than a row's weights at a time.
template <class V, class D, int R, int T>
constexpr bool kHoldsWeights = T > 2 && R*(D::kVectors + T) <= V::kBytes / 2;

template <class D>
HEARTH_INLINE typename D::Vector PieceVector(const uint8_t* piece, int v) {
  typename D::Vector vector;
  __builtin_memcpy(&vector, piece + v * static_cast<int>(sizeof(vector)), sizeof(vector));
  return vector;
}

// acc[r][t] += w[r] . x[t] over n columns, which begin a step.   w: rows w_stride bytes apart; kPieces: of a token; x moves on
template <class V, class D, int kPieces, int R, int T>
HEARTH_INLINE void DotTile(typename D::Acc (&acc)[R][T], const uint8_t* w, int64_t w_stride, PanelPart& x, int64_t n, FetchAhead& fetch) {
  constexpr int kStepBytes = D::kStep * D::kElementBytes;
  const auto fetch_lines = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int line = 0; line < kStepBytes; line += 64) fetch.Line();
  };
  const auto add_step = [&](const auto& load) __attribute__((always_inline)) {
    if constexpr (kHoldsWeights<V, D, R, T>) {
      typename D::W ws[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        fetch_lines();
        ws[r] = load(w + r * w_stride);
      }
#pragma GCC unroll 4
      for (int v = 0; v < D::kVectors; ++v) {
#pragma GCC unroll 16
        for (int i = 0; i < T * kPieces; ++i) {
          typename D::Vector one = PieceVector<D>(x.x + i * PieceBytes<D>(), v);
          asm("" : "+v"(one));  // In a register, or GCC loads it for each row.
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) D::Dot(acc[r][i / kPieces], ws[r].v[v], one);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        fetch_lines();
        const typename D::W ws = load(w + r * w_stride);
#pragma GCC unroll 4
        for (int v = 0; v < D::kVectors; ++v) {
#pragma GCC unroll 16
          for (int i = 0; i < T * kPieces; ++i) D::Dot(acc[r][i / kPieces], ws.v[v], PieceVector<D>(x.x + i * PieceBytes<D>(), v));
        }
      }
    }
    x.x += x.step;
  };
  int64_t c = 0;
  for (; c + D::kStep <= n; c += D::kStep, w += kStepBytes) {
    add_step([](const uint8_t* p) __attribute__((always_inline)) { return D::Load(p); });
  }
  if (c < n) {
    add_step([left = n - c](const uint8_t* p) __attribute__((always_inline)) { return D::LoadN(p, left); });
  }
}

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
template <class D, int kPieces, int R, int T>
HEARTH_INLINE void BlockDotTile(typename D::Acc (&total)[R][T], const uint8_t* w, int64_t w_stride, PanelPart x, int64_t n, FetchAhead& fetch) {
  const auto piece = [&](int i) __attribute__((always_inline)) { return reinterpret_cast<const bf16*>(x.x + i * PieceBytes<D>()); };
  const auto add_span = [&](int r, const uint8_t* p) __attribute__((always_inline)) {
    typename D::Scales scales;
    D::LoadScales(p, scales);
#pragma GCC unroll 8
    for (int step = 0; step < D::kSpan / D::kStep; ++step) {
      const typename D::W ws = D::Load(p, scales, step);
#pragma GCC unroll 16
      for (int i = 0; i < T * kPieces; ++i) D::Add(total[r][i / kPieces], ws, scales, step, piece(i));
    }
#pragma GCC unroll 16
    for (int i = 0; i < T * kPieces; ++i) D::Finish(total[r][i / kPieces], scales, piece(i));
  };
  int64_t c = 0;
  for (; c + D::kSpan <= n; c += D::kSpan, w += kSpanBytes<D>, x.x += x.step) {
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

// y[t, r] for rows [row, row + R) and the T tokens that x begins with.
template <class V, class D, int kPieces, int R, int T>
__attribute__((noinline)) void LinearTile(const WeightView& w, int64_t row, PanelPart x, float* y, int64_t ldy, FetchAhead fetch) {
  const int64_t stride = ColumnBytes<D>(w.row_stride);
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  typename D::Acc acc[R][T];
  ZeroTile<V, D, R, T>(acc);

  if constexpr (!D::kScaled) {
    if constexpr (BlockPolicy<D>) {
      BlockDotTile<D, kPieces, R, T>(acc, data, stride, x, w.cols, fetch);
    } else {
      DotTile<V, D, kPieces, R, T>(acc, data, stride, x, w.cols, fetch);
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
      DotTile<V, D, kPieces, R, T>(acc, data + block * kScaleBlock, stride, x, kScaleBlock, fetch);
      add_block(block);
    }
    if (const int64_t c = full_blocks * kScaleBlock; c < w.cols) {
      DotTile<V, D, kPieces, R, T>(acc, data + c, stride, x, w.cols - c, fetch);
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
// What a tile of one token is, of at most few.tokens, and of more; a path has them for a policy and the pieces of a token.
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

template <class V, class D, int kPieces, int R, int... T>
HEARTH_INLINE void LinearPart(std::integer_sequence<int, T...>, const WeightView& w, int64_t row, int64_t count, PanelPart x, float* y, int64_t ldy,
                              FetchAhead fetch) {
  static constexpr decltype(&LinearTile<V, D, kPieces, R, 1>) kTiles[] = {LinearTile<V, D, kPieces, R, T + 1>...};
  kTiles[count - 1](w, row, x, y, ldy, fetch);
}

// R rows times a panel's tokens in even parts of at most kTokens; the weights come from memory for the first part and from L1 for
// the others. `next`: the next group of rows, null if there is none; the parts share its fetching evenly.
template <class V, class D, int kPieces, int R, int kTokens>
HEARTH_INLINE void LinearRows(const WeightView& w, int64_t row, PanelPart x, int64_t m_count, float* y, int64_t ldy, const uint8_t* next) {
  const int parts = static_cast<int>((m_count + kTokens - 1) / kTokens);
  const int64_t step = CeilDiv(LineBytes<D>(), parts);
  const int64_t share = R * ColumnBytes<D>(w.row_stride) / parts;
  FetchAhead fetch =
      next != nullptr ? FetchAhead{next, step} : FetchAhead{static_cast<const uint8_t*>(w.data) + row * ColumnBytes<D>(w.row_stride), 0};
  for (int part = 0; part < parts; ++part) {
    const int64_t begin = part * m_count / parts, end = (part + 1) * m_count / parts;
    LinearPart<V, D, kPieces, R>(std::make_integer_sequence<int, kTokens>(), w, row, end - begin, {x.x + begin * kPieces * PieceBytes<D>(), x.step},
                                 y + begin * ldy, ldy, fetch);
    if (fetch.step != 0) fetch.next += share;
  }
}

// All rows times a panel of m tokens.
template <class Path, class D, int kPieces>
HEARTH_INLINE void LinearPanel(const WeightView& w, PanelPart x, int64_t m, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  using V = typename Path::V;
  constexpr TileShapes kShapes = Path::template kLinearTiles<D, kPieces>;
  const int64_t row_bytes = ColumnBytes<D>(w.row_stride);
  const auto rows = [&]<TileShape kShape>() __attribute__((always_inline)) {
    int64_t row = row_begin;
    for (; row + kShape.rows <= row_end; row += kShape.rows) {
      const bool more = w.fetch_ahead && row + 2 * kShape.rows <= row_end;
      const uint8_t* next = more ? static_cast<const uint8_t*>(w.data) + (row + kShape.rows) * row_bytes : nullptr;
      LinearRows<V, D, kPieces, kShape.rows, kShape.tokens>(w, row, x, m, y, ldy, next);
    }
    for (; row < row_end; ++row) LinearRows<V, D, kPieces, 1, kShape.tokens>(w, row, x, m, y, ldy, nullptr);
  };
  if (m == 1) {
    rows.template operator()<kShapes.one>();
  } else if (m <= kShapes.few.tokens) {
    rows.template operator()<kShapes.few>();
  } else {
    rows.template operator()<kShapes.many>();
  }
}

// In even panels, each of which reads the weights anew.
template <class Path, class D, int kTerms>
void LinearOf(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  if (m_count == 0) return;
  constexpr int64_t kPiece = kPieces<D, kTerms> * PieceBytes<D>();
  alignas(64) uint8_t panel[kPanelBytesOf<D, kTerms>];
  const int64_t steps = (w.cols + PieceColumns<D>() - 1) / PieceColumns<D>();
  const int64_t fitting = steps > 0 ? static_cast<int64_t>(sizeof(panel)) / (steps * kPiece) : m_count;
  const int64_t panels = (m_count + fitting - 1) / fitting;
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t begin = i * m_count / panels, tokens = (i + 1) * m_count / panels - begin;
    ArrangePanel<D, kTerms>(x + begin * kTerms * ldx, ldx, tokens, w.cols, panel);
    LinearPanel<Path, D, kPieces<D, kTerms>>(w, {panel, tokens * kPiece}, tokens, y + begin * ldy, ldy, row_begin, row_end);
  }
}

template <class Path, int kTerms>
void LinearInTerms(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  const auto product = [&]<class D>() { LinearOf<Path, D, kTerms>(w, x, ldx, m_count, y, ldy, row_begin, row_end); };
  switch (w.dtype) {
    case DType::kF8E4M3: return product.template operator()<typename Path::F8>();
    case DType::kBF16: return product.template operator()<typename Path::Bf16>();
    case DType::kF16: return product.template operator()<typename Path::F16>();
    case DType::kF32: return product.template operator()<typename Path::F32>();
    case DType::kQ8_0: return product.template operator()<typename Path::template Block<DType::kQ8_0>>();
    case DType::kQ6_K: return product.template operator()<typename Path::template Block<DType::kQ6_K>>();
    case DType::kQ4_K: return product.template operator()<typename Path::template Block<DType::kQ4_K>>();
    case DType::kI4G32: return product.template operator()<typename Path::template Block<DType::kI4G32>>();
    case DType::kQ5_K: return product.template operator()<typename Path::template Block<DType::kQ5_K>>();
    case DType::kQ3_K: return product.template operator()<typename Path::template Block<DType::kQ3_K>>();
    case DType::kInvalid: return;
  }
}

template <class Path>
void Linear(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, int terms, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  if (terms == 1) return LinearInTerms<Path, 1>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  LinearInTerms<Path, 2>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
}

}  // namespace
}  // namespace hearth
