#include "tests/quantized_models.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/quant_blocks.h"
#include "common/formats/file_io.h"
#include "common/formats/gguf_test_tokenizer.h"
#include "common/formats/model_config.h"
#include "common/formats/safetensors.h"

namespace hearth {
namespace {

using nlohmann::json;

void Put16(std::string& out, size_t at, uint16_t bits) { std::memcpy(&out[at], &bits, sizeof(bits)); }

// One block of `n` numbers.
std::string QuantizeBlock(DType dtype, const float* x) {
  const DTypeBlock block = BlockOf(dtype);
  const int n = static_cast<int>(block.elements);
  std::string out(static_cast<size_t>(block.bytes), '\0');
  const auto largest = [&](int begin, int count) {
    float max = 0;
    for (int i = begin; i < begin + count; ++i) max = std::max(max, std::fabs(x[i]));
    return max;
  };
  const auto nearest = [](float value, float scale, int low, int high) {
    return scale == 0 ? 0 : std::clamp(static_cast<int>(std::lround(value / scale)), low, high);
  };
  const auto or_at = [&](int at, int bits) {
    out[static_cast<size_t>(at)] = static_cast<char>(static_cast<uint8_t>(out[static_cast<size_t>(at)]) | bits);
  };
  if (dtype == DType::kQ8_0) {
    const uint16_t d = FloatToF16(largest(0, n) / 127);
    Put16(out, 0, d);
    for (int i = 0; i < n; ++i) or_at(2 + i, nearest(x[i], F16ToFloat(d), -127, 127) & 255);
  } else if (dtype == DType::kI4G32) {
    const bf16 scale = ToBf16(std::max(largest(0, n) / 7, 1e-30f));
    Put16(out, 0, scale.bits);
    for (int i = 0; i < n; ++i) or_at(2 + i / 2, (nearest(x[i], ToFloat(scale), -8, 7) + 8) << (i % 2 * 4));
  } else if (dtype == DType::kQ6_K) {
    const uint16_t d = FloatToF16(largest(0, n) / 31 / 127);
    Put16(out, 208, d);
    for (int part = 0; part < 16; ++part) {
      const int scale = nearest(largest(16 * part, 16) / 31, F16ToFloat(d), 0, 127);
      out[static_cast<size_t>(192 + part)] = static_cast<char>(scale);
      for (int i = 16 * part; i < 16 * part + 16; ++i) {
        const int q = nearest(x[i], F16ToFloat(d) * static_cast<float>(scale), -32, 31) + 32;
        const int half = i / 128, in_half = i % 128;
        or_at(64 * half + in_half % 64, (q & 15) << (in_half / 64 * 4));
        or_at(128 + 32 * half + in_half % 32, (q >> 4) << (in_half / 32 * 2));
      }
    }
  } else if (dtype == DType::kQ3_K) {
    const uint16_t d = FloatToF16(largest(0, n) / 4 / 31);
    Put16(out, 108, d);
    for (int part = 0; part < 16; ++part) {
      const int scale = nearest(largest(16 * part, 16) / 4, F16ToFloat(d), 0, 31);
      or_at(96 + part % 8, ((scale + 32) & 15) << (part / 8 * 4));
      or_at(104 + part % 4, ((scale + 32) >> 4) << (part / 4 * 2));
      for (int i = 16 * part; i < 16 * part + 16; ++i) {
        const int q = nearest(x[i], F16ToFloat(d) * static_cast<float>(scale), -4, 3) + 4;
        or_at(32 + i / 128 * 32 + i % 32, (q & 3) << (i / 32 % 4 * 2));
        or_at(i % 32, (q >> 2) << (i / 32));
      }
    }
  } else {
    HEARTH_CHECK(dtype == DType::kQ4_K || dtype == DType::kQ5_K);
    const int levels = dtype == DType::kQ5_K ? 31 : 15, nibbles = dtype == DType::kQ5_K ? 48 : 16;
    float low[8], step[8], max_step = 0, max_low = 0;
    for (int part = 0; part < 8; ++part) {
      const auto [min, max] = std::minmax_element(x + 32 * part, x + 32 * part + 32);
      low[part] = std::max(0.0f, -*min);
      step[part] = (*max + low[part]) / static_cast<float>(levels);
      max_step = std::max(max_step, step[part]);
      max_low = std::max(max_low, low[part]);
    }
    const uint16_t d = FloatToF16(max_step / 63), dmin = FloatToF16(max_low / 63);
    Put16(out, 0, d);
    Put16(out, 2, dmin);
    for (int part = 0; part < 8; ++part) {
      const int scale = nearest(step[part], F16ToFloat(d), 0, 63), min = nearest(low[part], F16ToFloat(dmin), 0, 63);
      if (part < 4) {
        or_at(4 + part, scale);
        or_at(8 + part, min);
      } else {
        or_at(8 + part, (scale & 15) | (min & 15) << 4);
        or_at(part, (scale >> 4) << 6);
        or_at(4 + part, (min >> 4) << 6);
      }
      for (int i = 32 * part; i < 32 * part + 32; ++i) {
        const int q = nearest(x[i] + F16ToFloat(dmin) * static_cast<float>(min), F16ToFloat(d) * static_cast<float>(scale), 0, levels);
        if (levels == 31) or_at(16 + i % 32, (q >> 4) << (i / 32));
        or_at(nibbles + i / 64 * 32 + i % 32, (q & 15) << (i / 32 % 2 * 4));
      }
    }
  }
  return out;
}

std::string Quantize(DType dtype, const std::vector<float>& x) {
  if (!IsBlockFormat(dtype)) {
    HEARTH_CHECK(dtype == DType::kF32);
    return std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float));
  }
  std::string out;
  for (size_t i = 0; i < x.size(); i += static_cast<size_t>(BlockOf(dtype).elements)) out += QuantizeBlock(dtype, &x[i]);
  return out;
}

