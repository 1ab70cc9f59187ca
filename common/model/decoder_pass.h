// One batch's walk through the decoder, written against Ops alone: the same code computes on the host and is timed by a device that computes nothing.
// Room: common/model. May touch: common/{experts,device,kernels,formats,shm,base}. Threads: one step loop.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/base/status.h"
#include "common/device/ops.h"
#include "common/formats/model_config.h"
#include "common/model/forward.h"
#include "common/model/model_weights.h"
#include "common/model/workspace.h"

namespace hearth {

// What a pass reads and where it writes; all outlive it.
struct PassContext {
  const ModelConfig& config;
  const ModelWeights& weights;
  const RopeTable& rope;
  int64_t num_shards;
  Ops& ops;
  Stream& stream;
  ForwardWorkspace& workspace;
  const KvPool& kv;
  const ForwardBatch& batch;
  const ForwardHooks* hooks;  // may be null
};

class DecoderPass {
 public:
  explicit DecoderPass(const PassContext& context);

  // logits [logit_rows, vocab] f32 on the host; may be null when none are wanted.
  absl::Status Run(float* logits);
  // The MTP module's pass instead of the decoder's: Model::Draft.
  absl::Status Draft(float* logits);

  // The pieces that both are made of, each over all rows of the batch and in the workspace, for who walks layers and rows in an order of its own
  // (common/slp). Nothing here waits for the stream.
  void Embed();
  // normed = the normed residual, the layer's input; its KV goes into the pages.
  void CacheInput(const AttentionWeights& weights, int64_t layer);
  // residual += attention of normed over the pages, whose KV of all positions up to the batch's own is there.
  void AttendCached(const AttentionWeights& weights, int64_t layer);
  // residual += the dense network of the normed residual
  void DenseBlock(const VectorF32& norm, const MlpWeights& weights);
  // expert_ids, expert_weights, and the normed input of the experts
  void ChooseExperts(const VectorF32& norm, const MoeWeights& weights);
  // residual += moe, the sum over the routed experts, and the shared expert
  void AddExperts(const MoeWeights& weights);
  // Of the residual stream's rows that are wanted: norm, head.
  void Logits(const VectorF32& norm, const WeightView& head, float* logits);
  // hidden = the residual stream's rows, normed: what the MTP module reads of a position, and ReadHidden gives.
  void KeepHidden(const VectorF32& norm);
  // The MTP slots of the batch's positions. Overwrites the residual stream.
  void WriteMtpKv(const MtpWeights& mtp, const AttentionWeights& attention);

 private:
  void Layer(int64_t layer);
  // attended = attention of normed
  void LatentAttention(const MlaWeights& w, int64_t layer);
  void GroupedAttention(const GqaWeights& w, int64_t layer);
  // What a layer caches of each position, from normed.
  void WriteKv(const AttentionWeights& w, int64_t layer, const std::vector<KvSequence>& sequences);
  void WriteLatent(const MlaWeights& w, int64_t layer, const std::vector<KvSequence>& sequences);
  HeadNorm NormOf(const HeadProjection& projection) const;
  void WriteKeysValues(const GqaWeights& w, int64_t layer, const std::vector<KvSequence>& sequences);
  void RoutedExperts(const MoeWeights& weights, int64_t layer);
  // projected = down(silu(gate(normed)) * up(normed))
  void Mlp(const MlpWeights& w);
  void JoinMtpInput(const MtpWeights& mtp);  // mtp_pass.cc

  void Norm(const float* x, const VectorF32& weight, int64_t m, int64_t n, Buffer& out);
  void Linear(const WeightView& w, const Buffer& x, int64_t m, Buffer& y);
  void AddTo(Buffer& y, const Buffer& x);  // y += x, both [M, hidden]

  absl::Status ShowLayer(int64_t layer);
  absl::Status ShowLayerDone(int64_t layer);
  void ShowGate(int64_t layer);
  // Once all work so far is done; an error ends the pass at the layer's end.
  void TakeTurn(const std::function<void(int64_t)>& turn, int64_t layer);

  const PassContext c_;
  const int64_t m_;
  absl::Status hook_status_;
};

}  // namespace hearth
