#include "tests/synthetic_models.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>

#include "absl/strings/str_replace.h"
#include "common/formats/synth.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

constexpr char kSynthConfig[] = R"({
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 320,
  "moe_intermediate_size": 384, "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
  "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 2, "topk_group": 1,
  "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 96,
  "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 8192,
  "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": null, "hidden_act": "silu", "attention_bias": false,
  "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
})";

// Biases, head norms, half of a head rotated, three query heads to a KV head, a shared expert.
constexpr char kGqaConfig[] = R"({
  "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 320,
  "moe_intermediate_size": 384, "num_hidden_layers": 3, "num_nextn_predict_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40,
  "partial_rotary_factor": 0.5, "attention_bias": true, "use_qk_norm": true, "n_shared_experts": 1, "n_routed_experts": 8,
  "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
  "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": null, "hidden_act": "silu",
  "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
})";

// The first with sixteen experts of which a row takes eight.
std::string TopEightConfig() {
  return absl::StrReplaceAll(kSynthConfig, {{"\"n_routed_experts\": 8", "\"n_routed_experts\": 16"},
                                            {"\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 8"},
                                            {"\"n_group\": 2", "\"n_group\": 1"}});
}

// Checkpoints of this process; they go with it, since another test may run beside this one.
class Checkpoints {
 public:
  Checkpoints() : dir_(std::filesystem::temp_directory_path() / ("hearth_synthetic." + std::to_string(getpid()))) {}
  ~Checkpoints() {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  std::string Get(const std::string& name) {
    const std::string dir = dir_ / name;
    if (!made_.insert(name).second) return dir;
    SynthOptions options;
    options.out_dir = dir;
    const absl::Status status = WriteSynthCheckpoint(name == "gqa" ? kGqaConfig : name == "top8" ? TopEightConfig() : kSynthConfig, options);
    EXPECT_TRUE(status.ok()) << status;
    return dir;
  }

 private:
  const std::filesystem::path dir_;
  std::set<std::string> made_;
};

}  // namespace

std::string SyntheticModelDir(const std::string& name) {
  static Checkpoints checkpoints;
  return checkpoints.Get(name);
}

std::string TestModelDir(const std::string& name) { return name == "fable" ? SourceDir() + "/deploy/models/fable-moe" : SyntheticModelDir(name); }

}  // namespace hearth
