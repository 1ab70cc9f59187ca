// GGUF files: what is read, and that nothing of what a damaged or hostile file says is believed.
#include "common/formats/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "common/base/quant_blocks.h"
#include "common/formats/gguf_model.h"
#include "common/formats/gguf_test_util.h"
#include "common/formats/model_config.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class GgufTest : public ::testing::Test {
 protected:
  GgufTest() {
    std::string dir = testing::TempDir() + "/hearth_gguf_test_XXXXXX";
    dir_ = mkdtemp(dir.data());
  }
  ~GgufTest() override { std::filesystem::remove_all(dir_); }
  std::string Path(const std::string& name = "model.gguf") const { return dir_ + "/" + name; }
  absl::Status ReadBytes(const std::string& bytes) const {
    std::ofstream(Path(), std::ios::binary) << bytes;
    return ReadGguf(Path()).status();
  }
  void ExpectRefused(const GgufTestWriter& writer, std::string_view what) const {
    const absl::Status status = ReadBytes(writer.Bytes());
    EXPECT_FALSE(status.ok()) << what;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(Path()), HasSubstr(std::string(what))));
  }

  std::string dir_;
};

GgufTestWriter SmallFile(uint32_t version = 3) {
  GgufTestWriter writer(version);
  writer.String("general.architecture", "deepseek2");
  writer.Uint16("a.number", 7);
  writer.Float("a.float", 0.5f);
  writer.Bool("a.bool", true);
  writer.Strings("a.list", {"x", "", "yz"});
  writer.Tensor("one", DType::kQ8_0, {3, 64}, std::string(3 * 68, '\1'));
  writer.Tensor("two", DType::kF32, {5}, std::string(20, '\2'));
  writer.Tensor("three", uint32_t{10}, {2, 256}, std::string(2 * 84, '\3'));
  return writer;
}

TEST_F(GgufTest, ReadsMetadataAndTensorsOfBothVersions) {
  for (const uint32_t version : {2u, 3u}) {
    const std::string bytes = SmallFile(version).Bytes();
    std::ofstream(Path(), std::ios::binary) << bytes;
    const absl::StatusOr<GgufModel> model = ReadGguf(Path());
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->metadata.at("general.architecture"), GgufValue(std::string("deepseek2")));
    EXPECT_EQ(model->metadata.at("a.number"), GgufValue(uint64_t{7}));
    EXPECT_EQ(model->metadata.at("a.float"), GgufValue(0.5));
    EXPECT_EQ(model->metadata.at("a.bool"), GgufValue(true));
    EXPECT_EQ(model->metadata.at("a.list"), GgufValue(GgufArray{3}));
    const CheckpointTensor& one = model->tensors.at("one");
    EXPECT_EQ(one.dtype, DType::kQ8_0);
    EXPECT_EQ(one.shape, (std::vector<int64_t>{3, 64}));
    EXPECT_EQ(one.bytes, 204u);
    EXPECT_EQ(bytes.substr(one.offset, one.bytes), std::string(204, '\1'));
    const CheckpointTensor& two = model->tensors.at("two");
    EXPECT_EQ(bytes.substr(two.offset, two.bytes), std::string(20, '\2'));
    EXPECT_EQ(model->tensors.at("three").dtype, DType::kInvalid);
    EXPECT_EQ(model->tensors.at("three").dtype_name, "Q2_K");
    EXPECT_EQ(model->files.size(), 1u);
  }
}

TEST_F(GgufTest, EveryTruncationIsAnErrorThatNamesTheFile) {
  const std::string bytes = SmallFile().Bytes();
  // The last tensor is of a type whose bytes are not known: its data may be missing unnoticed, until a plan asks for it.
  const size_t needed = bytes.size() - 352 - 64;
  for (size_t length = 0; length < needed; ++length) {
    const absl::Status status = ReadBytes(bytes.substr(0, length));
    ASSERT_FALSE(status.ok()) << length;
    ASSERT_THAT(std::string(status.message()), HasSubstr(Path())) << length;
  }
}

TEST_F(GgufTest, NoByteOfTheHeaderIsBelievedBlindly) {
  const std::string sound = SmallFile().Bytes();
  const size_t header = sound.find("three") + 5 + 4 + 16 + 4 + 8;
  for (size_t at = 0; at < header; ++at) {
    for (const char value : {'\xff', '\x7f', '\0', '\x80'}) {
      std::string bytes = sound;
      bytes[at] = value;
      const absl::Status status = ReadBytes(bytes);  // any status; sanitizers and the memory limit of tests are the judges
      if (status.ok()) continue;
      ASSERT_THAT(std::string(status.message()), HasSubstr(Path())) << at;
    }
  }
}

