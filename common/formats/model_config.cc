#include "common/formats/model_config.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/formats/attention_config.h"
#include "common/formats/config_keys.h"
#include "common/formats/families.h"
#include "common/formats/file_io.h"
#include "common/formats/gguf_model.h"
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
constexpr ConfigKeys::Range kLayers = {1, 1 << 12};
constexpr ConfigKeys::Range kExperts = {0, 1 << 16};
constexpr ConfigKeys::Range kPositions = {1, int64_t{1} << 31};
constexpr int64_t kAllExpertsMax = 1'000'000;  // layers x experts: bounds the tensor plan

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

absl::Status ParseFeedForward(const ConfigKeys& keys, ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::string act, keys.StringOr("hidden_act", "silu"));
  if (act != "silu") return keys.Refuse("hidden_act", "only \"silu\" is supported");
  ASSIGN_OR_RETURN(const bool mlp_bias, keys.BoolOr("mlp_bias", false));
  if (mlp_bias) return keys.Refuse("mlp_bias", "only false is supported");
  return absl::OkStatus();
}

// How the gate scores and chooses. Each architecture's own code has these combinations and no others.
absl::Status ParseGate(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  const bool sigmoid = family.scoring_func == ScoringFunc::kSigmoid;
  ASSIGN_OR_RETURN(const std::string scoring, keys.StringOr("scoring_func", sigmoid ? "sigmoid" : "softmax"));
  if (scoring != (sigmoid ? "sigmoid" : "softmax")) {
    return keys.Refuse("scoring_func", absl::StrCat(config.architecture, " supports only \"", sigmoid ? "sigmoid" : "softmax", "\""));
  }
  config.scoring_func = family.scoring_func;
  ASSIGN_OR_RETURN(const std::string method, keys.StringOr("topk_method", family.topk_method));
  const bool has_groups = config.architecture == "DeepseekV2ForCausalLM";
  if (sigmoid) {
    if (method != "noaux_tc") return keys.Refuse("topk_method", absl::StrCat(config.architecture, " supports only \"noaux_tc\""));
    config.topk_method = TopkMethod::kNoauxTc;
  } else if (method == "greedy") {
    config.topk_method = TopkMethod::kGreedy;
  } else if (method == "group_limited_greedy" && has_groups) {
    config.topk_method = TopkMethod::kGroupLimitedGreedy;
  } else {
    return keys.Refuse("topk_method", absl::StrCat(config.architecture, " supports \"greedy\"", has_groups ? " and \"group_limited_greedy\"" : ""));
  }
  config.norm_topk_prob = family.norm_topk_prob;
  if (family.norm_topk_key != nullptr) {
    ASSIGN_OR_RETURN(config.norm_topk_prob, keys.BoolOr(family.norm_topk_key, family.norm_topk_prob, /*note=*/true));
  }
  ASSIGN_OR_RETURN(config.routed_scaling_factor,
                   keys.DoubleOr("routed_scaling_factor", family.routed_scaling_factor, 1e-6, 1e6, family.has_shared_experts));
  return absl::OkStatus();
}

absl::Status ParseGroups(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  if (config.topk_method == TopkMethod::kGreedy) return absl::OkStatus();  // knows no groups: one of one
  const int64_t experts = config.n_routed_experts;
  ASSIGN_OR_RETURN(config.n_group, keys.IntOrNull("n_group", family.n_group, 1, {1, experts}));
  ASSIGN_OR_RETURN(config.topk_group, keys.IntOrNull("topk_group", std::min(family.topk_group, config.n_group), config.n_group, {1, config.n_group}));
  if (experts % config.n_group != 0) return keys.Refuse("n_group", absl::StrCat("must divide ", family.experts_key, " ", experts));
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

// Which experts every token visits.
absl::Status ParseSharedExperts(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  if (family.gated_shared_size_key != nullptr) {
    ASSIGN_OR_RETURN(config.shared_intermediate_size, keys.Int(family.gated_shared_size_key, kDimension));
    config.n_shared_experts = 1;
    config.shared_expert_gate = true;
    return absl::OkStatus();
  }
  if (!family.has_shared_experts) {
    // A size of zero or null is how some configs say that there are none.
    if (keys.HasValue("shared_intermediate_size")) return keys.Int("shared_intermediate_size", {0, 0}).status();
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(config.n_shared_experts, keys.IntOrNull("n_shared_experts", family.n_shared_experts, 0, {0, 256}));
  config.shared_intermediate_size = config.n_shared_experts * config.moe_intermediate_size;
  return absl::OkStatus();
}

// Which layers have experts.
absl::Status ParseMoeLayers(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  config.moe_layer_offset = family.moe_layer_offset;
  if (family.has_shared_experts) {
    ASSIGN_OR_RETURN(config.first_k_dense_replace, keys.IntOr("first_k_dense_replace", family.first_k_dense_replace, {0, kLayers.max}));
  }
  if (family.layer_freq_key != nullptr && keys.Has(family.layer_freq_key)) {
    ASSIGN_OR_RETURN(config.moe_layer_freq, keys.Int(family.layer_freq_key, kLayers));
  }
  if (!family.has_mlp_only_layers || !keys.HasValue("mlp_only_layers")) return absl::OkStatus();
  const json& list = *keys.Find("mlp_only_layers");
  const auto is_layer = [&](const json& layer) {
    return layer.is_number_unsigned() && layer.get<uint64_t>() < static_cast<uint64_t>(config.num_hidden_layers);
  };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_layer)) {
    return keys.Refuse("mlp_only_layers", absl::StrCat("need a list of layers below num_hidden_layers ", config.num_hidden_layers));
  }
  config.mlp_only_layers = list.get<std::vector<int64_t>>();
  std::sort(config.mlp_only_layers.begin(), config.mlp_only_layers.end());
  return absl::OkStatus();
}

