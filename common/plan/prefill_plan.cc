#include "common/plan/prefill_plan.h"

#include <algorithm>
#include <numeric>

namespace hearth {

const char* PrefillPathName(PrefillPath path) { return path == PrefillPath::kChunked ? "chunked" : "slp"; }

PrefillPlan::PrefillPlan(std::shared_ptr<SimWorld> world, PrefillPath path)
    : world_(std::move(world)), path_(path), device_(world_->num_gpus() > 0 ? world_->gpu(world_->num_gpus() - 1) : world_->cpu()) {}

absl::StatusOr<std::unique_ptr<PrefillPlan>> PrefillPlan::Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, PrefillPath path,
                                                               const Options& options) {
  auto plan = std::unique_ptr<PrefillPlan>(new PrefillPlan(std::move(world), path));
  Device& device = plan->device_;
  ASSIGN_OR_RETURN(plan->model_, Model::Bind(model.config, model.image, device));
  KvGeometry geometry = plan->model_->kv_geometry();
  geometry.num_pages = static_cast<uint64_t>((options.max_prompt + kPageTokens - 1) / kPageTokens);
  plan->kv_ = KvPool::InMemory(geometry);
  plan->pages_.resize(geometry.num_pages);
  std::iota(plan->pages_.begin(), plan->pages_.end(), 0);
  ASSIGN_OR_RETURN(plan->kv_on_device_, device.Allocate(geometry.num_pages * geometry.page_bytes()));
  if (path == PrefillPath::kStreamed) {
    ASSIGN_OR_RETURN(plan->slp_, SlpEngine::Make(device, *plan->model_, {.chunk_rows = options.chunk_rows, .max_rows = options.max_prompt}));
    plan->chunk_rows_ = plan->slp_->chunk_rows();
  } else {
    plan->chunk_rows_ = std::min(options.chunk_rows > 0 ? options.chunk_rows : device.caps().prefill_chunk_rows, options.max_prompt);
    plan->stream_ = device.MakeStream("prefill");
    ASSIGN_OR_RETURN(plan->workspace_, plan->model_->MakeWorkspace(plan->chunk_rows_, 0));
  }
  return plan;
}

absl::Status PrefillPlan::RunRows(int64_t first, int64_t rows, PrefillPoint& point) {
  ForwardBatch batch{.form = Form::kPrefill, .token_ids = std::vector<int32_t>(static_cast<size_t>(rows)), .sequences = {}, .logit_rows = {}};
  batch.sequences = {{.first_row = 0, .num_rows = rows, .start_position = first, .write_from = first, .pages = pages_.data()}};
  if (path_ == PrefillPath::kChunked) return model_->Forward(*stream_, *workspace_, *kv_, batch, nullptr, nullptr);
  RETURN_IF_ERROR(slp_->Run(*kv_, batch, nullptr, {}));
  point.bytes_loaded += slp_->last_pass().bytes_loaded;
  point.expert_slots = slp_->last_pass().expert_slots;
  return absl::OkStatus();
}

absl::StatusOr<PrefillPoint> PrefillPlan::Run(int64_t prompt) {
  PrefillPoint point{.prompt = prompt, .path = path_};
  const std::vector<ResourceUse> before = world_->uses();
  const int64_t begin_ns = world_->now_ns();
  const int64_t at_once = path_ == PrefillPath::kStreamed ? slp_->max_rows() : chunk_rows_;
  point.passes = (prompt + at_once - 1) / at_once;
  for (int64_t first = 0; first < prompt; first += at_once) RETURN_IF_ERROR(RunRows(first, std::min(at_once, prompt - first), point));
  point.seconds = static_cast<double>(world_->now_ns() - begin_ns) * 1e-9;
  point.busy = world_->UsesSince(before);
  return point;
}

}  // namespace hearth
