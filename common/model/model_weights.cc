#include "common/model/model_weights.h"

#include <cstring>
#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

// Looks tensors up under a common prefix, and holds their shapes against what the config says.
class Binder {
 public:
  Binder(const WeightImage& image, Device& device) : image_(image), device_(device) {}

  absl::Status Matrix(const std::string& name, int64_t rows, int64_t cols, WeightView& out) const { return Matrices(name, {rows, cols}, out); }

  // A tensor of any rank as one matrix: all but its last dimension are rows.
  absl::Status Matrices(const std::string& name, const std::vector<int64_t>& shape, WeightView& out) const {
    ASSIGN_OR_RETURN(const ImageTensor tensor, Find(name, shape));
    const int64_t cols = shape.back();
    const int64_t rows = std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>());
    if (tensor.dtype == DType::kF8E4M3 && tensor.scales == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(name, " is FP8 but has no block scales in the image"));
    }
    out = {.data = tensor.data,
           .dtype = tensor.dtype,
           .rows = rows,
           .cols = cols,
           .row_stride = cols,
           .scales = tensor.scales,
           .scale_stride = tensor.scale_stride,
           .scale_row0 = 0};
    return absl::OkStatus();
  }

  absl::Status Vector(const std::string& name, int64_t n, VectorF32& out) const {
    ASSIGN_OR_RETURN(const ImageTensor tensor, Find(name, {n}));
    ASSIGN_OR_RETURN(Buffer buffer, device_.Allocate(static_cast<size_t>(n) * sizeof(float)));
    float* to = buffer.as<float>();
    out.buffer = std::make_shared<const Buffer>(std::move(buffer));
    switch (tensor.dtype) {
      case DType::kF32: std::memcpy(to, tensor.data, static_cast<size_t>(n) * sizeof(float)); return absl::OkStatus();
      case DType::kBF16:
        for (int64_t i = 0; i < n; ++i) to[i] = ToFloat(static_cast<const bf16*>(tensor.data)[i]);
        return absl::OkStatus();
      case DType::kF16:
        for (int64_t i = 0; i < n; ++i) to[i] = F16ToFloat(static_cast<const uint16_t*>(tensor.data)[i]);
        return absl::OkStatus();
      default: break;
    }
    return absl::InvalidArgumentError(absl::StrCat(name, " is a vector of ", Sv(DTypeName(tensor.dtype)), "; supported: F32, BF16, F16"));
  }

  absl::Status Mlp(const std::string& prefix, int64_t hidden, int64_t n, MlpWeights& out) const {
    RETURN_IF_ERROR(Matrix(prefix + "gate_proj.weight", n, hidden, out.gate));
    RETURN_IF_ERROR(Matrix(prefix + "up_proj.weight", n, hidden, out.up));
    return Matrix(prefix + "down_proj.weight", hidden, n, out.down);
  }

 private:
  absl::StatusOr<ImageTensor> Find(const std::string& name, const std::vector<int64_t>& shape) const {
    ASSIGN_OR_RETURN(ImageTensor tensor, image_.Tensor(name));
    if (tensor.shape != shape) {
      return absl::InvalidArgumentError(absl::StrCat(name, " has shape ", ShapeText(tensor.shape), " in the image, but config.json makes it ",
                                                     ShapeText(shape), ": weights and config are of different models"));
    }
    return tensor;
  }

  const WeightImage& image_;
  Device& device_;
};

absl::Status BindMla(const ModelConfig& c, const Binder& bind, const std::string& prefix, MlaWeights& out) {
  const int64_t q_rows = c.num_attention_heads * c.qk_head_dim();
  if (c.q_lora_rank.has_value()) {
    RETURN_IF_ERROR(bind.Matrix(prefix + "q_a_proj.weight", *c.q_lora_rank, c.hidden_size, out.q_a.emplace()));
    RETURN_IF_ERROR(bind.Vector(prefix + "q_a_layernorm.weight", *c.q_lora_rank, out.q_a_norm));
    RETURN_IF_ERROR(bind.Matrix(prefix + "q_b_proj.weight", q_rows, *c.q_lora_rank, out.q));
  } else {
    RETURN_IF_ERROR(bind.Matrix(prefix + "q_proj.weight", q_rows, c.hidden_size, out.q));
  }
  RETURN_IF_ERROR(bind.Matrix(prefix + "kv_a_proj_with_mqa.weight", c.mla_row(), c.hidden_size, out.kv_a));
  RETURN_IF_ERROR(bind.Vector(prefix + "kv_a_layernorm.weight", c.kv_lora_rank, out.kv_a_norm));
  if (c.kv_b_split) {
    RETURN_IF_ERROR(bind.Matrices(prefix + "k_b_proj.weight", {c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim}, out.k_b));
    RETURN_IF_ERROR(bind.Matrix(prefix + "v_b_proj.weight", c.num_attention_heads * c.v_head_dim, c.kv_lora_rank, out.v_b));
  } else {
    RETURN_IF_ERROR(bind.Matrix(prefix + "kv_b_proj.weight", c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, out.kv_b));
  }
  return absl::OkStatus();
}