std::vector<float> Dequantize(DType dtype, const std::string& bytes, size_t count) {
  std::vector<float> out(count);
  if (IsBlockFormat(dtype)) {
    DequantizeRow(dtype, bytes.data(), static_cast<int64_t>(count), out.data());
  } else {
    std::memcpy(out.data(), bytes.data(), bytes.size());
  }
  return out;
}

absl::StatusOr<std::string> Bytes(const Checkpoint& checkpoint, const CheckpointTensor& tensor) {
  const std::string& path = checkpoint.files()[static_cast<size_t>(tensor.file)].path;
  ASSIGN_OR_RETURN(const OpenedFile file, OpenRegularFile(path));
  std::string bytes(tensor.bytes, '\0');
  RETURN_IF_ERROR(ReadExactly(file.fd.get(), path, tensor.offset, bytes.data(), bytes.size()));
  return bytes;
}

// A tensor of an FP8, BF16 or F32 checkpoint as floats, scales applied.
absl::StatusOr<std::vector<float>> Floats(const Checkpoint& checkpoint, const PlannedTensor& planned) {
  const CheckpointTensor* tensor = checkpoint.Find(planned.name);
  if (tensor == nullptr) return absl::NotFoundError(planned.name);
  ASSIGN_OR_RETURN(const std::string bytes, Bytes(checkpoint, *tensor));
  std::vector<float> out(bytes.size() / DTypeBytes(tensor->dtype, 1));
  std::vector<float> scales;
  if (tensor->dtype == DType::kF8E4M3) {
    ASSIGN_OR_RETURN(const std::string raw, Bytes(checkpoint, *checkpoint.Find(planned.name + "_scale_inv")));
    scales.resize(raw.size() / sizeof(float));
    std::memcpy(scales.data(), raw.data(), raw.size());
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (tensor->dtype == DType::kF32) {
      std::memcpy(&out[i], &bytes[4 * i], 4);
    } else if (tensor->dtype == DType::kBF16) {
      bf16 half;
      std::memcpy(&half, &bytes[2 * i], 2);
      out[i] = ToFloat(half);
    } else {
      const int64_t width = planned.shape[1], row = static_cast<int64_t>(i) / width, column = static_cast<int64_t>(i) % width;
      out[i] =
          F8E4M3ToFloat(static_cast<uint8_t>(bytes[i])) * scales[static_cast<size_t>(row / kScaleBlock * ScaleBlocks(width) + column / kScaleBlock)];
    }
  }
  return out;
}

class SafetensorsWriter {
 public:
  void Add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape, const std::string& bytes) {
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {data_.size(), data_.size() + bytes.size()}}};
    data_ += bytes;
  }
  void Write(const std::string& dir, const json& config) const {
    std::filesystem::create_directories(dir);
    std::ofstream(dir + "/config.json") << config.dump();
    const std::string head = header_.dump();
    std::ofstream out(dir + "/model.safetensors", std::ios::binary);
    out << GgufTestWriter::Sized(head) << data_;
  }

 private:
  json header_;
  std::string data_;
};

std::vector<float> Transposed(const float* x, int64_t rows, int64_t cols) {
  std::vector<float> out(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[static_cast<size_t>(c * rows + r)] = x[r * cols + c];
  }
  return out;
}

