#include "common/slp/weight_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/align.h"
#include "common/base/check.h"
#include "common/experts/expert_source.h"
#include "common/slp/expert_exchange.h"

namespace hearth {
namespace {

constexpr uint64_t kRunAlign = 256;

uint64_t ScaleBytes(const WeightView& view) {
  return static_cast<uint64_t>(ScaleBlocks(view.scale_row0 + view.rows) * view.scale_stride) * sizeof(float);
}

}  // namespace

void SubLayer::Add(const WeightView& view) {
  AddRun(view.data, DTypeBytes(view.dtype, static_cast<uint64_t>(view.rows * view.row_stride)));
  if (view.scales != nullptr) AddRun(view.scales, ScaleBytes(view));
}

void SubLayer::AddRun(const void* host, uint64_t bytes) {
  runs_.push_back({.host = host, .bytes = bytes, .offset = bytes_});
  bytes_ += AlignUp(bytes, kRunAlign);
}

const SubLayer::Run& SubLayer::RunAt(const void* host) const {
  const auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) { return r.host == host; });
  HEARTH_CHECK(run != runs_.end());
  return *run;
}

WeightView SubLayer::InSlot(WeightView view, const uint8_t* base) const {
  view.data = base + RunAt(view.data).offset;
  if (view.scales != nullptr) view.scales = reinterpret_cast<const float*>(base + RunAt(view.scales).offset);
  return view;
}

absl::StatusOr<WeightPlan> WeightPlan::Make(const Model& model, int64_t rank, int64_t ranks) {
  const ModelConfig& config = model.config();
  const ModelWeights& weights = model.weights();
  WeightPlan plan;
  plan.experts_begin_ = FirstExpertOf(rank, ranks, config.n_routed_experts);
  plan.experts_end_ = FirstExpertOf(rank + 1, ranks, config.n_routed_experts);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    LayerWeights copy = weights.layers[static_cast<size_t>(layer)];
    plan.layer_begin_.push_back(plan.num_items());
    PlannedItem attention{.layer = layer};
    ForEachMatrix(copy.attention, [&](WeightView& view) { attention.sub_layer.Add(view); });
    plan.Add(std::move(attention));
    PlannedItem feed_forward{.layer = layer};
    const auto add = [&](WeightView& view) { feed_forward.sub_layer.Add(view); };
    if (copy.mlp.has_value()) {
      ForEachMatrix(*copy.mlp, add);
    } else {
      ForEachMatrix(*copy.moe, add);
    }
    plan.Add(std::move(feed_forward));
    if (copy.mlp.has_value()) continue;
    for (int64_t expert = plan.experts_begin_; expert < plan.experts_end_; ++expert) {
      uint64_t bytes = 0;
      for (int64_t shard = 0; shard < model.num_shards(); ++shard) {
        const ExpertView view = weights.experts->Acquire(layer, expert, shard);
        weights.experts->Release(layer, expert, shard);
        if (view.count > 0 && view.record == nullptr) {
          return absl::UnimplementedError(absl::StrCat("layer ", layer, ", expert ", expert, ": its source keeps no records that could be streamed"));
        }
        bytes += RecordRoom(view);
      }
      plan.expert_bytes_max_ = std::max(plan.expert_bytes_max_, bytes);
      plan.Add({.layer = layer, .expert = expert});
    }
  }
  if (model.has_mtp()) {
    PlannedItem mtp{.layer = config.num_hidden_layers};
    mtp.sub_layer.Add(weights.mtp->eh_proj);
    AttentionWeights attention = weights.layers.back().attention;
    ForEachKvMatrix(attention, [&](WeightView& view) { mtp.sub_layer.Add(view); });
    plan.Add(std::move(mtp));
  }
  return plan;
}

void WeightPlan::Add(PlannedItem item) {
  sub_layer_bytes_max_ = std::max(sub_layer_bytes_max_, item.sub_layer.bytes());
  items_.push_back(std::move(item));
}

}  // namespace hearth
