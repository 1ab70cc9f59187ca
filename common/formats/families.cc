#include "common/formats/families.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/formats/file_io.h"

namespace hearth {
namespace {

using nlohmann::json;

constexpr MoeNames kMixtralNames = {.gate = "block_sparse_moe.gate.weight",
                                    .gate_bias = "block_sparse_moe.e_score_correction_bias",
                                    .experts = "block_sparse_moe.experts.",
                                    .gate_proj = "w1.weight",
                                    .up_proj = "w3.weight",
                                    .down_proj = "w2.weight"};

constexpr std::array kFamilies = {
    Family{.architecture = "DeepseekV3ForCausalLM",
           .model_types = {"deepseek_v3", "kimi_k2"},
           .has_shared_experts = true,
           .n_shared_experts = 1,
           .first_k_dense_replace = 3,
           .n_group = 8,
           .topk_group = 4,
           .routed_scaling_factor = 2.5},
    Family{.architecture = "DeepseekV2ForCausalLM",
           .model_types = {"deepseek_v2"},
           .scoring_func = ScoringFunc::kSoftmax,
           .topk_method = "greedy",
           .has_shared_experts = true,
           .n_shared_experts = 2,
           .norm_topk_prob = false},
    Family{.architecture = "Glm4MoeLiteForCausalLM",  // GLM-4.7-Flash
           .model_types = {"glm4_moe_lite"},
           .has_shared_experts = true,
           .n_shared_experts = 1,
           .first_k_dense_replace = 1,
           .routed_scaling_factor = 1.8},
    Family{.architecture = "Glm4MoeForCausalLM",  // GLM-4.5 to 4.7
           .model_types = {"glm4_moe"},
           .attention = AttentionKind::kGqa,
           .qkv_bias_key = "attention_bias",
           .qk_norm = QkNorm::kPerHead,
           .qk_norm_key = "use_qk_norm",
           .partial_rotary_factor = 0.5,
           .has_shared_experts = true,
           .n_shared_experts = 1,
           .first_k_dense_replace = 1},
    Family{.architecture = "Qwen3MoeForCausalLM",
           .model_types = {"qwen3_moe"},
           .attention = AttentionKind::kGqa,
           .qk_norm = QkNorm::kPerHead,
           .experts_key = "num_experts",
           .layer_freq_key = "decoder_sparse_step",
           .moe_layer_offset = 1,
           .has_mlp_only_layers = true,
           .scoring_func = ScoringFunc::kSoftmax,
           .topk_method = "greedy",
           .norm_topk_prob = false},
    Family{.architecture = "Qwen2MoeForCausalLM",
           .model_types = {"qwen2_moe"},
           .attention = AttentionKind::kGqa,
           .qkv_bias_key = "qkv_bias",
           .qkv_bias = true,
           .experts_key = "num_experts",
           .layer_freq_key = "decoder_sparse_step",
           .moe_layer_offset = 1,
           .has_mlp_only_layers = true,
           .scoring_func = ScoringFunc::kSoftmax,
           .topk_method = "greedy",
           .gated_shared_size_key = "shared_expert_intermediate_size",
           .norm_topk_prob = false,
           .moe_names = {.shared = "mlp.shared_expert."}},
    Family{.architecture = "MixtralForCausalLM",
           .model_types = {"mixtral"},
           .attention = AttentionKind::kGqa,
           .experts_key = "num_local_experts",
           .expert_size_key = "intermediate_size",
           .layer_freq_key = nullptr,
           .scoring_func = ScoringFunc::kSoftmax,
           .topk_method = "greedy",
           .norm_topk_key = nullptr,
           .moe_names = kMixtralNames},
    Family{.architecture = "MiniMaxM2ForCausalLM",
           .model_types = {"minimax_m2"},
           .attention = AttentionKind::kGqa,
           .qk_norm = QkNorm::kAllHeads,
           .qk_norm_key = "use_qk_norm",
           .experts_key = "num_local_experts",
           .expert_size_key = "intermediate_size",
           .layer_freq_key = nullptr,
           .norm_topk_key = nullptr,
           .moe_names = kMixtralNames},
};

std::string Supported() {
  std::string text;
  for (const Family& family : kFamilies) {
    absl::StrAppend(&text, text.empty() ? "supported: " : ", ", family.architecture, " (model_type ", family.model_types[0]);
    if (family.model_types[1] != nullptr) absl::StrAppend(&text, " or ", family.model_types[1]);
    text += ")";
  }
  return text;
}

bool HasModelType(const Family& family, std::string_view type) {
  return std::any_of(family.model_types.begin(), family.model_types.end(), [type](const char* known) { return known != nullptr && type == known; });
}

}  // namespace

absl::StatusOr<const Family*> ChooseFamily(const ConfigKeys& keys, ModelConfig& config) {
  const Family* family = nullptr;
  if (keys.HasValue("architectures")) {
    const json& list = *keys.Find("architectures");
    if (!list.is_array() || list.size() != 1 || !list[0].is_string()) {
      return keys.Refuse("architectures", absl::StrCat("need a list of one name; ", Supported()));
    }
    config.architecture = list[0].get<std::string>();
    for (const Family& known : kFamilies) {
      if (config.architecture == known.architecture) family = &known;
    }
    if (family == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(keys.path(), "architecture ", Quoted(config.architecture), " is not supported; ", Supported()));
    }
  }
  if (keys.HasValue("model_type")) {
    ASSIGN_OR_RETURN(config.model_type, keys.StringOr("model_type", ""));
    if (family == nullptr) {
      for (const Family& known : kFamilies) {
        if (HasModelType(known, config.model_type)) family = &known;
      }
    }
    if (family == nullptr || !HasModelType(*family, config.model_type)) {
      return keys.Refuse("model_type", absl::StrCat(family ? absl::StrCat("doesn't belong to ", config.architecture, "; ") : "", Supported()));
    }
  }
  if (family == nullptr) return keys.Refuse("architectures", Supported());
  if (config.architecture.empty()) config.architecture = family->architecture;
  if (config.model_type.empty()) config.model_type = family->model_types[0];
  return family;
}

}  // namespace hearth
