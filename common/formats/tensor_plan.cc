#include "common/formats/tensor_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/quant_blocks.h"
#include "common/formats/file_io.h"

namespace hearth {
namespace {

constexpr char kScaleSuffix[] = "_scale_inv";
constexpr char kEmbeddingName[] = "model.embed_tokens.weight";
constexpr char kHeadName[] = "lm_head.weight";

class PlanBuilder {
 public:
  explicit PlanBuilder(const ModelConfig& config) : c_(config) {}

  std::vector<PlannedTensor> Build() {
    Add(TensorRole::kEmbedding, kEmbeddingName, {c_.vocab_size, c_.hidden_size}).may_be_blocks = true;
    for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) {
      EnterLayer(layer);
      AddDecoderLayer();
    }
    layer_ = -1;
    prefix_.clear();
    Add(TensorRole::kNorm, "model.norm.weight", {c_.hidden_size});
    if (!c_.tie_word_embeddings) Add(TensorRole::kHead, kHeadName, {c_.vocab_size, c_.hidden_size}).may_be_blocks = true;
    return std::move(plan_);
  }

  std::vector<PlannedTensor> BuildMtp() {
    EnterLayer(c_.num_hidden_layers);
    AddCopy(TensorRole::kEmbedding, "embed_tokens.weight", kEmbeddingName);
    Add(TensorRole::kNorm, "enorm.weight", {c_.hidden_size});
    Add(TensorRole::kNorm, "hnorm.weight", {c_.hidden_size});
    AddLinear("eh_proj.weight", c_.hidden_size, 2 * c_.hidden_size);
    AddDecoderLayer();
    Add(TensorRole::kNorm, "shared_head.norm.weight", {c_.hidden_size});
    if (c_.tie_word_embeddings) {
      AddCopy(TensorRole::kEmbedding, "shared_head.head.weight", kEmbeddingName);
    } else {
      AddCopy(TensorRole::kHead, "shared_head.head.weight", kHeadName);
    }
    return std::move(plan_);
  }

 private:
  void EnterLayer(int64_t layer) {
    layer_ = layer;
    prefix_ = absl::StrCat("model.layers.", layer, ".");
  }

  void AddDecoderLayer() {
    Add(TensorRole::kNorm, "input_layernorm.weight", {c_.hidden_size});
    if (c_.attention == AttentionKind::kMla) {
      AddMla();
    } else {
      AddGqa();
    }
    Add(TensorRole::kNorm, "post_attention_layernorm.weight", {c_.hidden_size});
    if (c_.IsMoeLayer(layer_)) {
      AddMoe();
    } else {
      AddDense("mlp.", c_.intermediate_size);
    }
  }

  void AddMla() {
    const int64_t q_rows = c_.num_attention_heads * c_.qk_head_dim();
    if (c_.q_lora_rank) {
      AddLinear("self_attn.q_a_proj.weight", *c_.q_lora_rank, c_.hidden_size);
      Add(TensorRole::kNorm, "self_attn.q_a_layernorm.weight", {*c_.q_lora_rank});
      AddLinear("self_attn.q_b_proj.weight", q_rows, *c_.q_lora_rank);
    } else {
      AddLinear("self_attn.q_proj.weight", q_rows, c_.hidden_size);
    }
    AddLinear("self_attn.kv_a_proj_with_mqa.weight", c_.mla_row(), c_.hidden_size);
    Add(TensorRole::kNorm, "self_attn.kv_a_layernorm.weight", {c_.kv_lora_rank});
    if (c_.kv_b_split) {
      Add(TensorRole::kLinear, "self_attn.k_b_proj.weight", {c_.num_attention_heads, c_.kv_lora_rank, c_.qk_nope_head_dim}).may_be_blocks = true;
      AddLinear("self_attn.v_b_proj.weight", c_.num_attention_heads * c_.v_head_dim, c_.kv_lora_rank);
    } else {
      AddLinear("self_attn.kv_b_proj.weight", c_.num_attention_heads * (c_.qk_nope_head_dim + c_.v_head_dim), c_.kv_lora_rank);
    }
    AddLinear("self_attn.o_proj.weight", c_.hidden_size, c_.num_attention_heads * c_.v_head_dim);
  }