TEST_F(GgufTest, RefusesWhatContradictsItself) {
  EXPECT_THAT(std::string(ReadBytes("GGML and more bytes").message()), HasSubstr("not a GGUF file"));
  EXPECT_THAT(std::string(ReadBytes(GgufTestWriter(1).Bytes()).message()), HasSubstr("version 1"));
  EXPECT_THAT(std::string(ReadBytes(GgufTestWriter(0x03000000).Bytes()).message()), HasSubstr("big-endian"));
  {
    GgufTestWriter w;
    w.Uint32("twice", 1);
    w.Uint32("twice", 1);
    ExpectRefused(w, "given twice");
  }
  {
    GgufTestWriter w;
    w.Pair("key", 99, "");
    ExpectRefused(w, "unknown type 99");
  }
  {
    GgufTestWriter w;
    w.Pair("key", 9, GgufTestWriter::Raw(uint32_t{4}) + GgufTestWriter::Raw(uint64_t{1} << 62));
    ExpectRefused(w, "the array of \"key\"");
  }
  {
    GgufTestWriter w;
    w.Tensor("t", DType::kQ4_K, {2, 128}, std::string(144, '\0'));
    ExpectRefused(w, "no whole Q4_K blocks of 256");
  }
  {
    GgufTestWriter w;
    w.Tensor("t", DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}, "");
    ExpectRefused(w, "impossible shape");
  }
  {
    GgufTestWriter w;
    w.Tensor("t", DType::kF32, {64}, std::string(64, '\0'));
    w.Tensor("u", DType::kF32, {64}, std::string(256, '\0'));
    ExpectRefused(w, "overlaps \"t\"");
  }
  {
    GgufTestWriter w;
    w.Tensor("t", DType::kF32, {4}, std::string(16, '\0'));
    w.Tensor("t", DType::kF32, {4}, std::string(16, '\0'));
    ExpectRefused(w, "is there twice");
  }
}

TEST_F(GgufTest, SplitModelsAreReadFromAnyOfTheirParts) {
  const auto part = [](uint16_t number, const std::string& tensor) {
    GgufTestWriter w;
    if (number == 0) w.String("general.architecture", "deepseek2");
    w.Uint16("split.no", number);
    w.Uint16("split.count", 2);
    w.Tensor(tensor, DType::kF32, {4}, std::string(16, '\0'));
    return w;
  };
  part(0, "a").Write(Path("m-00001-of-00002.gguf"));
  const absl::Status missing = ReadGguf(Path("m-00001-of-00002.gguf")).status();
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_THAT(std::string(missing.message()), AllOf(HasSubstr("m-00002-of-00002.gguf"), HasSubstr("incomplete download")));
  part(1, "b").Write(Path("m-00002-of-00002.gguf"));
  for (const char* name : {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}) {
    const absl::StatusOr<GgufModel> model = ReadGguf(Path(name));
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->metadata.at("general.architecture"), GgufValue(std::string("deepseek2")));
    EXPECT_EQ(model->tensors.at("a").file, 0);
    EXPECT_EQ(model->tensors.at("b").file, 1);
  }
  EXPECT_EQ(FindGguf(dir_).value(), Path("m-00001-of-00002.gguf"));
  part(0, "b").Write(Path("m-00002-of-00002.gguf"));
  EXPECT_THAT(std::string(ReadGguf(Path("m-00001-of-00002.gguf")).status().message()), HasSubstr("says it is part 1 of 2"));
  std::filesystem::copy(Path("m-00001-of-00002.gguf"), Path("alone.gguf"));
  EXPECT_THAT(std::string(ReadGguf(Path("alone.gguf")).status().message()), HasSubstr("restore its name"));
  EXPECT_THAT(std::string(FindGguf(dir_).status().message()), HasSubstr("several GGUF models"));
}

