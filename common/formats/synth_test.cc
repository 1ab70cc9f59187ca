// Random checkpoints are real checkpoints: they open, fit their plan, hold good values of the promised size, and repeat
// by seed.
#include "common/formats/synth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/formats/config_test_base.h"
#include "common/formats/formats_test_util.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json SynthConfig() {
  json j = BaseV3();
  j["moe_intermediate_size"] = 384;
  j["hidden_size"] = 256;
  j["num_nextn_predict_layers"] = 1;
  j["quantization_config"] = Fp8Blocks();
  return j;
}

SynthOptions Options(std::string dir, uint64_t seed = 1, uint64_t shard_bytes = 4'000'000'000) {
  SynthOptions options;
  options.out_dir = std::move(dir);
  options.seed = seed;
  options.shard_bytes = shard_bytes;
  return options;
}

std::string TensorBytes(const Checkpoint& checkpoint, std::string_view name) {
  const CheckpointTensor* tensor = checkpoint.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return "";
  return ReadSlice(checkpoint.files()[static_cast<size_t>(tensor->file)].path, tensor->offset, tensor->bytes);
}

void ExpectGoodModel(const std::string& dir) {
  const auto config = ReadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const absl::Status fits = CheckPlan(*config, PlanTensors(*config), *checkpoint);
  ASSERT_TRUE(fits.ok()) << fits;
  for (const auto& [name, tensor] : checkpoint->tensors()) {
    const std::string bytes = TensorBytes(*checkpoint, name);
    const absl::Status good = CheckValues(name, tensor.dtype, bytes.data(), bytes.size() / DTypeBytes(tensor.dtype, 1), name.ends_with("_scale_inv"));
    ASSERT_TRUE(good.ok()) << good;
    EXPECT_EQ(tensor.offset % DTypeBytes(tensor.dtype, 1), 0u) << name;
  }
}

