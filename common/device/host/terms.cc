#include "common/device/host/terms.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace hearth {
namespace {

inline void Split(float value, bf16& high, bf16& low) {
  high = ToBf16(value);
  low = ToBf16(value - ToFloat(high));
}

// Sum of squares in double, in four interleaved partial sums: one order, whatever the batch.
double SumOfSquares(const float* x, int64_t n) {
  double partial[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) partial[j] += static_cast<double>(x[i + j]) * x[i + j];
  }
  for (int j = 0; i < n; ++i, ++j) partial[j] += static_cast<double>(x[i]) * x[i];
  return (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

// exp(x) for |x| <= 80 to about 1e-7 relative: basic operations only, so the same bits everywhere. 2^n times the Taylor series of the rest, |r| <= 0.35.
inline float ExpInRange(float x) {
  constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const double scaled = x * 0x1.71547652b82fep+0 + kRound;
  const double n = scaled - kRound;
  const double r = x - n * 0x1.62e42fefa39efp-1;
  const double series = 1 + r * (1 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040)))))));
  const uint64_t power = (std::bit_cast<uint64_t>(scaled) + 1023) << 52;
  return static_cast<float>(series * std::bit_cast<double>(power));
}

}  // namespace

void SplitTerms(const KernelTable& kernels, const float* x, int64_t n, int terms, bf16* out) {
  if (terms == 1) {
    kernels.to_bf16(x, out, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) Split(x[i], out[i], out[n + i]);
}

float RmsScale(const float* x, int64_t n, float eps) {
  return static_cast<float>(1.0 / std::sqrt(SumOfSquares(x, n) / static_cast<double>(n) + eps));
}

void NormF32(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const float scale = RmsScale(x, n, eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void NormTerms(const KernelTable& kernels, const float* x, const float* weight, float eps, int64_t n, int terms, bf16* out, int64_t stride) {
  if (terms == 1) {
    kernels.rms_norm(x, weight, eps, out, n);
    return;
  }
  const float scale = RmsScale(x, n, eps);
  for (int64_t i = 0; i < n; ++i) Split(x[i] * scale * weight[i], out[i], out[stride + i]);
}

void SiluMulTerms(const KernelTable& kernels, const float* gate, const float* up, int64_t n, int terms, bf16* out, int64_t stride) {
  if (terms == 1) {
    kernels.silu_mul(gate, up, out, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    // Beyond 80 the result is the gate itself, or 0, to F32.
    const float bounded = std::min(std::max(-gate[i], -80.0f), 80.0f);
    Split(gate[i] / (1.0f + ExpInRange(bounded)) * up[i], out[i], out[stride + i]);
  }
}

void LinearTerms(const KernelTable& kernels, Form form, const WeightView& w, const bf16* x, int64_t ldx, int64_t tokens, int terms, float* y,
                 int64_t ldy, int64_t row_begin, int64_t row_end, float* scratch) {
  if (form == Form::kDecode) return kernels.linear(w, x, ldx, tokens, terms, y, ldy, row_begin, row_end);
  if (terms == 1) return kernels.gemm(w, x, ldx, tokens, y, ldy, row_begin, row_end);
  const int64_t rows = row_end - row_begin;
  kernels.gemm(w.Rows(row_begin, rows), x, ldx, tokens * terms, scratch, rows, 0, rows);
  for (int64_t m = 0; m < tokens; ++m) {
    const float* high = scratch + m * terms * rows;
    float* out = y + m * ldy + row_begin;
    for (int64_t r = 0; r < rows; ++r) out[r] = high[r] + high[rows + r];
  }
}

}  // namespace hearth
