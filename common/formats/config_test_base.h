// A small valid config of each family, and a way to change one key at a time.
//
// Room: common/formats, tests only.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

#include "common/formats/model_config.h"

namespace hearth {

inline nlohmann::json BaseV3() {
  return {{"architectures", {"DeepseekV3ForCausalLM"}},
          {"model_type", "deepseek_v3"},
          {"vocab_size", 300},
          {"hidden_size", 136},
          {"intermediate_size", 200},
          {"moe_intermediate_size", 96},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 2},
          {"max_position_embeddings", 4096},
          {"q_lora_rank", 72},
          {"kv_lora_rank", 40},
          {"qk_nope_head_dim", 32},
          {"qk_rope_head_dim", 16},
          {"v_head_dim", 24},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 10000},
          {"n_routed_experts", 8},
          {"num_experts_per_tok", 2},
          {"n_shared_experts", 1},
          {"first_k_dense_replace", 1},
          {"n_group", 4},
          {"topk_group", 2},
          {"norm_topk_prob", true},
          {"routed_scaling_factor", 2.5},
          {"bos_token_id", 0},
          {"eos_token_id", 1}};
}

inline nlohmann::json BaseV2() {
  nlohmann::json config = BaseV3();
  config["architectures"] = {"DeepseekV2ForCausalLM"};
  config["model_type"] = "deepseek_v2";
  return config;
}

inline nlohmann::json Fp8Blocks() {
  return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}}};
}

inline absl::StatusOr<ModelConfig> Parse(const nlohmann::json& config, const std::string& generation = "") {
  return ParseModelConfig(config.dump(), generation);
}

}  // namespace hearth
