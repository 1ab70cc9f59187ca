#include "common/model/decoder_pass.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/trace/trace.h"

namespace hearth {

DecoderPass::DecoderPass(const PassContext& context) : c_(context), m_(static_cast<int64_t>(context.batch.token_ids.size())) {}

absl::Status DecoderPass::Run(float* logits) {
  Embed();
  RETURN_IF_ERROR(ShowLayer(-1));
  TraceLaps laps(c_.stream.trace_track());
  for (int64_t layer = 0; layer < c_.config.num_hidden_layers; ++layer) {
    Layer(layer);
    RETURN_IF_ERROR(ShowLayer(layer));
    laps.Lap("layer", "layer rows", layer, m_);
  }
  if (logits != nullptr && !c_.batch.logit_rows.empty()) Logits(c_.weights.final_norm, c_.weights.head, logits);
  if (c_.weights.mtp.has_value()) {
    const TraceSpan span(c_.stream.trace_track(), "mtp", "rows", m_);
    KeepHidden(c_.weights.final_norm);
    WriteMtpKv(*c_.weights.mtp, c_.weights.layers[static_cast<size_t>(c_.config.num_hidden_layers)].attention);
    RETURN_IF_ERROR(ShowLayerDone(c_.config.num_hidden_layers));
  }
  return c_.stream.Synchronize();
}

void DecoderPass::Embed() {
  ForwardWorkspace& w = c_.workspace;
  std::copy(c_.batch.token_ids.begin(), c_.batch.token_ids.end(), w.token_ids.as<int32_t>());
  c_.ops.Embed(c_.stream, {.table = c_.weights.embedding, .token_ids = w.token_ids.as<int32_t>(), .m = m_, .out = w.residual.as<float>()});
}

// One decoder layer (DeepSeek-V3, figure 2).
void DecoderPass::Layer(int64_t layer) {
  const LayerWeights& weights = c_.weights.layers[static_cast<size_t>(layer)];
  CacheInput(weights.attention, layer);
  AttendCached(weights.attention, layer);
  if (weights.mlp.has_value()) {
    DenseBlock(weights.post_attention_norm, *weights.mlp);
    return;
  }
  ChooseExperts(weights.post_attention_norm, *weights.moe);
  ShowGate(layer);
  if (c_.hooks != nullptr && c_.hooks->before_experts) TakeTurn(c_.hooks->before_experts, layer);
  RoutedExperts(*weights.moe, layer);
  if (c_.hooks != nullptr && c_.hooks->after_experts) TakeTurn(c_.hooks->after_experts, layer);
  AddExperts(*weights.moe);
}

void DecoderPass::CacheInput(const AttentionWeights& weights, int64_t layer) {
  ForwardWorkspace& w = c_.workspace;
  Norm(w.residual.as<float>(), weights.input_norm, m_, c_.config.hidden_size, w.normed);
  WriteKv(weights, layer, c_.batch.sequences);
}

void DecoderPass::AttendCached(const AttentionWeights& weights, int64_t layer) {
  ForwardWorkspace& w = c_.workspace;
  if (weights.mla.has_value()) {
    LatentAttention(*weights.mla, layer);
  } else {
    GroupedAttention(*weights.gqa, layer);
  }
  Linear(weights.o, w.attended, m_, w.projected);
  AddTo(w.residual, w.projected);
}

void DecoderPass::DenseBlock(const VectorF32& norm, const MlpWeights& weights) {
  ForwardWorkspace& w = c_.workspace;
  Norm(w.residual.as<float>(), norm, m_, c_.config.hidden_size, w.normed);
  Mlp(weights);  // into w.projected
  AddTo(w.residual, w.projected);
}

// Multi-head latent attention (DeepSeek-V2 section 2.1): queries through their own low rank, keys and values through the cached latent.
void DecoderPass::LatentAttention(const MlaWeights& weights, int64_t layer) {
  const ModelConfig& c = c_.config;
  ForwardWorkspace& w = c_.workspace;
  const KvSequence* sequences = c_.batch.sequences.data();
  const int64_t num_sequences = static_cast<int64_t>(c_.batch.sequences.size());

  if (weights.q_a.has_value()) {
    Linear(*weights.q_a, w.normed, m_, w.q_a);
    Norm(w.q_a.as<float>(), weights.q_a_norm, m_, *c.q_lora_rank, w.q_a_normed);
    Linear(weights.q, w.q_a_normed, m_, w.q);
  } else {
    Linear(weights.q, w.normed, m_, w.q);
  }
  c_.ops.MlaRopeQuery(c_.stream, {.q = w.q.as<float>(),
                                  .rope = c_.rope,
                                  .heads = c.num_attention_heads,
                                  .nope = c.qk_nope_head_dim,
                                  .rope_dim = c.qk_rope_head_dim,
                                  .sequences = sequences,
                                  .num_sequences = num_sequences,
                                  .terms = w.terms,
                                  .out = w.q_rotated.as<bf16>()});
  c_.ops.MlaAttention(c_.stream, {.form = c_.batch.form,
                                  .q = w.q_rotated.as<bf16>(),
                                  .kv_b = weights.kv_b,
                                  .k_b = weights.k_b,
                                  .v_b = weights.v_b,
                                  .heads = c.num_attention_heads,
                                  .nope = c.qk_nope_head_dim,
                                  .rope_dim = c.qk_rope_head_dim,
                                  .v_dim = c.v_head_dim,
                                  .rank = c.kv_lora_rank,
                                  .softmax_scale = static_cast<float>(c.SoftmaxScale()),
                                  .layer = layer,
                                  .skip = layer < c.num_hidden_layers ? 0 : 1,
                                  .kv = &c_.kv,
                                  .kv_dtype = c_.kv.geometry().dtype,
                                  .sequences = sequences,
                                  .num_sequences = num_sequences,
                                  .terms = w.terms,
                                  .out = w.attended.as<bf16>()});
}

// Grouped-query attention (arXiv 2305.13245): keys and values of fewer heads, each cached for a group of query heads.
void DecoderPass::GroupedAttention(const GqaWeights& weights, int64_t layer) {
  const ModelConfig& c = c_.config;
  ForwardWorkspace& w = c_.workspace;
  const KvSequence* sequences = c_.batch.sequences.data();
  const int64_t num_sequences = static_cast<int64_t>(c_.batch.sequences.size());

  Linear(weights.q.w, w.normed, m_, w.q);
  c_.ops.GqaRotateQuery(c_.stream, {.q = w.q.as<float>(),
                                    .bias = weights.q.bias.data(),
                                    .norm = NormOf(weights.q),
                                    .rope = c_.rope,
                                    .heads = c.num_attention_heads,
                                    .head_dim = c.qk_head_dim(),
                                    .sequences = sequences,
                                    .num_sequences = num_sequences});
  c_.ops.GqaAttention(c_.stream, {.q = w.q.as<float>(),
                                  .heads = c.num_attention_heads,
                                  .kv_heads = c.num_key_value_heads,
                                  .head_dim = c.qk_head_dim(),
                                  .softmax_scale = static_cast<float>(c.SoftmaxScale()),
                                  .layer = layer,
                                  .skip = layer < c.num_hidden_layers ? 0 : 1,
                                  .kv = &c_.kv,
                                  .kv_dtype = c_.kv.geometry().dtype,
                                  .sequences = sequences,
                                  .num_sequences = num_sequences,
                                  .terms = w.terms,
                                  .out = w.attended.as<bf16>()});
}

void DecoderPass::WriteKv(const AttentionWeights& weights, int64_t layer, const std::vector<KvSequence>& sequences) {
  if (weights.mla.has_value()) {
    WriteLatent(*weights.mla, layer, sequences);
  } else {
    WriteKeysValues(*weights.gqa, layer, sequences);
  }
}

void DecoderPass::WriteLatent(const MlaWeights& weights, int64_t layer, const std::vector<KvSequence>& sequences) {
  ForwardWorkspace& w = c_.workspace;
  Linear(weights.kv_a, w.normed, m_, w.kv_a);
  c_.ops.MlaWriteKv(c_.stream, {.kv_a = w.kv_a.as<float>(),
                                .norm_weight = weights.kv_a_norm.data(),
                                .eps = static_cast<float>(c_.config.rms_norm_eps),
                                .rope = c_.rope,
                                .rank = c_.config.kv_lora_rank,
                                .terms = w.terms,
                                .layer = layer,
                                .kv = &c_.kv,
                                .kv_dtype = c_.kv.geometry().dtype,
                                .sequences = sequences.data(),
                                .num_sequences = static_cast<int64_t>(sequences.size())});
}

void DecoderPass::WriteKeysValues(const GqaWeights& weights, int64_t layer, const std::vector<KvSequence>& sequences) {
  const ModelConfig& c = c_.config;
  ForwardWorkspace& w = c_.workspace;
  Linear(weights.k.w, w.normed, m_, w.k);
  Linear(weights.v.w, w.normed, m_, w.v);
  c_.ops.GqaWriteKv(c_.stream, {.k = w.k.as<float>(),
                                .v = w.v.as<float>(),
                                .k_bias = weights.k.bias.data(),
                                .v_bias = weights.v.bias.data(),
                                .norm = NormOf(weights.k),
                                .rope = c_.rope,
                                .kv_heads = c.num_key_value_heads,
                                .head_dim = c.qk_head_dim(),
                                .terms = w.terms,
                                .layer = layer,
                                .kv = &c_.kv,
                                .kv_dtype = c_.kv.geometry().dtype,
                                .sequences = sequences.data(),
                                .num_sequences = static_cast<int64_t>(sequences.size())});
}

HeadNorm DecoderPass::NormOf(const HeadProjection& projection) const {
  if (c_.config.qk_norm == QkNorm::kNone) return {};
  return {.over = c_.config.qk_norm == QkNorm::kPerHead ? HeadNorm::Over::kHead : HeadNorm::Over::kAllHeads,
          .weight = projection.norm.data(),
          .eps = static_cast<float>(c_.config.rms_norm_eps)};
}

// The gate chooses from the F32 residual, which it normalises for itself; the experts take the same in BF16.
void DecoderPass::ChooseExperts(const VectorF32& norm, const MoeWeights& weights) {
  const ModelConfig& c = c_.config;
  ForwardWorkspace& w = c_.workspace;
  Norm(w.residual.as<float>(), norm, m_, c.hidden_size, w.normed);
  c_.ops.Gate(c_.stream, {.x = w.residual.as<float>(),
                          .norm_weight = norm.data(),
                          .eps = static_cast<float>(c.rms_norm_eps),
                          .w = weights.gate,
                          .bias = weights.gate_bias.has_value() ? weights.gate_bias->data() : nullptr,
                          .params = {.num_experts = c.n_routed_experts,
                                     .top_k = c.num_experts_per_tok,
                                     .sigmoid = c.scoring_func == ScoringFunc::kSigmoid,
                                     .num_groups = c.topk_method == TopkMethod::kGreedy ? 1 : c.n_group,
                                     .top_groups = c.topk_method == TopkMethod::kGreedy ? 1 : c.topk_group,
                                     .group_score_top2 = c.topk_method == TopkMethod::kNoauxTc,
                                     .normalize = c.norm_topk_prob,
                                     .scaling = static_cast<float>(c.routed_scaling_factor)},
                          .m = m_,
                          .hidden = c.hidden_size,
                          .ids = w.expert_ids.as<int32_t>(),
                          .weights = w.expert_weights.as<float>()});
}

void DecoderPass::RoutedExperts(const MoeWeights& weights, int64_t layer) {
  const ModelConfig& c = c_.config;
  ForwardWorkspace& w = c_.workspace;
  c_.ops.Experts(c_.stream, {.form = c_.batch.form,
                             .source = c_.weights.experts.get(),
                             .layer = layer,
                             .num_experts = c.n_routed_experts,
                             .top_k = c.num_experts_per_tok,
                             .hidden = c.hidden_size,
                             .intermediate = c.moe_intermediate_size,
                             .num_shards = c_.num_shards,
                             .weight_dtypes = weights.expert_dtypes,
                             .terms = w.terms,
                             .x = w.normed.as<bf16>(),
                             .ids = w.expert_ids.as<int32_t>(),
                             .weights = w.expert_weights.as<float>(),
                             .m = m_,
                             .out = w.moe.as<float>()});
}

// The shared expert on top of the routed ones' sum, then the residual (DESIGN section 7).
void DecoderPass::AddExperts(const MoeWeights& weights) {
  ForwardWorkspace& w = c_.workspace;
  if (weights.shared.has_value()) {
    Mlp(*weights.shared);
    if (weights.shared_gate.has_value()) {
      Linear(*weights.shared_gate, w.normed, m_, w.shared_gate);
      c_.ops.AddGated(c_.stream,
                      {.x = w.projected.as<float>(), .gate = w.shared_gate.as<float>(), .m = m_, .n = c_.config.hidden_size, .y = w.moe.as<float>()});
    } else {
      AddTo(w.moe, w.projected);
    }
  }
  AddTo(w.residual, w.moe);
}

void DecoderPass::Mlp(const MlpWeights& weights) {
  ForwardWorkspace& w = c_.workspace;
  Linear(weights.gate, w.normed, m_, w.ffn_gate);
  Linear(weights.up, w.normed, m_, w.ffn_up);
  c_.ops.SiluMul(c_.stream, {.gate = w.ffn_gate.as<float>(),
                             .up = w.ffn_up.as<float>(),
                             .ld = weights.gate.rows,
                             .m = m_,
                             .n = weights.gate.rows,
                             .terms = w.terms,
                             .out = w.ffn_act.as<bf16>()});
  Linear(weights.down, w.ffn_act, m_, w.projected);
}

void DecoderPass::Logits(const VectorF32& norm, const WeightView& head, float* logits) {
  ForwardWorkspace& w = c_.workspace;
  const int64_t rows = static_cast<int64_t>(c_.batch.logit_rows.size());
  const TraceSpan span(c_.stream.trace_track(), "head", "rows", rows);
  const int64_t hidden = c_.config.hidden_size;
  std::copy(c_.batch.logit_rows.begin(), c_.batch.logit_rows.end(), w.logit_row_ids.as<int32_t>());
  c_.ops.GatherRows(c_.stream,
                    {.x = w.residual.as<float>(), .rows = w.logit_row_ids.as<int32_t>(), .m = rows, .n = hidden, .out = w.last.as<float>()});
  Norm(w.last.as<float>(), norm, rows, hidden, w.last_normed);
  Linear(head, w.last_normed, rows, w.logits);
  c_.ops.ToHost(c_.stream, {.device = w.logits.data(), .host = logits, .bytes = static_cast<uint64_t>(rows * c_.config.vocab_size) * sizeof(float)});
}

void DecoderPass::Norm(const float* x, const VectorF32& weight, int64_t m, int64_t n, Buffer& out) {
  c_.ops.RmsNorm(c_.stream, {.x = x,
                             .ldx = n,
                             .weight = weight.data(),
                             .eps = static_cast<float>(c_.config.rms_norm_eps),
                             .m = m,
                             .n = n,
                             .terms = c_.workspace.terms,
                             .out = out.as<bf16>()});
}

void DecoderPass::Linear(const WeightView& w, const Buffer& x, int64_t m, Buffer& y) {
  c_.ops.Linear(
      c_.stream,
      {.form = c_.batch.form, .w = w, .terms = c_.workspace.terms, .x = x.as<bf16>(), .ldx = w.cols, .m = m, .y = y.as<float>(), .ldy = w.rows});
}

void DecoderPass::AddTo(Buffer& y, const Buffer& x) {
  c_.ops.Add(c_.stream, {.x = x.as<float>(), .y = y.as<float>(), .n = m_ * c_.config.hidden_size});
}

absl::Status DecoderPass::ShowLayer(int64_t layer) {
  RETURN_IF_ERROR(hook_status_);
  if (c_.hooks == nullptr) return absl::OkStatus();
  const int64_t hidden = c_.config.hidden_size;
  if (c_.hooks->on_layer) {
    std::vector<float> residual(static_cast<size_t>(m_ * hidden));
    c_.ops.ToHost(c_.stream, {.device = c_.workspace.residual.data(), .host = residual.data(), .bytes = residual.size() * sizeof(float)});
    RETURN_IF_ERROR(c_.stream.Synchronize());
    c_.hooks->on_layer(layer, residual.data(), m_, hidden);
  }
  return layer < 0 ? absl::OkStatus() : ShowLayerDone(layer);
}

absl::Status DecoderPass::ShowLayerDone(int64_t layer) {
  if (c_.hooks == nullptr || !c_.hooks->on_layer_done) return absl::OkStatus();
  RETURN_IF_ERROR(c_.stream.Synchronize());
  if (!c_.hooks->on_layer_done(layer)) return absl::CancelledError(absl::StrCat("the pass was ended after layer ", layer));
  return absl::OkStatus();
}

void DecoderPass::TakeTurn(const std::function<void(int64_t)>& turn, int64_t layer) {
  if (!hook_status_.ok()) return;
  hook_status_ = c_.stream.Synchronize();
  turn(layer);
}

void DecoderPass::ShowGate(int64_t layer) {
  if (c_.hooks == nullptr || !c_.hooks->on_gate || !hook_status_.ok()) return;
  const int64_t top_k = c_.config.num_experts_per_tok;
  std::vector<int32_t> ids(static_cast<size_t>(m_ * top_k));
  std::vector<float> weights(ids.size());
  c_.ops.ToHost(c_.stream, {.device = c_.workspace.expert_ids.data(), .host = ids.data(), .bytes = ids.size() * sizeof(int32_t)});
  c_.ops.ToHost(c_.stream, {.device = c_.workspace.expert_weights.data(), .host = weights.data(), .bytes = weights.size() * sizeof(float)});
  hook_status_ = c_.stream.Synchronize();
  if (hook_status_.ok()) c_.hooks->on_gate(layer, ids.data(), weights.data(), m_, top_k);
}

}  // namespace hearth
