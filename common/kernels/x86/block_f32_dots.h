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
  static constexpr bool kSumsTerms = true;
  static constexpr int kBlock = U::kBlock;
  static constexpr int kBlockBytes = U::kBlockBytes;
  static constexpr int kSpan = kBlock;
  static constexpr int kStep = 32;
  static constexpr int kVectors = kStep / V::kLanes;
  static constexpr int kStepX = (kStep + (U::kHasMin ? V::kLanes : 0)) * static_cast<int>(sizeof(float) / sizeof(bf16));
  static constexpr int kSpanX = kSpan / kStep * kStepX;
  static constexpr int kPartVectors = U::kPart / V::kLanes;

  struct Scales {
    float scale[kBlock / U::kPart];
    float min[U::kHasMin ? kBlock / U::kPart : 1];
  };
  struct W {
    typename V::F q[kVectors];
  };
  static HEARTH_INLINE void LoadScales(const uint8_t* block, Scales& out) { U::Scales(block, out.scale, out.min); }
  static HEARTH_INLINE W Load(const uint8_t* block, const Scales&, int step) {
    W w;
    V::WidenI8(U::Unit(block, step), w.q);
    return w;
  }
  // Each step's activations as floats, `low` (if there is one) added to x; then, with minima, their sum in lanes.
  static HEARTH_INLINE void ArrangeX(const bf16* x, const bf16* low, bf16* out) {
#pragma GCC unroll 8
    for (int step = 0; step < kSpan / kStep; ++step) {
      float* const to = reinterpret_cast<float*>(out + step * kStepX);
      typename V::F sum = V::Zero();
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int at = step * kStep + v * V::kLanes;
        typename V::F floats = V::LoadBf16(x + at);
        if (low != nullptr) floats = V::Add(floats, V::LoadBf16(low + at));
        V::Store(to + v * V::kLanes, floats);
        sum = V::Add(sum, floats);
      }
      if constexpr (U::kHasMin) V::Store(to + kStep, sum);
    }
  }
  static HEARTH_INLINE void Add(Acc& total, const W& w, const Scales& scales, int step, const bf16* arranged) {
    const float* const x = reinterpret_cast<const float*>(arranged + step * kStepX);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += kPartVectors) {
      Acc sum = V::Mul(w.q[v], V::Load(x + v * V::kLanes));
#pragma GCC unroll 4
      for (int i = 1; i < kPartVectors; ++i) sum = V::Fma(w.q[v + i], V::Load(x + (v + i) * V::kLanes), sum);
      total = V::Fma(sum, V::Set(scales.scale[(step * kVectors + v) / kPartVectors]), total);
    }
    if constexpr (U::kHasMin) total = V::Fma(V::Load(x + kStep), V::Set(scales.min[step]), total);
  }
  static HEARTH_INLINE void Finish(Acc&, const Scales&, const bf16*) {}
};

}  // namespace
}  // namespace hearth
