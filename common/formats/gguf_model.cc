#include "common/formats/gguf_model.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/formats/file_io.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kArchitecture[] = "deepseek2";

// Typed look-ups of "deepseek2.*" keys.
class Metadata {
 public:
  explicit Metadata(const GgufModel& model) : model_(model) {}

  const GgufValue* Find(const std::string& key) const {
    const auto it = model_.metadata.find(key);
    return it == model_.metadata.end() ? nullptr : &it->second;
  }
  absl::Status Refuse(const std::string& key, std::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(model_.files[0].path, ": metadata key ", key, " ", Sv(what), "; convert the model again with a current convert_hf_to_gguf.py"));
  }
  absl::StatusOr<int64_t> Int(const std::string& key) const {
    const GgufValue* value = Find(key);
    if (value == nullptr) return Refuse(key, "is missing");
    if (const std::optional<int64_t> number = GgufInteger(*value)) return *number;
    return Refuse(key, "is no integer");
  }
  absl::StatusOr<int64_t> IntOr(const std::string& key, int64_t absent) const { return Find(key) == nullptr ? absent : Int(key); }
  absl::StatusOr<double> Number(const std::string& key) const {
    const GgufValue* value = Find(key);
    if (value == nullptr) return Refuse(key, "is missing");
    const auto* d = std::get_if<double>(value);
    // In JSON, which the value becomes, NaN and infinity would turn into null.
    if (d == nullptr || !std::isfinite(*d)) return Refuse(key, "is no finite floating-point number");
    return *d;
  }
  absl::StatusOr<double> NumberOr(const std::string& key, double absent) const { return Find(key) == nullptr ? absent : Number(key); }

 private:
  const GgufModel& model_;
};

// A float's shortest spelling, so that 1e-6 stored in F32 does not become 9.99999997475e-07.
double AsWritten(double value) {
  char text[64];
  const auto written = std::to_chars(text, text + sizeof(text), static_cast<float>(value));
  double parsed = value;
  std::from_chars(text, written.ptr, parsed);
  return parsed;
}

absl::Status AddAttention(const GgufModel& model, const Metadata& meta, json& config) {
  const std::string p = absl::StrCat(kArchitecture, ".attention.");
  ASSIGN_OR_RETURN(config["num_attention_heads"], meta.Int(p + "head_count"));
  ASSIGN_OR_RETURN(const double eps, meta.Number(p + "layer_norm_rms_epsilon"));
  config["rms_norm_eps"] = AsWritten(eps);
  ASSIGN_OR_RETURN(const int64_t q_lora_rank, meta.IntOr(p + "q_lora_rank", 0));
  config["q_lora_rank"] = q_lora_rank > 0 ? json(q_lora_rank) : json(nullptr);
  ASSIGN_OR_RETURN(config["kv_lora_rank"], meta.Int(p + "kv_lora_rank"));
  ASSIGN_OR_RETURN(const int64_t rope, meta.Int(absl::StrCat(kArchitecture, ".rope.dimension_count")));
  // Files with MLA's compressed cache in mind keep a head's own sizes under *_mla; older ones have no others.
  const bool mla = meta.Find(p + "key_length_mla") != nullptr;
  ASSIGN_OR_RETURN(const int64_t key_length, meta.Int(p + (mla ? "key_length_mla" : "key_length")));
  ASSIGN_OR_RETURN(config["v_head_dim"], meta.Int(p + (mla ? "value_length_mla" : "value_length")));
  if (key_length <= rope)
    return meta.Refuse(p + "key_length", absl::StrCat("is ", key_length, ", but rope.dimension_count ", rope, " is a part of it"));
  config["qk_nope_head_dim"] = key_length - rope;
  config["qk_rope_head_dim"] = rope;
  config["kv_b_split"] = model.tensors.contains("blk.0.attn_k_b.weight") && !model.tensors.contains("blk.0.attn_kv_b.weight");
  return absl::OkStatus();
}

