#include "common/plan/together_plan.h"

#include <algorithm>

namespace hearth {

absl::StatusOr<std::unique_ptr<TogetherPlan>> TogetherPlan::Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, const Options& options) {
  if (world->num_gpus() < 2) return absl::FailedPreconditionError("a prompt beside decoding streams is planned for two GPUs or more");
  auto plan = std::unique_ptr<TogetherPlan>(new TogetherPlan(std::move(world)));
  ASSIGN_OR_RETURN(plan->decode_, DecodePlan::Make(model, plan->world_, options.max_streams, options.max_context));
  ASSIGN_OR_RETURN(plan->prefill_, PrefillPlan::Make(model, plan->world_, PrefillPath::kStreamed,
                                                     {.chunk_rows = options.chunk_rows, .max_prompt = options.max_prompt}));
  return plan;
}

absl::StatusOr<TogetherPoint> TogetherPlan::Run(int64_t prompt, int64_t streams, int64_t context) {
  TogetherPoint point{.prompt = prompt, .streams = streams, .context = context};
  ASSIGN_OR_RETURN(const PrefillPoint prefill_alone, prefill_->Run(prompt));
  point.prefill_alone_s = prefill_alone.seconds;
  StepOrder order = StepOrder::kJoint;
  ASSIGN_OR_RETURN(DecodePoint decode_alone, decode_->Run(streams, context, order));
  if (streams > 1) {
    ASSIGN_OR_RETURN(const DecodePoint alternate, decode_->Run(streams, context, StepOrder::kAlternate));
    if (alternate.step_ms < decode_alone.step_ms) {
      order = StepOrder::kAlternate;
      decode_alone = alternate;
    }
  }
  point.step_alone_ms = decode_alone.step_ms;
  RETURN_IF_ERROR(RunBoth(order, point));
  return point;
}

absl::Status TogetherPlan::RunBoth(StepOrder order, TogetherPoint& point) {
  StopToken stop;
  absl::Status decoded;
  double sum_ms = 0;
  int64_t samples = 0;
  {
    const std::unique_ptr<Actor> decoder = world_->gpu(0).Spawn("decode loop", [&] {
      while (!stop.stopped() && decoded.ok()) {
        const absl::StatusOr<DecodePoint> step = decode_->Run(point.streams, point.context, order);
        decoded = step.status();
        if (!step.ok() || stop.stopped()) break;  // the last ones ran alone for a part
        sum_ms += step->step_ms;
        ++samples;
        point.step_beside_max_ms = std::max(point.step_beside_max_ms, step->step_ms);
      }
    });
    const absl::StatusOr<PrefillPoint> beside = prefill_->Run(point.prompt);
    stop.Stop();
    RETURN_IF_ERROR(beside.status());
    point.prefill_beside_s = beside->seconds;
  }
  RETURN_IF_ERROR(decoded);
  point.step_beside_ms = samples > 0 ? sum_ms / static_cast<double>(samples) : point.step_alone_ms;
  point.step_beside_max_ms = std::max(point.step_beside_max_ms, point.step_beside_ms);
  return absl::OkStatus();
}

}  // namespace hearth
