// Measures this machine and says it as a hardware profile.
// Room: common/roofline. May touch: common/{device,kernels,numa,base}. Threads: one caller, while the machine has little else to do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/roofline/hardware_profile.h"

namespace hearth {

struct ProbeReport {
  HardwareProfile profile;                            // without GPUs: those are not measured
  std::vector<std::pair<int, double>> read_gb_per_s;  // by threads: plain reads of memory that no cache holds
  double gemv_gb_per_s = 0;                           // an FP8 matrix by one row, as decode does it
  double gemm_gflops = 0;                             // the same matrix by many rows, as prefill does it
  double peak_gflops = 0;                             // VDPBF16PS on registers, all cores; 0 where the CPU lacks it
  double op_us = 0;                                   // an op without work, on all cores
};

// Takes a few seconds and at most a quarter of the free memory. threads 0, or more than that: as many as this process may run on; `profile.source` says
// how many it were.
// Errors: ResourceExhausted when there is too little memory to measure it.
absl::StatusOr<ProbeReport> ProbeThisMachine(int threads);

}  // namespace hearth