  void AddGqa() {
    const int64_t kv_heads = c_.num_key_value_heads;
    AddProjection("self_attn.q_proj.", c_.num_attention_heads * c_.qk_head_dim());
    AddProjection("self_attn.k_proj.", kv_heads * c_.qk_head_dim());
    AddProjection("self_attn.v_proj.", kv_heads * c_.v_head_dim);
    AddLinear("self_attn.o_proj.weight", c_.hidden_size, c_.num_attention_heads * c_.v_head_dim);
    if (c_.qk_norm == QkNorm::kNone) return;
    const bool all = c_.qk_norm == QkNorm::kAllHeads;
    Add(TensorRole::kNorm, "self_attn.q_norm.weight", {(all ? c_.num_attention_heads : 1) * c_.qk_head_dim()});
    Add(TensorRole::kNorm, "self_attn.k_norm.weight", {(all ? kv_heads : 1) * c_.qk_head_dim()});
  }

  void AddProjection(const std::string& name, int64_t rows) {
    AddLinear(name + "weight", rows, c_.hidden_size);
    if (c_.qkv_bias) Add(TensorRole::kBias, name + "bias", {rows});
  }

  void AddMoe() {
    const MoeNames& names = c_.moe_names;
    Add(TensorRole::kGate, names.gate, {c_.n_routed_experts, c_.hidden_size});
    if (c_.topk_method == TopkMethod::kNoauxTc) Add(TensorRole::kGateBias, names.gate_bias, {c_.n_routed_experts});
    const int64_t inner = c_.moe_intermediate_size;
    for (int64_t expert = 0; expert < c_.n_routed_experts; ++expert) {
      const std::string name = absl::StrCat(names.experts, expert, ".");
      AddExpert(TensorRole::kExpertGate, name + names.gate_proj, expert, inner, c_.hidden_size);
      AddExpert(TensorRole::kExpertUp, name + names.up_proj, expert, inner, c_.hidden_size);
      AddExpert(TensorRole::kExpertDown, name + names.down_proj, expert, c_.hidden_size, inner);
    }
    if (c_.shared_intermediate_size > 0) AddDense(names.shared, c_.shared_intermediate_size);
    if (c_.shared_expert_gate) Add(TensorRole::kGate, names.shared_gate, {1, c_.hidden_size});
  }

  void AddDense(const std::string& name, int64_t inner) {
    AddLinear(name + "gate_proj.weight", inner, c_.hidden_size);
    AddLinear(name + "up_proj.weight", inner, c_.hidden_size);
    AddLinear(name + "down_proj.weight", c_.hidden_size, inner);
  }

  PlannedTensor& Add(TensorRole role, const std::string& name, std::vector<int64_t> shape) {
    return plan_.emplace_back(PlannedTensor{prefix_ + name, role, std::move(shape), layer_, -1});
  }
  // Of a main model's tensor [vocab, hidden].
  void AddCopy(TensorRole role, const std::string& name, const char* of) {
    PlannedTensor& tensor = Add(role, name, {c_.vocab_size, c_.hidden_size});
    tensor.may_be_blocks = true;
    tensor.copy_of = of;
  }
  void AddLinear(const std::string& name, int64_t rows, int64_t columns) {
    PlannedTensor& tensor = Add(TensorRole::kLinear, name, {rows, columns});
    tensor.may_be_fp8 = tensor.may_be_blocks = true;
  }
  void AddExpert(TensorRole role, const std::string& name, int64_t expert, int64_t rows, int64_t columns) {
    PlannedTensor& tensor = Add(role, name, {rows, columns});
    tensor.expert = expert;
    tensor.may_be_fp8 = tensor.may_be_blocks = true;
  }

