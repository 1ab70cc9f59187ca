// config.json in all its dialects, and everything that must be refused by key.
#include "common/formats/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "common/formats/config_test_base.h"
#include "common/formats/formats_test_util.h"

namespace hearth {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void ExpectRefused(const absl::StatusOr<ModelConfig>& result, const std::string& part, const std::string& more = "") {
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status() << " wanted: " << part;
  EXPECT_THAT(Message(result.status()), AllOf(HasSubstr(part), HasSubstr(more)));
}

ModelConfig MustParse(const json& config, const std::string& generation = "") {
  absl::StatusOr<ModelConfig> parsed = Parse(config, generation);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *parsed : ModelConfig();
}

TEST(ModelConfig, ReadsEveryKey) {
  json j = BaseV3();
  j["quantization_config"] = Fp8Blocks();
  j["num_nextn_predict_layers"] = 1;
  j["rms_norm_eps"] = 1e-5;
  j["moe_layer_freq"] = 2;
  j["torch_dtype"] = "bfloat16";
  j["dtype"] = "bfloat16";
  j["head_dim"] = nullptr;
  j["some_new_key"] = {{"x", {1, 2, 3}}};
  const ModelConfig c = MustParse(j);
  EXPECT_EQ(c.architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(c.vocab_size, 300);
  EXPECT_EQ(c.hidden_size, 136);
  EXPECT_EQ(c.q_lora_rank, 72);
  EXPECT_EQ(c.KvRow(DType::kBF16, 1), 56);
  EXPECT_EQ(c.KvRow(DType::kF8E4M3, 2), 40 + 2 * 16 + 4);
  EXPECT_EQ(c.qk_head_dim(), 48);
  EXPECT_EQ(c.rms_norm_eps, 1e-5);
  EXPECT_EQ(c.n_group, 4);
  EXPECT_EQ(c.topk_group, 2);
  EXPECT_EQ(c.topk_method, TopkMethod::kNoauxTc);
  EXPECT_EQ(c.scoring_func, ScoringFunc::kSigmoid);
  EXPECT_TRUE(c.fp8_blocks);
  EXPECT_EQ(c.num_nextn_predict_layers, 1);
  EXPECT_FALSE(c.IsMoeLayer(0));
  EXPECT_FALSE(c.IsMoeLayer(1));  // moe_layer_freq 2
  EXPECT_TRUE(c.IsMoeLayer(2));
  EXPECT_THAT(c.notes, IsEmpty());
}

TEST(ModelConfig, FillsInWhatTransformersFillsIn) {
  const std::vector<std::string> optional = {
      "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace", "rope_theta", "model_type"};
  json v3 = BaseV3(), v2 = BaseV2();
  for (const std::string& key : optional) {
    v3.erase(key);
    v2.erase(key);
  }
  v3["n_routed_experts"] = 16;  // 8 groups of 2
  ModelConfig c = MustParse(v3);
  EXPECT_EQ(c.model_type, "deepseek_v3");
  EXPECT_EQ(c.n_group, 8);
  EXPECT_EQ(c.topk_group, 4);
  EXPECT_TRUE(c.norm_topk_prob);
  EXPECT_EQ(c.routed_scaling_factor, 2.5);
  EXPECT_EQ(c.n_shared_experts, 1);
  EXPECT_EQ(c.first_k_dense_replace, 3);
  EXPECT_EQ(c.rope_theta, 10000.0);
  EXPECT_THAT(c.notes, Contains(HasSubstr("n_group is missing: 8")));
  EXPECT_THAT(c.notes, Contains(HasSubstr("rope_theta is missing")));
  c = MustParse(v2);
  EXPECT_EQ(c.scoring_func, ScoringFunc::kSoftmax);
  EXPECT_EQ(c.topk_method, TopkMethod::kGreedy);
  EXPECT_EQ(c.n_group, 1);
  EXPECT_FALSE(c.norm_topk_prob);
  EXPECT_EQ(c.routed_scaling_factor, 1.0);
  EXPECT_EQ(c.n_shared_experts, 2);
  EXPECT_EQ(c.first_k_dense_replace, 0);
}

TEST(ModelConfig, NullsThatPublishedConfigsHave) {
  json j = BaseV3();
  for (const char* key : {"q_lora_rank", "n_group", "topk_group", "n_shared_experts", "rope_scaling", "rope_parameters", "quantization_config",
                          "num_nextn_predict_layers", "eos_token_id", "bos_token_id", "head_dim", "qk_head_dim"}) {
    j[key] = nullptr;
  }
  ModelConfig c = MustParse(j);
  EXPECT_FALSE(c.q_lora_rank.has_value());
  EXPECT_EQ(c.n_group, 1);
  EXPECT_EQ(c.topk_group, 1);
  EXPECT_EQ(c.n_shared_experts, 0);
  EXPECT_FALSE(c.rope_scaling.has_value());
  EXPECT_THAT(c.eos_token_ids, IsEmpty());
  EXPECT_THAT(c.notes, Contains(HasSubstr("no eos_token_id")));
  j["n_routed_experts"] = nullptr;
  c = MustParse(j);
  EXPECT_EQ(c.n_routed_experts, 0);
  EXPECT_FALSE(c.IsMoeLayer(2));
}

TEST(ModelConfig, AbsentQLoraRankIsAPlainProjection) {
  json j = BaseV3();
  j.erase("q_lora_rank");
  const ModelConfig c = MustParse(j);
  EXPECT_FALSE(c.q_lora_rank.has_value());
  EXPECT_THAT(c.notes, Contains(HasSubstr("q_lora_rank is missing")));
}

TEST(ModelConfig, GroupLimitedGreedy) {
  json j = BaseV2();
  j["topk_method"] = "group_limited_greedy";
  EXPECT_EQ(MustParse(j).topk_method, TopkMethod::kGroupLimitedGreedy);
  EXPECT_EQ(MustParse(j).n_group, 4);
}

TEST(ModelConfig, ArchitecturesAndTypesMustBelongTogether) {
  json j = BaseV3();
  j["model_type"] = "kimi_k2";
  EXPECT_EQ(MustParse(j).model_type, "kimi_k2");
  j.erase("architectures");
  EXPECT_EQ(MustParse(j).architecture, "DeepseekV3ForCausalLM");
  j["model_type"] = "dbrx";
  ExpectRefused(Parse(j), "dbrx", "DeepseekV3ForCausalLM");
  j.erase("model_type");
  ExpectRefused(Parse(j), "architectures is missing", "DeepseekV2ForCausalLM");
  j = BaseV3();
  j["model_type"] = "deepseek_v2";
  ExpectRefused(Parse(j), "model_type", "doesn't belong to DeepseekV3ForCausalLM");
  for (const json& bad : {json("DeepseekV3ForCausalLM"), json::array(), json{7}, json{"DeepseekV3ForCausalLM", "X"}}) {
    j = BaseV3();
    j["architectures"] = bad;
    ExpectRefused(Parse(j), "architectures");
  }
  j["architectures"] = {"DbrxForCausalLM"};
  ExpectRefused(Parse(j), "\"DbrxForCausalLM\" is not supported", "supported: DeepseekV3ForCausalLM");
}

// One changed key at a time, each refused with its name.
TEST(ModelConfig, RefusesByKey) {
  const std::vector<std::pair<std::string, std::vector<json>>> bad = {
      {"vocab_size", {nullptr, "300", 0, -1, 2.5, true, 1e18, 9223372036854775807, 18446744073709551615u, json::array()}},
      {"hidden_size", {nullptr, 0, -136, 4294967296}},
      {"intermediate_size", {0, nullptr}},
      {"moe_intermediate_size", {0, nullptr, -1}},
      {"num_hidden_layers", {0, nullptr, 1000000000}},
      {"num_attention_heads", {0, nullptr, 100000000}},
      {"max_position_embeddings", {0, nullptr, -5}},
      {"q_lora_rank", {0, -1, "x"}},
      {"kv_lora_rank", {0, nullptr}},
      {"qk_nope_head_dim", {0, nullptr}},
      {"qk_rope_head_dim", {0, nullptr, 15}},
      {"v_head_dim", {0, nullptr}},
      {"qk_head_dim", {47}},
      {"rope_theta", {0, 1, -1, "10000"}},
      {"rms_norm_eps", {0, -1e-6, nullptr, 2, "1e-6"}},
      {"n_routed_experts", {-1, "8", 100000000}},
      {"num_experts_per_tok", {0, 9, 5, nullptr}},  // 5 > 2 groups of 2
      {"n_shared_experts", {-1, 1000}},
      {"first_k_dense_replace", {-1, nullptr}},
      {"moe_layer_freq", {0, nullptr, json{0, 1, 1}}},
      {"n_group", {0, 3, 8, 16}},
      {"topk_group", {0, 5}},
      {"num_nextn_predict_layers", {-1, "1"}},
      {"routed_scaling_factor", {0, -1, nullptr, "2.5"}},
      {"norm_topk_prob", {1, nullptr, "true"}},
      {"tie_word_embeddings", {1, nullptr}},
      {"scoring_func", {"softmax", "tanh", 1}},
      {"topk_method", {"greedy", "magic"}},
      {"hidden_act", {"gelu", nullptr}},
      {"attention_bias", {true, 1}},
      {"mlp_bias", {true}},
      {"rope_interleave", {false, 0}},
      {"partial_rotary_factor", {0.5}},
      {"eos_token_id", {-1, 300, 1.0, "1", json{1, 300}, json{json{1}}}},
      {"bos_token_id", {-1, json{0, 1}}},
      {"quantization_config", {"fp8", json::array()}},
      {"rope_scaling", {"yarn", 4}},
  };
  ASSERT_TRUE(Parse(BaseV3()).ok());
  for (const auto& [key, values] : bad) {
    for (const json& value : values) {
      json j = BaseV3();
      j[key] = value;
      const auto result = Parse(j);
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << key << " = " << value;
      EXPECT_THAT(Message(result.status()), HasSubstr(key)) << value;
    }
  }
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "num_experts_per_tok"}) {
    json j = BaseV3();
    j.erase(key);
    ExpectRefused(Parse(j), std::string(key) + " is missing");
  }
  json v2 = BaseV2();
  v2["scoring_func"] = "sigmoid";
  ExpectRefused(Parse(v2), "scoring_func");
  v2 = BaseV2();
  v2["topk_method"] = "noaux_tc";
  ExpectRefused(Parse(v2), "topk_method");
}

