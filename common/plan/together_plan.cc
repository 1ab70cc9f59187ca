#include "common/plan/together_plan.h"

#include <algorithm>

#include "common/plan/decode_plan.h"
#include "common/plan/prefill_plan.h"

namespace hearth {

absl::StatusOr<TogetherPoint> PlanTogether(const PlannedModel& model, const HardwareProfile& hardware, const SimOptions& sim, int64_t chunk_rows,
                                           int64_t prompt, int64_t streams, int64_t context) {
  if (hardware.num_gpus < 2) return absl::FailedPreconditionError("a prompt beside decoding streams is planned for two GPUs or more");
  const std::shared_ptr<SimWorld> world = SimWorld::Make(hardware, sim);
  ASSIGN_OR_RETURN(const std::unique_ptr<DecodePlan> decode, DecodePlan::Make(model, world, streams, context));
  ASSIGN_OR_RETURN(const std::unique_ptr<PrefillPlan> prefill,
                   PrefillPlan::Make(model, world, PrefillPath::kStreamed, {.chunk_rows = chunk_rows, .max_prompt = prompt}));
  TogetherPoint point{.prompt = prompt, .streams = streams, .context = context};
  ASSIGN_OR_RETURN(const PrefillPoint prefill_alone, prefill->Run(prompt));
  point.prefill_alone_s = prefill_alone.seconds;
  StepOrder order = StepOrder::kJoint;
  ASSIGN_OR_RETURN(DecodePoint decode_alone, decode->Run(streams, context, order));
  if (streams > 1) {
    ASSIGN_OR_RETURN(const DecodePoint alternate, decode->Run(streams, context, StepOrder::kAlternate));
    if (alternate.step_ms < decode_alone.step_ms) {
      order = StepOrder::kAlternate;
      decode_alone = alternate;
    }
  }
  point.step_alone_ms = decode_alone.step_ms;

  StopToken stop;
  absl::Status decoded;
  double sum_ms = 0;
  int64_t samples = 0;
  {
    const std::unique_ptr<Actor> decoder = world->gpu(0).Spawn("decode loop", [&] {
      while (!stop.stopped() && decoded.ok()) {
        const absl::StatusOr<DecodePoint> step = decode->Run(streams, context, order);
        decoded = step.status();
        if (!step.ok() || stop.stopped()) break;  // the last ones ran alone for a part
        sum_ms += step->step_ms;
        ++samples;
        point.step_beside_max_ms = std::max(point.step_beside_max_ms, step->step_ms);
      }
    });
    const absl::StatusOr<PrefillPoint> beside = prefill->Run(prompt);
    stop.Stop();
    RETURN_IF_ERROR(beside.status());
    point.prefill_beside_s = beside->seconds;
  }
  RETURN_IF_ERROR(decoded);
  point.step_beside_ms = samples > 0 ? sum_ms / static_cast<double>(samples) : point.step_alone_ms;
  return point;
}

}  // namespace hearth
