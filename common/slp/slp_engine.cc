#include "common/slp/slp_engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/model/batch_check.h"
#include "common/slp/slp_pass.h"

namespace hearth {

absl::StatusOr<std::unique_ptr<SlpEngine>> SlpEngine::Make(Device& device, const Model& model, const SlpOptions& options) {
  const int64_t ranks = options.group == nullptr ? 1 : options.group->size();
  if (!RanksShareQuarters(ranks)) {
    return absl::InvalidArgumentError(absl::StrCat(ranks, " prefill ranks: experts are shared by quarters of their ids, so there can be 1, 2 or 4"));
  }
  ASSIGN_OR_RETURN(WeightPlan plan, WeightPlan::Make(model, options.group == nullptr ? 0 : options.group->rank(), ranks));
  ASSIGN_OR_RETURN(std::unique_ptr<SlpMemory> memory, SlpMemory::Make(device, model, plan, options));
  return std::unique_ptr<SlpEngine>(new SlpEngine(device, model, std::move(plan), std::move(memory), options));
}

absl::Status SlpEngine::Check(const KvPool& kv, const ForwardBatch& batch) const {
  RETURN_IF_ERROR(CheckBatch(model_.config(), model_.kv_geometry(), kv.geometry(), max_rows(), options_.with_logits ? max_rows() : 0, batch));
  if (model_.has_mtp()) RETURN_IF_ERROR(CheckPriorHidden(batch));
  if (batch.form != Form::kPrefill) return absl::InvalidArgumentError("batch: weights are streamed for the prefill form alone");
  if (!std::is_sorted(batch.logit_rows.begin(), batch.logit_rows.end())) return absl::InvalidArgumentError("batch: logit rows must ascend");
  return absl::OkStatus();
}

absl::Status SlpEngine::Run(const KvPool& kv, const ForwardBatch& batch, float* logits, const SlpHooks& hooks) {
  if (const absl::Status status = Check(kv, batch); !status.ok()) {
    if (options_.group != nullptr) options_.group->End(status);
    return status;
  }
  const int64_t begin_ns = device_.Now();
  SlpPass pass({.device = device_,
                .model = model_,
                .plan = plan_,
                .experts = options_.experts != nullptr ? options_.experts.get() : model_.weights().experts.get(),
                .memory = *memory_,
                .kv = kv,
                .batch = batch,
                .hooks = hooks,
                .group = options_.group,
                .exchange = options_.exchange});
  const absl::Status status = pass.Run(logits);
  stats_ = pass.stats();
  stats_.duration_ns = device_.Now() - begin_ns;
  last_hidden_ = pass.TakeLastHidden();
  return status;
}

}  // namespace hearth