TEST(ModelConfig, EdgesThatAreLegal) {
  json j = BaseV3();
  j["first_k_dense_replace"] = 3;  // = layers: no MoE layer
  EXPECT_FALSE(MustParse(j).IsMoeLayer(2));
  j["first_k_dense_replace"] = 0;
  EXPECT_TRUE(MustParse(j).IsMoeLayer(0));
  j["n_shared_experts"] = 0;
  EXPECT_EQ(MustParse(j).n_shared_experts, 0);
  j["num_key_value_heads"] = 1;
  EXPECT_THAT(MustParse(j).notes, Contains(HasSubstr("num_key_value_heads")));
  j["tie_word_embeddings"] = true;
  EXPECT_TRUE(MustParse(j).tie_word_embeddings);
}

TEST(ModelConfig, OtherQuantizationsAreRefusedByName) {
  const auto with = [](const char* key, json value) {
    json j = BaseV3();
    j["quantization_config"] = Fp8Blocks();
    j["quantization_config"][key] = std::move(value);
    return Parse(j);
  };
  ASSERT_TRUE(with("scale_fmt", "ue8m0").ok());
  ExpectRefused(with("quant_method", "gptq"), "gptq", "fp8");
  ExpectRefused(with("quant_method", "compressed-tensors"), "pack-quantized");
  ExpectRefused(with("fmt", "e5m2"), "e5m2", "e4m3");
  ExpectRefused(with("activation_scheme", "static"), "static");
  for (const json& block : {json{64, 64}, json{1, 128}, json{128}, json(128), json(nullptr), json{128, 128, 128}, json{128.5, 128}}) {
    ExpectRefused(with("weight_block_size", block), "weight_block_size", "[128, 128]");
  }
  json j = BaseV3();
  j["quantization_config"] = json::object();
  ExpectRefused(Parse(j), "quant_method");
}

