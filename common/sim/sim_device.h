// One device of a SimWorld: the Device seam on top of the engine. Contract: sim_world.h.
// Room: common/sim. Threads: see sim_engine.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/device/device.h"
#include "common/roofline/hardware_profile.h"
#include "common/sim/seeded_gate.h"
#include "common/sim/sim_engine.h"
#include "common/sim/sim_world.h"

namespace hearth {

// What all devices of a world have in common.
struct SimShared {
  HardwareProfile hardware;
  SimOptions options;
  SimEngine engine;
  SeededGate gate;
  int dram, cores, core_reads;  // resources
  int expert_track;             // of the timeline: what the CPU does for the GPUs

  SimShared(const HardwareProfile& profile, const SimOptions& with);
};

// `gpu` < 0: the CPU.
std::unique_ptr<Device> MakeSimDevice(std::shared_ptr<SimShared> world, int64_t gpu);

}  // namespace hearth
