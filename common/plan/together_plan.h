// One prompt computed while streams decode, on two GPUs over one DRAM: what each costs the other.
// Room: common/plan. May touch: common/{sim,slp,model,image,formats,device,shm,base}. Threads: one.
#pragma once

#include <cstdint>

#include "common/base/status.h"
#include "common/plan/planned_model.h"
#include "common/roofline/hardware_profile.h"
#include "common/sim/sim_world.h"

namespace hearth {

struct TogetherPoint {
  int64_t prompt = 0;
  int64_t streams = 0;
  int64_t context = 0;         // of each stream
  double prefill_alone_s = 0;  // to the KV of the whole prompt, weights streamed
  double prefill_beside_s = 0;
  double step_alone_ms = 0;  // mean of decode steps, in the faster order
  double step_beside_ms = 0;
  double step_beside_max_ms = 0;  // the slowest of them
};

// Errors: FailedPrecondition with less than two GPUs; those of the two plans.
absl::StatusOr<TogetherPoint> PlanTogether(const PlannedModel& model, const HardwareProfile& hardware, const SimOptions& sim, int64_t chunk_rows,
                                           int64_t prompt, int64_t streams, int64_t context);

}  // namespace hearth
