#include "common/model/workspace.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace hearth {

absl::StatusOr<std::unique_ptr<ForwardWorkspace>> ForwardWorkspace::Make(const ModelConfig& c, bool has_mtp, Device& device, int64_t max_rows,
                                                                         int64_t max_logit_rows) {
  if (max_rows < 1 || max_logit_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("a workspace for ", max_rows, " rows and ", max_logit_rows, " logit rows: at least 1 and 0"));
  }
  auto w = std::make_unique<ForwardWorkspace>();
  w->rows = max_rows;
  w->logit_rows = max_logit_rows;
  absl::Status status;
  auto make = [&](Buffer& buffer, int64_t rows, int64_t width, size_t element) {
    if (!status.ok() || rows * width == 0) return;
    auto made = device.Allocate(static_cast<size_t>(rows * width) * element);
    if (made.ok()) {
      buffer = *std::move(made);
    } else {
      status = Annotate(made.status(), absl::StrCat("workspace for ", max_rows, " rows"));
    }
  };
  const bool has_moe = c.n_routed_experts > 0;
  const int64_t ffn = std::max(c.intermediate_size, c.shared_intermediate_size);
  w->terms = device.caps().activation_terms;
  const int64_t terms = w->terms;
  const int64_t head_rows = c.num_attention_heads * c.qk_head_dim();
  make(w->token_ids, max_rows, 1, sizeof(int32_t));
  make(w->residual, max_rows, c.hidden_size, sizeof(float));
  make(w->normed, max_rows, terms * c.hidden_size, sizeof(bf16));
  make(w->q_a, max_rows, c.q_lora_rank.value_or(0), sizeof(float));
  make(w->q_a_normed, max_rows, terms * c.q_lora_rank.value_or(0), sizeof(bf16));
  make(w->q, max_rows, head_rows, sizeof(float));
  if (c.attention == AttentionKind::kMla) {
    make(w->q_rotated, max_rows, terms * head_rows, sizeof(bf16));
    make(w->kv_a, max_rows, c.mla_row(), sizeof(float));
  } else {
    make(w->k, max_rows, c.num_key_value_heads * c.qk_head_dim(), sizeof(float));
    make(w->v, max_rows, c.num_key_value_heads * c.v_head_dim, sizeof(float));
  }
  make(w->attended, max_rows, terms * c.num_attention_heads * c.v_head_dim, sizeof(bf16));
  make(w->projected, max_rows, c.hidden_size, sizeof(float));
  make(w->ffn_gate, max_rows, ffn, sizeof(float));
  make(w->ffn_up, max_rows, ffn, sizeof(float));
  make(w->ffn_act, max_rows, terms * ffn, sizeof(bf16));
  if (has_moe) {
    make(w->expert_ids, max_rows, c.num_experts_per_tok, sizeof(int32_t));
    make(w->expert_weights, max_rows, c.num_experts_per_tok, sizeof(float));
    make(w->moe, max_rows, c.hidden_size, sizeof(float));
    if (c.shared_expert_gate) make(w->shared_gate, max_rows, 1, sizeof(float));
  }
  if (has_mtp) {
    make(w->hidden, 2 * max_rows, c.hidden_size, sizeof(float));
    make(w->hidden_ids, max_rows, 1, sizeof(int32_t));
    make(w->previous, max_rows, c.hidden_size, sizeof(float));
    make(w->joined, max_rows, 2 * terms * c.hidden_size, sizeof(bf16));
  }
  make(w->logit_row_ids, max_logit_rows, 1, sizeof(int32_t));
  make(w->last, max_logit_rows, c.hidden_size, sizeof(float));
  make(w->last_normed, max_logit_rows, terms * c.hidden_size, sizeof(bf16));
  make(w->logits, max_logit_rows, c.vocab_size, sizeof(float));
  RETURN_IF_ERROR(status);
  return w;
}

}  // namespace hearth
