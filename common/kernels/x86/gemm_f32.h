// The prefill form's product in F32 FMAs (see gemm.h), for weights of any plain precision, on paths without BF16 products and for what those don't take.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include <cstring>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/gemm.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"

namespace hearth {
namespace {

// One vector of a row's weights as floats; LoadN: its first n, the rest zero.
template <class V>
struct F8Floats {
  static constexpr int kElementBytes = 1;
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 256.0f;  // see F8InF32
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::LoadF8(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadF8N(p, n); }
};
template <class V, int kBytes>
struct PlainFloats {
  static constexpr int kElementBytes = kBytes;
  static constexpr bool kScaled = false;
  static constexpr float kFactor = 1.0f;
};
template <class V>
struct Bf16Floats : PlainFloats<V, 2> {
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::LoadBf16(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadBf16N(p, n); }
};
template <class V>
struct F16Floats : PlainFloats<V, 2> {
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::LoadF16(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadF16N(p, n); }
};
template <class V>
struct F32Floats : PlainFloats<V, 4> {
  static HEARTH_INLINE typename V::F Load(const uint8_t* p) { return V::Load(p); }
  static HEARTH_INLINE typename V::F LoadN(const uint8_t* p, int64_t n) { return V::LoadN(p, n); }
};

template <class Path>
struct F32Form {
  using V = typename Path::V;
  static constexpr int kVectors = Path::kGemmVectors;
  static constexpr int kAtOnce = Path::kGemmTokensAtOnce;

  // [column][vector of rows][row]. 32 KiB with sixteen lanes, 8 KiB with eight.
  struct Tile {
    alignas(64) float columns[kScaleBlock][kVectors][V::kLanes];
  };

  template <class P>
  static __attribute__((noinline)) void Fill(Tile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t begin, int64_t cols) {
    for (int64_t c = 0; c < kScaleBlock; c += V::kLanes) {
      typename V::F square[V::kLanes];
      const uint8_t* p = data + (begin + c) * P::kElementBytes;
      if (rows >= V::kLanes && cols - c >= V::kLanes) {
#pragma GCC unroll 16
        for (int r = 0; r < V::kLanes; ++r) square[r] = P::Load(p + r * stride);
      } else {
        for (int r = 0; r < V::kLanes; ++r) square[r] = r < rows && c < cols ? P::LoadN(p + r * stride, cols - c) : V::Zero();
      }
      V::Transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < V::kLanes; ++i) V::Store(tile.columns[c + i][v], square[i]);
    }
  }

  template <int N, int T>
  static HEARTH_INLINE void Step(typename V::F (&acc)[N][T], const Tile& tile, int p, const bf16* x, int64_t ldx) {
    typename V::I pairs[T];
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      int32_t pair;
      std::memcpy(&pair, x + t * ldx, sizeof(pair));
      pairs[t] = V::SetInt(pair);
    }
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      typename V::F w[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) w[v] = V::Load(tile.columns[2 * p + odd][v]);
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        const typename V::F one = odd ? V::OddBf16(pairs[t]) : V::EvenBf16(pairs[t]);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) acc[v][t] = V::Fma(w[v], one, acc[v][t]);
      }
    }
  }
};

template <class Path>
void GemmInF32(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  using G = F32Form<Path>;
  using V = typename Path::V;
  switch (w.dtype) {
    case DType::kF8E4M3: return GemmOf<G, F8Floats<V>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kBF16: return GemmOf<G, Bf16Floats<V>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kF16: return GemmOf<G, F16Floats<V>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kF32: return GemmOf<G, F32Floats<V>>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    default: return Linear<Path>(w, x, ldx, m_count, 1, y, ldy, row_begin, row_end);
  }
}

}  // namespace
}  // namespace hearth
