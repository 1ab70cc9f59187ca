// What `gemm` brings while it multiplies a tile: weights are short pieces of rows that lie kilobytes apart, which no hardware prefetcher follows, and
// filling would wait for each of them while nothing else happens.
//
// Rows often lie a multiple of 1 KiB apart, so a tile's lines share a few sets of the first-level cache, which hold 24 to 96 of the 128: they push each other
// out before they are filled from. Hence two steps: the tile after the next is fetched, which leaves it in the second-level cache at least; the next
// one, there by now, is copied side by side and filled from the copy. Fetched with a hint for the second level alone, lines are lost now and then.
// Included by gemm.h only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

// Where a tile's weights lie; no rows: there is none.
struct GemmTile {
  const uint8_t* data = nullptr;
  int64_t stride = 0;
  int64_t row_bytes = 0;
  int64_t rows = 0;
};

constexpr int kAheadPairs = 2;                              // of columns that are multiplied between two steps
constexpr int kAheadSteps = kScaleBlock / 2 / kAheadPairs;  // in a part of the tokens

HEARTH_INLINE void FetchLine(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

HEARTH_INLINE void FetchTile(const GemmTile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t b = 0; b < tile.row_bytes; b += 64) FetchLine(tile.data + r * tile.stride + b);
  }
}

// Brings a tile's rows to `stage`, for forms with a CopyLine, evenly over the products of the tile before: in one burst they would be more misses than a
// core can keep.   kStageRow: bytes of a whole tile's row
// What Step does stands between products whose sums fill the registers: so it has no loop for a tile whose rows end early, which Finish brings.
template <class G, int kStageRow>
class GemmAhead {
 public:
  GemmAhead() = default;
  // next: the tile to bring; behind: the one after it, whose rows lie as far apart; parts: of the tokens; stage: [next.rows, kStageRow]
  HEARTH_INLINE GemmAhead(const GemmTile& next, const GemmTile& behind, int64_t parts, uint8_t* stage)
      : next_(next.data),
        behind_(behind.rows > 0 ? behind.data : next.data),
        stride_(next.stride),
        row_bytes_(next.row_bytes),
        left_(next.rows),
        stage_(stage),
        rate_(next.row_bytes < kStageRow ? 0 : next.rows * kRow / (parts * kAheadSteps) + 1) {}

  HEARTH_INLINE void BeginPart(int64_t /*part*/) {}
  HEARTH_INLINE void Step() {
    for (due_ += rate_; due_ >= kRow && left_ > 0; due_ -= kRow) BringRow();
  }
  HEARTH_INLINE void Finish() {
    for (; row_bytes_ < kStageRow && left_ > 0; Advance()) {
      for (int64_t b = 0; b < row_bytes_; b += 64) G::CopyLine(stage_ + b, next_ + b, row_bytes_ - b);
      for (int64_t b = 0; b < kStageRow; b += 64) FetchLine(behind_ + b);
    }
    while (left_ > 0) BringRow();
  }

 private:
  static constexpr int64_t kRow = 1 << 16;  // due_ and rate_ are in so many parts of a row

  HEARTH_INLINE void BringRow() {
#pragma GCC unroll 4
    for (int b = 0; b < kStageRow; b += 64) FetchLine(behind_ + b);
#pragma GCC unroll 4
    for (int b = 0; b < kStageRow; b += 64) G::CopyLine(stage_ + b, next_ + b, 64);
    Advance();
  }
  HEARTH_INLINE void Advance() {
    next_ += stride_;
    behind_ += stride_;
    stage_ += kStageRow;
    --left_;
  }

  const uint8_t* next_ = nullptr;
  const uint8_t* behind_ = nullptr;
  int64_t stride_ = 0;
  int64_t row_bytes_ = 0;
  int64_t left_ = 0;
  uint8_t* stage_ = nullptr;
  int64_t rate_ = 0;
  int64_t due_ = 0;
};

// Other forms fill a tile from where it lies: the next one is fetched, 128 bytes of each row in each part until it is there.
template <class G>
class GemmAhead<G, 0> {
 public:
  GemmAhead() = default;
  HEARTH_INLINE GemmAhead(const GemmTile& next, const GemmTile& /*behind*/, int64_t /*parts*/, const uint8_t* idle) : next_(next), idle_(idle) {}

  HEARTH_INLINE void BeginPart(int64_t part) {
    const bool fetches = part * kFetched < next_.row_bytes;
    at_ = fetches ? next_.data + part * kFetched : idle_;
    stride_ = fetches ? next_.stride : 0;
  }
  HEARTH_INLINE void Step() {
    const uint8_t* at = at_;
#pragma GCC unroll 2
    for (int i = 0; i < kAheadPairs; ++i, at += stride_) {
      FetchLine(at);
      FetchLine(at + 64);
    }
    at_ = at;
  }
  HEARTH_INLINE void Finish() {}

 private:
  static constexpr int64_t kFetched = 128;

  GemmTile next_;
  const uint8_t* idle_ = nullptr;  // what is there already, read where nothing is to be fetched
  const uint8_t* at_ = nullptr;
  int64_t stride_ = 0;
};

}  // namespace
}  // namespace hearth
