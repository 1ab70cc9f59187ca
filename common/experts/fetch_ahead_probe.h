// Whether fetching weights ahead in software pays on this machine: measured on the machine's own image, by the very op that is to run, before work begins.
// Room: common/experts. May touch: common/{device,kernels,shm,base}. Threads: one, while nobody else uses the device's ops.
#pragma once

#include <cstdint>
#include <string>

#include "common/device/host/host_device.h"
#include "common/experts/expert_source.h"

namespace hearth {

struct FetchAheadProbe {
  bool on = true;                            // what the device was set to
  double on_gb_per_s = 0, off_gb_per_s = 0;  // medians; 0: not measured
  std::string note;                          // why it was not measured

  // "on (34.1 against 28.0 GB/s)", "off (30.2 against 27.7 GB/s)", "on (not measured: ...)"
  std::string ToString() const;
};

// Runs a layer's experts in decode form, top_k at a time, with and without in turn, until budget_ns is used up, and sets the device to the faster.
//   shape   hidden, intermediate, num_experts, top_k, layer, num_shards, weight_dtype of the layer; the rest is filled in
// Not measured where all of the layer's experts fit into caches, or where an op failed.
FetchAheadProbe ProbeFetchAhead(HostDevice& device, ExpertSource& source, ExpertsArgs shape, int64_t budget_ns);

}  // namespace hearth