void AddMetadata(const ModelConfig& c, GgufTestWriter& w) {
  const std::string p = "deepseek2.";
  const auto number = [&](const std::string& key, int64_t value) { w.Uint32(p + key, static_cast<uint32_t>(value)); };
  w.String("general.architecture", "deepseek2");
  number("block_count", c.num_hidden_layers);
  number("context_length", c.max_position_embeddings);
  number("embedding_length", c.hidden_size);
  number("feed_forward_length", c.intermediate_size);
  number("attention.head_count", c.num_attention_heads);
  number("attention.q_lora_rank", c.q_lora_rank.value_or(0));
  number("attention.kv_lora_rank", c.kv_lora_rank);
  number("attention.key_length_mla", c.qk_head_dim());
  number("attention.value_length_mla", c.v_head_dim);
  number("rope.dimension_count", c.qk_rope_head_dim);
  number("leading_dense_block_count", c.first_k_dense_replace);
  number("expert_count", c.n_routed_experts);
  number("expert_used_count", c.num_experts_per_tok);
  number("expert_shared_count", c.n_shared_experts);
  number("expert_feed_forward_length", c.moe_intermediate_size);
  number("expert_gating_func", c.scoring_func == ScoringFunc::kSigmoid ? 2 : 1);
  number("expert_group_count", c.n_group);
  number("expert_group_used_count", c.topk_group);
  w.Float(p + "attention.layer_norm_rms_epsilon", static_cast<float>(c.rms_norm_eps));
  w.Float(p + "rope.freq_base", static_cast<float>(c.rope_theta));
  w.Float(p + "expert_weights_scale", static_cast<float>(c.routed_scaling_factor));
  w.Bool(p + "expert_weights_norm", c.norm_topk_prob);
}

const std::map<std::string, std::string>& GgufNames() {
  static const auto* names = new std::map<std::string, std::string>{
      {"input_layernorm.weight", "attn_norm.weight"},
      {"self_attn.q_proj.weight", "attn_q.weight"},
      {"self_attn.q_a_proj.weight", "attn_q_a.weight"},
      {"self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"},
      {"self_attn.q_b_proj.weight", "attn_q_b.weight"},
      {"self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"},
      {"self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"},
      {"self_attn.kv_b_proj.weight", "attn_kv_b.weight"},
      {"self_attn.o_proj.weight", "attn_output.weight"},
      {"post_attention_layernorm.weight", "ffn_norm.weight"},
      {"mlp.gate_proj.weight", "ffn_gate.weight"},
      {"mlp.up_proj.weight", "ffn_up.weight"},
      {"mlp.down_proj.weight", "ffn_down.weight"},
      {"mlp.gate.weight", "ffn_gate_inp.weight"},
      {"mlp.gate.e_score_correction_bias", "exp_probs_b.bias"},
      {"mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"},
      {"mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"},
      {"mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"},
  };
  return *names;
}

struct Source {
  ModelConfig config;
  json config_json;
  Checkpoint checkpoint;
};

absl::StatusOr<Source> Open(const std::string& model_dir) {
  Source source;
  ASSIGN_OR_RETURN(source.config, ReadModelConfig(model_dir));
  std::ifstream in(model_dir + "/config.json");
  source.config_json = json::parse(in);
  source.config_json.erase("quantization_config");
  ASSIGN_OR_RETURN(source.checkpoint, Checkpoint::Open(model_dir));
  return source;
}

}  // namespace

DType Fitting(const PlannedTensor& planned, DType wanted) {
  if (!planned.may_be_blocks) return DType::kF32;
  for (const DType dtype : {wanted, DType::kQ8_0}) {
    if (planned.shape.back() % BlockOf(dtype).elements == 0) return dtype;
  }
  return DType::kF32;
}

