// Ideas for the decode kernel's FP8 product with one token, to be measured beside the product's own: bench/kernel_lab.
// Room: common/kernels, benches only. All are exact; Rows(...) of an entry computes y[r] for rows [begin, end) of w, one token.
#pragma once

#include <cstdint>

#include "common/kernels/kernels.h"

namespace hearth {

struct LabEntry {
  const char* name;
  void (*rows)(const WeightView& w, const bf16* x, float* y, int64_t begin, int64_t end);
};

// For CPUs with the avx512bf16 path; the caller has checked. A plain constant, so that naming it runs no code of its file.
constexpr int kNumLabEntries = 5;
extern const LabEntry kLabEntries[kNumLabEntries];

}  // namespace hearth