TEST(ModelConfig, CompressedTensorsOfFourBitsInGroupsOf32) {
  const json weights = {{"num_bits", 4}, {"group_size", 32}, {"strategy", "group"}, {"symmetric", true}, {"type", "int"}};
  const auto with = [&](const char* key, const json& value) {
    json j = BaseV3();
    json changed = weights;
    if (key[0] != '\0') changed[key] = value;
    j["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                {"format", "pack-quantized"},
                                {"ignore", {"lm_head", "re:.*self_attn.*"}},
                                {"config_groups", {{"group_0", {{"input_activations", nullptr}, {"targets", {"Linear"}}, {"weights", changed}}}}}};
    return Parse(j);
  };
  const absl::StatusOr<ModelConfig> config = with("", nullptr);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->int4_groups);
  EXPECT_FALSE(config->fp8_blocks);
  ExpectRefused(with("num_bits", 8), "num_bits", "supported: 4");
  ExpectRefused(with("group_size", 128), "group_size", "supported: 32");
  ExpectRefused(with("symmetric", false), "symmetric");
  ExpectRefused(with("type", "float"), "config_groups.group_0.weights.type");
  ExpectRefused(with("strategy", "channel"), "strategy", "supported: \"group\"");
  ExpectRefused(with("dynamic", true), "dynamic");
  ExpectRefused(with("actorder", "group"), "actorder");
  ExpectRefused(with("actorder", true), "actorder");
  for (const json& harmless : {json(nullptr), json(false), json("weight"), json("static")}) EXPECT_TRUE(with("actorder", harmless).ok()) << harmless;
  json activations = BaseV3();
  activations["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                        {"format", "pack-quantized"},
                                        {"config_groups", {{"group_0", {{"input_activations", {{"num_bits", 8}}}, {"weights", weights}}}}}};
  ExpectRefused(Parse(activations), "input_activations");
}

