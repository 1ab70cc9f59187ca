// What passes over prompt tokens will cost on a machine that need not be there, as the three terms of common/roofline/pass_cost.h: prompts of several
// lengths through the engines' own code in virtual time (prefill_plan.h), and the cost that fits them. What a router predicts with before it has measured.
// Room: common/plan. May touch: common/{sim,slp,model,image,formats,roofline,device,shm,base}. Threads: one. Takes a fraction of a second.
#pragma once

#include <cstdint>

#include "common/base/status.h"
#include "common/plan/planned_model.h"
#include "common/plan/prefill_plan.h"
#include "common/roofline/hardware_profile.h"
#include "common/roofline/pass_cost.h"
#include "common/sim/sim_world.h"

namespace hearth {

// In passes of `rows` tokens at most. Errors: those of PrefillPlan.
absl::StatusOr<PassCost> PlanPassCost(const PlannedModel& model, const HardwareProfile& hardware, const SimOptions& sim, PrefillPath path,
                                      int64_t rows);

}  // namespace hearth
