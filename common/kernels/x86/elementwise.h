// The kernels that walk one vector of numbers: to_bf16, rms_norm, silu_mul, axpy, max_finite, exp_sum.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vector_exp.h"

namespace hearth {
namespace {

template <class V>
void VectorToBf16(const float* src, bf16* dst, int64_t n) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::StoreBf16(dst + i, V::Load(src + i));
  if (i < n) V::StoreBf16N(dst + i, V::LoadN(src + i, n - i), n - i);
}

// The sum of squares: two chains of lanes, even and odd vectors, added at the end.
template <class V>
HEARTH_INLINE float SumOfSquares(const float* x, int64_t n) {
  typename V::F a = V::Zero();
  typename V::F b = V::Zero();
  for (int64_t i = 0; i < n; i += 2 * V::kLanes) {
    const typename V::F even = V::LoadN(x + i, n - i);
    const typename V::F odd = V::LoadN(x + i + V::kLanes, n - i - V::kLanes);
    a = V::Fma(even, even, a);
    b = V::Fma(odd, odd, b);
  }
  return V::ReduceAdd(V::Add(a, b));
}

template <class V>
void RmsNorm(const float* x, const float* weight, float eps, bf16* out, int64_t n) {
  const float mean = SumOfSquares<V>(x, n) / static_cast<float>(n);
  const float inverse = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
  const typename V::F factor = V::Set(inverse);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    V::StoreBf16(out + i, V::Mul(V::Mul(V::Load(x + i), factor), V::Load(weight + i)));
  }
  if (i < n) V::StoreBf16N(out + i, V::Mul(V::Mul(V::LoadN(x + i, n - i), factor), V::LoadN(weight + i, n - i)), n - i);
}

template <class V>
HEARTH_INLINE typename V::F Silu(typename V::F x) {
  const typename V::F one = V::Set(1.0f);
  return V::Div(x, V::Add(one, Exp<V>(V::Sub(V::Zero(), x))));
}

template <class V>
void SiluMul(const float* gate, const float* up, bf16* out, int64_t n) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::StoreBf16(out + i, V::Mul(Silu<V>(V::Load(gate + i)), V::Load(up + i)));
  if (i < n) V::StoreBf16N(out + i, V::Mul(Silu<V>(V::LoadN(gate + i, n - i)), V::LoadN(up + i, n - i)), n - i);
}

template <class V>
void Axpy(float a, const float* x, float* y, int64_t n) {
  const typename V::F factor = V::Set(a);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::Store(y + i, V::Fma(factor, V::Load(x + i), V::Load(y + i)));
  if (i < n) V::StoreN(y + i, V::Fma(factor, V::LoadN(x + i, n - i), V::LoadN(y + i, n - i)), n - i);
}

template <class V>
float MaxFinite(const float* x, int64_t n) {
  float best = x[0];
  float zero = 0;  // becomes NaN at the first x that is not finite
  int64_t i = 0;
  if (n >= V::kLanes) {
    typename V::F lanes = V::Load(x);
    typename V::F zeros = V::Zero();
    for (; i + V::kLanes <= n; i += V::kLanes) {
      const typename V::F xs = V::Load(x + i);
      lanes = V::Max(lanes, xs);
      zeros = V::Fma(xs, V::Zero(), zeros);
    }
    zero = V::ReduceAdd(zeros);
    float values[V::kLanes];
    V::Store(values, lanes);
    for (const float value : values) best = value > best ? value : best;
  }
  for (; i < n; ++i) {
    best = x[i] > best ? x[i] : best;
    zero += x[i] * 0.0f;
  }
  return best + zero;
}

template <class V>
float ExpSum(const float* x, int64_t n, float top, float factor, float* out) {
  const typename V::F tops = V::Set(top);
  const typename V::F factors = V::Set(factor);
  const auto weigh = [&](typename V::F xs) __attribute__((always_inline)) { return Exp<V>(V::Mul(V::Sub(xs, tops), factors)); };
  typename V::F sum = V::Zero();
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const typename V::F weights = weigh(V::Load(x + i));
    if (out != nullptr) V::Store(out + i, weights);
    sum = V::Add(sum, weights);
  }
  if (i == n) return V::ReduceAdd(sum);
  float tail[V::kLanes] = {};
  V::StoreN(tail, weigh(V::LoadN(x + i, n - i)), n - i);
  if (out != nullptr) V::StoreN(out + i, V::Load(tail), n - i);
  return V::ReduceAdd(V::Add(sum, V::Load(tail)));
}

}  // namespace
}  // namespace hearth