json YarnScaling() {
  return {{"factor", 40},           {"original_max_position_embeddings", 64}, {"beta_fast", 32}, {"beta_slow", 1}, {"mscale", 0.707},
          {"mscale_all_dim", 0.707}};
}

json WithScaling(json scaling) {
  json j = BaseV3();
  j["rope_scaling"] = std::move(scaling);
  return j;
}

TEST(RopeDialects, AllSpellingsOfYarnAreOneModel) {
  std::vector<json> spellings(5, YarnScaling());
  spellings[0]["type"] = "yarn";
  spellings[1]["rope_type"] = "yarn";
  spellings[2]["type"] = "yarn";
  spellings[2]["rope_type"] = "yarn";
  spellings[3]["type"] = nullptr;
  spellings[3]["rope_type"] = "yarn";
  spellings[4]["rope_type"] = "yarn";
  spellings[4]["factor"] = 40.0;
  const ModelConfig first = MustParse(WithScaling(spellings[0]));
  ASSERT_TRUE(first.rope_scaling.has_value());
  EXPECT_EQ(first.rope_scaling->factor, 40.0);
  std::vector<json> configs;
  for (const json& spelling : spellings) configs.push_back(WithScaling(spelling));
  json modern = BaseV3();
  modern.erase("rope_theta");
  modern["rope_parameters"] = spellings[1];
  modern["rope_parameters"]["rope_theta"] = 10000.0;
  configs.push_back(modern);
  modern["rope_theta"] = 10000;
  modern["rope_scaling"] = spellings[0];  // said twice, and the same
  configs.push_back(modern);
  for (const json& config : configs) {
    const ModelConfig c = MustParse(config);
    EXPECT_EQ(c.RopeInverseFrequencies(), first.RopeInverseFrequencies()) << config;
    EXPECT_EQ(c.SoftmaxScale(), first.SoftmaxScale());
    EXPECT_EQ(c.RopeAttentionFactor(), first.RopeAttentionFactor());
    EXPECT_EQ(c.rope_theta, 10000.0);
    EXPECT_THAT(c.notes, IsEmpty());
  }
}