absl::Status ParseExperts(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  config.moe_names = family.moe_names;
  if (keys.Has(family.experts_key) && !keys.HasValue(family.experts_key)) {
    config.n_routed_experts = 0;  // null: a dense model
  } else {
    ASSIGN_OR_RETURN(config.n_routed_experts, keys.Int(family.experts_key, kExperts));
  }
  ASSIGN_OR_RETURN(config.num_nextn_predict_layers,
                   keys.HasValue("num_nextn_predict_layers") ? keys.Int("num_nextn_predict_layers", {0, 64}) : absl::StatusOr<int64_t>(0));
  if (config.n_routed_experts == 0) return absl::OkStatus();

  if (config.n_routed_experts * config.num_hidden_layers > kAllExpertsMax) {
    return keys.Refuse(family.experts_key, absl::StrCat("times ", config.num_hidden_layers, " layers is above the ", kAllExpertsMax, " supported"));
  }
  ASSIGN_OR_RETURN(config.num_experts_per_tok, keys.Int("num_experts_per_tok", {1, config.n_routed_experts}));
  ASSIGN_OR_RETURN(config.moe_intermediate_size, keys.Int(family.expert_size_key, kDimension));
  RETURN_IF_ERROR(ParseSharedExperts(keys, family, config));
  RETURN_IF_ERROR(ParseMoeLayers(keys, family, config));
  RETURN_IF_ERROR(ParseGate(keys, family, config));
  return ParseGroups(keys, family, config);
}

// {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, ...}}}, "ignore": [...]}. Which weights are left
// out (`ignore`) shows in what the checkpoint holds.
absl::Status ParseCompressedTensors(const ConfigKeys& keys, ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::string format, keys.StringOr("format", ""));
  if (format != "pack-quantized") return keys.Refuse("format", "supported: \"pack-quantized\"");
  const json* groups = keys.Find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) return keys.Refuse("config_groups", "need an object of groups");
  for (const auto& [name, group] : groups->items()) {
    const std::string path = absl::StrCat(keys.path(), "config_groups.", name, ".");
    if (!group.is_object() || !group.contains("weights") || !group["weights"].is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(path, "weights is missing or no object"));
    }
    if (group.contains("input_activations") && !group["input_activations"].is_null()) {
      return absl::InvalidArgumentError(absl::StrCat(path, "input_activations is given; supported: null, activations are not quantized"));
    }
    const ConfigKeys weights(group["weights"], path + "weights.", &config.notes);
    ASSIGN_OR_RETURN(const int64_t bits, weights.Int("num_bits", {1, 64}));
    if (bits != 4) return weights.Refuse("num_bits", "supported: 4");
    ASSIGN_OR_RETURN(const int64_t size, weights.Int("group_size", {-1, 1 << 20}));
    if (size != 32) return weights.Refuse("group_size", "supported: 32");
    ASSIGN_OR_RETURN(const bool symmetric, weights.BoolOr("symmetric", true));
    if (!symmetric) return weights.Refuse("symmetric", "supported: true");
    ASSIGN_OR_RETURN(const std::string type, weights.StringOr("type", "int"));
    if (type != "int") return weights.Refuse("type", "supported: \"int\"");
    ASSIGN_OR_RETURN(const std::string strategy, weights.StringOr("strategy", "group"));
    if (strategy != "group") return weights.Refuse("strategy", "supported: \"group\"");
    ASSIGN_OR_RETURN(const bool dynamic, weights.BoolOr("dynamic", false));
    if (dynamic) return weights.Refuse("dynamic", "supported: false");
    // "weight" and "static" only tell in which order the weights were quantized; "group" (and true) permutes the groups' columns.
    const json* order = weights.Find("actorder");
    if (order != nullptr && !order->is_null() && *order != json(false) && *order != json("weight") && *order != json("static")) {
      return weights.Refuse("actorder", "supported: null, \"weight\", \"static\" (groups of neighbouring columns)");
    }
  }
  config.int4_groups = true;
  return absl::OkStatus();
}

