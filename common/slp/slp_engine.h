// Stream-loading prefill ([SLO] 3.1): one pass over all layers computes many prompt tokens while the weights pass through device memory that holds a small
// part of them. Layers outside, chunks of rows inside, so that each weight crosses the link once a pass.
// Room: common/slp. May touch: common/{model,experts,device,kernels,formats,shm,base}. Not: threads, clocks or waits but the device's.
// Threads: Run by one thread at a time. A pass has two actors beside its caller (the model): a loader, which walks the plan of items, takes ring slots and
// enqueues copies, and an unloader, which gives a slot back when the work that reads it is done.
// Several ranks (processes or threads, each with a device) may share a pass ([SLO] 3.2, ADR 0012): each computes stripes of the rows (stripes.h), loads all
// sub-layers but only its own id-quarters' experts, and exchanges rows and sums (expert_exchange.h) through Collectives. All write into one KV pool.
// The bits are those of Model::Forward in the prefill form, whatever the ring, the chunks, the ranks and the prompts that share the pass (DESIGN section 7).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/model/forward.h"
#include "common/slp/slp_memory.h"
#include "common/slp/weight_plan.h"

namespace hearth {

// Called on the thread of Run.
struct SlpHooks {
  // The layer's KV of every row is written; its experts may still run. False ends the pass. As ForwardHooks has it, the MTP module's layer comes last.
  std::function<bool(int64_t layer)> on_layer_done;
  // Looked at before each expert and each chunk of attention. False ends the pass.
  std::function<bool()> wanted;
};

// What a pass did.
struct SlpPassStats {
  int64_t rows = 0;
  int64_t expert_slots = 0;  // of the ring
  uint64_t bytes_loaded = 0;
  int64_t experts_loaded = 0;    // those that nobody chose among them, whose load had begun when the gate spoke
  int64_t experts_skipped = 0;   // never loaded
  int64_t waited_ns = 0;         // for weights that were still on their way: the link is the limit
  int64_t loader_waited_ns = 0;  // for a slot, all of them being read or waiting to be: arithmetic is the limit
  int64_t duration_ns = 0;
  ExpertSource::Counts source;  // of the experts' source, during the pass
  // One of several ranks:
  std::vector<Traffic> traffic;       // what it sent
  uint64_t dedup_dispatch_bytes = 0;  // what it and those who answer it would send with DedupDispatchBytes' way, for comparison
};

class SlpEngine {
 public:
  // Takes what the device's budget has left, up to what the options ask for. Errors: ResourceExhausted, with what would be enough; InvalidArgument for a
  // number of ranks that can't share the experts.
  static absl::StatusOr<std::unique_ptr<SlpEngine>> Make(Device& device, const Model& model, const SlpOptions& options);
  // The smallest budget of such a device that Make works with, what the device has given away already, the model's part among it, included.
  static absl::StatusOr<uint64_t> BudgetMin(const Device& device, const Model& model, const SlpOptions& options);

  int64_t max_rows() const { return memory_->sizes.rows; }
  int64_t chunk_rows() const { return memory_->chunk->rows; }
  // Slots of the expert ring in a pass alone of so many rows.
  int64_t SlotsBeside(int64_t rows) const;

  // As Model::Forward in the prefill form, with at most max_rows() rows. logits may be null; they are for engines made with them, and logit_rows ascend.
  // Errors: InvalidArgument for a batch that contradicts itself; Cancelled when a hook ended the pass. After any error the engine takes the next pass.
  absl::Status Run(const KvPool& kv, const ForwardBatch& batch, float* logits, const SlpHooks& hooks);

  // The group whose passes RunShared is a rank of from now on, with as many ranks as the options say; null: none. It outlives its use.
  absl::Status SetGroup(Collectives* group);
  // The same pass with the group's other ranks, which are all given the same batch; each writes the logits of its own rows and no others.
  // Errors beside Run's: Cancelled also when another rank's hook ended the pass, InvalidArgument also for sequences too uneven for dispatch; as Collectives
  // when another rank is gone or failed. After a lost rank the group is of no more use; the engine is.
  absl::Status RunShared(const KvPool& kv, const ForwardBatch& batch, float* logits, const SlpHooks& hooks);

  // Of the last pass. The hidden state [hidden] f32 at the last row of a sequence; only with an MTP module.
  const std::vector<float>& LastHidden(int64_t sequence) const { return last_hidden_[static_cast<size_t>(sequence)]; }
  const SlpPassStats& last_pass() const { return stats_; }

 private:
  SlpEngine(Device& device, const Model& model, WeightPlan plan, std::unique_ptr<SlpMemory> memory, const SlpOptions& options)
      : device_(device), model_(model), plan_(std::move(plan)), memory_(std::move(memory)), options_(options) {}
  absl::Status Check(const KvPool& kv, const ForwardBatch& batch) const;
  absl::Status Pass(const WeightPlan& plan, Collectives* group, const KvPool& kv, const ForwardBatch& batch, float* logits, const SlpHooks& hooks);

  Device& device_;
  const Model& model_;
  const WeightPlan plan_;  // of a pass alone
  Collectives* group_ = nullptr;
  std::optional<WeightPlan> shared_plan_;  // of the group's rank
  const std::unique_ptr<SlpMemory> memory_;
  const SlpOptions options_;
  std::vector<std::vector<float>> last_hidden_;  // by sequence
  SlpPassStats stats_;
};

}  // namespace hearth