absl::Status AddRope(const Metadata& meta, json& config) {
  const std::string p = absl::StrCat(kArchitecture, ".rope.");
  ASSIGN_OR_RETURN(const double theta, meta.NumberOr(p + "freq_base", 10000.0));
  config["rope_theta"] = AsWritten(theta);
  config["rope_scaling"] = nullptr;
  const GgufValue* type = meta.Find(p + "scaling.type");
  if (type == nullptr || *type == GgufValue(std::string("none"))) return absl::OkStatus();
  if (*type != GgufValue(std::string("yarn"))) return meta.Refuse(p + "scaling.type", "is another than \"yarn\" and \"none\", the supported ones");
  ASSIGN_OR_RETURN(const double factor, meta.Number(p + "scaling.factor"));
  ASSIGN_OR_RETURN(const int64_t original, meta.Int(p + "scaling.original_context_length"));
  ASSIGN_OR_RETURN(const double log_multiplier, meta.NumberOr(p + "scaling.yarn_log_multiplier", 0.0));
  ASSIGN_OR_RETURN(const double beta_fast, meta.NumberOr(p + "scaling.yarn_beta_fast", 32.0));
  ASSIGN_OR_RETURN(const double beta_slow, meta.NumberOr(p + "scaling.yarn_beta_slow", 1.0));
  // The converter stores 0.1 * mscale_all_dim. DeepSeek's models have mscale equal to it.
  const double mscale = AsWritten(10.0 * AsWritten(log_multiplier));
  config["rope_scaling"] = {{"type", "yarn"},
                            {"factor", AsWritten(factor)},
                            {"original_max_position_embeddings", original},
                            {"beta_fast", AsWritten(beta_fast)},
                            {"beta_slow", AsWritten(beta_slow)},
                            {"mscale", mscale},
                            {"mscale_all_dim", mscale}};
  return absl::OkStatus();
}

absl::Status AddExperts(const Metadata& meta, json& config) {
  const std::string p = absl::StrCat(kArchitecture, ".");
  ASSIGN_OR_RETURN(const int64_t experts, meta.IntOr(p + "expert_count", 0));
  config["n_routed_experts"] = experts;
  // Sigmoid with a bias for the choice is DeepSeek-V3's gate, softmax V2's. Files from before the key was there are of V2.
  ASSIGN_OR_RETURN(const int64_t gating, meta.IntOr(p + "expert_gating_func", 1));
  if (gating != 1 && gating != 2) return meta.Refuse(p + "expert_gating_func", absl::StrCat("is ", gating, "; supported: 1 (softmax), 2 (sigmoid)"));
  const bool v3 = gating == 2;
  config["architectures"] = {v3 ? "DeepseekV3ForCausalLM" : "DeepseekV2ForCausalLM"};
  config["model_type"] = v3 ? "deepseek_v3" : "deepseek_v2";
  if (experts == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(config["num_experts_per_tok"], meta.Int(p + "expert_used_count"));
  ASSIGN_OR_RETURN(config["moe_intermediate_size"], meta.Int(p + "expert_feed_forward_length"));
  ASSIGN_OR_RETURN(config["n_shared_experts"], meta.IntOr(p + "expert_shared_count", 0));
  ASSIGN_OR_RETURN(config["first_k_dense_replace"], meta.IntOr(p + "leading_dense_block_count", 0));
  ASSIGN_OR_RETURN(const double scale, meta.NumberOr(p + "expert_weights_scale", 1.0));
  config["routed_scaling_factor"] = scale == 0.0 ? 1.0 : AsWritten(scale);
  const GgufValue* norm = meta.Find(p + "expert_weights_norm");
  config["norm_topk_prob"] = norm != nullptr && *norm == GgufValue(true);
  // Files from before the keys were there: DeepSeek-V3's own 8 groups and 4 of them where the experts are its 256, else none.
  const bool v3_groups = v3 && experts == 256;
  ASSIGN_OR_RETURN(const int64_t groups, meta.IntOr(p + "expert_group_count", v3_groups ? 8 : 1));
  ASSIGN_OR_RETURN(const int64_t groups_used, meta.IntOr(p + "expert_group_used_count", v3_groups ? 4 : 1));
  if (groups_used > std::max<int64_t>(groups, 1)) {
    return meta.Refuse(p + "expert_group_used_count", absl::StrCat("is ", groups_used, ", but there are ", groups, " groups of experts"));
  }
  config["n_group"] = std::max<int64_t>(groups, 1);
  config["topk_group"] = std::max<int64_t>(groups_used, 1);
  config["topk_method"] = v3 ? "noaux_tc" : groups > 1 ? "group_limited_greedy" : "greedy";
  config["scoring_func"] = v3 ? "sigmoid" : "softmax";
  return absl::OkStatus();
}

absl::Status AddTokens(const GgufModel& model, const Metadata& meta, json& config) {
  const auto embedding = model.tensors.find("token_embd.weight");
  if (embedding == model.tensors.end() || embedding->second.shape.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(model.files[0].path, ": tensor token_embd.weight [vocabulary, embedding] is missing"));
  }
  config["vocab_size"] = embedding->second.shape[0];
  config["tie_word_embeddings"] = !model.tensors.contains("output.weight");
  config["bos_token_id"] = nullptr;
  if (meta.Find("tokenizer.ggml.bos_token_id") != nullptr) {
    ASSIGN_OR_RETURN(config["bos_token_id"], meta.Int("tokenizer.ggml.bos_token_id"));
  }
  std::vector<int64_t> eos;
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (meta.Find(key) == nullptr) continue;
    ASSIGN_OR_RETURN(const int64_t id, meta.Int(key));
    if (std::find(eos.begin(), eos.end(), id) == eos.end()) eos.push_back(id);
  }
  config["eos_token_id"] = eos.empty() ? json(nullptr) : json(eos);
  return absl::OkStatus();
}

