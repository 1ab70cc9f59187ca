// What passes over prompts should cost here before any was measured: the model's ops on a hardware profile, in virtual time (common/plan).
// Room: services/router. May touch: common/{plan,roofline,formats,base}. Threads: the pool's; takes a second for the largest models.
#pragma once

#include <string>
#include <vector>

#include "common/base/node_config.h"
#include "common/base/status.h"
#include "common/roofline/pass_cost.h"

namespace hearth::router {

struct PlannedCost {
  std::string way;  // PathCosts
  PassCost cost;
  bool shape_only = false;  // node.hardware is not set: of some machine, so that only the terms' proportions mean anything
};

// OK, or what is wrong with the file that node.hardware names: InvalidArgument or NotFound.
absl::Status CheckHardware(const NodeConfig& config);
// Of the chunked ways: workers of this version compute on the CPU, and what streaming weights past it costs is only measured.
absl::StatusOr<std::vector<PlannedCost>> PlanCosts(const NodeConfig& config, const std::string& model_dir);

}  // namespace hearth::router
