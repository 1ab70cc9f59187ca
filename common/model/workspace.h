// The device memory of one forward pass: every intermediate of a layer has its own buffer, allocated once.
// Room: common/model. May touch: common/{device,formats,base}. Threads: one step loop.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/formats/model_config.h"
#include "common/model/forward.h"

namespace hearth {

struct ForwardWorkspace : Model::Workspace {
  using Part = Buffer ForwardWorkspace::*;
  // `without`: these stay empty, for whoever puts buffers of another place there.
  static absl::StatusOr<std::unique_ptr<ForwardWorkspace>> Make(const ModelConfig& config, bool has_mtp, Device& device, int64_t max_rows,
                                                                int64_t max_logit_rows, std::span<const Part> without = {});
  // What that takes of a device's budget, each buffer rounded up as far as a device may.
  static uint64_t Bytes(const ModelConfig& config, bool has_mtp, int64_t terms, int64_t max_rows, int64_t max_logit_rows,
                        std::span<const Part> without = {});

  int64_t max_rows() const override { return rows; }

  int64_t rows = 0;
  int64_t logit_rows = 0;
  int terms = 1;  // BF16 terms of a matrix input: what is bf16 below has so many numbers an element

  // [rows, ...]
  Buffer token_ids;       // i32
  Buffer residual;        // f32 [hidden]: the residual stream
  Buffer normed;          // bf16 [hidden]
  Buffer q_a;             // f32 [q_lora_rank]
  Buffer q_a_normed;      // bf16 [q_lora_rank]
  Buffer q;               // f32 [heads, nope + rope]
  Buffer q_rotated;       // bf16 [heads, nope + rope]
  Buffer kv_a;            // f32 [kv_lora_rank + rope]
  Buffer k;               // f32 [kv_heads, head_dim]; GQA, with q above as f32 [heads, head_dim] throughout
  Buffer v;               // f32 [kv_heads, head_dim]
  Buffer attended;        // bf16 [heads, v]
  Buffer projected;       // f32 [hidden]: output of o_proj, of a dense layer, of the shared expert
  Buffer ffn_gate;        // f32 [widest feed-forward network]
  Buffer ffn_up;          // f32
  Buffer ffn_act;         // bf16
  Buffer expert_ids;      // i32 [top_k]
  Buffer expert_weights;  // f32 [top_k]
  Buffer moe;             // f32 [hidden]: sum over the routed experts
  Buffer shared_gate;     // f32 [1]

  // With an MTP module, [rows, ...]:
  Buffer hidden;      // f32 [2, rows, hidden], not [rows, 2, hidden]: hidden states of the last pass; behind them the ones that came with the batch
  Buffer hidden_ids;  // i32: of which row of `hidden`
  Buffer previous;    // f32 [hidden]: the hidden state that a row's MTP slot is made from
  Buffer joined;      // bf16 [2 hidden]: embedding and hidden state, normed

  // [logit_rows, ...]
  Buffer logit_row_ids;  // i32
  Buffer last;           // f32 [hidden]
  Buffer last_normed;    // bf16 [hidden]
  Buffer logits;         // f32 [vocab]
};

}  // namespace hearth