absl::Status ParseQuantization(const ConfigKeys& config_keys, ModelConfig& config) {
  constexpr char kKey[] = "quantization_config";
  if (!config_keys.HasValue(kKey)) return absl::OkStatus();
  const json& object = *config_keys.Find(kKey);
  if (!object.is_object()) return config_keys.Refuse(kKey, "need an object or null");
  const ConfigKeys keys(object, absl::StrCat(config_keys.path(), kKey, "."), &config.notes);
  ASSIGN_OR_RETURN(const std::string method, keys.StringOr("quant_method", ""));
  if (method == "compressed-tensors") return ParseCompressedTensors(keys, config);
  if (method != "fp8") {
    return keys.Refuse("quant_method",
                       "supported: \"fp8\" (E4M3 with 128x128 blocks), \"compressed-tensors\" (INT4 in groups of 32), or no quantization_config for "
                       "BF16 weights");
  }
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

bool ModelConfig::IsMoeLayer(int64_t layer) const {
  return n_routed_experts > 0 && layer >= first_k_dense_replace && (layer + moe_layer_offset) % moe_layer_freq == 0 &&
         !std::binary_search(mlp_only_layers.begin(), mlp_only_layers.end(), layer);
}

int64_t ModelConfig::KvRow(DType dtype, int64_t terms) const {
  constexpr int64_t kScaleBytes = sizeof(float);
  const bool f8 = dtype == DType::kF8E4M3;
  if (attention == AttentionKind::kMla) {
    return f8 ? kv_lora_rank + static_cast<int64_t>(sizeof(bf16)) * qk_rope_head_dim + kScaleBytes : terms * mla_row();
  }
  return 2 * num_key_value_heads * (f8 ? v_head_dim + kScaleBytes : terms * v_head_dim);
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json_text, std::string_view generation_config_text) {
  ASSIGN_OR_RETURN(const json object, ParseStrictJson(kConfigName, json_text));
  if (!object.is_object()) return absl::InvalidArgumentError(absl::StrCat(kConfigName, ": must be a JSON object"));
  ModelConfig config;
  const ConfigKeys keys(object, absl::StrCat(kConfigName, ": "), &config.notes);
  ASSIGN_OR_RETURN(const Family* family, ChooseFamily(keys, config));
  RETURN_IF_ERROR(ParseDimensions(keys, config));
  RETURN_IF_ERROR(ParseAttention(keys, *family, config));
  RETURN_IF_ERROR(ParseFeedForward(keys, config));
  RETURN_IF_ERROR(ParseExperts(keys, *family, config));
  RETURN_IF_ERROR(ParseQuantization(keys, config));
  ASSIGN_OR_RETURN(config.kv_b_split, keys.BoolOr("kv_b_split", false));
  RETURN_IF_ERROR(ParseSpecialTokens(keys, generation_config_text, config));
  return config;
}

absl::StatusOr<ModelTexts> ReadModelTexts(const ModelFiles& files) {
  if (files.gguf.has_value()) {
    ASSIGN_OR_RETURN(std::string config_text, GgufConfigJson(*files.gguf));
    return ModelTexts{std::move(config_text), std::string()};
  }
  ASSIGN_OR_RETURN(std::string config_text, ReadSmallFile(absl::StrCat(files.path, "/", kConfigName), kConfigBytesMax));
  const std::string generation_path = absl::StrCat(files.path, "/", kGenerationName);
  absl::StatusOr<std::string> generation_text = ReadSmallFile(generation_path, kConfigBytesMax);
  if (absl::IsNotFound(generation_text.status())) {
    generation_text = std::string();
  } else if (!generation_text.ok()) {
    return generation_text.status();
  } else if (generation_text->empty()) {
    // Absent is fine, but an empty file was cut off somewhere.
    return absl::InvalidArgumentError(absl::StrCat(generation_path, ": is empty; restore or remove it"));
  }
  return ModelTexts{std::move(config_text), *std::move(generation_text)};
}

absl::StatusOr<ModelConfig> ReadModelConfig(const ModelFiles& files) {
  ASSIGN_OR_RETURN(const ModelTexts texts, ReadModelTexts(files));
  absl::StatusOr<ModelConfig> config = ParseModelConfig(texts.config_json, texts.generation_config_json);
  if (!config.ok()) return Annotate(config.status(), files.path);
  return config;
}

absl::StatusOr<ModelTexts> ReadModelTexts(const std::string& model_path) {
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(model_path));
  return ReadModelTexts(files);
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_path) {
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(model_path));
  return ReadModelConfig(files);
}

std::string ModelFilesDir(const std::string& model_path) {
  if (!IsGgufPath(model_path)) return model_path;
  const std::string parent = std::filesystem::path(model_path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace hearth
