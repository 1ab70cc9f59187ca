// Block formats times BF16 activations in F32 FMAs: the policy of linear.h for paths without BF16 products. A step is 32 columns, in order in
// the lanes; the products with the integers are exact. Included by the files of this folder only; see isa_local.h.
#pragma once

#include "common/kernels/kernels.h"
#include "common/kernels/x86/block_units.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

template <class V, DType kDType>
struct BlockInF32 {
  using U = BlockUnits<kDType>;
  using Acc = typename V::F;
  static constexpr bool kScaled = false;  // by blocks of 128 columns
  static constexpr int kBlock = U::kBlock;
  static constexpr int kBlockBytes = U::kBlockBytes;
  static constexpr int kSpan = kBlock;
  static constexpr int kStep = 32;
  static constexpr int kVectors = kStep / V::kLanes;
  static constexpr int kPartVectors = U::kPart / V::kLanes;

  struct Scales {
    float scale[kBlock / U::kPart];
    float min[U::kHasMin ? kBlock / U::kPart : 1];
  };
  struct W {
    typename V::F q[kVectors];
  };
  struct X {
    typename V::F x[kVectors];
    typename V::F sum;  // used with minima only
  };

  static HEARTH_INLINE void LoadScales(const uint8_t* block, Scales& out) { U::Scales(block, out.scale, out.min); }
  static HEARTH_INLINE W Load(const uint8_t* block, int step) {
    W w;
    V::WidenI8(U::Unit(block, step), w.q);
    return w;
  }
  static HEARTH_INLINE X LoadX(const bf16* p) {
    X out;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) out.x[v] = V::LoadBf16(p + v * V::kLanes);
    out.sum = out.x[0];
    if constexpr (U::kHasMin) {
#pragma GCC unroll 4
      for (int v = 1; v < kVectors; ++v) out.sum = V::Add(out.sum, out.x[v]);
    }
    return out;
  }
  static HEARTH_INLINE void Add(Acc& total, const W& w, const Scales& scales, int step, const X& x) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += kPartVectors) {
      Acc sum = V::Mul(w.q[v], x.x[v]);
#pragma GCC unroll 4
      for (int i = 1; i < kPartVectors; ++i) sum = V::Fma(w.q[v + i], x.x[v + i], sum);
      total = V::Fma(sum, V::Set(scales.scale[(step * kVectors + v) / kPartVectors]), total);
    }
    if constexpr (U::kHasMin) total = V::Fma(x.sum, V::Set(scales.min[step]), total);
  }
};

}  // namespace
}  // namespace hearth
