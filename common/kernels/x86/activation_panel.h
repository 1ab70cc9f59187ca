// The activations of a `linear` call, put in the order of its weights once for all rows: a panel of some tokens, [step of columns][token][term], each
// piece as the dot policy wants its vectors, zeros behind the last column. So a tile walks it in one ascending line, whatever the rows of x are aligned
// to, and no tile moves lanes or widens numbers again.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

// The policies of block formats.
template <class D>
concept BlockPolicy = requires {
  D::kBlock;
};

// Columns of a piece.
template <class D>
constexpr int PieceColumns() {
  if constexpr (BlockPolicy<D>) {
    return D::kSpan;
  } else {
    return D::kStep;
  }
}
template <class D>
constexpr int PieceBytes() {
  if constexpr (BlockPolicy<D>) {
    return D::kSpanX * static_cast<int>(sizeof(bf16));
  } else {
    return static_cast<int>(sizeof(typename D::X));
  }
}
// Pieces of a token, of activations in kTerms terms.
template <class D, int kTerms>
constexpr int kPieces = D::kSumsTerms ? 1 : kTerms;

// A panel lies on the caller's stack and should stay in L2 beside the weights that pass, which are read anew for each panel: eight tokens in two terms of
// the widest matrices there are (16384 to 18432 columns) fit, or one row of the longest.
constexpr int64_t kPanelBytes = 576 << 10;
template <class D, int kTerms>
constexpr int64_t kPanelBytesOf = [] {
  constexpr int64_t kRow = (kRowColumnsMax + PieceColumns<D>() - 1) / PieceColumns<D>() * PieceBytes<D>() * kPieces<D, kTerms>;
  return kRow > kPanelBytes ? kRow : kPanelBytes;
}();

// One token's piece of all terms, from whole columns.   x: terms ldx apart
template <class D, int kTerms>
HEARTH_INLINE void ArrangePiece(const bf16* x, int64_t ldx, uint8_t* out) {
  if constexpr (BlockPolicy<D>) {
    if constexpr (D::kSumsTerms) {
      D::ArrangeX(x, kTerms > 1 ? x + ldx : nullptr, reinterpret_cast<bf16*>(out));
    } else {
#pragma GCC unroll 2
      for (int term = 0; term < kTerms; ++term) D::ArrangeX(x + term * ldx, reinterpret_cast<bf16*>(out + term * PieceBytes<D>()));
    }
  } else {
#pragma GCC unroll 2
    for (int piece = 0; piece < kPieces<D, kTerms>; ++piece) {
      typename D::X vectors = D::LoadX(x + piece * ldx);
      if constexpr (D::kSumsTerms && kTerms > 1) {
        const typename D::X low = D::LoadX(x + ldx);
#pragma GCC unroll 4
        for (int v = 0; v < D::kVectors; ++v) vectors.v[v] = D::Add(vectors.v[v], low.v[v]);
      }
      __builtin_memcpy(out + piece * PieceBytes<D>(), &vectors, sizeof(vectors));
    }
  }
}

// x [tokens, kTerms, cols], rows ldx apart
template <class D, int kTerms>
void ArrangePanel(const bf16* x, int64_t ldx, int64_t tokens, int64_t cols, uint8_t* out) {
  constexpr int kColumns = PieceColumns<D>();
  for (int64_t c = 0; c < cols; c += kColumns) {
    const int64_t left = cols - c;
    for (int64_t t = 0; t < tokens; ++t, out += kPieces<D, kTerms> * PieceBytes<D>()) {
      const bf16* from = x + t * kTerms * ldx + c;
      if (left >= kColumns) {
        ArrangePiece<D, kTerms>(from, ldx, out);
        continue;
      }
      alignas(64) uint8_t rest[kTerms][kColumns * sizeof(bf16)] = {};
      for (int term = 0; term < kTerms; ++term) __builtin_memcpy(rest[term], from + term * ldx, static_cast<size_t>(left) * sizeof(bf16));
      ArrangePiece<D, kTerms>(reinterpret_cast<const bf16*>(rest[0]), kColumns, out);
    }
  }
}

}  // namespace
}  // namespace hearth
