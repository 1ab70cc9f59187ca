// Prompts computed while streams decode, on two GPUs over one DRAM: what each costs the other.
// Room: common/plan. May touch: common/{sim,slp,model,image,formats,device,shm,base}. Threads: one.
#pragma once

#include <cstdint>
#include <memory>

#include "common/base/status.h"
#include "common/plan/decode_plan.h"
#include "common/plan/planned_model.h"
#include "common/plan/prefill_plan.h"
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
  // What is added, of what it takes alone.
  double prefill_more() const { return prefill_beside_s / prefill_alone_s - 1; }
  double step_more() const { return step_beside_ms / step_alone_ms - 1; }
  double slowest_step_more() const { return step_beside_max_ms / step_alone_ms - 1; }
};

class TogetherPlan {
 public:
  struct Options {
    int64_t chunk_rows = 0;  // of the streamed pass; 0: as the device likes it
    // Up to these.
    int64_t max_prompt = 0;
    int64_t max_streams = 0;
    int64_t max_context = 0;
  };
  // Errors: FailedPrecondition with less than two GPUs; those of the two plans.
  static absl::StatusOr<std::unique_ptr<TogetherPlan>> Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, const Options& options);

  absl::StatusOr<TogetherPoint> Run(int64_t prompt, int64_t streams, int64_t context);

 private:
  explicit TogetherPlan(std::shared_ptr<SimWorld> world) : world_(std::move(world)) {}
  // Decodes until the prompt is done, or fails.
  absl::Status RunBoth(StepOrder order, TogetherPoint& point);

  const std::shared_ptr<SimWorld> world_;
  std::unique_ptr<DecodePlan> decode_;
  std::unique_ptr<PrefillPlan> prefill_;
};

}  // namespace hearth
