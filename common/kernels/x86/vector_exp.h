// exp() in lanes, within about 2 ulp: 2^n times a polynomial, in one order of operations on every path.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

// exp(-inf) = 0, exp(inf) = inf, NaN stays NaN; subnormal results are rounded, not flushed.
template <class V>
HEARTH_INLINE typename V::F Exp(typename V::F x) {
  using F = typename V::F;
  // Beyond these the result is 0 and inf anyway. The argument comes second: Max and Min hand on a NaN from there.
  x = V::Min(V::Set(89.5f), V::Max(V::Set(-105.0f), x));
  const F n = V::Round(V::Mul(x, V::Set(0x1.715476p+0f)));  // log2(e)
  // x - n ln 2 with ln 2 in two parts, the first short enough that its product with n is exact.
  F r = V::Fnma(n, V::Set(0x1.62e4p-1f), x);
  r = V::Fnma(n, V::Set(0x1.7f7d1cp-20f), r);
  // |r| <= ln(2)/2: the Taylor series up to r^7/7!; the next term is below 6e-9 of the result.
  F p = V::Set(1.0f / 5040);
  p = V::Fma(p, r, V::Set(1.0f / 720));
  p = V::Fma(p, r, V::Set(1.0f / 120));
  p = V::Fma(p, r, V::Set(1.0f / 24));
  p = V::Fma(p, r, V::Set(1.0f / 6));
  p = V::Fma(p, r, V::Set(0.5f));
  p = V::Fma(p, r, V::Set(1.0f));
  p = V::Fma(p, r, V::Set(1.0f));
  return V::TimesPow2(p, n);
}

template <class V>
HEARTH_INLINE float ExpOne(float x) {
  return V::Lane0(Exp<V>(V::Set(x)));
}

}  // namespace
}  // namespace hearth