  const ModelConfig& c_;
  std::vector<PlannedTensor> plan_;
  std::string prefix_;
  int64_t layer_ = -1;
};

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::Status CheckShape(const std::string& name, const std::vector<int64_t>& found, const std::vector<int64_t>& wanted, std::string_view why) {
  if (found == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", Quoted(name), " has shape ", ShapeText(found), ", ", Sv(why), " needs ", ShapeText(wanted)));
}

absl::Status CheckScale(const PlannedTensor& planned, const CheckpointTensor& scale) {
  if (scale.dtype != DType::kF32 && scale.dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(scale.name), " has dtype ", Quoted(scale.dtype_name), "; supported for scales: F32, BF16"));
  }
  const std::vector<int64_t> wanted = {ScaleBlocks(planned.shape[0]), ScaleBlocks(planned.shape[1])};
  return CheckShape(scale.name, scale.shape, wanted,
                    absl::StrCat("one scale a ", kScaleBlock, "x", kScaleBlock, " block of the weight's ", ShapeText(planned.shape)));
}

absl::Status CheckInt4(const ModelConfig& config, const PlannedTensor& planned, const Checkpoint& checkpoint, size_t& needed, NameList& missing) {
  const Int4Names names = Int4NamesOf(planned.name);
  if (!config.int4_groups) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(names.packed), " is packed INT4, but config.json has no quantization_config of that kind; restore it"));
  }
  ++needed;
  const CheckpointTensor* scale = checkpoint.Find(names.scale);
  if (scale == nullptr) {
    missing.Add(names.scale);
    return absl::OkStatus();
  }
  if (scale->dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(scale->name), " has dtype ", Quoted(scale->dtype_name), "; supported for scales of INT4: BF16"));
  }
  const int64_t group = BlockOf(DType::kI4G32).elements;
  if (planned.shape[1] % group != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(names.packed), " has rows of ", planned.shape[1], " numbers, no whole groups of ", group, ": not supported"));
  }
  return CheckShape(scale->name, scale->shape, {planned.shape[0], planned.shape[1] / group},
                    absl::StrCat("one scale for each ", group, " numbers of the weight's ", ShapeText(planned.shape)));
}

// One tensor that is there, and its scale, which counts as needed and may be missing.
absl::Status CheckTensor(const ModelConfig& config, const PlannedTensor& planned, const CheckpointTensor& tensor, const Checkpoint& checkpoint,
                         size_t& needed, NameList& missing) {
  RETURN_IF_ERROR(CheckShape(tensor.name, tensor.shape, planned.shape, "config.json"));
  const std::string scale_name = planned.name + kScaleSuffix;
  const CheckpointTensor* scale = checkpoint.Find(scale_name);
  if (tensor.dtype == DType::kInvalid || (tensor.dtype == DType::kF8E4M3 && !planned.may_be_fp8) ||
      (IsBlockFormat(tensor.dtype) && !planned.may_be_blocks)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(tensor.name), " has dtype ", Quoted(tensor.dtype_name),
                                                   "; supported here: F32, F16, BF16", planned.may_be_fp8 ? ", F8_E4M3 with 128x128 scales" : "",
                                                   planned.may_be_blocks ? ", GGUF's Q8_0, Q6_K, Q5_K, Q4_K and Q3_K, INT4 in groups of 32" : ""));
  }
  if (planned.shape.back() > kRowColumnsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(tensor.name), " has rows of ", planned.shape.back(), " numbers; at most ", kRowColumnsMax, " are supported"));
  }
  if (tensor.dtype == DType::kI4G32) return CheckInt4(config, planned, checkpoint, needed, missing);
  if (tensor.dtype != DType::kF8E4M3) {
    if (scale == nullptr) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(scale_name), " is a scale, but its weight is ",
                                                   std::string(DTypeName(tensor.dtype)), ", which has none: files of two conversions mixed?"));
  }
  if (!config.fp8_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Quoted(tensor.name), " is F8_E4M3, but config.json has no quantization_config; restore it"));
  }
  ++needed;
  if (scale == nullptr) {
    missing.Add(scale_name);
    return absl::OkStatus();
  }
  return CheckScale(planned, *scale);
}

