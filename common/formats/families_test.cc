// What each family of grouped-query attention reads from its own keys, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/formats/config_test_base.h"
#include "common/formats/formats_test_util.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

// What all of them share; a family adds its own keys.
json Gqa(const char* architecture, const char* model_type, const json& more) {
  json config = {{"architectures", {architecture}}, {"model_type", model_type}, {"vocab_size", 300},        {"hidden_size", 96},
                 {"intermediate_size", 160},        {"num_hidden_layers", 4},   {"num_attention_heads", 6}, {"num_key_value_heads", 2},
                 {"max_position_embeddings", 4096}, {"rope_theta", 1000000},    {"num_experts_per_tok", 2}, {"eos_token_id", 1}};
  config.update(more);
  return config;
}
json Qwen3(const json& more = json::object()) {
  json config = Gqa("Qwen3MoeForCausalLM", "qwen3_moe", {{"head_dim", 32}, {"num_experts", 8}, {"moe_intermediate_size", 48}});
  config.update(more);
  return config;
}
json Mixtral(const json& more = json::object()) {
  json config = Gqa("MixtralForCausalLM", "mixtral", {{"num_local_experts", 8}});
  config.update(more);
  return config;
}

ModelConfig MustParse(const json& config) {
  absl::StatusOr<ModelConfig> parsed = Parse(config);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *parsed : ModelConfig();
}

