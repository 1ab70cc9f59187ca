// Small checkpoints of any shape for the image's tests: random bytes that are legal values.
// Room: common/image, tests only.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/dtype.h"
#include "common/formats/model_config.h"
#include "common/formats/tensor_plan.h"
#include "common/shm/region.h"

namespace hearth {

struct TestCheckpointOptions {
  bool fp8 = true;
  DType scale_dtype = DType::kF32;
  DType plain_dtype = DType::kBF16;
  uint32_t seed = 1;
  int header_padding = 0;  // extra blanks: moves every tensor off its alignment
};

inline nlohmann::json TestConfig() {
  return {{"architectures", {"DeepseekV3ForCausalLM"}},
          {"model_type", "deepseek_v3"},
          {"vocab_size", 300},
          {"hidden_size", 200},
          {"intermediate_size", 264},
          {"moe_intermediate_size", 384},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 2},
          {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-6},
          {"tie_word_embeddings", false},
          {"q_lora_rank", 32},
          {"kv_lora_rank", 48},
          {"qk_nope_head_dim", 16},
          {"qk_rope_head_dim", 8},
          {"v_head_dim", 16},
          {"rope_theta", 10000.0},
          {"rope_scaling", nullptr},
          {"n_routed_experts", 4},
          {"num_experts_per_tok", 2},
          {"n_shared_experts", 1},
          {"first_k_dense_replace", 1},
          {"moe_layer_freq", 1},
          {"n_group", 1},
          {"topk_group", 1},
          {"scoring_func", "sigmoid"},
          {"topk_method", "noaux_tc"},
          {"norm_topk_prob", true},
          {"routed_scaling_factor", 2.5},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"bos_token_id", 0},
          {"eos_token_id", 1},
          {"num_nextn_predict_layers", 0},
          {"torch_dtype", "bfloat16"}};
}

inline void AppendRandomValues(DType dtype, int64_t count, bool positive, std::mt19937& random, std::string& bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = (positive ? 0.001f : -1.0f) + static_cast<float>(random() % 1000) * 0.002f;
    const uint8_t code = static_cast<uint8_t>(random() % 256);
    const bf16 half = ToBf16(value);
    const uint16_t f16 = FloatToF16(value);
    switch (dtype) {
      case DType::kF8E4M3: bytes.push_back(static_cast<char>((code & 0x7f) == 0x7f ? 1 : code)); break;
      case DType::kBF16: bytes.append(reinterpret_cast<const char*>(&half), 2); break;
      case DType::kF16: bytes.append(reinterpret_cast<const char*>(&f16), 2); break;
      default: bytes.append(reinterpret_cast<const char*>(&value), 4); break;
    }
  }
}

// Writes config.json and model.safetensors into `dir`, which exists.
inline void WriteTestCheckpoint(const std::string& dir, nlohmann::json config, const TestCheckpointOptions& options) {
  if (options.fp8) {
    config["quantization_config"] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}}};
  }
  const std::string text = config.dump();
  std::ofstream(dir + "/config.json") << text;
  const absl::StatusOr<ModelConfig> parsed = ParseModelConfig(text, "");
  if (!parsed.ok()) fprintf(stderr, "%s\n", std::string(parsed.status().message()).c_str());
  HEARTH_CHECK(parsed.ok());
  std::mt19937 random(options.seed);
  nlohmann::json header;
  std::string bytes;
  const auto add = [&](const std::string& name, DType dtype, const std::vector<int64_t>& shape, bool positive) {
    const size_t begin = bytes.size();
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    AppendRandomValues(dtype, count, positive, random, bytes);
    header[name] = {{"dtype", std::string(DTypeName(dtype))}, {"shape", shape}, {"data_offsets", {begin, bytes.size()}}};
  };
  for (const PlannedTensor& tensor : PlanTensors(*parsed)) {
    const bool quantized = options.fp8 && tensor.may_be_fp8;
    add(tensor.name, quantized ? DType::kF8E4M3 : options.plain_dtype, tensor.shape, false);
    if (quantized) add(tensor.name + "_scale_inv", options.scale_dtype, {(tensor.shape[0] + 127) / 128, (tensor.shape[1] + 127) / 128}, true);
  }
  std::string head = header.dump();
  head.append(static_cast<size_t>(options.header_padding), ' ');
  const uint64_t head_bytes = head.size();
  std::ofstream out(dir + "/model.safetensors", std::ios::binary);
  out.write(reinterpret_cast<const char*>(&head_bytes), 8);
  out << head << bytes;
}

// Empty directories for a node's regions and disk parts, and beside them a checkpoint of TestConfig with so many experts. Gone with it.
struct TestImagePlace {
  explicit TestImagePlace(int64_t experts) {
    char shm[] = "/dev/shm/hearth_image_test_XXXXXX";
    std::string made = (std::filesystem::temp_directory_path() / "hearth_image_test_XXXXXX").string();
    work = mkdtemp(made.data());
    model_dir = work + "/model";
    regions = {mkdtemp(shm), "n1", work + "/disk"};
    std::filesystem::create_directory(regions.disk_dir);
    std::filesystem::create_directory(model_dir);
    nlohmann::json config = TestConfig();
    config["n_routed_experts"] = experts;
    WriteTestCheckpoint(model_dir, config, {});
  }
  ~TestImagePlace() {
    std::filesystem::remove_all(regions.dir);
    std::filesystem::remove_all(work);
  }
  TestImagePlace(const TestImagePlace&) = delete;
  TestImagePlace& operator=(const TestImagePlace&) = delete;

  std::string work;  // holds the checkpoint and the disk parts
  std::string model_dir;
  RegionPlace regions;
};

}  // namespace hearth
