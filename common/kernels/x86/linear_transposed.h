// y = x W: columns in lanes, rows ascending, eight rows per pass over y, so that weights arrive as eight streams and y
// stays in L1. A column's sum is one chain of FMAs in row order whatever the column range is. Block formats: a block of each of
// the eight rows becomes floats in L1 first. Included by the files of this folder only; see isa_local.h.
#pragma once

#include "common/kernels/kernels.h"
#include "common/kernels/x86/block_units.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

// One vector of consecutive weights as floats, 1 / kFactor of their value.
template <class V>
struct F8Lanes {
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 256.0f;
  static constexpr int kElementBytes = 1;
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::LoadF8(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadF8N(p, n); }
};
template <class V>
struct Bf16Lanes {
  static constexpr bool kScaled = false;
  static constexpr int kElementBytes = 2;
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::LoadBf16(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadBf16N(p, n); }
};
template <class V>
struct F16Lanes {
  static constexpr bool kScaled = false;
  static constexpr int kElementBytes = 2;
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::LoadF16(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadF16N(p, n); }
};
template <class V>
struct F32Lanes {
  static constexpr bool kScaled = false;
  static constexpr int kElementBytes = 4;
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::Load(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadN(p, n); }
};

// Adds rows [row, row + R) to y over the columns [c, end); FP8: within one block column.
template <class V, class L, int R>
HEARTH_INLINE void AddRows(const WeightView& w, int64_t row, const float* x, float* y, int64_t c, int64_t end, bool first) {
  const int64_t stride = w.row_stride * L::kElementBytes;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  typename V::F xs[R];
  typename V::F scale[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    xs[r] = V::Set(x[row + r]);
    if constexpr (L::kScaled) {
      const int64_t block_row = (w.scale_row0 + row + r) / kScaleBlock;
      scale[r] = V::Set(w.scales[block_row * w.scale_stride + c / kScaleBlock] * L::kFactor);
    }
  }
  const auto add = [&](typename V::F sum, int r, typename V::F weight) __attribute__((always_inline)) {
    if constexpr (L::kScaled) weight = V::Mul(weight, scale[r]);
    return V::Fma(xs[r], weight, sum);
  };
  for (; c + V::kLanes <= end; c += V::kLanes) {
    typename V::F sum = first ? V::Zero() : V::Load(y + c);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum = add(sum, r, L::Load(data + r * stride + c * L::kElementBytes));
    V::Store(y + c, sum);
  }
  if (c < end) {
    typename V::F sum = first ? V::Zero() : V::LoadN(y + c, end - c);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum = add(sum, r, L::LoadN(data + r * stride + c * L::kElementBytes, end - c));
    V::StoreN(y + c, sum, end - c);
  }
}

template <class V, class L, int R>
__attribute__((noinline)) void AddRowsOverBlocks(const WeightView& w, int64_t row, const float* x, float* y, int64_t col_begin, int64_t col_end,
                                                 bool first) {
  if constexpr (!L::kScaled) {
    AddRows<V, L, R>(w, row, x, y, col_begin, col_end, first);
  } else {
    for (int64_t c = col_begin; c < col_end;) {
      const int64_t block_end = (c / kScaleBlock + 1) * kScaleBlock;
      const int64_t end = block_end < col_end ? block_end : col_end;
      AddRows<V, L, R>(w, row, x, y, c, end, first);
      c = end;
    }
  }
}

template <class V, class L>
void LinearTransposedOf(const WeightView& w, const float* x, float* y, int64_t col_begin, int64_t col_end) {
  constexpr int kRows = 8;
  int64_t row = 0;
  for (; row + kRows <= w.rows; row += kRows) AddRowsOverBlocks<V, L, kRows>(w, row, x, y, col_begin, col_end, row == 0);
  for (; row < w.rows; ++row) AddRowsOverBlocks<V, L, 1>(w, row, x, y, col_begin, col_end, row == 0);
}

