// The architectures that are supported, each as a description: what its config.json calls things, what Transformers fills in, and what it has.
// Room: common/formats, internal. Threads: any; constants.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "common/base/status.h"
#include "common/formats/config_keys.h"
#include "common/formats/model_config.h"

namespace hearth {

// Keys are those of config.json; nullptr: the family has no such key and the value is fixed.
struct Family {
  const char* architecture;
  std::array<const char*, 2> model_types;

  AttentionKind attention = AttentionKind::kMla;
  const char* qkv_bias_key = nullptr;  // GQA: the key that puts biases on q, k and v
  bool qkv_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  const char* qk_norm_key = nullptr;   // its value false means none
  double partial_rotary_factor = 1.0;  // of GQA

  const char* experts_key = "n_routed_experts";
  const char* expert_size_key = "moe_intermediate_size";
  const char* layer_freq_key = "moe_layer_freq";
  int64_t moe_layer_offset = 0;
  bool has_mlp_only_layers = false;
  ScoringFunc scoring_func = ScoringFunc::kSigmoid;
  const char* topk_method = "noaux_tc";
  // Shared experts: so many of the routed experts' size (n_shared_experts), or one of a size of its own behind a gate.
  bool has_shared_experts = false;
  const char* gated_shared_size_key = nullptr;
  int64_t n_shared_experts = 0;
  int64_t first_k_dense_replace = 0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  const char* norm_topk_key = "norm_topk_prob";
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;
  MoeNames moe_names = {};
};

// Architecture and model_type must be known and belong together; either one alone is enough. Sets both in `config`.
absl::StatusOr<const Family*> ChooseFamily(const ConfigKeys& keys, ModelConfig& config);

}  // namespace hearth
