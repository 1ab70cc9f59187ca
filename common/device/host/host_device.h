// The host device: this machine's cores and memory behind the Device seam. Always there; the product's default without a GPU.
// Room: common/device/host. May touch: common/{kernels,numa,shm,base}. Threads: see device.h.
// The only folder above common/base that makes threads, waits and reads the clock: engines ask their Device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/device/expert_engine.h"
#include "common/device/host/thread_pool.h"
#include "common/kernels/kernels.h"

namespace hearth {

struct HostDeviceOptions {
  std::optional<Isa> isa;  // none: the best that this CPU supports and `numerics` allow
  Numerics numerics = Numerics::kExact;
  int num_threads = 0;                 // 0: as many as this process may run on
  int num_pools = 1;                   // one per NUMA shard of the experts; at most num_threads are made
  std::vector<std::vector<int>> cpus;  // by pool: cores to pin its threads to; empty: not pinned
  uint64_t memory_budget_bytes = 0;    // 0: no limit but the machine's
  // 1: matrix inputs and KV are plain BF16. 2: both are high + low (terms.h): F32 accuracy (mean logit error 1e-5 instead of 1e-2) for twice the KV bytes
  // and, where weights do not come from DRAM, about twice the time. The KV pool must be made for it: Model::kv_geometry has the row.
  int activation_terms = 1;
  DType kv_dtype = DType::kBF16;  // or kF8E4M3: of the KV pool
  // Multiply-adds under which an op runs on the calling thread alone: waking another costs about 5 us. Moves time, never a bit of the result.
  int64_t parallel_work_min = 128 * 1024;
  int64_t spin_ns = 50'000;  // how long a pool's thread without work spins before it sleeps (thread_pool.h)
  // What the ToDevice op may copy a second, all streams together; 0: as fast as memory. A real link's pace, to measure how copies hide behind work.
  int64_t link_bytes_per_s = 0;
};

// DeviceCaps::numerics of a host device made with these, for who must name it before it is made.
std::string HostNumerics(Isa isa, int activation_terms, DType kv_dtype);

class HostDevice : public Device {
 public:
  // FailedPrecondition for a path that this CPU lacks or the numerics forbid (it names those there are).
  static absl::StatusOr<std::unique_ptr<HostDevice>> Create(const HostDeviceOptions& options);

  virtual ThreadPool& pool() = 0;
  virtual const KernelTable& kernels() const = 0;
  virtual int64_t parallel_work_min() const = 0;
  // Whether the decode kernels fetch weights ahead in software: true at first; common/experts/fetch_ahead_probe.h measures it. Between ops only.
  virtual bool fetch_ahead() const = 0;
  virtual void SetFetchAhead(bool on) = 0;
  // Who runs the Experts op. Call once, before the first op (MakeHostDevice of common/experts does).
  virtual void SetExpertEngine(std::unique_ptr<ExpertEngine> engine) = 0;
};

}  // namespace hearth
