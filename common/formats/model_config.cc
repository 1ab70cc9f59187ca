#include "common/formats/model_config.h"

#include <algorithm>
#include <array>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/formats/config_keys.h"
#include "common/formats/file_io.h"
#include "common/formats/rope_config.h"
#include "common/formats/strict_json.h"

namespace hearth {
namespace {

using nlohmann::json;

constexpr uint64_t kConfigBytesMax = 16 << 20;
constexpr char kConfigName[] = "config.json";
constexpr char kGenerationName[] = "generation_config.json";

// Far above any model, and low enough that no product of three of them overflows 64 bits.
constexpr ConfigKeys::Range kDimension = {1, 1 << 20};
constexpr ConfigKeys::Range kVocabulary = {1, 1 << 24};
constexpr ConfigKeys::Range kHeads = {1, 1 << 16};
constexpr ConfigKeys::Range kLayers = {1, 1 << 12};
constexpr ConfigKeys::Range kExperts = {0, 1 << 16};
constexpr ConfigKeys::Range kPositions = {1, int64_t{1} << 31};
constexpr int64_t kAllExpertsMax = 1'000'000;  // layers x experts: bounds the tensor plan

// What the configuration classes of Transformers fill in, by architecture.
struct Family {
  const char* architecture;
  std::array<const char*, 2> model_types;
  ScoringFunc scoring_func;
  const char* topk_method;
  int64_t n_shared_experts;
  int64_t first_k_dense_replace;
  int64_t n_group;
  int64_t topk_group;
  bool norm_topk_prob;
  double routed_scaling_factor;
};

constexpr std::array kFamilies = {
    Family{"DeepseekV3ForCausalLM", {"deepseek_v3", "kimi_k2"}, ScoringFunc::kSigmoid, "noaux_tc", 1, 3, 8, 4, true, 2.5},
    Family{"DeepseekV2ForCausalLM", {"deepseek_v2", nullptr}, ScoringFunc::kSoftmax, "greedy", 2, 0, 1, 1, false, 1.0},
};
constexpr char kSupportedArchitectures[] =
    "supported: DeepseekV3ForCausalLM (model_type deepseek_v3 or kimi_k2), DeepseekV2ForCausalLM (model_type "
    "deepseek_v2)";

bool HasModelType(const Family& family, std::string_view type) {
  return std::any_of(family.model_types.begin(), family.model_types.end(), [type](const char* known) { return known != nullptr && type == known; });
}

// Architecture and model_type must be known and belong together; either one alone is enough.
absl::StatusOr<const Family*> ChooseFamily(const ConfigKeys& keys, ModelConfig& config) {
  const Family* family = nullptr;
  if (keys.HasValue("architectures")) {
    const json& list = *keys.Find("architectures");
    if (!list.is_array() || list.size() != 1 || !list[0].is_string()) {
      return keys.Refuse("architectures", absl::StrCat("need a list of one name; ", kSupportedArchitectures));
    }
    config.architecture = list[0].get<std::string>();
    for (const Family& known : kFamilies) {
      if (config.architecture == known.architecture) family = &known;
    }
    if (family == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(keys.path(), "architecture ", Quoted(config.architecture), " is not supported; ", kSupportedArchitectures));
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
      return keys.Refuse("model_type",
                         absl::StrCat(family ? absl::StrCat("doesn't belong to ", config.architecture, "; ") : "", kSupportedArchitectures));
    }
  }
  if (family == nullptr) return keys.Refuse("architectures", kSupportedArchitectures);
  if (config.architecture.empty()) config.architecture = family->architecture;
  if (config.model_type.empty()) config.model_type = family->model_types[0];
  return family;
}

absl::Status ParseDimensions(const ConfigKeys& keys, ModelConfig& config) {
  ASSIGN_OR_RETURN(config.vocab_size, keys.Int("vocab_size", kVocabulary));
  ASSIGN_OR_RETURN(config.hidden_size, keys.Int("hidden_size", kDimension));
  ASSIGN_OR_RETURN(config.num_hidden_layers, keys.Int("num_hidden_layers", kLayers));
  ASSIGN_OR_RETURN(config.intermediate_size, keys.Int("intermediate_size", kDimension));
  ASSIGN_OR_RETURN(config.max_position_embeddings, keys.Int("max_position_embeddings", kPositions));
  ASSIGN_OR_RETURN(config.rms_norm_eps, keys.DoubleOr("rms_norm_eps", 1e-6, 1e-30, 1.0));
  ASSIGN_OR_RETURN(config.tie_word_embeddings, keys.BoolOr("tie_word_embeddings", false));
  return absl::OkStatus();
}

absl::Status ParseAttention(const ConfigKeys& keys, ModelConfig& config) {
  ASSIGN_OR_RETURN(config.num_attention_heads, keys.Int("num_attention_heads", kHeads));
  // Transformers always writes this key; hand-made configs leave it out where there is no such rank.
  if (keys.HasValue("q_lora_rank")) {
    ASSIGN_OR_RETURN(config.q_lora_rank, keys.Int("q_lora_rank", kDimension));
  } else if (!keys.Has("q_lora_rank")) {
    keys.Note(absl::StrCat(keys.path(), "q_lora_rank is missing: read as null, a plain q_proj"));
  }
  ASSIGN_OR_RETURN(config.kv_lora_rank, keys.Int("kv_lora_rank", kDimension));
  ASSIGN_OR_RETURN(config.qk_nope_head_dim, keys.Int("qk_nope_head_dim", kHeads));
  ASSIGN_OR_RETURN(config.qk_rope_head_dim, keys.Int("qk_rope_head_dim", kHeads));
  ASSIGN_OR_RETURN(config.v_head_dim, keys.Int("v_head_dim", kHeads));
  if (config.qk_rope_head_dim % 2 != 0) return keys.Refuse("qk_rope_head_dim", "need an even number: rotation works on pairs");
  if (keys.HasValue("qk_head_dim")) {
    const int64_t sum = config.qk_head_dim();
    ASSIGN_OR_RETURN(const int64_t given, keys.Int("qk_head_dim", {1, 1 << 17}));
    if (given != sum) return keys.Refuse("qk_head_dim", absl::StrCat("contradicts qk_nope_head_dim + qk_rope_head_dim = ", sum));
  }
  if (keys.HasValue("num_key_value_heads")) {
    ASSIGN_OR_RETURN(const int64_t given, keys.Int("num_key_value_heads", kHeads));
    if (given != config.num_attention_heads) {
      keys.Note(absl::StrCat(keys.path(), "num_key_value_heads is ", given, ": ignored, MLA has one latent vector for all heads"));
    }
  }
  ASSIGN_OR_RETURN(const bool attention_bias, keys.BoolOr("attention_bias", false));
  if (attention_bias) return keys.Refuse("attention_bias", "only false is supported");
  ASSIGN_OR_RETURN(config.rope_interleave, keys.BoolOr("rope_interleave", true));
  if (!config.rope_interleave) {
    return keys.Refuse("rope_interleave", "only true is supported: rotary pairs are neighbours (2i, 2i+1), as the DeepSeek models have them");
  }
  if (keys.HasValue("partial_rotary_factor")) RETURN_IF_ERROR(keys.Double("partial_rotary_factor", 1.0, 1.0).status());
  ASSIGN_OR_RETURN(RopeConfig rope, ParseRopeConfig(keys, config.max_position_embeddings, &config.notes));
  config.rope_theta = rope.theta;
  config.rope_scaling = rope.scaling;
  return absl::OkStatus();
}

absl::Status ParseFeedForward(const ConfigKeys& keys, ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::string act, keys.StringOr("hidden_act", "silu"));
  if (act != "silu") return keys.Refuse("hidden_act", "only \"silu\" is supported");
  ASSIGN_OR_RETURN(const bool mlp_bias, keys.BoolOr("mlp_bias", false));
  if (mlp_bias) return keys.Refuse("mlp_bias", "only false is supported");
  return absl::OkStatus();
}