TEST(RopeDialects, NothingMeansNone) {
  for (const json& none : {json(nullptr), json::object(), json{{"type", "default"}}, json{{"rope_type", "default"}}, json{{"rope_theta", 10000}}}) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      json j = BaseV3();
      j[key] = none;
      EXPECT_FALSE(MustParse(j).rope_scaling.has_value()) << none;
    }
  }
  json j = BaseV3();
  j.erase("rope_theta");
  j["rope_parameters"] = {{"rope_theta", 50000}, {"rope_type", "default"}};
  EXPECT_EQ(MustParse(j).rope_theta, 50000.0);
}

TEST(RopeDialects, RefusesContradictionsAndUnknownTypes) {
  json both = YarnScaling();
  both["type"] = "yarn";
  both["rope_type"] = "default";
  ExpectRefused(Parse(WithScaling(both)), "rope_scaling.type", "contradicts");
  for (const char* type : {"linear", "dynamic", "longrope", "llama3", "su", "YARN", ""}) {
    json unknown = YarnScaling();
    unknown["rope_type"] = type;
    ExpectRefused(Parse(WithScaling(unknown)), "rope_scaling.rope_type is \"" + std::string(type) + "\"", "yarn");
  }
  ExpectRefused(Parse(WithScaling(YarnScaling())), "rope_type is missing");
  json j = BaseV3();
  j["rope_parameters"] = {{"rope_theta", 20000}};
  ExpectRefused(Parse(j), "rope_theta", "20000");
  json yarn = YarnScaling();
  yarn["type"] = "yarn";
  j = WithScaling(yarn);
  yarn["factor"] = 20;
  j["rope_parameters"] = yarn;
  ExpectRefused(Parse(j), "rope_parameters", "contradicts rope_scaling");
  j = BaseV3();
  j["rope_parameters"] = {{"full_attention", {{"rope_type", "default"}}}};
  ExpectRefused(Parse(j), "rope_parameters", "full_attention");
}

TEST(RopeDialects, RefusesBadYarnNumbers) {
  const auto with = [](const char* key, json value) {
    json yarn = YarnScaling();
    yarn["type"] = "yarn";
    yarn[key] = std::move(value);
    return Parse(WithScaling(yarn));
  };
  ExpectRefused(with("factor", 0.5), "rope_scaling.factor");
  ExpectRefused(with("factor", nullptr), "rope_scaling.factor");
  ExpectRefused(with("factor", "40"), "rope_scaling.factor");
  ExpectRefused(with("original_max_position_embeddings", 0), "original_max_position_embeddings");
  ExpectRefused(with("original_max_position_embeddings", 64.5), "original_max_position_embeddings");
  ExpectRefused(with("beta_fast", 0.5), "beta_fast");
  ExpectRefused(with("beta_slow", 0), "beta_slow");
  ExpectRefused(with("mscale", "1"), "mscale");
  ExpectRefused(with("truncate", false), "truncate");
}

TEST(RopeDialects, MissingOriginalContextIsNoted) {
  json yarn = YarnScaling();
  yarn["type"] = "yarn";
  yarn.erase("original_max_position_embeddings");
  const ModelConfig c = MustParse(WithScaling(yarn));
  EXPECT_EQ(c.rope_scaling->original_max_position_embeddings, 4096);
  EXPECT_THAT(c.notes, ElementsAre(HasSubstr("original_max_position_embeddings is missing")));
}