// GGUF's name of a tensor inside a block, and the plan's inside a layer.
constexpr std::array<std::array<const char*, 2>, 19> kBlockTensors = {{
    {"attn_norm.weight", "input_layernorm.weight"},
    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_q_a.weight", "self_attn.q_a_proj.weight"},
    {"attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"},
    {"attn_q_b.weight", "self_attn.q_b_proj.weight"},
    {"attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    {"attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"},
    {"attn_kv_b.weight", "self_attn.kv_b_proj.weight"},
    {"attn_output.weight", "self_attn.o_proj.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},
    {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"},
    {"ffn_gate_inp.weight", "mlp.gate.weight"},
    {"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"},
    {"ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"},
    {"ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"},
    {"attn_k_b.weight", "self_attn.k_b_proj.weight"},
}};
constexpr std::array<std::array<const char*, 2>, 3> kExpertTensors = {{
    {"ffn_gate_exps.weight", "gate_proj.weight"},
    {"ffn_up_exps.weight", "up_proj.weight"},
    {"ffn_down_exps.weight", "down_proj.weight"},
}};

}  // namespace

absl::StatusOr<std::string> GgufConfigJson(const GgufModel& model) {
  const Metadata meta(model);
  const GgufValue* architecture = meta.Find("general.architecture");
  const std::string* name = architecture != nullptr ? std::get_if<std::string>(architecture) : nullptr;
  if (name == nullptr || *name != kArchitecture) {
    const std::string found = name != nullptr ? Quoted(*name) : architecture != nullptr ? "no string" : "missing";
    return absl::InvalidArgumentError(absl::StrCat(model.files[0].path, ": general.architecture is ", found, "; supported: \"", kArchitecture,
                                                   "\" (DeepSeek-V2, V3, R1, Kimi-K2)"));
  }
  json config;
  const std::string p = absl::StrCat(kArchitecture, ".");
  ASSIGN_OR_RETURN(config["num_hidden_layers"], meta.Int(p + "block_count"));
  ASSIGN_OR_RETURN(config["hidden_size"], meta.Int(p + "embedding_length"));
  ASSIGN_OR_RETURN(config["intermediate_size"], meta.Int(p + "feed_forward_length"));
  ASSIGN_OR_RETURN(config["max_position_embeddings"], meta.Int(p + "context_length"));
  RETURN_IF_ERROR(AddTokens(model, meta, config));
  RETURN_IF_ERROR(AddAttention(model, meta, config));
  RETURN_IF_ERROR(AddRope(meta, config));
  RETURN_IF_ERROR(AddExperts(meta, config));
  return config.dump(2);
}

namespace {

// The tensors of a GGUF model under the tensor plan's names.
class TensorNames {
 public:
  explicit TensorNames(const GgufModel& model) : model_(model) {}

  absl::StatusOr<std::map<std::string, CheckpointTensor, std::less<>>> Map() {
    const Metadata meta(model_);
    ASSIGN_OR_RETURN(num_experts_, meta.IntOr(absl::StrCat(kArchitecture, ".expert_count"), 0));
    for (const auto& [name, tensor] : model_.tensors) {
      if (name == "token_embd.weight") RETURN_IF_ERROR(Add(tensor, name, "model.embed_tokens.weight"));
      if (name == "output_norm.weight") RETURN_IF_ERROR(Add(tensor, name, "model.norm.weight"));
      if (name == "output.weight") RETURN_IF_ERROR(Add(tensor, name, "lm_head.weight"));
      if (name.starts_with("blk.")) RETURN_IF_ERROR(AddOfBlock(tensor, name));
    }
    return std::move(tensors_);
  }

 private:
  absl::Status Refuse(const CheckpointTensor& tensor, const std::string& gguf_name, std::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(model_.files[static_cast<size_t>(tensor.file)].path, ": tensor ", Quoted(gguf_name), " ", Sv(what)));
  }

  absl::Status Add(CheckpointTensor tensor, const std::string& gguf_name, std::string name) {
    if (tensor.dtype == DType::kInvalid) {
      return Refuse(tensor, gguf_name, absl::StrCat("is of type ", tensor.dtype_name, "; supported: F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q4_K, Q3_K"));
    }
    tensor.name = name;
    tensors_.emplace(std::move(name), std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status AddOfBlock(const CheckpointTensor& tensor, const std::string& name) {
    const size_t dot = name.find('.', 4);
    if (dot == std::string::npos) return absl::OkStatus();
    const std::string layer = absl::StrCat("model.layers.", name.substr(4, dot - 4), ".");
    const std::string_view rest = std::string_view(name).substr(dot + 1);
    for (const auto& [gguf, ours] : kBlockTensors) {
      if (rest == gguf) return Add(tensor, name, layer + ours);
    }
    if (rest == "attn_v_b.weight" && tensor.shape.size() == 3) {  // heads of [v, kv_lora_rank], one below the other
      CheckpointTensor joined = tensor;
      joined.shape = {tensor.shape[0] * tensor.shape[1], tensor.shape[2]};
      return Add(std::move(joined), name, layer + "self_attn.v_b_proj.weight");
    }
    for (const auto& [gguf, ours] : kExpertTensors) {
      if (rest == gguf) return AddExperts(tensor, name, layer, ours);
    }
    return absl::OkStatus();
  }

  absl::Status AddExperts(const CheckpointTensor& stack, const std::string& name, const std::string& layer, const char* part) {
    if (stack.shape.size() != 3) {
      return Refuse(stack, name, "is no stack of all experts' matrices; convert the model again with a current convert_hf_to_gguf.py");
    }
    // Held against the metadata before anything is made of each: the shape is the file's word alone.
    if (stack.shape[0] != num_experts_) {
      return Refuse(stack, name, absl::StrCat("stacks ", stack.shape[0], " matrices, but ", kArchitecture, ".expert_count is ", num_experts_));
    }
    const uint64_t bytes = stack.bytes / static_cast<uint64_t>(num_experts_);
    for (int64_t expert = 0; expert < num_experts_; ++expert) {
      CheckpointTensor slice = stack;
      slice.shape = {stack.shape[1], stack.shape[2]};
      slice.bytes = bytes;
      slice.offset = stack.offset + bytes * static_cast<uint64_t>(expert);
      RETURN_IF_ERROR(Add(std::move(slice), name, absl::StrCat(layer, "mlp.experts.", expert, ".", part)));
    }
    return absl::OkStatus();
  }

  const GgufModel& model_;
  int64_t num_experts_ = 0;
  std::map<std::string, CheckpointTensor, std::less<>> tensors_;
};

}  // namespace

absl::StatusOr<std::map<std::string, CheckpointTensor, std::less<>>> GgufTensors(const GgufModel& model) { return TensorNames(model).Map(); }

absl::StatusOr<std::string> FindGguf(const std::string& path) {
  if (IsGgufPath(path)) return path;
  std::error_code error;
  std::vector<std::string> found;
  std::string later;  // some part of a split model that is not its first
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".safetensors")) return std::string();
    const bool later_part = name.find("-of-") != std::string::npos && name.find("-00001-of-") == std::string::npos;
    if (IsGgufPath(name)) {
      if (later_part) later = it->path().string();
      if (!later_part) found.push_back(it->path().string());
    }
  }
  if (found.empty() && !later.empty()) {
    return absl::NotFoundError(absl::StrCat(path, " holds ", later, ", but not the first part of that model (-00001-of-...)"));
  }
  if (found.size() > 1) {
    std::sort(found.begin(), found.end());
    return absl::InvalidArgumentError(
        absl::StrCat(path, " holds several GGUF models, ", found[0], " and ", found[1], " among them: name one of them"));
  }
  return found.empty() ? std::string() : found[0];
}

}  // namespace hearth