absl::Status BindGqa(const ModelConfig& c, const Binder& bind, const std::string& prefix, GqaWeights& out) {
  const int64_t head_dim = c.v_head_dim;
  const auto projection = [&](const std::string& letter, int64_t heads, HeadProjection& to) -> absl::Status {
    const int64_t rows = heads * head_dim;
    RETURN_IF_ERROR(bind.Matrix(prefix + letter + "_proj.weight", rows, c.hidden_size, to.w));
    if (c.qkv_bias) RETURN_IF_ERROR(bind.Vector(prefix + letter + "_proj.bias", rows, to.bias));
    if (c.qk_norm == QkNorm::kNone || letter == "v") return absl::OkStatus();
    return bind.Vector(prefix + letter + "_norm.weight", c.qk_norm == QkNorm::kAllHeads ? rows : head_dim, to.norm);
  };
  RETURN_IF_ERROR(projection("q", c.num_attention_heads, out.q));
  RETURN_IF_ERROR(projection("k", c.num_key_value_heads, out.k));
  return projection("v", c.num_key_value_heads, out.v);
}

absl::Status BindAttention(const ModelConfig& c, const Binder& bind, const std::string& layer, AttentionWeights& out) {
  const std::string prefix = layer + "self_attn.";
  RETURN_IF_ERROR(bind.Vector(layer + "input_layernorm.weight", c.hidden_size, out.input_norm));
  if (c.attention == AttentionKind::kMla) {
    RETURN_IF_ERROR(BindMla(c, bind, prefix, out.mla.emplace()));
  } else {
    RETURN_IF_ERROR(BindGqa(c, bind, prefix, out.gqa.emplace()));
  }
  return bind.Matrix(prefix + "o_proj.weight", c.hidden_size, c.num_attention_heads * c.v_head_dim, out.o);
}

// `layer_prefix`: "model.layers.N."
absl::Status BindMoe(const ModelConfig& c, const WeightImage& image, const Binder& bind, const std::string& layer_prefix, int64_t layer,
                     MoeWeights& out) {
  const MoeNames& names = c.moe_names;
  RETURN_IF_ERROR(bind.Matrix(layer_prefix + names.gate, c.n_routed_experts, c.hidden_size, out.gate));
  if (c.topk_method == TopkMethod::kNoauxTc) {
    RETURN_IF_ERROR(bind.Vector(layer_prefix + names.gate_bias, c.n_routed_experts, out.gate_bias.emplace()));
  }
  if (c.shared_intermediate_size > 0) {
    RETURN_IF_ERROR(bind.Mlp(layer_prefix + names.shared, c.hidden_size, c.shared_intermediate_size, out.shared.emplace()));
  }
  if (c.shared_expert_gate) RETURN_IF_ERROR(bind.Matrix(layer_prefix + names.shared_gate, 1, c.hidden_size, out.shared_gate.emplace()));
  ASSIGN_OR_RETURN(const ImageExpert expert, image.Expert(layer, 0, 0));
  out.expert_dtypes = expert.dtypes;
  return absl::OkStatus();
}

