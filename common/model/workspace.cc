#include "common/model/workspace.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/ceil_div.h"

namespace hearth {

namespace {

using Part = ForwardWorkspace::Part;

// each(part, rows, width, bytes of an element), in the order in which they are allocated.
template <class Each>
void ForEachPart(const ModelConfig& c, bool has_mtp, int64_t terms, int64_t max_rows, int64_t max_logit_rows, Each each) {
  using W = ForwardWorkspace;
  const int64_t ffn = std::max(c.intermediate_size, c.shared_intermediate_size);
  const int64_t head_rows = c.num_attention_heads * c.qk_head_dim();
  each(&W::token_ids, max_rows, 1, sizeof(int32_t));
  each(&W::residual, max_rows, c.hidden_size, sizeof(float));
  each(&W::normed, max_rows, terms * c.hidden_size, sizeof(bf16));
  each(&W::q_a, max_rows, c.q_lora_rank.value_or(0), sizeof(float));
  each(&W::q_a_normed, max_rows, terms * c.q_lora_rank.value_or(0), sizeof(bf16));
  each(&W::q, max_rows, head_rows, sizeof(float));
  if (c.attention == AttentionKind::kMla) {
    each(&W::q_rotated, max_rows, terms * head_rows, sizeof(bf16));
    each(&W::kv_a, max_rows, c.mla_row(), sizeof(float));
  } else {
    each(&W::k, max_rows, c.num_key_value_heads * c.qk_head_dim(), sizeof(float));
    each(&W::v, max_rows, c.num_key_value_heads * c.v_head_dim, sizeof(float));
  }
  each(&W::attended, max_rows, terms * c.num_attention_heads * c.v_head_dim, sizeof(bf16));
  each(&W::projected, max_rows, c.hidden_size, sizeof(float));
  each(&W::ffn_gate, max_rows, ffn, sizeof(float));
  each(&W::ffn_up, max_rows, ffn, sizeof(float));
  each(&W::ffn_act, max_rows, terms * ffn, sizeof(bf16));
  if (c.n_routed_experts > 0) {
    each(&W::expert_ids, max_rows, c.num_experts_per_tok, sizeof(int32_t));
    each(&W::expert_weights, max_rows, c.num_experts_per_tok, sizeof(float));
    each(&W::moe, max_rows, c.hidden_size, sizeof(float));
    if (c.shared_expert_gate) each(&W::shared_gate, max_rows, 1, sizeof(float));
  }
  if (has_mtp) {
    each(&W::hidden, 2 * max_rows, c.hidden_size, sizeof(float));
    each(&W::hidden_ids, max_rows, 1, sizeof(int32_t));
    each(&W::previous, max_rows, c.hidden_size, sizeof(float));
    each(&W::joined, max_rows, 2 * terms * c.hidden_size, sizeof(bf16));
  }
  each(&W::logit_row_ids, max_logit_rows, 1, sizeof(int32_t));
  each(&W::last, max_logit_rows, c.hidden_size, sizeof(float));
  each(&W::last_normed, max_logit_rows, terms * c.hidden_size, sizeof(bf16));
  each(&W::logits, max_logit_rows, c.vocab_size, sizeof(float));
}

bool IsOneOf(Part part, std::span<const Part> parts) { return std::find(parts.begin(), parts.end(), part) != parts.end(); }

}  // namespace

absl::StatusOr<std::unique_ptr<ForwardWorkspace>> ForwardWorkspace::Make(const ModelConfig& c, bool has_mtp, Device& device, int64_t max_rows,
                                                                         int64_t max_logit_rows, std::span<const Part> without) {
  if (max_rows < 1 || max_logit_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("a workspace for ", max_rows, " rows and ", max_logit_rows, " logit rows: at least 1 and 0"));
  }
  auto w = std::make_unique<ForwardWorkspace>();
  w->rows = max_rows;
  w->logit_rows = max_logit_rows;
  w->terms = device.caps().activation_terms;
  absl::Status status;
  ForEachPart(c, has_mtp, w->terms, max_rows, max_logit_rows, [&](Part part, int64_t rows, int64_t width, size_t element) {
    if (!status.ok() || rows * width == 0 || IsOneOf(part, without)) return;
    auto made = device.Allocate(static_cast<size_t>(rows * width) * element);
    if (made.ok()) {
      (*w).*part = *std::move(made);
    } else {
      status = Annotate(made.status(), absl::StrCat("workspace for ", max_rows, " rows"));
    }
  });
  RETURN_IF_ERROR(status);
  return w;
}

uint64_t ForwardWorkspace::Bytes(const ModelConfig& c, bool has_mtp, int64_t terms, int64_t max_rows, int64_t max_logit_rows,
                                 std::span<const Part> without) {
  uint64_t bytes = 0;
  ForEachPart(c, has_mtp, terms, max_rows, max_logit_rows, [&](Part part, int64_t rows, int64_t width, size_t element) {
    constexpr auto kRounding = static_cast<int64_t>(kBufferRounding);
    if (!IsOneOf(part, without)) bytes += static_cast<uint64_t>(CeilDiv(rows * width * static_cast<int64_t>(element), kRounding) * kRounding);
  });
  return bytes;
}

}  // namespace hearth
