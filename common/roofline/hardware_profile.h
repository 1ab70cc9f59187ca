// What a machine can do, as a TOML file says it: sockets, cores and DRAM; GPUs with their memory, arithmetic and links; and which share of each the
// kernels reach. The simulator and `hearth plan` calculate with it; `hearth probe` writes one by measuring; deploy/hardware/ has some.
// Room: common/roofline. May touch: common/{device,kernels,base}. Threads: any; a plain value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/status.h"

namespace hearth {

struct CpuProfile {
  std::string name;
  int64_t sockets = 0;  // all alike, each with memory of its own
  // Of one socket:
  int64_t cores = 0;
  int64_t channels = 0;
  double memory_gib = 0;
  double cache_mib = 0;  // last level: activations that fit into it cost no DRAM traffic

  double channel_gb_per_s = 0;      // DDR5-6400: 6.4e9 transfers of 8 bytes = 51.2
  double core_gb_per_s = 0;         // what a core asks of DRAM, were that without limit and all others reading, too
  double bf16_gflops_per_core = 0;  // VDPBF16PS on registers
  double memory_efficiency = 0;     // share of the channels' rate that the expert kernels reach
  double compute_efficiency = 0;    // share of the cores' rate that matrix products reach
  double op_us = 0;                 // to hand an op to all cores and to gather them again

  double MemoryBytes() const { return static_cast<double>(sockets) * memory_gib * 1073741824.0; }
  double CacheBytes() const { return static_cast<double>(sockets) * cache_mib * 1048576.0; }
  // Of all sockets together, as reached.
  double BytesPerSecond() const { return static_cast<double>(sockets * channels) * channel_gb_per_s * 1e9 * memory_efficiency; }
  // As asked for by all cores: what they get is BytesPerSecond at most.
  double AskedBytesPerSecond() const { return static_cast<double>(sockets * cores) * core_gb_per_s * 1e9; }
  double FlopsPerSecond() const { return static_cast<double>(sockets * cores) * bf16_gflops_per_core * 1e9 * compute_efficiency; }
};

struct GpuProfile {
  std::string name;
  double memory_gib = 0;
  double memory_gb_per_s = 0;
  double bf16_tflops = 0;    // dense, F32 accumulation: activations are BF16 whatever the weights are (DESIGN section 7)
  double link_gb_per_s = 0;  // to the host's memory, each way, as reached by large copies
  double link_us = 0;        // of a small copy, from its issue to its end
  double memory_efficiency = 0;
  double compute_efficiency = 0;
  double op_us = 0;       // what an op takes beside its traffic and arithmetic: launch, ramp, the kernels that one op stands for
  double enqueue_us = 0;  // of the thread that enqueues

  double MemoryBytes() const { return memory_gib * 1073741824.0; }
  double BytesPerSecond() const { return memory_gb_per_s * 1e9 * memory_efficiency; }
  double FlopsPerSecond() const { return bf16_tflops * 1e12 * compute_efficiency; }
  double LinkBytesPerSecond() const { return link_gb_per_s * 1e9; }
};

struct HardwareProfile {
  std::string name;
  std::string source;  // where the numbers come from, for people
  CpuProfile cpu;
  int64_t num_gpus = 0;  // all alike
  GpuProfile gpu;
};

// Errors: InvalidArgument with "file:line: key: what is wrong, what is wanted"; every key is required, but for the table [gpu] as a whole.
absl::StatusOr<HardwareProfile> ParseHardwareProfile(std::string_view toml_text, std::string_view source_path);
// As ParseHardwareProfile reads it.
std::string FormatHardwareProfile(const HardwareProfile& profile);

// Changes one thing: "gpus=1", "pcie=4" (generation, x16), "vram=16GB", "sockets=1", "channels=8" (of all sockets together), "cores=16" (likewise).
// Errors: InvalidArgument lists what there is.
absl::Status ApplyWhatIf(std::string_view change, HardwareProfile& profile);

}  // namespace hearth