absl::Status BindMtp(const ModelConfig& c, const WeightImage& image, const Binder& bind, ModelWeights& weights) {
  MtpWeights& mtp = weights.mtp.emplace();
  // Left out of the image where they repeat the main model's.
  const auto own_or = [&](const char* name, const WeightView& main, WeightView& out) -> absl::Status {
    const std::string full = MtpTensorName(c, name);
    if (image.Tensor(full).ok()) return bind.Matrix(full, c.vocab_size, c.hidden_size, out);
    out = main;
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(own_or("embed_tokens.weight", weights.embedding, mtp.embedding));
  RETURN_IF_ERROR(own_or("shared_head.head.weight", weights.head, mtp.head));
  RETURN_IF_ERROR(bind.Vector(MtpTensorName(c, "enorm.weight"), c.hidden_size, mtp.enorm));
  RETURN_IF_ERROR(bind.Vector(MtpTensorName(c, "hnorm.weight"), c.hidden_size, mtp.hnorm));
  RETURN_IF_ERROR(bind.Matrix(MtpTensorName(c, "eh_proj.weight"), c.hidden_size, 2 * c.hidden_size, mtp.eh_proj));
  return bind.Vector(MtpTensorName(c, "shared_head.norm.weight"), c.hidden_size, mtp.head_norm);
}

}  // namespace

void ForEachMatrix(AttentionWeights& weights, absl::FunctionRef<void(WeightView&)> visit) {
  if (weights.mla.has_value()) {
    MlaWeights& mla = *weights.mla;
    if (mla.q_a.has_value()) visit(*mla.q_a);
    for (WeightView* view : {&mla.q, &mla.kv_b, &mla.k_b, &mla.v_b}) {
      if (view->data != nullptr) visit(*view);
    }
  } else {
    visit(weights.gqa->q.w);
  }
  ForEachKvMatrix(weights, visit);
  visit(weights.o);
}

void ForEachKvMatrix(AttentionWeights& weights, absl::FunctionRef<void(WeightView&)> visit) {
  if (weights.mla.has_value()) {
    visit(weights.mla->kv_a);
  } else {
    visit(weights.gqa->k.w);
    visit(weights.gqa->v.w);
  }
}

void ForEachMatrix(MlpWeights& weights, absl::FunctionRef<void(WeightView&)> visit) {
  for (WeightView* view : {&weights.gate, &weights.up, &weights.down}) visit(*view);
}

void ForEachMatrix(MoeWeights& weights, absl::FunctionRef<void(WeightView&)> visit) {
  visit(weights.gate);
  if (weights.shared.has_value()) ForEachMatrix(*weights.shared, visit);
  if (weights.shared_gate.has_value()) visit(*weights.shared_gate);
}

absl::StatusOr<ModelWeights> BindWeights(const ModelConfig& config, const std::shared_ptr<const WeightImage>& image, Device& device) {
  const Binder bind(*image, device);
  ModelWeights weights;
  RETURN_IF_ERROR(bind.Matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size, weights.embedding));
  RETURN_IF_ERROR(bind.Vector("model.norm.weight", config.hidden_size, weights.final_norm));
  if (config.tie_word_embeddings) {
    weights.head = weights.embedding;
  } else {
    RETURN_IF_ERROR(bind.Matrix("lm_head.weight", config.vocab_size, config.hidden_size, weights.head));
  }
  const bool has_mtp = config.num_nextn_predict_layers > 0 && image->Tensor(MtpTensorName(config, "eh_proj.weight")).ok();
  if (has_mtp) RETURN_IF_ERROR(BindMtp(config, *image, bind, weights));
  weights.layers.resize(static_cast<size_t>(config.num_hidden_layers + (has_mtp ? 1 : 0)));
  std::vector<int64_t> moe_layers;
  for (int64_t i = 0; i < static_cast<int64_t>(weights.layers.size()); ++i) {
    LayerWeights& layer = weights.layers[static_cast<size_t>(i)];
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    RETURN_IF_ERROR(BindAttention(config, bind, prefix, layer.attention));
    RETURN_IF_ERROR(bind.Vector(prefix + "post_attention_layernorm.weight", config.hidden_size, layer.post_attention_norm));
    if (config.IsMoeLayer(i)) {
      moe_layers.push_back(i);
      RETURN_IF_ERROR(BindMoe(config, *image, bind, prefix, i, layer.moe.emplace()));
    } else {
      RETURN_IF_ERROR(bind.Mlp(prefix + "mlp.", config.hidden_size, config.intermediate_size, layer.mlp.emplace()));
    }
  }
  if (!moe_layers.empty()) {
    ASSIGN_OR_RETURN(weights.experts, MakeImageExpertSource(image, moe_layers, config.n_routed_experts, config.hidden_size));
  }
  return weights;
}

}  // namespace hearth
