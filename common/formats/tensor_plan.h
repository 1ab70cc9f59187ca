// Which tensors a model must have, with shape and role: the one description that the image builder, `verify` and
// `synth` share.
// Room: common/formats. May touch: common/base. Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "common/formats/model_config.h"
#include "common/formats/safetensors.h"

namespace hearth {

enum class TensorRole {
  kEmbedding,   // [vocab, hidden]
  kHead,        // [vocab, hidden]; absent when tied
  kNorm,        // vectors
  kLinear,      // 2-D weight, may be FP8 with `<name>_scale_inv`, or of a block format
  kGate,        // MoE gate weight [experts, hidden]
  kGateBias,    // e_score_correction_bias [experts]
  kBias,        // of a projection; vectors
  kExpertGate,  // routed expert, by (layer, expert)
  kExpertUp,
  kExpertDown,
};

struct PlannedTensor {
  std::string name;  // as in the checkpoint, "model.layers.3.mlp.experts.7.gate_proj.weight"
  TensorRole role = TensorRole::kLinear;
  std::vector<int64_t> shape;
  int64_t layer = -1;   // -1: outside the layers
  int64_t expert = -1;  // routed experts only
  bool may_be_fp8 = false;
  bool may_be_blocks = false;  // quant_blocks.h
  // The MTP module's embedding and head: checkpoints repeat the main model's tensor of this name. May be missing, and is then that tensor.
  std::string copy_of;
};

// In the order in which a pass needs them, without the MTP module.
std::vector<PlannedTensor> PlanTensors(const ModelConfig& config);

// The first MTP module, layer num_hidden_layers (DeepSeek-V3 section 2.2): a decoder layer between eh_proj, which joins the next token's embedding
// (enorm) with a hidden state (hnorm), and shared_head. Empty where the config has none.
std::vector<PlannedTensor> PlanMtpTensors(const ModelConfig& config);
// "model.layers.61.eh_proj.weight"
std::string MtpTensorName(const ModelConfig& config, std::string_view name);
// A checkpoint may lack the module that its config names (conversions leave it out). One that has some of it must have all of it: CheckPlan.
bool HasMtpModule(const std::vector<PlannedTensor>& mtp_plan, const Checkpoint& checkpoint);

// In what dtype a published checkpoint of this config keeps a tensor: FP8 where quantization_config says so, INT4 for its routed experts, F32 for the
// gate's bias, else BF16.
DType PublishedDType(const ModelConfig& config, const PlannedTensor& tensor);
// The checkpoint that the config describes, without its MTP module: names, dtypes and shapes, and no file behind them.
Checkpoint DescribeCheckpoint(const ModelConfig& config);

// Holds the plan against a checkpoint: every tensor there, shape and dtype right, each FP8 weight with an F32 (or BF16)
// scale of ceil(rows/128) x ceil(cols/128), no scale without weight, no FP8 without quantization_config; INT4 nibbles with a BF16 scale for each 32 of
// them, and not without quantization_config either. Errors list
// what is missing
// ("3 of 512 tensors missing: a, b, c: incomplete download?") or give both shapes.
absl::Status CheckPlan(const ModelConfig& config, const std::vector<PlannedTensor>& plan, const Checkpoint& checkpoint);

// Refuses values that can't be right (DESIGN section 7): NaN codes in FP8, NaN or infinity in
// BF16/F16/F32, scales that are not positive finite numbers; in GGUF's blocks, scales that are not finite. `name` and the first bad index go into the DataLoss error.
// Fast enough for every byte at load.
absl::Status CheckValues(const std::string& name, DType dtype, const void* data, uint64_t count, bool is_scale);

}  // namespace hearth
