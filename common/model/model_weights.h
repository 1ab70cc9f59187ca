// A model's tensors, found by the names that its family's checkpoints use and checked against the config's shapes.
// Room: common/model. May touch: common/{experts,device,kernels,formats,shm,base}. Threads: const once bound.
// Matrices stay where the image holds them; norms and biases, tiny vectors, become F32 in device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/base/status.h"
#include "common/device/device.h"
#include "common/experts/expert_source.h"
#include "common/formats/model_config.h"
#include "common/kernels/kernels.h"
#include "common/shm/weight_image.h"

namespace hearth {

// Copies share the device memory, so that weights are values: a copy's matrices may be pointed elsewhere (common/slp) while its vectors stay.
struct VectorF32 {
  std::shared_ptr<const Buffer> buffer;
  const float* data() const { return buffer == nullptr ? nullptr : buffer->as<float>(); }
};

struct MlaWeights {
  std::optional<WeightView> q_a;  // [q_lora_rank, hidden]; none: q is the plain q_proj
  VectorF32 q_a_norm;             // [q_lora_rank]
  WeightView q;                   // q_b_proj [heads * (nope + rope), q_lora_rank], or q_proj [.., hidden]
  WeightView kv_a;                // [kv_lora_rank + rope, hidden]
  VectorF32 kv_a_norm;            // [kv_lora_rank]
  WeightView kv_b;                // [heads * (nope + v), kv_lora_rank]; not there when its halves come apart:
  WeightView k_b;                 // [heads * kv_lora_rank, nope], a head's keys transposed
  WeightView v_b;                 // [heads * v, kv_lora_rank]
};

// A projection of grouped-query attention, with what is done to its output.
struct HeadProjection {
  WeightView w;    // [heads * head_dim, hidden]
  VectorF32 bias;  // [heads * head_dim], or empty
  VectorF32 norm;  // [head_dim] or [heads * head_dim] (QkNorm), or empty; of queries and keys
};

struct GqaWeights {
  HeadProjection q;
  HeadProjection k;
  HeadProjection v;
};

struct AttentionWeights {
  VectorF32 input_norm;           // [hidden]
  std::optional<MlaWeights> mla;  // one of the two
  std::optional<GqaWeights> gqa;
  WeightView o;  // [hidden, heads * v]
};

// A gated feed-forward network: the dense layers' and the shared expert.
struct MlpWeights {
  WeightView gate;  // [n, hidden]
  WeightView up;    // [n, hidden]
  WeightView down;  // [hidden, n]
};

struct MoeWeights {
  WeightView gate;                     // [experts, hidden]
  std::optional<VectorF32> gate_bias;  // e_score_correction_bias [experts]
  std::optional<MlpWeights> shared;
  std::optional<WeightView> shared_gate;  // [1, hidden]
  ExpertDTypes expert_dtypes;
};

struct LayerWeights {
  AttentionWeights attention;
  VectorF32 post_attention_norm;  // [hidden]
  std::optional<MlpWeights> mlp;  // a dense layer
  std::optional<MoeWeights> moe;  // or one of experts
};

// The MTP module around its decoder layer (DeepSeek-V3 section 2.2, figure 3).
struct MtpWeights {
  WeightView embedding;  // [vocab, hidden]; the main model's where the image has no other
  VectorF32 enorm;       // [hidden], of the embedding
  VectorF32 hnorm;       // [hidden], of the hidden state
  WeightView eh_proj;    // [hidden, 2 hidden]: embedding, then hidden state
  VectorF32 head_norm;   // [hidden]
  WeightView head;       // [vocab, hidden]; likewise
};

struct ModelWeights {
  WeightView embedding;              // [vocab, hidden]
  std::vector<LayerWeights> layers;  // the MTP module's, if there is one, is the last
  VectorF32 final_norm;              // [hidden]
  WeightView head;                   // [vocab, hidden]; the embedding where they are tied
  std::optional<MtpWeights> mtp;
  std::unique_ptr<ExpertSource> experts;  // null without MoE layers
};

// Every matrix that is there, in one order.
void ForEachMatrix(AttentionWeights& weights, absl::FunctionRef<void(WeightView&)> visit);
void ForEachMatrix(MlpWeights& weights, absl::FunctionRef<void(WeightView&)> visit);
// The gate, the shared expert and its gate; not the routed experts.
void ForEachMatrix(MoeWeights& weights, absl::FunctionRef<void(WeightView&)> visit);
// What the cached keys and values are made with: a part of the first.
void ForEachKvMatrix(AttentionWeights& weights, absl::FunctionRef<void(WeightView&)> visit);

// Errors: NotFound names a tensor that is missing, InvalidArgument one of the wrong shape, with both shapes.
absl::StatusOr<ModelWeights> BindWeights(const ModelConfig& config, const std::shared_ptr<const WeightImage>& image, Device& device);

}  // namespace hearth
