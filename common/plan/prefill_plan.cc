#include "common/plan/prefill_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace hearth {
namespace {

// As many of the machine's GPUs as can share the experts (expert_exchange.h).
int64_t RanksOf(const SimWorld& world, PrefillPath path) {
  if (path != PrefillPath::kShared) return 1;
  int64_t ranks = world.num_gpus();
  while (!RanksShareQuarters(ranks)) --ranks;
  return ranks;
}

}  // namespace

const char* PrefillPathName(PrefillPath path) {
  switch (path) {
    case PrefillPath::kChunked: return "chunked";
    case PrefillPath::kStreamed: return "slp";
    case PrefillPath::kShared: return "dslp";
  }
  return "?";
}

absl::StatusOr<std::unique_ptr<PrefillPlan>> PrefillPlan::Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, PrefillPath path,
                                                               const Options& options) {
  if (path == PrefillPath::kShared && world->num_gpus() < 2) {
    return absl::FailedPreconditionError(absl::StrCat("a prompt is shared by 2 or 4 GPUs; there is ", world->num_gpus()));
  }
  auto plan = std::unique_ptr<PrefillPlan>(new PrefillPlan(std::move(world), path));
  const int64_t ranks = RanksOf(*plan->world_, path);
  std::vector<std::unique_ptr<Collectives>> group(static_cast<size_t>(ranks));
  if (ranks > 1) {
    group = plan->world_->MakeGroup(ranks);
    const GpuProfile& gpu = plan->world_->hardware().gpu;
    const int64_t terms = plan->world_->gpu(0).caps().activation_terms;
    const ExchangeLink link{.bytes_per_s = gpu.LinkBytesPerSecond(), .latency_s = 2 * gpu.link_us * 1e-6};
    plan->exchange_shape_ = ExchangeOfModel(model.config, ranks, options.max_prompt, terms);
    plan->exchange_ = options.exchange.value_or(ChooseExchange(plan->exchange_shape_, link));
  }
  const int64_t gpus = plan->world_->num_gpus();
  for (int64_t i = 0; i < ranks; ++i) {
    Rank& rank = plan->ranks_.emplace_back();
    rank.device = gpus > 0 ? &plan->world_->gpu(gpus - ranks + i) : &plan->world_->cpu();
    rank.group = std::move(group[static_cast<size_t>(i)]);
    ASSIGN_OR_RETURN(rank.model, Model::Bind(model.config, model.image, *rank.device));
    if (i == 0) {
      ASSIGN_OR_RETURN(plan->kv_, PlannedKv::Of(*rank.model, options.max_prompt));
    }
    const KvGeometry& geometry = plan->kv_.pool->geometry();
    ASSIGN_OR_RETURN(rank.kv_on_device, rank.device->Allocate(geometry.num_pages * geometry.page_bytes()));
    if (path == PrefillPath::kChunked) continue;
    ASSIGN_OR_RETURN(
        rank.slp, SlpEngine::Make(*rank.device, *rank.model,
                                  {.chunk_rows = options.chunk_rows, .max_rows = options.max_prompt, .ranks = ranks, .exchange = plan->exchange_}));
    RETURN_IF_ERROR(rank.slp->SetGroup(rank.group.get()));
    plan->chunk_rows_ = rank.slp->chunk_rows();
  }
  if (path == PrefillPath::kChunked) {
    const Rank& only = plan->ranks_.front();
    plan->chunk_rows_ = std::min(options.chunk_rows > 0 ? options.chunk_rows : only.device->caps().prefill_chunk_rows, options.max_prompt);
    plan->stream_ = only.device->MakeStream("prefill");
    ASSIGN_OR_RETURN(plan->workspace_, only.model->MakeWorkspace(plan->chunk_rows_, 0));
  }
  return plan;
}

absl::Status PrefillPlan::RunRows(int64_t first, int64_t rows, PrefillPoint& point) {
  ForwardBatch batch{.form = Form::kPrefill, .token_ids = std::vector<int32_t>(static_cast<size_t>(rows)), .sequences = {}, .logit_rows = {}};
  batch.sequences = {{.first_row = 0, .num_rows = rows, .start_position = first, .write_from = first, .pages = kv_.pages.data()}};
  if (path_ == PrefillPath::kChunked) return ranks_.front().model->Forward(*stream_, *workspace_, *kv_.pool, batch, nullptr, nullptr);
  return RunStreamed(batch, point);
}

absl::Status PrefillPlan::RunStreamed(const ForwardBatch& batch, PrefillPoint& point) {
  std::vector<absl::Status> statuses(ranks_.size());
  const auto run = [&](size_t i) {
    statuses[i] = ranks_.size() == 1 ? ranks_[i].slp->Run(*kv_.pool, batch, nullptr, {}) : ranks_[i].slp->RunShared(*kv_.pool, batch, nullptr, {});
  };
  {
    std::vector<std::unique_ptr<Actor>> others;
    for (size_t i = 1; i < ranks_.size(); ++i) others.push_back(ranks_[i].device->Spawn("rank", [&, i] { run(i); }));
    run(0);
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    RETURN_IF_ERROR(statuses[i]);
    const SlpPassStats& pass = ranks_[i].slp->last_pass();
    point.bytes_loaded += pass.bytes_loaded;
    for (const Traffic& traffic : pass.traffic) point.bytes_sent += traffic.bytes;
    point.expert_slots = pass.expert_slots;
  }
  return absl::OkStatus();
}

absl::StatusOr<PrefillPoint> PrefillPlan::Run(int64_t prompt) {
  PrefillPoint point{.prompt = prompt, .path = path_};
  const std::vector<ResourceUse> before = world_->uses();
  const int64_t begin_ns = world_->now_ns();
  const int64_t at_once = path_ == PrefillPath::kChunked ? chunk_rows_ : max_rows();
  point.passes = (prompt + at_once - 1) / at_once;
  for (int64_t first = 0; first < prompt; first += at_once) RETURN_IF_ERROR(RunRows(first, std::min(at_once, prompt - first), point));
  point.seconds = static_cast<double>(world_->now_ns() - begin_ns) * 1e-9;
  point.busy = world_->UsesSince(before);
  return point;
}

}  // namespace hearth
