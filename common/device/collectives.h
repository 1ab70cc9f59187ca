// What the ranks of a group say to each other in a pass: one interface, behind it shared memory (host/shm_collectives.h) or links in virtual time (common/sim).
// Room: common/device. May touch: common/base. Threads: those of the rank's pass; a group has one object a rank, in one process or in several.
//
// All ranks make the same calls in the same order, between Begin and End of a pass. A call is enqueued on a stream, as an op is; an error ends the stream.
// If a rank dies or leaves the pass, the others' waits end within a second with an error that names it: Unavailable for one that is gone (the group is then
// of no more use), Aborted or Cancelled for one that left; the next pass is whole again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"

namespace hearth {

// Each rank's part of one run of bytes reaches all ranks.
struct AllGatherArgs {
  const char* name = "";            // by which its bytes are counted
  void* data = nullptr;             // all parts beside each other, by rank; the caller's own is there already
  const uint64_t* bytes = nullptr;  // [ranks], the same at all ranks
  bool steers = false;              // what comes decides what the engine does next: a device that computes nothing brings it all the same
};

// Each rank has a part for every rank.
struct AllToAllArgs {
  const char* name = "";
  const void* from = nullptr;               // parts beside each other, by the rank that gets them
  const uint64_t* send_bytes = nullptr;     // [ranks]
  void* to = nullptr;                       // parts beside each other, by the rank that they come from
  const uint64_t* receive_bytes = nullptr;  // [ranks]; the caller's own part is left where it is if this says 0, copied otherwise
};

// Nobody goes on before all are here; what a rank has written to memory that all share is then seen by all.
struct BarrierArgs {
  const char* name = "";
  uint64_t shared_bytes = 0;  // of that memory: what the rank would have sent, each other rank's copy counted, if the ranks did not share it
};

// Bytes that this rank sent to others.
struct Traffic {
  std::string name;
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Waits until all ranks have begun the pass. `stop`, and a `wanted` that says false, end its waits with Cancelled; `stop` outlives the pass, as
  // does what `wanted` asks.
  virtual absl::Status Begin(const StopToken& stop, const std::function<bool()>& wanted) = 0;
  // Of the pass that was begun; of the next one if none is. With an error the others' pass ends too.
  virtual void End(const absl::Status& status) = 0;
  // Of the pass that was begun: OK, or that another rank is gone or has left it. Waits for nothing; for long stretches between two calls.
  virtual absl::Status Check() = 0;

  virtual void AllGather(Stream& stream, const AllGatherArgs& args) = 0;
  virtual void AllToAll(Stream& stream, const AllToAllArgs& args) = 0;
  virtual void Barrier(Stream& stream, const BarrierArgs& args) = 0;

  // Of the last pass, in the order of the first calls.
  virtual const std::vector<Traffic>& traffic() const = 0;

  // Any thread. Whether another rank has begun a pass that this one has not.
  virtual bool Called() const = 0;
  // Any thread. Waits until another rank begins a pass, at most so long; returns a number that changes with each such begin. `seen`: what it returned last.
  virtual uint32_t AwaitCall(uint32_t seen, int64_t timeout_ns) const = 0;
};

// Adds to a list of traffic.
void Count(std::vector<Traffic>& traffic, const char* name, uint64_t bytes);

}  // namespace hearth
