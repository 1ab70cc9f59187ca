// One pass: the three actors' bodies over one batch. Contract: slp_engine.h; what the actors say to each other: item_board.h, device_ring.h.
// Room: common/slp. May touch: common/{model,experts,device,kernels,formats,shm,base}. Threads: Run's is the model; Load and Unload are actors of their own.
//
// The order of items is the order in which the model first needs them, so two slots of either ring are enough: whatever slot the loader waits for, the
// model has all items before it and ends with one of that ring before it needs another. (A layer's gate and shared expert keep their slot while the
// experts pass; the next layer's attention takes another one.)
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/experts/expert_groups.h"
#include "common/experts/expert_source.h"
#include "common/model/decoder_pass.h"
#include "common/slp/item_board.h"
#include "common/slp/slp_engine.h"
#include "common/slp/slp_memory.h"
#include "common/slp/stripes.h"
#include "common/slp/weight_plan.h"

namespace hearth {

// Shorter waits are not shown in a trace: looking whether something is there takes as long.
inline constexpr int64_t kWaitShownNs = 2'000;

class SlpPass {
 public:
  struct Context {  // all of it outlives the pass
    Device& device;
    const Model& model;
    const WeightPlan& plan;
    ExpertSource* experts;  // null without MoE layers
    SlpMemory& memory;
    const KvPool& kv;
    const ForwardBatch& batch;
    const SlpHooks& hooks;
    Collectives* group;  // null: alone
    ExpertExchange exchange;
  };
  explicit SlpPass(const Context& context);

  // Once. Returns with all actors ended, all streams idle and both rings free.
  absl::Status Run(float* logits);
  const SlpPassStats& stats() const { return stats_; }
  std::vector<std::vector<float>> TakeLastHidden() { return std::move(last_hidden_); }

 private:
  // Rows [first, first + batch's rows) of the rank's own, as a batch of their own.
  struct Chunk {
    int64_t first = 0;
    ForwardBatch batch;
    std::vector<size_t> stripe;         // by the chunk's sequences
    std::vector<size_t> logit_indices;  // by the chunk's logit rows: which of the whole batch's
  };

  // An expert that the source has not been given back.
  struct Held {
    int64_t item = 0;
    int64_t slot = 0;
  };

  // Loader.
  void Load();
  void Copy(int64_t item, int64_t slot);
  // What the source expects, in the order of the plan.
  void ExpectExperts();
  // Gives the source back what has been copied, and waits until no more than `held_max` experts are held.
  void ReleaseCopied(int64_t held_max);
  void ReleaseOldest();

  // Unloader.
  void Unload();

  absl::Status RunActors(float* logits);
  PassShape Shape(int64_t own_rows) const;

  // Model.
  void CutIntoChunks();
  DecoderPass At(const Chunk& chunk);
  absl::Status Walk(float* logits);
  absl::Status Layer(int64_t layer);
  absl::Status LayerDone(int64_t layer);
  // Cancelled when the hook says so; the group's error when another rank has ended the pass.
  absl::Status StillWanted(int64_t layer);
  void Logits(float* logits);
  absl::Status WriteMtpKv();
  absl::Status ReadEnds();
  absl::Status ShareEnds();

  // Model: routed experts (slp_experts.cc).
  // Afterwards the rank has the rows that its experts work on, and knows which of them each takes.
  absl::Status BringRows();
  absl::Status ReadChoices(int64_t rows);
  absl::Status SendRows();
  // The sum over all experts, of the rank's rows: the chunks' moe.
  absl::Status RoutedExperts(const MoeWeights& weights, int64_t layer);
  absl::Status SumQuarters(const MoeWeights& weights, int64_t layer);
  void ExchangeSums();
  absl::Status ExpertOutputs(const MoeWeights& weights, int64_t layer);
  void ReturnOutputs();
  absl::Status RunExpert(const MoeWeights& weights, int64_t layer, int64_t expert, const bf16* x, float* sum);
  void AddSum(int from, int to, int64_t rows);
  // gate_weights_ by pair.
  void WeightsByPair(const ExpertGroups& groups);
  // The groups' rows and pair_weights_ to the device.
  void PutGroups(const ExpertGroups& groups, Buffer& rows, Buffer& weights);
  // The item's slot, once work that is enqueued from now on may read it.
  absl::StatusOr<int64_t> Await(int64_t item);
  // No work that reads the item is enqueued from now on.
  void Done(int64_t item, int64_t slot);
  const uint8_t* SubLayerData(int64_t slot) { return c_.memory.sub_layers->slot(slot).data; }

  bool alone() const { return ranks_ == 1; }
  bool dispatches() const { return !alone() && c_.exchange == ExpertExchange::kDispatch; }
  // By rank: its rows, times so many bytes.
  std::vector<uint64_t> RankBytes(int64_t row_bytes) const;

  DeviceRing& RingOf(int64_t item) { return c_.plan.item(item).expert >= 0 ? *c_.memory.experts : *c_.memory.sub_layers; }
  // Ends the pass for all actors.
  void Stop(const absl::Status& status);

  const Context c_;
  const ModelConfig& config_;
  const ModelWeights& weights_;
  Ops& ops_;
  const int64_t rank_, ranks_;
  const Stripes stripes_;
  const int64_t own_rows_, all_rows_;
  ItemBoard board_;
  const std::unique_ptr<Stream> compute_, copy_, unload_;
  const std::unique_ptr<Stream> held_;  // on which the loader waits for copies from the source's own memory
  std::vector<Chunk> chunks_;
  std::vector<std::vector<ExpertView>> slot_shards_;  // [expert slots]: written by the loader, published with the item
  std::deque<Held> being_copied_;                     // in the order of the copies; the loader's
  std::vector<int32_t> ids_;                          // the gate's choices of a layer, on the host
  std::vector<float> gate_weights_;
  ExpertGroups groups_;                          // of the rows that the rank's experts see
  std::vector<float> pair_weights_;              // by pair of the groups that go to the device next
  ExpertGroups own_groups_;                      // with dispatch: of the rank's own rows
  std::vector<int32_t> counts_;                  // with dispatch, [ranks, experts]: pairs
  std::vector<uint64_t> out_bytes_, in_bytes_;   // with dispatch, [ranks]: of rows sent and received
  std::vector<std::vector<float>> ends_;         // hidden states where the chunks' sequences end, in the order of chunks
  std::vector<std::vector<float>> stripe_ends_;  // by stripe
  std::vector<std::vector<float>> last_hidden_;
  SlpPassStats stats_;
};

}  // namespace hearth
