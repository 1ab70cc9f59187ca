// A machine in virtual time: its CPU and its GPUs as Devices on one clock, which share its memory and links. Ops take the time that the roofline gives
// them and compute nothing, so an engine written against the Device seam runs here as it is, at the scale of any machine and model.
// Room: common/sim. May touch: common/{roofline,device,experts,kernels,shm,base}. Threads: those of sim_engine.h; one world is one simulation.
//
// What an op uses: on a GPU its arithmetic and its memory; on the CPU all cores and DRAM, weights spread evenly over the sockets; a copy its direction of
// the link, DRAM, and the GPU's memory. On a GPU the Experts op is CPU work between two small copies, and runs beside its stream: a later op waits for it
// once it names the output, as do Synchronize and Record. So the shared expert is computed meanwhile ([SLO] 3.4).
// Enqueueing returns at once, at the GPU's enqueue_us; on the CPU device, too, where a host device would run the op first.
// Memory is address space: buffers read as zeros and take up what is really written. ToHost copies, ToDevice does not: nobody computes with weights.
// The gate's choices are drawn at enqueueing, since they alone steer what an engine does next.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/device/collectives.h"
#include "common/device/device.h"
#include "common/roofline/hardware_profile.h"
#include "common/trace/timeline.h"

namespace hearth {

struct SimOptions {
  uint64_t seed = 1;
  // Experts are chosen with probabilities proportional to 1 / rank^skew; 0: all alike.
  double routing_skew = 0;
  // Of a decode step, rows that chose the same expert read it once. False: each row reads its own eight, one row after the other.
  bool experts_shared = true;
  DType kv_dtype = DType::kBF16;
  bool record = false;  // keep the timeline
};

// How much of it was used, up to now.
struct ResourceUse {
  std::string name;  // "dram", "gpu 0 link in"
  double busy_seconds = 0;
};

class SimWorld {
 public:
  static std::unique_ptr<SimWorld> Make(const HardwareProfile& hardware, const SimOptions& options);
  virtual ~SimWorld() = default;
  // Keeps the calling thread, and the actors made by it from now on, on the CPU where it is: of a world's actors one runs at a time, and the baton is
  // passed faster within a CPU than across. For programs that do nothing else.
  static void StayOnOneCpu();

  virtual const HardwareProfile& hardware() const = 0;
  virtual int64_t num_gpus() const = 0;
  virtual Device& gpu(int64_t index) = 0;
  virtual Device& cpu() = 0;
  // The last `ranks` GPUs as a group, by rank (sim_collectives.h).
  virtual std::vector<std::unique_ptr<Collectives>> MakeGroup(int64_t ranks) = 0;
  virtual int64_t now_ns() const = 0;
  virtual std::vector<ResourceUse> uses() const = 0;
  // What was used since `before`, an earlier uses() of this world, divided by `parts`.
  std::vector<ResourceUse> UsesSince(const std::vector<ResourceUse>& before, int parts = 1) const;
  virtual const Timeline& timeline() const = 0;
};

}  // namespace hearth
