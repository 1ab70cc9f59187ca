// The CPU expert engine: routed experts computed where their bytes lie, by one pool of threads per NUMA shard (DESIGN section 6, Decode).
// Room: common/experts. May touch: common/{device,kernels,shm,base}. Not: threads of its own, clocks. Threads: one Run at a time.
//
// Tasks are (expert, block of weight rows). A task of gate and up rows ends in SiLU(gate) * up; an expert's last one releases its down tasks,
// so no expert waits for another. Outputs of many tokens are made and summed for a slice of hidden at a time, so that they take no [pairs, hidden] floats.
// A slice's last down task releases the summing, whose order DESIGN section 7 fixes:
//   prefill form: an expert's shards ascending, times the gate weight, by ascending id inside four id-quarters, (q0 + q1) + (q2 + q3);
//   decode form: the quarters within each shard, then the shards ascending.
// Who runs a task, and how rows are cut, moves time and never a bit.
#pragma once

#include <memory>

#include "common/base/status.h"
#include "common/device/expert_engine.h"
#include "common/device/host/host_device.h"

namespace hearth {

// What a walk over the experts works in, at most. Each walk reads and converts its experts' weights anew, so tokens go in as few walks as this allows:
// of DeepSeek-V3 2600 tokens at once with one BF16 term, 1300 with two.
inline constexpr int64_t kExpertWorkspaceBytes = int64_t{512} << 20;

// Works on the device's pool and takes its workspace from the device's budget, as much as its largest batch needs; the device outlives it.
std::unique_ptr<ExpertEngine> MakeCpuExpertEngine(HostDevice& device, int64_t workspace_bytes = kExpertWorkspaceBytes);

// A host device that can run every op: HostDevice::Create with this engine put in.
absl::StatusOr<std::unique_ptr<HostDevice>> MakeHostDevice(const HostDeviceOptions& options);

}  // namespace hearth
