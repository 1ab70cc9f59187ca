// A machine of round numbers, for tests that say what must come out.
// Room: common/sim/testing. Threads: any.
#pragma once

#include "common/roofline/hardware_profile.h"

namespace hearth {

// Round numbers: DRAM 100 GB/s, links 10 GB/s, GPU memory 1 TB/s and 100 TFLOPS; nothing but traffic and arithmetic takes time.
inline HardwareProfile RoundMachine() {
  HardwareProfile p{.name = "round"};
  p.cpu = {.name = "cpu", .sockets = 2, .cores = 10, .channels = 5, .memory_gib = 100, .cache_mib = 0, .channel_gb_per_s = 10};
  p.cpu.core_gb_per_s = 10;
  p.cpu.bf16_gflops_per_core = 50;
  p.cpu.memory_efficiency = p.cpu.compute_efficiency = 1;
  p.num_gpus = 2;
  p.gpu = {.name = "gpu", .memory_gib = 1, .memory_gb_per_s = 1000, .bf16_tflops = 100, .link_gb_per_s = 10};
  p.gpu.memory_efficiency = p.gpu.compute_efficiency = 1;
  return p;
}

}  // namespace hearth
