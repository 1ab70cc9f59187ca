// What a pass loads, in the order in which it loads it: sub-layers and routed experts of every layer, and where each lies in its slot.
// Room: common/slp. May touch: common/{model,experts,device,kernels,base}. Threads: const once made.
// One of several ranks loads all sub-layers, and of the experts its own.
// Embedding and head are not among them: a pass reads the embedding's rows of its own tokens and seldom any logits, both where the image has them.
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/status.h"
#include "common/kernels/kernels.h"
#include "common/model/forward.h"
#include "common/model/model_weights.h"

namespace hearth {

// Matrices that are loaded together.
class SubLayer {
 public:
  struct Run {  // of bytes in the image
    const void* host = nullptr;
    uint64_t bytes = 0;
    uint64_t offset = 0;  // in the slot
  };

  void Add(const WeightView& view);
  const std::vector<Run>& runs() const { return runs_; }
  uint64_t bytes() const { return bytes_; }
  // A view that was added, moved to a slot at `base`.
  WeightView InSlot(WeightView view, const uint8_t* base) const;

 private:
  void AddRun(const void* host, uint64_t bytes);
  const Run& RunAt(const void* host) const;

  std::vector<Run> runs_;
  uint64_t bytes_ = 0;
};

struct PlannedItem {
  int64_t layer = 0;
  int64_t expert = -1;  // -1: a sub-layer
  SubLayer sub_layer;
};

class WeightPlan {
 public:
  // Errors: Unimplemented for an ExpertSource that does not keep records.
  // Of the routed experts those of id-quarters [4 * rank / ranks, 4 * (rank + 1) / ranks): what this rank of several multiplies with.
  static absl::StatusOr<WeightPlan> Make(const Model& model, int64_t rank, int64_t ranks);

  const std::vector<PlannedItem>& items() const { return items_; }
  int64_t num_items() const { return static_cast<int64_t>(items_.size()); }
  const PlannedItem& item(int64_t index) const { return items_[static_cast<size_t>(index)]; }
  // Indices of items: a layer's attention; its dense network, or its gate and shared expert; its routed expert. What the MTP module caches with.
  int64_t attention(int64_t layer) const { return layer_begin_[static_cast<size_t>(layer)]; }
  int64_t feed_forward(int64_t layer) const { return attention(layer) + 1; }
  int64_t expert(int64_t layer, int64_t expert) const { return attention(layer) + 2 + expert - experts_begin_; }
  int64_t mtp() const { return num_items() - 1; }

  // The experts of the plan: [experts_begin, experts_end).
  int64_t experts_begin() const { return experts_begin_; }
  int64_t experts_end() const { return experts_end_; }

  uint64_t sub_layer_bytes_max() const { return sub_layer_bytes_max_; }
  uint64_t expert_bytes_max() const { return expert_bytes_max_; }  // all shards; 0: no routed experts

  // Bytes that a shard's record takes in a slot, with what keeps the next one aligned.
  static uint64_t RecordRoom(const ExpertView& shard) { return (shard.record_bytes + 255) / 256 * 256; }

 private:
  void Add(PlannedItem item);

  std::vector<PlannedItem> items_;
  std::vector<int64_t> layer_begin_;
  int64_t experts_begin_ = 0, experts_end_ = 0;
  uint64_t sub_layer_bytes_max_ = 0;
  uint64_t expert_bytes_max_ = 0;
};

}  // namespace hearth
