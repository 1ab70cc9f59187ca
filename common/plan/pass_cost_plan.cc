#include "common/plan/pass_cost_plan.h"

#include <algorithm>
#include <array>

namespace hearth {
namespace {

constexpr std::array<int64_t, 4> kPrompts = {64, 512, 4096, 16384};

}  // namespace

absl::StatusOr<PassCost> PlanPassCost(const PlannedModel& model, const HardwareProfile& hardware, const SimOptions& sim, PrefillPath path,
                                      int64_t rows) {
  const int64_t longest = std::min(model.config.max_position_embeddings - 1, kPrompts.back());
  ASSIGN_OR_RETURN(const std::unique_ptr<PrefillPlan> plan,
                   PrefillPlan::Make(model, SimWorld::Make(hardware, sim), path, {.chunk_rows = rows, .max_prompt = longest}));
  PassFit fit;
  for (const int64_t tokens : kPrompts) {
    if (tokens > longest) break;
    ASSIGN_OR_RETURN(const PrefillPoint point, plan->Run(tokens));
    fit.Add({.work = WorkOf(0, tokens), .seconds = point.seconds, .passes = static_cast<double>(point.passes)});
  }
  const std::optional<PassCost> cost = fit.cost();
  if (!cost.has_value()) return absl::FailedPreconditionError("the model's context has no room for a prompt");
  return *cost;
}

}  // namespace hearth