TEST(Synth, WritesAModelThatOpens) {
  TempDir dir;
  const std::string out = dir.At("new/model");
  SynthOptions options = Options(out);
  uint64_t last = 0, total = 0;
  options.progress = [&](uint64_t done, uint64_t all) {
    EXPECT_GT(done, last);
    last = done;
    total = all;
  };
  const std::string config_text = SynthConfig().dump(2);
  const absl::Status written = WriteSynthCheckpoint(config_text, options);
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_EQ(last, total);
  EXPECT_GT(total, 0u);
  EXPECT_EQ(ReadFile(out + "/config.json"), config_text);
  ExpectGoodModel(out);
  EXPECT_TRUE(std::filesystem::exists(out + "/model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(out + "/model.safetensors.index.json"));
}

TEST(Synth, ShardsAndOrderDontChangeTheValues) {
  TempDir dir;
  ASSERT_TRUE(WriteSynthCheckpoint(SynthConfig().dump(), Options(dir.At("one"))).ok());
  ASSERT_TRUE(WriteSynthCheckpoint(SynthConfig().dump(), Options(dir.At("many"), 1, 1'000'000)).ok());
  ASSERT_TRUE(WriteSynthCheckpoint(SynthConfig().dump(), Options(dir.At("other"), 2)).ok());
  ExpectGoodModel(dir.At("many"));
  const auto one = Checkpoint::Open(dir.At("one")), many = Checkpoint::Open(dir.At("many")), other = Checkpoint::Open(dir.At("other"));
  ASSERT_TRUE(one.ok() && many.ok() && other.ok());
  EXPECT_GT(many->files().size(), 3u);
  for (const CheckpointFile& file : many->files()) EXPECT_LT(file.bytes, 1'100'000u);
  EXPECT_EQ(one->tensors().size(), many->tensors().size());
  int same = 0;
  for (const auto& [name, tensor] : one->tensors()) {
    EXPECT_EQ(TensorBytes(*one, name), TensorBytes(*many, name)) << name;
    same += TensorBytes(*one, name) == TensorBytes(*other, name);
  }
  EXPECT_EQ(same, 0);
}

// As Kimi-K2-Thinking's config.json says it, and as its index names and its files shape an expert's tensors.
json Int4Config() {
  json j = BaseV3();
  j["moe_intermediate_size"] = 384;
  j["hidden_size"] = 256;
  const json weights = {{"actorder", nullptr},  {"block_structure", nullptr},        {"dynamic", false},    {"group_size", 32},  {"num_bits", 4},
                        {"observer", "minmax"}, {"observer_kwargs", json::object()}, {"strategy", "group"}, {"symmetric", true}, {"type", "int"}};
  j["quantization_config"] = {
      {"config_groups",
       {{"group_0", {{"input_activations", nullptr}, {"output_activations", nullptr}, {"targets", {"Linear"}}, {"weights", weights}}}}},
      {"format", "pack-quantized"},
      {"ignore", {"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", R"(re:.*mlp\.(gate|up|gate_up|down)_proj.*)"}},
      {"kv_cache_scheme", nullptr},
      {"quant_method", "compressed-tensors"},
      {"quantization_status", "compressed"}};
  return j;
}

TEST(Synth, Int4ExpertsArePackedAsPublished) {
  TempDir dir;
  const std::string out = dir.At("m");
  const absl::Status written = WriteSynthCheckpoint(Int4Config().dump(), Options(out, 1, 1'000'000));
  ASSERT_TRUE(written.ok()) << written;
  const auto config = ReadModelConfig(out);
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_TRUE(config->int4_groups);
  const auto checkpoint = Checkpoint::Open(out);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::vector<PlannedTensor> plan = PlanTensors(*config);
  const absl::Status fits = CheckPlan(*config, plan, *checkpoint);
  ASSERT_TRUE(fits.ok()) << fits;
  size_t experts = 0;
  for (const PlannedTensor& planned : plan) {
    const CheckpointTensor* tensor = checkpoint->Find(planned.name);
    ASSERT_NE(tensor, nullptr) << planned.name;
    if (planned.expert < 0) {
      EXPECT_NE(tensor->dtype, DType::kI4G32) << planned.name;
      continue;
    }
    ++experts;
    EXPECT_EQ(tensor->dtype, DType::kI4G32) << planned.name;
    const std::string shape = TensorBytes(*checkpoint, planned.name + "_shape");
    int32_t sides[2];
    ASSERT_EQ(shape.size(), sizeof(sides));
    std::memcpy(sides, shape.data(), sizeof(sides));
    EXPECT_EQ((std::vector<int64_t>{sides[0], sides[1]}), planned.shape) << planned.name;
  }
  EXPECT_GT(experts, 0u);
  const std::string name = absl::StrCat("model.layers.", config->first_k_dense_replace, ".mlp.experts.0.down_proj.weight");
  const CheckpointTensor *packed = checkpoint->Find(name + "_packed"), *scale = checkpoint->Find(name + "_scale");
  ASSERT_TRUE(packed != nullptr && scale != nullptr);
  EXPECT_EQ(packed->dtype_name, "I32");
  EXPECT_EQ(packed->shape, (std::vector<int64_t>{256, 384 / 8}));
  EXPECT_EQ(scale->dtype_name, "BF16");
  EXPECT_EQ(scale->shape, (std::vector<int64_t>{256, 384 / 32}));
  EXPECT_EQ(checkpoint->Find(name + "_shape")->dtype_name, "I32");
  // The numbers that the two stand for are as large as the other formats' weights.
  const std::string words = TensorBytes(*checkpoint, name + "_packed"), scales = TensorBytes(*checkpoint, name + "_scale");
  const absl::Status good = CheckValues(name + "_scale", DType::kBF16, scales.data(), scales.size() / 2, true);
  EXPECT_TRUE(good.ok()) << good;
  double squares = 0;
  for (size_t i = 0; i < 256 * 384; ++i) {
    bf16 s;
    std::memcpy(&s, &scales[i / 32 * 2], 2);
    const double x = ToFloat(s) * (((static_cast<uint8_t>(words[i / 2]) >> (i % 2 * 4)) & 15) - 8);
    squares += x * x;
  }
  const double depth = std::sqrt(2.0 * static_cast<double>(config->num_hidden_layers));
  EXPECT_NEAR(std::sqrt(squares / (256 * 384)) * std::sqrt(384.0) * depth, 1.0, 0.1);
  json odd = Int4Config();
  odd["moe_intermediate_size"] = 80;
  EXPECT_THAT(std::string(WriteSynthCheckpoint(odd.dump(), Options(dir.At("odd"))).message()), HasSubstr("no whole groups of 32"));
}

TEST(Synth, WeightsHaveTheSpreadThatKeepsActivationsNearOne) {
  TempDir dir;
  ASSERT_TRUE(WriteSynthCheckpoint(SynthConfig().dump(), Options(dir.At("m"))).ok());
  const auto checkpoint = Checkpoint::Open(dir.At("m"));
  ASSERT_TRUE(checkpoint.ok());
  const auto spread_of = [&](const std::string& name) {
    const std::string weight = TensorBytes(*checkpoint, name), scales = TensorBytes(*checkpoint, name + "_scale_inv");
    const std::vector<int64_t>& shape = checkpoint->Find(name)->shape;
    double squares = 0;
    for (int64_t r = 0; r < shape[0]; ++r) {
      for (int64_t c = 0; c < shape[1]; ++c) {
        float scale;
        std::memcpy(&scale, scales.data() + 4 * (r / 128 * ((shape[1] + 127) / 128) + c / 128), 4);
        const double w = F8E4M3ToFloat(static_cast<uint8_t>(weight[static_cast<size_t>(r * shape[1] + c)])) * scale;
        squares += w * w;
      }
    }
    return std::sqrt(squares / static_cast<double>(shape[0] * shape[1]));
  };
  // sqrt(inputs) x spread: 1, or 1 / sqrt(2 x layers) where the residual stream is written. The few block scales vary
  // by a quarter.
  EXPECT_NEAR(spread_of("model.layers.1.mlp.experts.3.gate_proj.weight") * std::sqrt(256.0), 1.0, 0.4);
  EXPECT_NEAR(spread_of("model.layers.1.mlp.experts.3.down_proj.weight") * std::sqrt(384.0 * 6), 1.0, 0.4);
  EXPECT_NE(TensorBytes(*checkpoint, "model.layers.1.mlp.experts.3.gate_proj.weight"),
            TensorBytes(*checkpoint, "model.layers.1.mlp.experts.4.gate_proj.weight"));
  const std::string norm = TensorBytes(*checkpoint, "model.norm.weight");
  for (size_t i = 0; i < norm.size(); i += 2) {
    bf16 value;
    std::memcpy(&value.bits, norm.data() + i, 2);
    EXPECT_NEAR(ToFloat(value), 1.0f, 0.35f);
  }
}

TEST(Synth, WritesEveryFamily) {
  TempDir dir;
  json v2 = BaseV2();
  v2["q_lora_rank"] = nullptr;
  v2["tie_word_embeddings"] = true;
  v2["eos_token_id"] = {1, 2};
  ASSERT_TRUE(WriteSynthCheckpoint(v2.dump(), Options(dir.At("v2"))).ok());
  ExpectGoodModel(dir.At("v2"));
  const auto config = ReadModelConfig(dir.At("v2"));
  ASSERT_TRUE(config.ok());
  EXPECT_THAT(config->eos_token_ids, ::testing::ElementsAre(1, 2));
  json dense = BaseV3();
  dense["n_routed_experts"] = nullptr;
  ASSERT_TRUE(WriteSynthCheckpoint(dense.dump(), Options(dir.At("dense"))).ok());
  ExpectGoodModel(dir.At("dense"));
}

TEST(Synth, ByteTokenizerHasEveryByteOnce) {
  TempDir dir;
  ASSERT_TRUE(WriteSynthCheckpoint(BaseV3().dump(), Options(dir.At("m"))).ok());
  const json tokenizer = json::parse(ReadFile(dir.At("m/tokenizer.json")));
  const json& vocab = tokenizer["model"]["vocab"];
  ASSERT_EQ(vocab.size(), 300u);
  EXPECT_EQ(vocab["</s>"], 1);
  EXPECT_EQ(vocab["A"], 3 + 'A');
  EXPECT_EQ(vocab["~"], 3 + '~');
  EXPECT_EQ(vocab["\u0100"], 3);        // byte 0
  EXPECT_EQ(vocab["\u0120"], 3 + ' ');  // the space's letter in every byte-level vocabulary
  EXPECT_EQ(vocab["\u010a"], 3 + '\n');
  EXPECT_EQ(vocab["\u00ff"], 3 + 0xff);
  EXPECT_EQ(vocab["\u0143"], 3 + 0xad);  // the soft hyphen is not printable, the last to be moved
  std::vector<bool> seen(300);
  for (const auto& [token, id] : vocab.items()) seen[id.get<size_t>()] = true;
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 300);
  const json config = json::parse(ReadFile(dir.At("m/tokenizer_config.json")));
  EXPECT_EQ(config["eos_token"], "</s>");
  EXPECT_THAT(config["chat_template"].get<std::string>(), HasSubstr("add_generation_prompt"));
}

TEST(Synth, CopiesAGivenTokenizer) {
  TempDir dir;
  std::filesystem::create_directory(dir.At("tok"));
  SynthOptions options = Options(dir.At("m"));
  options.tokenizer_dir = dir.At("tok");
  EXPECT_EQ(WriteSynthCheckpoint(BaseV3().dump(), options).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(std::filesystem::exists(dir.At("m")));
  WriteFile(dir.At("tok/tokenizer.json"), "{\"x\": 1}");
  WriteFile(dir.At("tok/tokenizer_config.json"), "{}");
  json tiny = BaseV3();
  tiny["vocab_size"] = 100;
  ASSERT_TRUE(WriteSynthCheckpoint(tiny.dump(), options).ok());
  EXPECT_EQ(ReadFile(dir.At("m/tokenizer.json")), "{\"x\": 1}");
}

TEST(Synth, RefusesBeforeWriting) {
  TempDir dir;
  json tiny = BaseV3();
  tiny["vocab_size"] = 258;
  absl::Status status = WriteSynthCheckpoint(tiny.dump(), Options(dir.At("a")));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("259"));
  EXPECT_FALSE(WriteSynthCheckpoint("{}", Options(dir.At("b"))).ok());
  WriteFile(dir.At("occupied"), "x");
  status = WriteSynthCheckpoint(BaseV3().dump(), Options(dir.path()));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(status), HasSubstr("not empty"));
  json huge = BaseV3();
  huge["vocab_size"] = 1 << 24;
  huge["hidden_size"] = 1 << 20;
  status = WriteSynthCheckpoint(huge.dump(), [&] {
    SynthOptions options = Options(dir.At("c"));
    options.tokenizer_dir = SourceDir() + "/deploy/models/fable-moe";
    return options;
  }());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(Message(status), HasSubstr("TB"));
}

}  // namespace
}  // namespace hearth
