#include "common/slp/slp_engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/model/batch_check.h"
#include "common/slp/slp_pass.h"

namespace hearth {
namespace {

// Fewer rows at once would not pay for the weights' way out of device memory.
constexpr int64_t kChunkRowsMin = 64;
// A chunk's work room is at most a quarter of the budget: beyond that, rows and slots are worth more than fewer chunks (docs/simulation.md).
constexpr uint64_t kWorkShare = 4;

absl::StatusOr<WeightPlan> PlanOf(const Model& model, const SlpOptions& options) {
  if (!RanksShareQuarters(options.ranks)) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.ranks, " prefill ranks: experts are shared by quarters of their ids, so there can be 1, 2 or 4"));
  }
  return WeightPlan::Make(model, 0, 1);
}

}  // namespace

absl::StatusOr<uint64_t> SlpEngine::BudgetMin(const Device& device, const Model& model, const SlpOptions& options) {
  ASSIGN_OR_RETURN(const WeightPlan plan, PlanOf(model, options));
  SlpOptions least = options;
  if (options.chunk_rows == 0) least.chunk_rows = device.caps().prefill_chunk_rows;
  while (options.chunk_rows == 0 && least.chunk_rows / 2 >= kChunkRowsMin) least.chunk_rows /= 2;
  return device.memory().used_bytes + SlpMemory::BytesMin(device.caps(), model, plan, least);
}

absl::StatusOr<std::unique_ptr<SlpEngine>> SlpEngine::Make(Device& device, const Model& model, const SlpOptions& options) {
  ASSIGN_OR_RETURN(WeightPlan plan, PlanOf(model, options));
  SlpOptions with = options;
  with.chunk_rows = options.chunk_rows > 0 ? options.chunk_rows : device.caps().prefill_chunk_rows;
  const DeviceMemory before = device.memory();
  const uint64_t left = before.budget_bytes - before.used_bytes;
  for (;; with.chunk_rows /= 2) {
    absl::StatusOr<std::unique_ptr<SlpMemory>> memory = SlpMemory::Make(device, model, plan, with);
    const bool may_halve = options.chunk_rows == 0 && with.chunk_rows / 2 >= kChunkRowsMin;
    if (may_halve && (memory.ok() ? (*memory)->work_bytes > left / kWorkShare : absl::IsResourceExhausted(memory.status()))) continue;
    RETURN_IF_ERROR(memory.status());
    return std::unique_ptr<SlpEngine>(new SlpEngine(device, model, std::move(plan), *std::move(memory), with));
  }
}

int64_t SlpEngine::SlotsBeside(int64_t rows) const {
  return memory_->SlotsFor({.own_rows = rows, .all_rows = rows, .experts = plan_.experts_end() - plan_.experts_begin()});
}

absl::Status SlpEngine::Check(const KvPool& kv, const ForwardBatch& batch) const {
  RETURN_IF_ERROR(CheckBatch(model_.config(), model_.kv_geometry(), kv.geometry(), max_rows(), options_.with_logits ? max_rows() : 0, batch));
  if (model_.has_mtp()) RETURN_IF_ERROR(CheckPriorHidden(batch));
  if (batch.form != Form::kPrefill) return absl::InvalidArgumentError("batch: weights are streamed for the prefill form alone");
  if (!std::is_sorted(batch.logit_rows.begin(), batch.logit_rows.end())) return absl::InvalidArgumentError("batch: logit rows must ascend");
  return absl::OkStatus();
}

absl::Status SlpEngine::SetGroup(Collectives* group) {
  if (group != nullptr && group->size() != options_.ranks) {
    return absl::InvalidArgumentError(absl::StrCat("a group of ", group->size(), " ranks for an engine made for ", options_.ranks));
  }
  group_ = group;
  shared_plan_.reset();
  if (group == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(shared_plan_, WeightPlan::Make(model_, group->rank(), group->size()));
  return absl::OkStatus();
}

absl::Status SlpEngine::Run(const KvPool& kv, const ForwardBatch& batch, float* logits, const SlpHooks& hooks) {
  RETURN_IF_ERROR(Check(kv, batch));
  return Pass(plan_, nullptr, kv, batch, logits, hooks);
}

absl::Status SlpEngine::RunShared(const KvPool& kv, const ForwardBatch& batch, float* logits, const SlpHooks& hooks) {
  HEARTH_CHECK(group_ != nullptr);
  if (const absl::Status status = Check(kv, batch); !status.ok()) {
    group_->End(status);
    return status;
  }
  return Pass(*shared_plan_, group_, kv, batch, logits, hooks);
}

absl::Status SlpEngine::Pass(const WeightPlan& plan, Collectives* group, const KvPool& kv, const ForwardBatch& batch, float* logits,
                             const SlpHooks& hooks) {
  const int64_t begin_ns = device_.Now();
  ExpertSource* experts = options_.experts != nullptr ? options_.experts.get() : model_.weights().experts.get();
  const ExpertSource::Counts before = experts != nullptr ? experts->counts() : ExpertSource::Counts();
  SlpPass pass({.device = device_,
                .model = model_,
                .plan = plan,
                .experts = experts,
                .memory = *memory_,
                .kv = kv,
                .batch = batch,
                .hooks = hooks,
                .group = group,
                .exchange = options_.exchange});
  const absl::Status status = pass.Run(logits);
  stats_ = pass.stats();
  stats_.duration_ns = device_.Now() - begin_ns;
  const ExpertSource::Counts after = experts != nullptr ? experts->counts() : ExpertSource::Counts();
  stats_.source = {.from_rings = after.from_rings - before.from_rings,
                   .from_image = after.from_image - before.from_image,
                   .waited_ns = after.waited_ns - before.waited_ns};
  last_hidden_ = pass.TakeLastHidden();
  return status;
}

}  // namespace hearth