// The metadata of DeepSeek-V3 as the converters write it.
GgufTestWriter DeepSeekV3() {
  GgufTestWriter w;
  w.String("general.architecture", "deepseek2");
  for (const auto& [key, value] : std::vector<std::pair<std::string, uint32_t>>{{"block_count", 61},
                                                                                {"context_length", 163840},
                                                                                {"embedding_length", 7168},
                                                                                {"feed_forward_length", 18432},
                                                                                {"attention.head_count", 128},
                                                                                {"attention.head_count_kv", 1},
                                                                                {"leading_dense_block_count", 3},
                                                                                {"attention.q_lora_rank", 1536},
                                                                                {"attention.kv_lora_rank", 512},
                                                                                {"attention.key_length", 576},
                                                                                {"attention.value_length", 512},
                                                                                {"attention.key_length_mla", 192},
                                                                                {"attention.value_length_mla", 128},
                                                                                {"expert_feed_forward_length", 2048},
                                                                                {"expert_count", 256},
                                                                                {"expert_used_count", 8},
                                                                                {"expert_shared_count", 1},
                                                                                {"expert_gating_func", 2},
                                                                                {"rope.dimension_count", 64},
                                                                                {"rope.scaling.original_context_length", 4096}}) {
    w.Uint32("deepseek2." + key, value);
  }
  w.Float("deepseek2.attention.layer_norm_rms_epsilon", 1e-6f);
  w.Float("deepseek2.rope.freq_base", 10000.0f);
  w.Float("deepseek2.rope.scaling.factor", 40.0f);
  w.Float("deepseek2.rope.scaling.yarn_log_multiplier", 0.1f);
  w.String("deepseek2.rope.scaling.type", "yarn");
  w.Float("deepseek2.expert_weights_scale", 2.5f);
  w.Bool("deepseek2.expert_weights_norm", true);
  w.Uint32("tokenizer.ggml.bos_token_id", 0);
  w.Uint32("tokenizer.ggml.eos_token_id", 1);
  w.Strings("tokenizer.ggml.tokens", {"a", "b"});
  w.Tensor("token_embd.weight", DType::kF32, {2, 2}, std::string(16, '\0'));
  w.Tensor("output.weight", DType::kF32, {2, 2}, std::string(16, '\0'));
  w.Tensor("blk.0.attn_k_b.weight", DType::kF32, {1, 2, 2}, std::string(16, '\0'));
  return w;
}

TEST_F(GgufTest, ConfigComesFromMetadata) {
  DeepSeekV3().Write(Path());
  const absl::StatusOr<ModelConfig> config = ReadModelConfig(Path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, "DeepseekV3ForCausalLM");
  EXPECT_EQ(config->num_hidden_layers, 61);
  EXPECT_EQ(config->hidden_size, 7168);
  EXPECT_EQ(config->intermediate_size, 18432);
  EXPECT_EQ(config->moe_intermediate_size, 2048);
  EXPECT_EQ(config->first_k_dense_replace, 3);
  EXPECT_EQ(config->q_lora_rank, 1536);
  EXPECT_EQ(config->kv_lora_rank, 512);
  EXPECT_EQ(config->qk_nope_head_dim, 128);
  EXPECT_EQ(config->qk_rope_head_dim, 64);
  EXPECT_EQ(config->v_head_dim, 128);
  EXPECT_EQ(config->n_routed_experts, 256);
  EXPECT_EQ(config->num_experts_per_tok, 8);
  EXPECT_EQ(config->n_group, 8);
  EXPECT_EQ(config->topk_group, 4);
  EXPECT_EQ(config->topk_method, TopkMethod::kNoauxTc);
  EXPECT_TRUE(config->norm_topk_prob);
  EXPECT_EQ(config->routed_scaling_factor, 2.5);
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_EQ(config->vocab_size, 2);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_TRUE(config->kv_b_split);
  EXPECT_EQ(config->eos_token_ids, std::vector<int32_t>{1});
  ASSERT_TRUE(config->rope_scaling.has_value());
  EXPECT_EQ(config->rope_scaling->factor, 40.0);
  EXPECT_EQ(config->rope_scaling->mscale, 1.0);
  EXPECT_EQ(config->rope_scaling->mscale_all_dim, 1.0);
  EXPECT_EQ(ModelFilesDir(Path()), dir_);
  EXPECT_EQ(ModelFilesDir(dir_), dir_);
}

TEST_F(GgufTest, OtherArchitecturesAndMissingKeysAreRefusedByName) {
  GgufTestWriter other;
  other.String("general.architecture", "llama");
  other.Write(Path());
  EXPECT_THAT(std::string(ReadModelConfig(Path()).status().message()), AllOf(HasSubstr("\"llama\""), HasSubstr("deepseek2")));
  GgufTestWriter missing;
  missing.String("general.architecture", "deepseek2");
  missing.Write(Path());
  EXPECT_THAT(std::string(ReadModelConfig(Path()).status().message()), HasSubstr("deepseek2.block_count is missing"));
}