// Numbers of the published formulas, computed outside this code base.
TEST(RopeMath, DeepSeekV3) {
  ModelConfig c;
  c.qk_nope_head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.rope_theta = 10000;
  EXPECT_NEAR(c.SoftmaxScale(), 0.07216878364870323, 1e-15);
  EXPECT_EQ(c.RopeAttentionFactor(), 1.0);
  EXPECT_NEAR(c.RopeInverseFrequencies()[16], 0.01, 1e-15);
  c.rope_scaling = RopeScaling{40, 4096, 32, 1, 1.0, 1.0, {}};
  const std::vector<double> f = c.RopeInverseFrequencies();
  ASSERT_EQ(f.size(), 32u);
  EXPECT_EQ(f[0], 1.0);
  EXPECT_NEAR(f[10], 0.05623413251903491, 1e-15);  // the last unchanged one
  EXPECT_NEAR(f[11], 0.03900692656714386, 1e-15);
  EXPECT_NEAR(f[16], 0.0055, 1e-15);
  EXPECT_NEAR(f[22], 0.0001778279410038922, 1e-17);
  EXPECT_NEAR(f[23], 3.33380358040831e-05, 1e-18);  // the first fully stretched one
  EXPECT_NEAR(f[31], 3.3338035804083097e-06, 1e-19);
  EXPECT_NEAR(c.SoftmaxScale(), 0.1352337788608801, 1e-15);
  EXPECT_EQ(c.RopeAttentionFactor(), 1.0);
}

TEST(RopeMath, ShortContextClampsTheRamp) {
  ModelConfig c;
  c.qk_nope_head_dim = 32;
  c.qk_rope_head_dim = 16;
  c.rope_scaling = RopeScaling{40, 64, 32, 1, 0.707, 0.707, {}};
  const std::vector<double> expected = {1.0,     0.21345374206136564,   0.035,   0.0007905694150420947,
                                        0.00025, 7.905694150420948e-05, 2.5e-05, 7.905694150420949e-06};
  const std::vector<double> f = c.RopeInverseFrequencies();
  ASSERT_EQ(f.size(), expected.size());
  for (size_t i = 0; i < f.size(); ++i) EXPECT_NEAR(f[i], expected[i], 1e-14) << i;
  EXPECT_NEAR(c.SoftmaxScale(), 0.22944277358585222, 1e-14);
}

TEST(RopeMath, MagnitudesWithoutAllDim) {
  ModelConfig c;
  c.qk_nope_head_dim = 32;
  c.qk_rope_head_dim = 16;
  c.rope_scaling = RopeScaling{40, 64, 32, 1, 1.0, 0.0, {}};
  EXPECT_NEAR(c.SoftmaxScale(), 1 / std::sqrt(48.0), 1e-15);
  EXPECT_NEAR(c.RopeAttentionFactor(), 0.1 * std::log(40.0) + 1, 1e-15);
  c.rope_scaling->attention_factor = 1.25;
  EXPECT_EQ(c.RopeAttentionFactor(), 1.25);
}

TEST(EndTokens, AreTheUnionOfBothFiles) {
  json j = BaseV3();
  j["eos_token_id"] = 2;
  EXPECT_THAT(MustParse(j).eos_token_ids, ElementsAre(2));
  EXPECT_THAT(MustParse(j, R"({"eos_token_id": [2, 7]})").eos_token_ids, ElementsAre(2, 7));
  EXPECT_THAT(MustParse(j, R"({"eos_token_id": 9})").eos_token_ids, ElementsAre(2, 9));
  EXPECT_THAT(MustParse(j, R"({"eos_token_id": null})").eos_token_ids, ElementsAre(2));
  EXPECT_THAT(MustParse(j, R"({"temperature": 0.6})").eos_token_ids, ElementsAre(2));
  j["eos_token_id"] = {7, 2, 7};
  EXPECT_THAT(MustParse(j).eos_token_ids, ElementsAre(2, 7));
  j.erase("eos_token_id");
  j.erase("bos_token_id");
  const ModelConfig c = MustParse(j, R"({"eos_token_id": 9, "bos_token_id": 4})");
  EXPECT_THAT(c.eos_token_ids, ElementsAre(9));
  EXPECT_EQ(c.bos_token_id, 4);
}