// How the gate scores and chooses. Each architecture's own code has these combinations and no others.
absl::Status ParseGate(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  const bool is_v3 = family.scoring_func == ScoringFunc::kSigmoid;
  ASSIGN_OR_RETURN(const std::string scoring, keys.StringOr("scoring_func", is_v3 ? "sigmoid" : "softmax"));
  if (scoring != (is_v3 ? "sigmoid" : "softmax")) {
    return keys.Refuse("scoring_func", absl::StrCat(config.architecture, " supports only \"", is_v3 ? "sigmoid" : "softmax", "\""));
  }
  config.scoring_func = family.scoring_func;
  ASSIGN_OR_RETURN(const std::string method, keys.StringOr("topk_method", family.topk_method));
  if (is_v3) {
    if (method != "noaux_tc") return keys.Refuse("topk_method", absl::StrCat(config.architecture, " supports only \"noaux_tc\""));
    config.topk_method = TopkMethod::kNoauxTc;
  } else if (method == "greedy") {
    config.topk_method = TopkMethod::kGreedy;
  } else if (method == "group_limited_greedy") {
    config.topk_method = TopkMethod::kGroupLimitedGreedy;
  } else {
    return keys.Refuse("topk_method", absl::StrCat(config.architecture, " supports \"greedy\" and \"group_limited_greedy\""));
  }
  ASSIGN_OR_RETURN(config.norm_topk_prob, keys.BoolOr("norm_topk_prob", family.norm_topk_prob, /*note=*/true));
  ASSIGN_OR_RETURN(config.routed_scaling_factor, keys.DoubleOr("routed_scaling_factor", family.routed_scaling_factor, 1e-6, 1e6));
  return absl::OkStatus();
}

