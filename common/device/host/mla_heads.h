// What both forms of latent attention do with one head: its part of kv_b, and its result.
// Room: common/device/host. May touch: common/{kernels,base}. Threads: pure functions.
#pragma once

#include "common/device/ops.h"
#include "common/kernels/kernels.h"

namespace hearth {

// One head's values of one row, into the terms of the result.
inline void StoreResult(const MlaAttentionArgs& a, const float* values, int64_t row, int64_t head) {
  bf16* high = a.out + (row * a.terms * a.heads + head) * a.v_dim;
  bf16* low = high + a.heads * a.v_dim;
  for (int64_t i = 0; i < a.v_dim; ++i) {
    high[i] = hearth::ToBf16(values[i]);
    if (a.terms > 1) low[i] = hearth::ToBf16(values[i] - ToFloat(high[i]));
  }
}

// A head's half of kv_b that gives values.
inline WeightView ValueRows(const MlaAttentionArgs& a, int64_t head) {
  return a.k_b.data == nullptr ? a.kv_b.Rows(head * (a.nope + a.v_dim) + a.nope, a.v_dim) : a.v_b.Rows(head * a.v_dim, a.v_dim);
}

}  // namespace hearth