TEST(EndTokens, ABrokenGenerationConfigIsAnError) {
  for (const char* text : {"{", "[]", "null", "{\"eos_token_id\": \"</s>\"}", "{\"eos_token_id\": 300}", "{\"temperature\": NaN}", "   "}) {
    const auto result = Parse(BaseV3(), text);
    ExpectRefused(result, "generation_config.json");
  }
}

TEST(ConfigFiles, AreReadFromADirectory) {
  TempDir dir;
  EXPECT_EQ(ReadModelConfig(dir.path()).status().code(), absl::StatusCode::kNotFound);
  WriteFile(dir.At("config.json"), BaseV3().dump());
  auto config = ReadModelConfig(dir.path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_token_ids, ElementsAre(1));
  WriteFile(dir.At("generation_config.json"), R"({"eos_token_id": [7]})");
  config = ReadModelConfig(dir.path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_token_ids, ElementsAre(1, 7));
  WriteFile(dir.At("generation_config.json"), "");
  ExpectRefused(ReadModelConfig(dir.path()), "generation_config.json", "empty");
}

TEST(StrictJsonText, SaysWhereAndWhat) {
  const auto parse = [](std::string_view text) { return ParseModelConfig(text, ""); };
  ExpectRefused(parse(""), "config.json: is empty");
  ExpectRefused(parse("\xef\xbb\xbf{}"), "byte order mark");
  ExpectRefused(parse(std::string("{}\0garbage", 10)), "zero byte");
  ExpectRefused(parse("{\n  \"rms_norm_eps\": NaN\n}"), "line 2, column 19 at key \"rms_norm_eps\"", "NaN");
  ExpectRefused(parse("{\"a\": {\"b\": Infinity}}"), "\"a.b\"", "Infinity is not a JSON number");
  ExpectRefused(parse("{\"a\": [1, -Infinity]}"), "\"a\"", "-Infinity is not");
  ExpectRefused(parse("{\"a\": 1, // hello\n\"b\": 2}"), "line 1, column 10", "comments");
  ExpectRefused(parse("{\"a\": 1, /* x */ \"b\": 2}"), "comments");
  ExpectRefused(parse("{\"a\": 1, \"a\": 2}"), "\"a\"", "given twice");
  ExpectRefused(parse("{\"x\": {\"a\": 1, \"a\": 1}}"), "\"x.a\"", "given twice");
  ExpectRefused(parse("{\"a\": 1,}"), "line 1, column 9");
  ExpectRefused(parse("{\"a\": 1e999}"), "\"a\"");
  ExpectRefused(parse("{\"a\": 1} X"), "line 1, column 10");
  ExpectRefused(parse(std::string(100'000, '[')), "nested deeper than 64");
  ExpectRefused(parse("{\"a\": \"\xff\"}"), "line 1");
  ExpectRefused(parse("[]"), "must be a JSON object");
  ExpectRefused(parse("null"), "must be a JSON object");
}

// Whatever is cut off or flipped, the parser answers.
TEST(StrictJsonText, SurvivesTruncationAndBitFlips) {
  json j = BaseV3();
  j["quantization_config"] = Fp8Blocks();
  const std::string text = j.dump();
  for (size_t length = 0; length < text.size(); ++length) EXPECT_FALSE(ParseModelConfig(text.substr(0, length), "").ok()) << length;
  int refused = 0;
  for (size_t byte = 0; byte < text.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = text;
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << bit));
      refused += !ParseModelConfig(flipped, "").ok();
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace hearth
