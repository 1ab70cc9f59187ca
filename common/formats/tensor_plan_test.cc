// The plan against checkpoints that fit and that don't, and against the outside reference models.
#include "common/formats/tensor_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <vector>

#include "common/formats/config_test_base.h"
#include "common/formats/formats_test_util.h"

namespace hearth {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A directory with every planned tensor of `config`, which a test then changes.
class PlanTest : public ::testing::Test {
 protected:
  void Build(json config_json) {
    const auto parsed = Parse(config_json);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    config_ = *parsed;
    for (const PlannedTensor& planned : PlanTensors(config_)) {
      const bool fp8 = config_.fp8_blocks && planned.may_be_fp8;
      Put(planned.name, fp8 ? "F8_E4M3" : "BF16", planned.shape);
      if (fp8) Put(planned.name + "_scale_inv", "F32", {(planned.shape[0] + 127) / 128, (planned.shape[1] + 127) / 128});
    }
  }
  void BuildFp8() {
    json j = BaseV3();
    j["quantization_config"] = Fp8Blocks();
    Build(j);
  }
  void Put(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) {
    static const std::map<std::string, uint64_t> kBytes = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F8_E4M3", 1}, {"I64", 8}, {"F8_E5M2", 1}};
    uint64_t bytes = kBytes.at(dtype);
    for (int64_t d : shape) bytes *= static_cast<uint64_t>(d);
    tensors_[name] = FakeTensor{name, dtype, std::move(shape), bytes};
  }
  absl::Status Check() {
    std::vector<FakeTensor> list;
    for (const auto& [name, tensor] : tensors_) list.push_back(tensor);
    WriteFile(dir_.At("model.safetensors"), SafetensorsOf(list));
    const auto checkpoint = Checkpoint::Open(dir_.path());
    if (!checkpoint.ok()) return checkpoint.status();
    return CheckPlan(config_, PlanTensors(config_), *checkpoint);
  }
  void ExpectRefused(absl::StatusCode code, std::vector<std::string> parts) {
    const absl::Status status = Check();
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : parts) EXPECT_THAT(Message(status), HasSubstr(part));
  }

  ModelConfig config_;
  std::map<std::string, FakeTensor> tensors_;
  TempDir dir_;
};

constexpr char kVictim[] = "model.layers.1.mlp.experts.7.up_proj.weight";
constexpr char kKvA[] = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight";

TEST_F(PlanTest, ListsWhatAPassNeedsInItsOrder) {
  Build(BaseV3());
  const std::vector<PlannedTensor> plan = PlanTensors(config_);
  EXPECT_EQ(plan.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(plan.front().shape, (std::vector<int64_t>{300, 136}));
  EXPECT_EQ(plan.back().role, TensorRole::kHead);
  // 3 layers: 2 norms, 7 attention tensors each; one dense MLP; two MoE with gate, bias, 8 experts, shared; embedding,
  // norm, head.
  EXPECT_EQ(plan.size(), 3u * 9 + 3 + 2u * (2 + 8 * 3 + 3) + 3);
  const auto at = std::find_if(plan.begin(), plan.end(), [](const PlannedTensor& t) { return t.name == kVictim; });
  ASSERT_NE(at, plan.end());
  EXPECT_EQ(at->role, TensorRole::kExpertUp);
  EXPECT_EQ(at->layer, 1);
  EXPECT_EQ(at->expert, 7);
  EXPECT_EQ(at->shape, (std::vector<int64_t>{96, 136}));
  EXPECT_TRUE(at->may_be_fp8);
  for (size_t i = 1; i + 2 < plan.size(); ++i) EXPECT_LE(plan[i].layer, plan[i + 1].layer + (plan[i + 1].layer == -1 ? 100 : 0));
}

TEST_F(PlanTest, GreedyGatesHaveNoBiasAndTiedModelsNoHead) {
  json j = BaseV2();
  j["tie_word_embeddings"] = true;
  j["q_lora_rank"] = nullptr;
  Build(j);
  EXPECT_FALSE(tensors_.contains("lm_head.weight"));
  EXPECT_FALSE(tensors_.contains("model.layers.1.mlp.gate.e_score_correction_bias"));
  EXPECT_TRUE(tensors_.contains("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_TRUE(Check().ok()) << Check();
}

TEST_F(PlanTest, AcceptsOddDimensionsAndPartialBlocks) {
  BuildFp8();
  EXPECT_TRUE(Check().ok()) << Check();
  EXPECT_EQ(tensors_.at(std::string(kKvA) + "_scale_inv").shape, (std::vector<int64_t>{1, 2}));  // 56 x 136
  for (int64_t rank : {72, 200, 129}) {
    for (int64_t hidden : {136, 128, 129}) {
      tensors_.clear();
      json j = BaseV3();
      j["quantization_config"] = Fp8Blocks();
      j["kv_lora_rank"] = rank - 16;
      j["hidden_size"] = hidden;
      Build(j);
      EXPECT_TRUE(Check().ok()) << Check();
    }
  }
}

TEST_F(PlanTest, NamesMissingTensorsAndScales) {
  BuildFp8();
  const size_t needed = tensors_.size() - 1;  // nobody asks for the scale of a weight that is missing itself
  tensors_.erase(kVictim);
  tensors_.erase("model.norm.weight");
  tensors_.erase(std::string(kKvA) + "_scale_inv");
  ExpectRefused(absl::StatusCode::kNotFound, {absl::StrCat("3 of ", needed, " tensors missing"), kVictim, "model.norm.weight",
                                              std::string(kKvA) + "_scale_inv", "incomplete download?"});
}

TEST_F(PlanTest, NamesOnlyAFewOfVeryManyMissing) {
  BuildFp8();
  const size_t needed = tensors_.size() - 48;
  std::erase_if(tensors_, [](const auto& entry) { return entry.first.find(".experts.") != std::string::npos; });
  ExpectRefused(absl::StatusCode::kNotFound, {absl::StrCat("48 of ", needed, " tensors missing"), "and 40 more"});
}

TEST_F(PlanTest, GivesBothShapes) {
  BuildFp8();
  Put(kVictim, "F8_E4M3", {136, 96});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {kVictim, "[136, 96]", "[96, 136]"});
  BuildFp8();
  Put(std::string(kVictim) + "_scale_inv", "F32", {2, 1});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"_scale_inv", "[2, 1]", "[1, 2]", "128x128"});
  BuildFp8();
  Put(std::string(kVictim) + "_scale_inv", "F32", {1, 2, 1});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"[1, 2, 1]"});
  BuildFp8();
  Put("model.norm.weight", "BF16", {1, 136});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"model.norm.weight", "[1, 136]", "[136]"});
}

