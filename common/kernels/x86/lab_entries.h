// Ideas for the decode kernel's FP8 product, to be measured beside the product's own: bench/kernel_lab.
// Room: common/kernels, benches only. All are exact, and for FP8 weights only.
#pragma once

#include <cstdint>

#include "common/kernels/kernels.h"

namespace hearth {

struct LabEntry {
  const char* name;
  LinearKernel* linear;
};

// For CPUs with the avx512bf16 path; the caller has checked. A plain constant, so that naming it runs no code of its file.
constexpr int kNumLabEntries = 8;
extern const LabEntry kLabEntries[kNumLabEntries];

}  // namespace hearth