// The likeliest reason when only the query projection is missing.
std::string QueryRankHint(const ModelConfig& config, const Checkpoint& checkpoint) {
  if (config.attention != AttentionKind::kMla) return "";
  const bool has_low_rank = checkpoint.Find("model.layers.0.self_attn.q_a_proj.weight") != nullptr;
  const bool has_plain = checkpoint.Find("model.layers.0.self_attn.q_proj.weight") != nullptr;
  if (!config.q_lora_rank && has_low_rank && !has_plain) return " (the checkpoint has q_a_proj: config.json needs its q_lora_rank)";
  if (config.q_lora_rank && has_plain && !has_low_rank) return " (the checkpoint has q_proj: q_lora_rank in config.json should be null)";
  return "";
}

}  // namespace

std::vector<PlannedTensor> PlanTensors(const ModelConfig& config) { return PlanBuilder(config).Build(); }

std::vector<PlannedTensor> PlanMtpTensors(const ModelConfig& config) {
  if (config.num_nextn_predict_layers == 0) return {};
  return PlanBuilder(config).BuildMtp();
}

std::string MtpTensorName(const ModelConfig& config, std::string_view name) {
  return absl::StrCat("model.layers.", config.num_hidden_layers, ".", Sv(name));
}

bool HasMtpModule(const std::vector<PlannedTensor>& mtp_plan, const Checkpoint& checkpoint) {
  return std::any_of(mtp_plan.begin(), mtp_plan.end(),
                     [&](const PlannedTensor& planned) { return planned.copy_of.empty() && checkpoint.Find(planned.name) != nullptr; });
}

DType PublishedDType(const ModelConfig& config, const PlannedTensor& tensor) {
  if (tensor.role == TensorRole::kGateBias) return DType::kF32;
  if (config.fp8_blocks && tensor.may_be_fp8) return DType::kF8E4M3;
  if (config.int4_groups && tensor.expert >= 0) return DType::kI4G32;
  return DType::kBF16;
}

Checkpoint DescribeCheckpoint(const ModelConfig& config) {
  std::map<std::string, CheckpointTensor, std::less<>> tensors;
  const auto add = [&](const std::string& name, DType dtype, std::vector<int64_t> shape) {
    CheckpointTensor tensor{.name = name, .dtype = dtype, .shape = std::move(shape)};
    uint64_t elements = 1;
    for (const int64_t side : tensor.shape) elements *= static_cast<uint64_t>(side);
    tensor.bytes = DTypeBytes(dtype, elements);
    tensors.emplace(name, std::move(tensor));
  };
  for (const PlannedTensor& planned : PlanTensors(config)) {
    const DType dtype = PublishedDType(config, planned);
    add(planned.name, dtype, planned.shape);
    if (dtype == DType::kF8E4M3) add(planned.name + "_scale_inv", DType::kF32, {ScaleBlocks(planned.shape[0]), ScaleBlocks(planned.shape[1])});
    if (dtype == DType::kI4G32) {
      const Int4Names names = Int4NamesOf(planned.name);
      add(names.scale, DType::kBF16, {planned.shape[0], planned.shape[1] / 32});
      add(names.packed, DType::kF32, {planned.shape[0], planned.shape[1] / 8});  // words of 32 bits
    }
  }
  return Checkpoint::OfTensors(std::move(tensors));
}

absl::Status CheckPlan(const ModelConfig& config, const std::vector<PlannedTensor>& plan, const Checkpoint& checkpoint) {
  NameList missing;
  size_t needed = plan.size();
  absl::Status first_error;
  for (const PlannedTensor& planned : plan) {
    const CheckpointTensor* tensor = checkpoint.Find(planned.name);
    if (tensor == nullptr) {
      if (planned.copy_of.empty()) missing.Add(planned.name);
      continue;
    }
    first_error.Update(CheckTensor(config, planned, *tensor, checkpoint, needed, missing));
  }
  // What is wrong outranks what is missing: a checkpoint of another shape usually also lacks something.
  if (!first_error.ok()) return Annotate(first_error, checkpoint.dir());
  if (!missing.empty()) {
    return absl::NotFoundError(absl::StrCat(checkpoint.dir(), ": ", missing.size(), " of ", needed, " tensors missing: ", missing.ToString(),
                                            QueryRankHint(config, checkpoint), ": incomplete download?"));
  }
  return absl::OkStatus();
}

}  // namespace hearth