TEST_F(PlanTest, NamesTypesItCantUse) {
  BuildFp8();
  Put(kVictim, "F8_E5M2", {96, 136});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {kVictim, "F8_E5M2", "F8_E4M3"});
  BuildFp8();
  Put("model.norm.weight", "F8_E4M3", {136});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"model.norm.weight", "F8_E4M3", "BF16"});
  BuildFp8();
  Put(std::string(kVictim) + "_scale_inv", "F16", {1, 2});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"_scale_inv", "F16", "F32, BF16"});
  BuildFp8();
  Put(std::string(kVictim) + "_scale_inv", "BF16", {1, 2});
  Put("model.layers.1.mlp.gate.e_score_correction_bias", "F32", {8});
  EXPECT_TRUE(Check().ok()) << Check();
}

TEST_F(PlanTest, Fp8AndItsDeclarationGoTogether) {
  BuildFp8();
  config_.fp8_blocks = false;
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"F8_E4M3", "quantization_config"});
  BuildFp8();
  Put(kVictim, "BF16", {96, 136});
  ExpectRefused(absl::StatusCode::kInvalidArgument, {std::string(kVictim) + "_scale_inv", "BF16"});
  tensors_.erase(std::string(kVictim) + "_scale_inv");  // one matrix that was not converted is fine
  EXPECT_TRUE(Check().ok()) << Check();
}

TEST_F(PlanTest, IgnoresWhatIsNotNeeded) {
  BuildFp8();
  Put("model.layers.0.self_attn.rotary_emb.inv_freq", "I64", {8});
  Put("model.layers.3.eh_proj.weight", "F8_E5M2", {4, 4});  // the MTP layer
  Put("model.layers.3.embed_tokens.weight_scale_inv", "F32", {1});
  Put("lm_head.bias", "F32", {300});
  EXPECT_TRUE(Check().ok()) << Check();
}

TEST_F(PlanTest, HintsAtTheQueryRank) {
  json j = BaseV3();
  Build(j);
  config_.q_lora_rank.reset();
  ExpectRefused(absl::StatusCode::kNotFound, {"q_proj.weight", "config.json needs its q_lora_rank"});
}

class ReferenceModel : public ::testing::TestWithParam<const char*> {};

TEST_P(ReferenceModel, FitsItsPlanAndHoldsGoodValues) {
  const std::string name = GetParam();
  const std::string dir = name == "fable-moe" ? SourceDir() + "/deploy/models/fable-moe" : OracleModels() + "/" + name;
  if (!std::filesystem::exists(dir)) GTEST_SKIP() << dir << " is not here";
  const auto config = ReadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const absl::Status fits = CheckPlan(*config, PlanTensors(*config), *checkpoint);
  EXPECT_TRUE(fits.ok()) << fits;
  for (const auto& [tensor_name, tensor] : checkpoint->tensors()) {
    const std::string bytes = ReadSlice(checkpoint->files()[static_cast<size_t>(tensor.file)].path, tensor.offset, tensor.bytes);
    const absl::Status good =
        CheckValues(tensor_name, tensor.dtype, bytes.data(), bytes.size() / DTypeBytes(tensor.dtype, 1), tensor_name.ends_with("_scale_inv"));
    EXPECT_TRUE(good.ok()) << good;
  }
}
INSTANTIATE_TEST_SUITE_P(Supported, ReferenceModel,
                         ::testing::Values("fable-moe", "deepseek_v3_yarn", "deepseek_v3_odd", "kimi_k2", "deepseek_v3_no_qlora", "deepseek_v2_lite",
                                           "qwen3_moe", "qwen3_moe_bf16_tied", "qwen2_moe", "mixtral", "glm4_moe", "glm4_moe_lite", "minimax_m2"));

class OtherFamily : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(OtherFamily, IsRefusedByName) {
  const std::string dir = OracleModels() + "/" + GetParam().first;
  if (!std::filesystem::exists(dir)) GTEST_SKIP() << dir << " is not here";
  const absl::Status status = ReadModelConfig(dir).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), AllOf(HasSubstr(GetParam().second), HasSubstr("not supported"), HasSubstr("supported: DeepseekV3ForCausalLM")));
}
INSTANTIATE_TEST_SUITE_P(Unsupported, OtherFamily,
                         ::testing::Values(std::pair("dbrx", "DbrxForCausalLM"), std::pair("gpt_oss", "GptOssForCausalLM")));

}  // namespace
}  // namespace hearth