TEST_F(GgufTest, ExpertsAreSlicesOfTheirStack) {
  GgufTestWriter w;
  w.Uint32("deepseek2.expert_count", 3);
  std::string data;
  for (int expert = 0; expert < 3; ++expert) data += std::string(2 * 34, static_cast<char>('a' + expert));
  w.Tensor("blk.4.ffn_down_exps.weight", DType::kQ8_0, {3, 2, 32}, data);
  w.Tensor("blk.4.ffn_gate_inp.weight", DType::kF32, {3, 2}, std::string(24, '\0'));
  w.Write(Path());
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(Path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string bytes = w.Bytes();
  for (int expert = 0; expert < 3; ++expert) {
    const CheckpointTensor* slice = checkpoint->Find("model.layers.4.mlp.experts." + std::to_string(expert) + ".down_proj.weight");
    ASSERT_NE(slice, nullptr);
    EXPECT_EQ(slice->shape, (std::vector<int64_t>{2, 32}));
    EXPECT_EQ(bytes.substr(slice->offset, slice->bytes), std::string(68, static_cast<char>('a' + expert)));
  }
  EXPECT_NE(checkpoint->Find("model.layers.4.mlp.gate.weight"), nullptr);
}

TEST_F(GgufTest, AStackIsHeldAgainstTheMetadataBeforeItIsCut) {
  constexpr uint32_t kQ4_0 = 2;  // ggml's number of a type that Hearth does not compute with
  const auto error = [&](const GgufTestWriter& w) {
    w.Write(Path());
    return std::string(Checkpoint::Open(Path()).status().message());
  };
  for (const int64_t stacked : {int64_t{2}, int64_t{1} << 40}) {
    GgufTestWriter w;
    w.Uint32("deepseek2.expert_count", 3);
    w.Tensor("blk.1.ffn_gate_exps.weight", kQ4_0, {stacked, 1, 1}, "");
    EXPECT_THAT(error(w), AllOf(HasSubstr("blk.1.ffn_gate_exps.weight"), HasSubstr(std::to_string(stacked)), HasSubstr("expert_count is 3")));
  }
  GgufTestWriter w;
  w.Uint32("deepseek2.expert_count", 3);
  w.Tensor("blk.1.ffn_gate_exps.weight", kQ4_0, {3, 2, 32}, std::string(3 * 2 * 18, '\0'));
  EXPECT_THAT(error(w), AllOf(HasSubstr("blk.1.ffn_gate_exps.weight"), HasSubstr("Q4_0"), HasSubstr("Q8_0")));
}

TEST_F(GgufTest, RowsThatNoKernelTakesAreRefusedByTensor) {
  for (const int64_t columns : {kRowColumnsMax, kRowColumnsMax + 32}) {
    GgufTestWriter w;
    w.Tensor("output.weight", DType::kQ8_0, {1, columns}, std::string(static_cast<size_t>(columns / 32 * 34), '\0'));
    w.Write(Path());
    const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(Path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    PlannedTensor head;
    head.name = "lm_head.weight";
    head.shape = {1, columns};
    head.may_be_blocks = true;
    const absl::Status status = CheckPlan({}, {head}, *checkpoint);
    if (columns == kRowColumnsMax) {
      EXPECT_TRUE(status.ok()) << status;
      continue;
    }
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("lm_head.weight"), HasSubstr("65568"), HasSubstr("at most 65536")));
  }
}

TEST_F(GgufTest, NumbersThatAreNoneAreRefusedByTheirKey) {
  GgufTestWriter w;
  w.String("general.architecture", "deepseek2");
  for (const char* key : {"block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count"}) {
    w.Uint32(std::string("deepseek2.") + key, 4);
  }
  w.Float("deepseek2.attention.layer_norm_rms_epsilon", std::numeric_limits<float>::quiet_NaN());
  w.Tensor("token_embd.weight", DType::kF32, {2, 4}, std::string(32, '\0'));
  w.Write(Path());
  EXPECT_THAT(std::string(ReadModelConfig(Path()).status().message()), HasSubstr("layer_norm_rms_epsilon is no finite"));
}

TEST_F(GgufTest, ADirectoryOfLaterPartsAloneIsToldSo) {
  GgufTestWriter w;
  w.Write(dir_ + "/m-00002-of-00002.gguf");
  EXPECT_THAT(std::string(ReadModelConfig(dir_).status().message()), AllOf(HasSubstr("m-00002-of-00002.gguf"), HasSubstr("first part")));
}

}  // namespace
}  // namespace hearth
