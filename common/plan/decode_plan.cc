#include "common/plan/decode_plan.h"

namespace hearth {
namespace {

constexpr int kSteps = 4;

}  // namespace

DecodePlan::DecodePlan(std::shared_ptr<SimWorld> world)
    : world_(std::move(world)), device_(world_->num_gpus() > 0 ? world_->gpu(0) : world_->cpu()), stream_(device_.MakeStream("decode")) {}

absl::StatusOr<std::unique_ptr<DecodePlan>> DecodePlan::Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, int64_t max_batch,
                                                             int64_t max_context) {
  auto plan = std::unique_ptr<DecodePlan>(new DecodePlan(std::move(world)));
  ASSIGN_OR_RETURN(plan->model_, Model::Bind(model.config, model.image, plan->device_));
  ASSIGN_OR_RETURN(plan->kv_, PlannedKv::Of(*plan->model_, max_context + 1));
  plan->logits_.resize(static_cast<size_t>(max_batch * model.config.vocab_size));
  for (const StepOrder order : {StepOrder::kJoint, StepOrder::kAlternate}) {
    ASSIGN_OR_RETURN(plan->runners_[static_cast<size_t>(order)],
                     StepRunner::Make(plan->device_, *plan->model_, {.max_rows = max_batch, .max_logit_rows = max_batch, .order = order}));
  }
  return plan;
}

absl::StatusOr<DecodePoint> DecodePlan::Run(int64_t batch, int64_t context, StepOrder order) {
  ForwardBatch rows{.form = Form::kDecode, .token_ids = std::vector<int32_t>(static_cast<size_t>(batch)), .sequences = {}, .logit_rows = {}};
  for (int64_t i = 0; i < batch; ++i) {
    rows.sequences.push_back({.first_row = i, .num_rows = 1, .start_position = context, .write_from = context, .pages = kv_.pages.data()});
    rows.logit_rows.push_back(static_cast<int32_t>(i));
  }
  StepRunner* runner = runners_[static_cast<size_t>(order)].get();
  if (runner == nullptr) return absl::InvalidArgumentError("decode is planned in joint and in alternating order");
  const std::vector<ResourceUse> before = world_->uses();
  const int64_t begin_ns = world_->now_ns();
  for (int step = 0; step < kSteps; ++step) {
    for (const absl::Status& status : runner->Run(*stream_, *kv_.pool, rows, logits_.data(), nullptr)) RETURN_IF_ERROR(status);
  }
  DecodePoint point{.batch = batch, .context = context, .order = order, .busy = world_->UsesSince(before, kSteps)};
  point.step_ms = static_cast<double>(world_->now_ns() - begin_ns) * 1e-6 / kSteps;
  return point;
}

}  // namespace hearth