absl::StatusOr<QuantizedModels> WriteGgufModels(const std::string& model_dir, const std::string& to, const DTypeChoice& choice, bool split_kv_b) {
  ASSIGN_OR_RETURN(const Source source, Open(model_dir));
  const ModelConfig& c = source.config;
  GgufTestWriter gguf;
  SafetensorsWriter plain;
  AddMetadata(c, gguf);
  AddTokenizer(gguf, model_dir, "deepseek-v3", static_cast<size_t>(c.vocab_size));
  struct Stack {
    DType dtype = DType::kInvalid;
    std::vector<int64_t> shape;
    std::string data;
  };
  std::map<std::string, Stack> stacks;  // of experts, by GGUF's name
  for (const PlannedTensor& planned : PlanTensors(c)) {
    ASSIGN_OR_RETURN(const std::vector<float> values, Floats(source.checkpoint, planned));
    const DType dtype = choice(planned);
    const std::string layer = absl::StrCat("model.layers.", planned.layer, "."), block = absl::StrCat("blk.", planned.layer, ".");
    const std::string rest = planned.layer < 0 ? "" : planned.name.substr(layer.size());
    std::vector<float> placed;  // what the plain twin gets
    if (rest == "self_attn.kv_b_proj.weight" && split_kv_b) {
      const int64_t rank = c.kv_lora_rank, nope = c.qk_nope_head_dim, v = c.v_head_dim;
      std::string keys, heads_values;
      for (int64_t head = 0; head < c.num_attention_heads; ++head) {
        const float* rows = values.data() + head * (nope + v) * rank;
        const std::string k = Quantize(dtype, Transposed(rows, nope, rank));
        const std::vector<float> value_rows(rows + nope * rank, rows + (nope + v) * rank);
        const std::string values_bytes = Quantize(dtype, value_rows);
        const std::vector<float> k_again = Dequantize(dtype, k, static_cast<size_t>(nope * rank));
        const std::vector<float> back = Transposed(k_again.data(), rank, nope), v_back = Dequantize(dtype, values_bytes, value_rows.size());
        placed.insert(placed.end(), back.begin(), back.end());
        placed.insert(placed.end(), v_back.begin(), v_back.end());
        keys += k;
        heads_values += values_bytes;
      }
      gguf.Tensor(block + "attn_k_b.weight", dtype, {c.num_attention_heads, rank, nope}, keys);
      gguf.Tensor(block + "attn_v_b.weight", dtype, {c.num_attention_heads, v, rank}, heads_values);
    } else {
      const std::string bytes = Quantize(dtype, values);
      placed = Dequantize(dtype, bytes, values.size());
      if (planned.expert >= 0) {
        const std::string part = planned.role == TensorRole::kExpertGate ? "gate" : planned.role == TensorRole::kExpertUp ? "up" : "down";
        Stack& stack = stacks[absl::StrCat(block, "ffn_", part, "_exps.weight")];
        stack.dtype = dtype;
        stack.shape = {planned.expert + 1, planned.shape[0], planned.shape[1]};
        stack.data += bytes;
      } else if (planned.layer >= 0) {
        gguf.Tensor(block + GgufNames().at(rest), dtype, planned.shape, bytes);
      } else {
        const char* name = planned.role == TensorRole::kEmbedding ? "token_embd.weight"
                           : planned.role == TensorRole::kHead    ? "output.weight"
                                                                  : "output_norm.weight";
        gguf.Tensor(name, dtype, planned.shape, bytes);
      }
    }
    plain.Add(planned.name, "F32", planned.shape, std::string(reinterpret_cast<const char*>(placed.data()), placed.size() * sizeof(float)));
  }
  for (const auto& [name, stack] : stacks) gguf.Tensor(name, stack.dtype, stack.shape, stack.data);
  std::filesystem::create_directories(to + "/gguf");
  gguf.Write(to + "/gguf/model.gguf");
  plain.Write(to + "/plain", source.config_json);
  return QuantizedModels{to + "/gguf/model.gguf", to + "/plain"};
}

absl::StatusOr<QuantizedModels> WriteInt4Models(const std::string& model_dir, const std::string& to, const DTypeChoice& choice) {
  ASSIGN_OR_RETURN(const Source source, Open(model_dir));
  SafetensorsWriter packed, plain;
  for (const PlannedTensor& planned : PlanTensors(source.config)) {
    ASSIGN_OR_RETURN(const std::vector<float> values, Floats(source.checkpoint, planned));
    std::vector<float> placed = values;
    if (choice(planned) == DType::kI4G32) {
      const std::string blocks = Quantize(DType::kI4G32, values);
      placed = Dequantize(DType::kI4G32, blocks, values.size());
      std::string nibbles, scales;
      for (size_t at = 0; at < blocks.size(); at += 18) {
        scales += blocks.substr(at, 2);
        nibbles += blocks.substr(at + 2, 16);
      }
      packed.Add(planned.name + "_packed", "I32", {planned.shape[0], planned.shape[1] / 8}, nibbles);
      packed.Add(planned.name + "_scale", "BF16", {planned.shape[0], planned.shape[1] / 32}, scales);
      packed.Add(planned.name + "_shape", "I64", {2}, GgufTestWriter::Raw(planned.shape[0]) + GgufTestWriter::Raw(planned.shape[1]));
    } else {
      packed.Add(planned.name, "F32", planned.shape, std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
    }
    plain.Add(planned.name, "F32", planned.shape, std::string(reinterpret_cast<const char*>(placed.data()), placed.size() * sizeof(float)));
  }
  json config = source.config_json;
  config["quantization_config"] = {
      {"quant_method", "compressed-tensors"},
      {"format", "pack-quantized"},
      {"ignore", {"lm_head"}},
      {"config_groups",
       {{"group_0",
         {{"input_activations", nullptr},
          {"targets", {"Linear"}},
          {"weights", {{"num_bits", 4}, {"group_size", 32}, {"strategy", "group"}, {"symmetric", true}, {"type", "int"}}}}}}}};
  packed.Write(to + "/int4", config);
  plain.Write(to + "/plain", source.config_json);
  return QuantizedModels{to + "/int4", to + "/plain"};
}

}  // namespace hearth