// The blocks of R rows that hold column c, added to y over [begin, end) of their columns.
template <class V, DType kDType, int R>
__attribute__((noinline)) void AddBlockOfRows(const WeightView& w, int64_t row, const float* x, float* y, int64_t c, int64_t begin, int64_t end,
                                              bool first) {
  using U = BlockUnits<kDType>;
  alignas(64) float weights[R][U::kBlock];
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + (row * w.row_stride + c) / U::kBlock * U::kBlockBytes;
  const int64_t stride = w.row_stride / U::kBlock * U::kBlockBytes;
  typename V::F xs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    DequantizeBlock<V, kDType>(data + r * stride, weights[r]);
    xs[r] = V::Set(x[row + r]);
  }
  float* out = y + c;
  int64_t i = begin;
  for (; i + V::kLanes <= end; i += V::kLanes) {
    typename V::F sum = first ? V::Zero() : V::Load(out + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum = V::Fma(xs[r], V::Load(weights[r] + i), sum);
    V::Store(out + i, sum);
  }
  if (i < end) {
    typename V::F sum = first ? V::Zero() : V::LoadN(out + i, end - i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum = V::Fma(xs[r], V::LoadN(weights[r] + i, end - i), sum);
    V::StoreN(out + i, sum, end - i);
  }
}

template <class V, DType kDType>
void LinearTransposedOfBlocks(const WeightView& w, const float* x, float* y, int64_t col_begin, int64_t col_end) {
  constexpr int64_t kBlock = BlockUnits<kDType>::kBlock;
  for (int64_t c = col_begin / kBlock * kBlock; c < col_end; c += kBlock) {
    const int64_t begin = col_begin > c ? col_begin - c : 0;
    const int64_t end = col_end - c < kBlock ? col_end - c : kBlock;
    int64_t row = 0;
    for (; row + 8 <= w.rows; row += 8) AddBlockOfRows<V, kDType, 8>(w, row, x, y, c, begin, end, row == 0);
    for (; row < w.rows; ++row) AddBlockOfRows<V, kDType, 1>(w, row, x, y, c, begin, end, row == 0);
  }
}

template <class Path>
void LinearTransposed(const WeightView& w, const float* x, float* y, int64_t col_begin, int64_t col_end) {
  using V = typename Path::V;
  if (w.rows == 0) {
    for (int64_t c = col_begin; c < col_end; ++c) y[c] = 0.0f;
    return;
  }
  switch (w.dtype) {
    case DType::kF8E4M3: return LinearTransposedOf<V, F8Lanes<V>>(w, x, y, col_begin, col_end);
    case DType::kBF16: return LinearTransposedOf<V, Bf16Lanes<V>>(w, x, y, col_begin, col_end);
    case DType::kF16: return LinearTransposedOf<V, F16Lanes<V>>(w, x, y, col_begin, col_end);
    case DType::kF32: return LinearTransposedOf<V, F32Lanes<V>>(w, x, y, col_begin, col_end);
    case DType::kQ8_0: return LinearTransposedOfBlocks<V, DType::kQ8_0>(w, x, y, col_begin, col_end);
    case DType::kQ6_K: return LinearTransposedOfBlocks<V, DType::kQ6_K>(w, x, y, col_begin, col_end);
    case DType::kQ4_K: return LinearTransposedOfBlocks<V, DType::kQ4_K>(w, x, y, col_begin, col_end);
    case DType::kI4G32: return LinearTransposedOfBlocks<V, DType::kI4G32>(w, x, y, col_begin, col_end);
    case DType::kQ5_K: return LinearTransposedOfBlocks<V, DType::kQ5_K>(w, x, y, col_begin, col_end);
    case DType::kQ3_K: return LinearTransposedOfBlocks<V, DType::kQ3_K>(w, x, y, col_begin, col_end);
    case DType::kInvalid: return;
  }
}

}  // namespace
}  // namespace hearth
