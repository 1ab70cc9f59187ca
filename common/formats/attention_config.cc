#include "common/formats/attention_config.h"

#include "absl/strings/str_cat.h"
#include "common/formats/rope_config.h"

namespace hearth {
namespace {

constexpr ConfigKeys::Range kRank = {1, 1 << 20};
constexpr ConfigKeys::Range kHeads = {1, 1 << 16};

absl::Status ParseMla(const ConfigKeys& keys, ModelConfig& config) {
  // Transformers always writes this key; hand-made configs leave it out where there is no such rank.
  if (keys.HasValue("q_lora_rank")) {
    ASSIGN_OR_RETURN(config.q_lora_rank, keys.Int("q_lora_rank", kRank));
  } else if (!keys.Has("q_lora_rank")) {
    keys.Note(absl::StrCat(keys.path(), "q_lora_rank is missing: read as null, a plain q_proj"));
  }
  ASSIGN_OR_RETURN(config.kv_lora_rank, keys.Int("kv_lora_rank", kRank));
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
  ASSIGN_OR_RETURN(const RopeConfig rope, ParseRopeConfig(keys, config.max_position_embeddings, /*partial_rotary_factor_min=*/1.0, &config.notes));
  config.rope_theta = rope.theta;
  config.rope_scaling = rope.scaling;
  return absl::OkStatus();
}

// Attention over a window is another mask than the one that all pages are walked with.
absl::Status RefuseSlidingWindow(const ConfigKeys& keys) {
  ASSIGN_OR_RETURN(const bool used, keys.BoolOr("use_sliding_window", keys.HasValue("sliding_window")));
  if (!used) return absl::OkStatus();
  return keys.Refuse(keys.HasValue("sliding_window") ? "sliding_window" : "use_sliding_window", "attention over a sliding window is not supported");
}

absl::Status ParseHeadNorm(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  config.qk_norm = family.qk_norm;
  if (family.qk_norm_key != nullptr) {
    ASSIGN_OR_RETURN(const bool used, keys.BoolOr(family.qk_norm_key, family.qk_norm == QkNorm::kAllHeads, /*note=*/true));
    if (!used) config.qk_norm = QkNorm::kNone;
  }
  if (config.qk_norm == QkNorm::kAllHeads && keys.HasValue("qk_norm_type")) {
    ASSIGN_OR_RETURN(const std::string type, keys.StringOr("qk_norm_type", ""));
    if (type != "per_layer") return keys.Refuse("qk_norm_type", "only \"per_layer\" is supported: one norm over all heads of a layer");
  }
  return absl::OkStatus();
}

absl::Status ParseGqa(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  ASSIGN_OR_RETURN(config.num_key_value_heads, keys.Int("num_key_value_heads", {1, config.num_attention_heads}));
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return keys.Refuse("num_key_value_heads", absl::StrCat("must divide num_attention_heads ", config.num_attention_heads));
  }
  int64_t head_dim = config.hidden_size / config.num_attention_heads;
  if (keys.HasValue("head_dim")) {
    ASSIGN_OR_RETURN(head_dim, keys.Int("head_dim", kHeads));
  } else if (config.hidden_size % config.num_attention_heads != 0) {
    return keys.Refuse("head_dim",
                       absl::StrCat("without it num_attention_heads ", config.num_attention_heads, " must divide hidden_size ", config.hidden_size));
  }
  config.qkv_bias = family.qkv_bias;
  if (family.qkv_bias_key != nullptr) {
    ASSIGN_OR_RETURN(config.qkv_bias, keys.BoolOr(family.qkv_bias_key, family.qkv_bias));
  } else {
    ASSIGN_OR_RETURN(const bool attention_bias, keys.BoolOr("attention_bias", false));
    if (attention_bias) return keys.Refuse("attention_bias", "only false is supported");
  }
  RETURN_IF_ERROR(ParseHeadNorm(keys, family, config));
  RETURN_IF_ERROR(RefuseSlidingWindow(keys));

  ASSIGN_OR_RETURN(const RopeConfig rope, ParseRopeConfig(keys, config.max_position_embeddings, /*partial_rotary_factor_min=*/1e-3, &config.notes));
  config.rope_theta = rope.theta;
  config.rope_scaling = rope.scaling;
  config.rope_interleave = false;
  if (keys.HasValue("rotary_dim")) {
    ASSIGN_OR_RETURN(config.qk_rope_head_dim, keys.Int("rotary_dim", {2, head_dim}));
  } else {
    config.qk_rope_head_dim = static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor.value_or(family.partial_rotary_factor));
  }
  if (config.qk_rope_head_dim < 2 || config.qk_rope_head_dim % 2 != 0) {
    return keys.Refuse(keys.HasValue("rotary_dim") ? "rotary_dim" : "head_dim",
                       absl::StrCat("gives ", config.qk_rope_head_dim, " rotated elements of a head; need an even number: rotation works on pairs"));
  }
  config.qk_nope_head_dim = head_dim - config.qk_rope_head_dim;
  config.v_head_dim = head_dim;
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseAttention(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  config.attention = family.attention;
  ASSIGN_OR_RETURN(config.num_attention_heads, keys.Int("num_attention_heads", kHeads));
  return family.attention == AttentionKind::kMla ? ParseMla(keys, config) : ParseGqa(keys, family, config);
}

}  // namespace hearth