absl::Status ParseGroups(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  if (config.topk_method == TopkMethod::kGreedy) return absl::OkStatus();  // knows no groups: one of one
  const int64_t experts = config.n_routed_experts;
  ASSIGN_OR_RETURN(config.n_group, keys.IntOrNull("n_group", family.n_group, 1, {1, experts}));
  ASSIGN_OR_RETURN(config.topk_group, keys.IntOrNull("topk_group", std::min(family.topk_group, config.n_group), config.n_group, {1, config.n_group}));
  if (experts % config.n_group != 0) return keys.Refuse("n_group", absl::StrCat("must divide n_routed_experts ", experts));
  const int64_t group_experts = experts / config.n_group;
  if (config.topk_method == TopkMethod::kNoauxTc && config.n_group > 1 && group_experts < 2) {
    return keys.Refuse("n_group", absl::StrCat("leaves one expert a group; noaux_tc scores a group by its two best"));
  }
  if (config.num_experts_per_tok > config.topk_group * group_experts) {
    return keys.Refuse("num_experts_per_tok",
                       absl::StrCat("is more than topk_group ", config.topk_group, " groups of ", group_experts, " experts hold"));
  }
  return absl::OkStatus();
}

absl::Status ParseExperts(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  if (keys.Has("n_routed_experts") && !keys.HasValue("n_routed_experts")) {
    config.n_routed_experts = 0;  // null: a dense model
  } else {
    ASSIGN_OR_RETURN(config.n_routed_experts, keys.Int("n_routed_experts", kExperts));
  }
  ASSIGN_OR_RETURN(config.num_nextn_predict_layers,
                   keys.HasValue("num_nextn_predict_layers") ? keys.Int("num_nextn_predict_layers", {0, 64}) : absl::StatusOr<int64_t>(0));
  if (config.n_routed_experts == 0) return absl::OkStatus();

  if (config.n_routed_experts * config.num_hidden_layers > kAllExpertsMax) {
    return keys.Refuse("n_routed_experts", absl::StrCat("times ", config.num_hidden_layers, " layers is above the ", kAllExpertsMax, " supported"));
  }
  ASSIGN_OR_RETURN(config.num_experts_per_tok, keys.Int("num_experts_per_tok", {1, config.n_routed_experts}));
  ASSIGN_OR_RETURN(config.moe_intermediate_size, keys.Int("moe_intermediate_size", kDimension));
  ASSIGN_OR_RETURN(config.n_shared_experts, keys.IntOrNull("n_shared_experts", family.n_shared_experts, 0, {0, 256}));
  ASSIGN_OR_RETURN(config.first_k_dense_replace, keys.IntOr("first_k_dense_replace", family.first_k_dense_replace, {0, kLayers.max}));
  ASSIGN_OR_RETURN(config.moe_layer_freq, keys.Has("moe_layer_freq") ? keys.Int("moe_layer_freq", kLayers) : absl::StatusOr<int64_t>(1));
  RETURN_IF_ERROR(ParseGate(keys, family, config));
  return ParseGroups(keys, family, config);
}

absl::Status ParseQuantization(const ConfigKeys& config_keys, ModelConfig& config) {
  constexpr char kKey[] = "quantization_config";
  if (!config_keys.HasValue(kKey)) return absl::OkStatus();
  const json& object = *config_keys.Find(kKey);
  if (!object.is_object()) return config_keys.Refuse(kKey, "need an object or null");
  const ConfigKeys keys(object, absl::StrCat(config_keys.path(), kKey, "."), &config.notes);
  ASSIGN_OR_RETURN(const std::string method, keys.StringOr("quant_method", ""));
  if (method != "fp8")
    return keys.Refuse("quant_method", "supported: \"fp8\" (E4M3 with 128x128 blocks), or no quantization_config for BF16 weights");
  ASSIGN_OR_RETURN(const std::string fmt, keys.StringOr("fmt", "e4m3"));
  if (fmt != "e4m3") return keys.Refuse("fmt", "supported: \"e4m3\"");
  ASSIGN_OR_RETURN(const std::string activations, keys.StringOr("activation_scheme", "dynamic"));
  if (activations != "dynamic") return keys.Refuse("activation_scheme", "supported: \"dynamic\"");
  const json* block = keys.Find("weight_block_size");
  if (block == nullptr || *block != json::array({128, 128})) return keys.Refuse("weight_block_size", "supported: [128, 128]");
  config.fp8_blocks = true;
  return absl::OkStatus();
}

