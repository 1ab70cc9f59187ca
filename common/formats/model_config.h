// What a checkpoint's config.json says, checked once, with the names that DeepSeek's checkpoints use. families.cc lists the architectures and
// what each of them means by its own keys.
// Room: common/formats. May touch: common/base. Threads: any; a plain value.
//
// Every key is either required, or has the default that Transformers gives it; a missing, null, mistyped or
// contradictory one is an InvalidArgument that names the key, what was found and what is supported. Unknown
// architectures are refused by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "common/formats/model_files.h"

namespace hearth {

enum class ScoringFunc { kSigmoid, kSoftmax };
// greedy: plain top-k. group_limited_greedy: groups scored by their best expert. noaux_tc: bias for the choice, groups
// by their two best.
enum class TopkMethod { kGreedy, kGroupLimitedGreedy, kNoauxTc };

struct RopeScaling {  // YaRN (arXiv 2309.00071); absent = plain RoPE
  double factor = 1.0;
  int64_t original_max_position_embeddings = 0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 1.0;
  double mscale_all_dim = 0.0;
  std::optional<double> attention_factor;  // when given, replaces the quotient of the two
};

// kMla: one cached latent for all heads (DeepSeek-V2 section 2.1). kGqa: cached keys and values, each for a group of query heads (arXiv 2305.13245).
enum class AttentionKind { kMla, kGqa };
// RMSNorm of queries and keys before rotation: each head for itself, or all heads as one vector.
enum class QkNorm { kNone, kPerHead, kAllHeads };

// What a family calls the tensors of its MoE layers, behind "model.layers.N.". Dense layers are "mlp." everywhere.
struct MoeNames {
  const char* gate = "mlp.gate.weight";
  const char* gate_bias = "mlp.gate.e_score_correction_bias";
  const char* experts = "mlp.experts.";  // then the expert's id, "." and one of the three
  const char* gate_proj = "gate_proj.weight";
  const char* up_proj = "up_proj.weight";
  const char* down_proj = "down_proj.weight";
  const char* shared = "mlp.shared_experts.";
  const char* shared_gate = "mlp.shared_expert_gate.weight";
};

struct ModelConfig {
  std::string architecture;  // "DeepseekV3ForCausalLM"
  std::string model_type;    // "deepseek_v3", "kimi_k2", "qwen3_moe", ...

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // dense layers
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;

  AttentionKind attention = AttentionKind::kMla;
  // GQA. A head's first qk_rope_head_dim elements are rotated, in pairs (i, i + half); head_dim = nope + rope = v_head_dim.
  int64_t num_key_value_heads = 0;
  bool qkv_bias = false;
  QkNorm qk_norm = QkNorm::kNone;

  // MLA (DeepSeek-V2 section 2.1)
  std::optional<int64_t> q_lora_rank;  // none: a plain q_proj
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  double rope_theta = 10000.0;
  bool rope_interleave = true;
  std::optional<RopeScaling> rope_scaling;

  // MoE
  int64_t n_routed_experts = 0;  // 0: no MoE layer at all
  int64_t num_experts_per_tok = 0;
  int64_t n_shared_experts = 0;
  int64_t shared_intermediate_size = 0;  // of all shared experts together; 0: none
  bool shared_expert_gate = false;       // their output is weighted by sigmoid(shared_gate . x)
  int64_t moe_intermediate_size = 0;
  int64_t first_k_dense_replace = 0;
  int64_t moe_layer_freq = 1;
  int64_t moe_layer_offset = 0;          // 0: layers freq, 2 freq, ... of 0-based ids; 1: of ids that begin at 1 (decoder_sparse_step)
  std::vector<int64_t> mlp_only_layers;  // dense all the same; ascending
  MoeNames moe_names;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  ScoringFunc scoring_func = ScoringFunc::kSigmoid;
  TopkMethod topk_method = TopkMethod::kNoauxTc;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1.0;

  int64_t num_nextn_predict_layers = 0;  // MTP modules (DeepSeek-V3 section 2.2); the first is used, where the checkpoint has it

  std::vector<int32_t> eos_token_ids;  // union of config.json, generation_config.json
  std::optional<int32_t> bos_token_id;

  bool fp8_blocks = false;   // quantization_config: fp8, e4m3, 128x128 blocks
  bool int4_groups = false;  // quantization_config: compressed-tensors, pack-quantized, 4 bits in groups of 32, symmetric
  // Of GGUF models only: kv_b_proj's two halves are tensors of their own, k_b_proj [heads, kv_lora_rank, nope] (a head's keys transposed) and v_b_proj.
  bool kv_b_split = false;
  // What was assumed, for the log ("rope_scaling.original_max_position_embeddings is missing: ...").
  std::vector<std::string> notes;

  // Layers that have KV: the first MTP module's is the last of them, also for a checkpoint that turns out to lack it (then nobody writes it).
  int64_t kv_layers() const { return num_hidden_layers + (num_nextn_predict_layers > 0 ? 1 : 0); }
  bool IsMoeLayer(int64_t layer) const;
  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t mla_row() const { return kv_lora_rank + qk_rope_head_dim; }
  // Elements of `dtype` that a KV pool keeps a token and layer (docs/kv-pool.md): BF16 in so many terms, or FP8, where they are bytes and hold the scales
  // and the rotary part too.
  int64_t KvRow(DType dtype, int64_t terms) const;

  // Softmax scale: (nope + rope)^-0.5, times mscale(factor, mscale_all_dim)^2 under YaRN (DeepSeek's own modelling
  // code).
  double SoftmaxScale() const;
  // Rotary inverse frequencies [qk_rope_head_dim / 2] and the factor on cos and sin (YaRN: mscale(f, mscale) /
  // mscale(f, mscale_all_dim)).
  std::vector<double> RopeInverseFrequencies() const;
  double RopeAttentionFactor() const;
};

// `json_text`: config.json, where Python's NaN/Infinity are refused by key; `generation_config_text`: empty when the
// file is absent.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json_text, std::string_view generation_config_text);

// Both texts of a model: the files of a Hugging Face directory, or what a GGUF's metadata says in the same words (gguf_model.h).
struct ModelTexts {
  std::string config_json;
  std::string generation_config_json;  // empty: there is none
};
// Errors: NotFound when `files` is neither; InvalidArgument names the metadata key or, for the config, its own.
absl::StatusOr<ModelTexts> ReadModelTexts(const ModelFiles& files);
absl::StatusOr<ModelConfig> ReadModelConfig(const ModelFiles& files);
// The same of a path. Errors: those of OpenModelFiles, too.
absl::StatusOr<ModelTexts> ReadModelTexts(const std::string& model_path);
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& model_path);
// Where the tokenizer's files lie: the directory itself, or the one that holds the GGUF file.
std::string ModelFilesDir(const std::string& model_path);

}  // namespace hearth
