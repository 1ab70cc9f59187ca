// Collectives of simulated GPUs: what crosses takes the sender's link out, host memory and the receiver's link in, all shared with whatever else uses them.
// Room: common/sim. May touch: common/{device,base}. Threads: one actor a rank; see sim_engine.h.
//
// Nothing is brought but what steers. A call goes on once all ranks have made it (no rank's thread runs ahead of the others by more than a call), its
// transfers begin when every rank's stream has come there and end together, as the slowest does.
#pragma once

#include <memory>
#include <vector>

#include "common/device/collectives.h"
#include "common/sim/sim_device.h"

namespace hearth {

// By rank. `gpus` are of that world and outlive the group.
std::vector<std::unique_ptr<Collectives>> MakeSimGroup(std::shared_ptr<SimShared> world, const std::vector<Device*>& gpus);

}  // namespace hearth