// An id, a list of ids, or null.
absl::StatusOr<std::vector<int32_t>> ParseTokenIds(const ConfigKeys& keys, const char* key, int64_t vocab_size) {
  std::vector<int32_t> ids;
  if (!keys.HasValue(key)) return ids;
  const json& value = *keys.Find(key);
  const json list = value.is_array() ? value : json::array({value});
  for (const json& id : list) {
    const bool is_id = id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab_size);
    if (!is_id) {
      return keys.Refuse(key, absl::StrCat("need a token id below vocab_size ", vocab_size, ", a list of such ids, or null"));
    }
    ids.push_back(static_cast<int32_t>(id.get<uint64_t>()));
  }
  return ids;
}

absl::Status ParseSpecialTokens(const ConfigKeys& keys, std::string_view generation_text, ModelConfig& config) {
  // The union of what both files declare: either may be the one that was kept up to date.
  ASSIGN_OR_RETURN(config.eos_token_ids, ParseTokenIds(keys, "eos_token_id", config.vocab_size));
  ASSIGN_OR_RETURN(std::vector<int32_t> bos, ParseTokenIds(keys, "bos_token_id", config.vocab_size));
  if (!generation_text.empty()) {
    ASSIGN_OR_RETURN(const json generation, ParseStrictJson(kGenerationName, generation_text));
    if (!generation.is_object()) return absl::InvalidArgumentError(absl::StrCat(kGenerationName, ": must be a JSON object"));
    const ConfigKeys generation_keys(generation, absl::StrCat(kGenerationName, ": "), &config.notes);
    ASSIGN_OR_RETURN(const std::vector<int32_t> more, ParseTokenIds(generation_keys, "eos_token_id", config.vocab_size));
    config.eos_token_ids.insert(config.eos_token_ids.end(), more.begin(), more.end());
    if (bos.empty()) {
      ASSIGN_OR_RETURN(bos, ParseTokenIds(generation_keys, "bos_token_id", config.vocab_size));
    }
  }
  std::sort(config.eos_token_ids.begin(), config.eos_token_ids.end());
  config.eos_token_ids.erase(std::unique(config.eos_token_ids.begin(), config.eos_token_ids.end()), config.eos_token_ids.end());
  if (config.eos_token_ids.empty()) config.notes.push_back("no eos_token_id declared: only max_tokens and stop strings end an answer");
  if (bos.size() > 1) return keys.Refuse("bos_token_id", "need one token id or null");
  if (!bos.empty()) config.bos_token_id = bos[0];
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json_text, std::string_view generation_config_text) {
  ASSIGN_OR_RETURN(const json object, ParseStrictJson(kConfigName, json_text));
  if (!object.is_object()) return absl::InvalidArgumentError(absl::StrCat(kConfigName, ": must be a JSON object"));
  ModelConfig config;
  const ConfigKeys keys(object, absl::StrCat(kConfigName, ": "), &config.notes);
  ASSIGN_OR_RETURN(const Family* family, ChooseFamily(keys, config));
  RETURN_IF_ERROR(ParseDimensions(keys, config));
  RETURN_IF_ERROR(ParseAttention(keys, config));
  RETURN_IF_ERROR(ParseFeedForward(keys, config));
  RETURN_IF_ERROR(ParseExperts(keys, *family, config));
  RETURN_IF_ERROR(ParseQuantization(keys, config));
  RETURN_IF_ERROR(ParseSpecialTokens(keys, generation_config_text, config));
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_dir) {
  ASSIGN_OR_RETURN(const std::string config_text, ReadSmallFile(absl::StrCat(model_dir, "/", kConfigName), kConfigBytesMax));
  const std::string generation_path = absl::StrCat(model_dir, "/", kGenerationName);
  absl::StatusOr<std::string> generation_text = ReadSmallFile(generation_path, kConfigBytesMax);
  if (absl::IsNotFound(generation_text.status())) {
    generation_text = std::string();
  } else if (!generation_text.ok()) {
    return generation_text.status();
  } else if (generation_text->empty()) {
    // Absent is fine, but an empty file was cut off somewhere.
    return absl::InvalidArgumentError(absl::StrCat(generation_path, ": is empty; restore or remove it"));
  }
  absl::StatusOr<ModelConfig> config = ParseModelConfig(config_text, *generation_text);
  if (!config.ok()) return Annotate(config.status(), model_dir);
  return config;
}

}  // namespace hearth
