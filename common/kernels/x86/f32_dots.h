// How weights of each precision meet BF16 activations in F32 FMAs: the dot policies of linear.h for paths without BF16
// products. A policy says how one step of a row is loaded, how the tail is, in which vectors, and how a vector of weights and one of activations add to an
// accumulator. Activations of two terms are added up first (kSumsTerms), which is exact for terms that split an F32 number. Where it is cheaper, weights and activations are both split into even and odd elements; which lane an element goes to depends
// on its column alone. `kFactor` is what the policy owes to the block's scale. Included by the files of this folder
// only; see isa_local.h.
#pragma once

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

// The weights are 2^-8 times their value (Vec512::EvenF8), the block's scale makes it good: exact, unless a product is
// below 2^-118 in magnitude.
template <class V>
struct F8InF32 {
  using Acc = typename V::F;
  using Vector = typename V::F;
  static constexpr bool kScaled = true;
  static constexpr bool kSumsTerms = true;
  static constexpr float kFactor = 256.0f;
  static constexpr int kElementBytes = 1;
  static constexpr int kStep = V::kBytes;
  static constexpr int kVectors = 4;

  // The lower half of the even elements, of the odd ones, the upper halves.
  struct W {
    Vector v[kVectors];
  };
  using X = W;

  static HEARTH_INLINE W Load(const uint8_t* p) { return Split(V::LoadBytes(p)); }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return Split(V::LoadBytesN(p, n)); }
  static HEARTH_INLINE X LoadX(const bf16* p) { return SplitX(V::LoadBytes(p), V::LoadBytes(p + kStep / 2)); }
  static HEARTH_INLINE X LoadXN(const bf16* p, int64_t n) { return SplitX(V::LoadBytesN(p, 2 * n), V::LoadBytesN(p + kStep / 2, 2 * n - V::kBytes)); }
  static HEARTH_INLINE Vector Add(Vector a, Vector b) { return V::Add(a, b); }
  static HEARTH_INLINE void Dot(Acc& acc, Vector w, Vector x) { acc = V::Fma(w, x, acc); }

 private:
  static HEARTH_INLINE W Split(typename V::I codes) {
    const typename V::I even = V::EvenF8(codes);
    const typename V::I odd = V::OddF8(codes);
    return {{V::LowF16(even), V::LowF16(odd), V::HighF16(even), V::HighF16(odd)}};
  }
  static HEARTH_INLINE X SplitX(typename V::I low, typename V::I high) {
    return {{V::EvenBf16(low), V::OddBf16(low), V::EvenBf16(high), V::OddBf16(high)}};
  }
};

// What the unscaled policies share: a step is two vectors of floats.
template <class V>
struct UnscaledInF32 {
  using Acc = typename V::F;
  using Vector = typename V::F;
  static constexpr bool kScaled = false;
  static constexpr bool kSumsTerms = true;
  static constexpr float kFactor = 1.0f;
  static constexpr int kStep = 2 * V::kLanes;
  static constexpr int kVectors = 2;

  struct W {
    Vector v[kVectors];
  };
  using X = W;

  static HEARTH_INLINE Vector Add(Vector a, Vector b) { return V::Add(a, b); }
  static HEARTH_INLINE void Dot(Acc& acc, Vector w, Vector x) { acc = V::Fma(w, x, acc); }
};

template <class V>
struct Bf16InF32 : UnscaledInF32<V> {
  using typename UnscaledInF32<V>::W;
  using typename UnscaledInF32<V>::X;
  static constexpr int kElementBytes = 2;
  static HEARTH_INLINE W Load(const uint8_t* p) { return Split(V::LoadBytes(p)); }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return Split(V::LoadBytesN(p, 2 * n)); }
  static HEARTH_INLINE X LoadX(const bf16* p) { return Split(V::LoadBytes(p)); }
  static HEARTH_INLINE X LoadXN(const bf16* p, int64_t n) { return Split(V::LoadBytesN(p, 2 * n)); }

 private:
  static HEARTH_INLINE W Split(typename V::I x) { return {{V::EvenBf16(x), V::OddBf16(x)}}; }
};

template <class V>
struct ContiguousInF32 : UnscaledInF32<V> {
  using typename UnscaledInF32<V>::X;
  static HEARTH_INLINE X LoadX(const bf16* p) { return {{V::LoadBf16(p), V::LoadBf16(p + V::kLanes)}}; }
  static HEARTH_INLINE X LoadXN(const bf16* p, int64_t n) { return {{V::LoadBf16N(p, n), V::LoadBf16N(p + V::kLanes, n - V::kLanes)}}; }
};

template <class V>
struct F16InF32 : ContiguousInF32<V> {
  using typename UnscaledInF32<V>::W;
  static constexpr int kElementBytes = 2;
  static HEARTH_INLINE W Load(const uint8_t* p) { return {{V::LoadF16(p), V::LoadF16(p + 2 * V::kLanes)}}; }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return {{V::LoadF16N(p, n), V::LoadF16N(p + 2 * V::kLanes, n - V::kLanes)}}; }
};

template <class V>
struct F32InF32 : ContiguousInF32<V> {
  using typename UnscaledInF32<V>::W;
  static constexpr int kElementBytes = 4;
  static HEARTH_INLINE W Load(const uint8_t* p) { return {{V::Load(p), V::Load(p + 4 * V::kLanes)}}; }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return {{V::LoadN(p, n), V::LoadN(p + 4 * V::kLanes, n - V::kLanes)}}; }
};

}  // namespace
}  // namespace hearth
