// The roofline of one op on one device: how long each of the device's resources would be busy with it, were it alone. The op lasts as long as the
// busiest (the hierarchical roofline of [LIGHTNING] 3, for one level); what happens when several share a resource is the simulator's business.
// Room: common/roofline. May touch: common/{device,base}. Threads: any; pure functions.
#pragma once

#include <algorithm>

#include "common/device/op_cost.h"
#include "common/roofline/hardware_profile.h"

namespace hearth {

struct OpTime {
  double fixed_s = 0;    // nothing is busy: launch, hand-over
  double compute_s = 0;  // tensor units, or cores
  double memory_s = 0;   // HBM, or DRAM of all sockets
  double asking_s = 0;   // of a CPU: the cores' ways to DRAM
  double Alone() const { return fixed_s + std::max({compute_s, memory_s, asking_s}); }
};

// On a GPU, all operands in its memory.
OpTime TimeOnGpu(const GpuProfile& gpu, const OpCost& cost);
// On all sockets together, weights and KV in DRAM and spread evenly. Activations cost traffic only where they don't fit into the caches.
OpTime TimeOnCpu(const CpuProfile& cpu, const OpCost& cost);
// A copy over a GPU's link, one way.
double SecondsOnLink(const GpuProfile& gpu, double bytes);

}  // namespace hearth
