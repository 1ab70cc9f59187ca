// A device whose ops ask before they start: the same streams, memory and bits, but each op is shown to a gate first, which may hold it back while
// somebody else needs the cores (DESIGN 4.7). Products with weights, the longest ops of a pass, are divided where the gate says so. For devices that run an op before the enqueueing call returns, as the host does.
// Room: common/device. May touch: common/{kernels,shm,base}. Threads: as Device; the gate is called from every thread that enqueues.
#pragma once

#include <cstdint>
#include <memory>

#include "common/device/device.h"
#include "common/device/op_cost.h"

namespace hearth {

class OpGate {
 public:
  virtual ~OpGate() = default;
  // Returns when an op of this kind and cost may start, what it is expected to take.
  virtual void Before(int kind, const OpCost& cost) = 0;
  // The op ran for so long.
  virtual void After(int kind, const OpCost& cost, int64_t ns) = 0;
  // In how many parts an op that can be divided is best run now, so that none is long; 1: whole.
  virtual int64_t Parts(int kind, const OpCost& cost) = 0;
};
// Kinds are numbers below this, one for each call of Ops.
inline constexpr int kOpKinds = 32;

// Both outlive it.
std::unique_ptr<Device> GateOps(Device& device, OpGate& gate);

}  // namespace hearth