const PlannedTensor* Find(const std::vector<PlannedTensor>& plan, const std::string& name) {
  for (const PlannedTensor& tensor : plan) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void ExpectRefused(const json& config, const std::string& part) {
  const absl::Status status = Parse(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << part;
  EXPECT_THAT(Message(status), HasSubstr(part));
}

TEST(Families, Qwen3MoeHasHeadNormsAndNoSharedExpert) {
  const ModelConfig c = MustParse(Qwen3({{"norm_topk_prob", true}}));
  EXPECT_EQ(c.attention, AttentionKind::kGqa);
  EXPECT_EQ(c.qk_head_dim(), 32);
  EXPECT_EQ(c.qk_rope_head_dim, 32);
  EXPECT_EQ(c.KvRow(DType::kBF16, 2), 2 * 2 * 32 * 2);
  EXPECT_EQ(c.KvRow(DType::kF8E4M3, 2), 2 * 2 * (32 + 4));
  EXPECT_EQ(c.qk_norm, QkNorm::kPerHead);
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_EQ(c.scoring_func, ScoringFunc::kSoftmax);
  EXPECT_EQ(c.topk_method, TopkMethod::kGreedy);
  EXPECT_TRUE(c.norm_topk_prob);
  EXPECT_EQ(c.shared_intermediate_size, 0);
  EXPECT_FALSE(MustParse(Qwen3()).norm_topk_prob);
  const std::vector<PlannedTensor> plan = PlanTensors(c);
  ASSERT_NE(Find(plan, "model.layers.0.self_attn.q_norm.weight"), nullptr);
  EXPECT_EQ(Find(plan, "model.layers.0.self_attn.q_norm.weight")->shape, std::vector<int64_t>{32});
  EXPECT_EQ(Find(plan, "model.layers.0.self_attn.k_proj.weight")->shape, (std::vector<int64_t>{64, 96}));
}

TEST(Families, QwenLayersAreSparseByStepUnlessListedAsDense) {
  const ModelConfig c = MustParse(Qwen3({{"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}}));
  EXPECT_FALSE(c.IsMoeLayer(0));
  EXPECT_TRUE(c.IsMoeLayer(1));
  EXPECT_FALSE(c.IsMoeLayer(2));
  EXPECT_FALSE(c.IsMoeLayer(3));
  ExpectRefused(Qwen3({{"mlp_only_layers", {4}}}), "mlp_only_layers");
  ExpectRefused(Qwen3({{"decoder_sparse_step", 0}}), "decoder_sparse_step");
}

TEST(Families, Qwen2MoeHasBiasesAndAGatedSharedExpert) {
  const json config = Gqa("Qwen2MoeForCausalLM", "qwen2_moe",
                          {{"num_experts", 8},
                           {"moe_intermediate_size", 48},
                           {"shared_expert_intermediate_size", 200},
                           {"use_sliding_window", false},
                           {"sliding_window", 4096}});
  const ModelConfig c = MustParse(config);
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_EQ(c.qk_norm, QkNorm::kNone);
  EXPECT_TRUE(c.shared_expert_gate);
  const std::vector<PlannedTensor> plan = PlanTensors(c);
  ASSERT_NE(Find(plan, "model.layers.0.mlp.shared_expert.up_proj.weight"), nullptr);
  EXPECT_EQ(Find(plan, "model.layers.0.mlp.shared_expert.up_proj.weight")->shape, (std::vector<int64_t>{200, 96}));
  EXPECT_NE(Find(plan, "model.layers.0.mlp.shared_expert_gate.weight"), nullptr);
  EXPECT_NE(Find(plan, "model.layers.3.self_attn.v_proj.bias"), nullptr);
  json without = config;
  without.erase("shared_expert_intermediate_size");
  ExpectRefused(without, "shared_expert_intermediate_size");
}

TEST(Families, MixtralTakesItsExpertsSizeFromIntermediateSize) {
  const ModelConfig c = MustParse(Mixtral());
  EXPECT_EQ(c.moe_intermediate_size, 160);
  EXPECT_EQ(c.qk_head_dim(), 16);  // hidden_size / heads
  EXPECT_TRUE(c.norm_topk_prob);
  const std::vector<PlannedTensor> plan = PlanTensors(c);
  ASSERT_NE(Find(plan, "model.layers.2.block_sparse_moe.experts.7.w2.weight"), nullptr);
  EXPECT_EQ(Find(plan, "model.layers.2.block_sparse_moe.experts.7.w2.weight")->role, TensorRole::kExpertDown);
  EXPECT_EQ(Find(plan, "model.layers.2.block_sparse_moe.experts.7.w1.weight")->role, TensorRole::kExpertGate);
}

TEST(Families, Glm4MoeRotatesHalfOfAHead) {
  json config = Gqa("Glm4MoeForCausalLM", "glm4_moe",
                    {{"head_dim", 32}, {"n_routed_experts", 8}, {"moe_intermediate_size", 48}, {"attention_bias", true}, {"use_qk_norm", true}});
  ModelConfig c = MustParse(config);
  EXPECT_EQ(c.qk_rope_head_dim, 16);
  EXPECT_EQ(c.qk_nope_head_dim, 16);
  EXPECT_EQ(c.RopeInverseFrequencies().size(), 8u);
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_EQ(c.qk_norm, QkNorm::kPerHead);
  EXPECT_EQ(c.topk_method, TopkMethod::kNoauxTc);
  EXPECT_EQ(c.shared_intermediate_size, 48);
  EXPECT_FALSE(c.IsMoeLayer(0));
  config["use_qk_norm"] = false;
  config["partial_rotary_factor"] = 0.25;
  c = MustParse(config);
  EXPECT_EQ(c.qk_norm, QkNorm::kNone);
  EXPECT_EQ(c.qk_rope_head_dim, 8);
  config["partial_rotary_factor"] = 0.03;
  ExpectRefused(config, "rotated elements");
}

TEST(Families, MiniMaxM2NormalisesAllHeadsAsOne) {
  json config =
      Gqa("MiniMaxM2ForCausalLM", "minimax_m2", {{"head_dim", 32}, {"num_local_experts", 8}, {"rotary_dim", 16}, {"scoring_func", "sigmoid"}});
  const ModelConfig c = MustParse(config);
  EXPECT_EQ(c.qk_norm, QkNorm::kAllHeads);
  EXPECT_EQ(c.qk_rope_head_dim, 16);
  EXPECT_EQ(c.moe_intermediate_size, 160);
  const std::vector<PlannedTensor> plan = PlanTensors(c);
  ASSERT_NE(Find(plan, "model.layers.0.self_attn.q_norm.weight"), nullptr);
  EXPECT_EQ(Find(plan, "model.layers.0.self_attn.q_norm.weight")->shape, std::vector<int64_t>{6 * 32});
  EXPECT_NE(Find(plan, "model.layers.0.block_sparse_moe.e_score_correction_bias"), nullptr);
  config["qk_norm_type"] = "per_token";
  ExpectRefused(config, "qk_norm_type");
}

TEST(Families, WhatGroupedAttentionCannotDoIsRefusedByKey) {
  ExpectRefused(Qwen3({{"num_key_value_heads", 4}}), "num_key_value_heads");
  ExpectRefused(Qwen3({{"attention_bias", true}}), "attention_bias");
  ExpectRefused(Qwen3({{"use_sliding_window", true}, {"sliding_window", 4096}}), "sliding_window");
  ExpectRefused(Mixtral({{"sliding_window", 4096}}), "sliding_window");
  ExpectRefused(Mixtral({{"num_attention_heads", 10}, {"num_key_value_heads", 2}}), "head_dim");
  ExpectRefused(Mixtral({{"head_dim", 15}}), "even number");
  ExpectRefused(Qwen3({{"scoring_func", "sigmoid"}}), "scoring_func");
}

}  // namespace
}  // namespace hearth
