// Activations as sums of BF16 terms. One term is the plain form: 8 bits of mantissa. Two terms, x = high + low, hold 16, so a product sees its input
// nearly as F32 holds it: the decode form's kernel takes both into one sum; the prefill form's is given both as rows of their own, and the two products
// are added.
// Why: rounding inputs and KV is what moves logits (by 0.01 on average for fable-moe, 0.00001 with two terms) and, through them, near-ties of the gate.
// Weights are read once either way.
// Room: common/device/host. May touch: common/{device,kernels,base}. Threads: any. Layout: [tokens, terms, n], a token's terms beside each other.
#pragma once

#include <cstdint>

#include "common/base/dtype.h"
#include "common/device/host/scratch.h"
#include "common/device/ops.h"
#include "common/kernels/kernels.h"

namespace hearth {

// out [terms, n] of x [n].
void SplitTerms(const KernelTable& kernels, const float* x, int64_t n, int terms, bf16* out);
// 1 / sqrt(mean of squares + eps), the sum in double, in one order.
float RmsScale(const float* x, int64_t n, float eps);
// RMSNorm in F32.   out [n]
void NormF32(const float* x, const float* weight, float eps, int64_t n, float* out);
// The same, then split: `stride` elements lie between a token's terms.
void NormTerms(const KernelTable& kernels, const float* x, const float* weight, float eps, int64_t n, int terms, bf16* out, int64_t stride);
// silu(gate) * up, then split: `stride` elements lie between a token's terms.
void SiluMulTerms(const KernelTable& kernels, const float* gate, const float* up, int64_t n, int terms, bf16* out, int64_t stride);

// Scratch that LinearTerms takes for so many tokens and rows, in floats.
inline int64_t LinearTermsScratch(Form form, int64_t tokens, int64_t rows, int terms) {
  return form == Form::kDecode || terms == 1 ? 0 : tokens * terms * rows;
}
// y[m, r] = sum over terms of x[m, term] . w[r], for r in [row_begin, row_end), by the form's kernel.
//   x [tokens, terms, cols], `ldx` between terms; y as the kernel has it
void LinearTerms(const KernelTable& kernels, Form form, const WeightView& w, const bf16* x, int64_t ldx, int64_t tokens, int terms, float* y,
                 int64_t ldy, int64_t row_begin, int64_t row_end, float* scratch);

}  // namespace hearth
