// A GGUF model in Hugging Face's words: a config.json made from its metadata, and its tensors under the names that the tensor plan has.
// Room: common/formats. May touch: common/base. Threads: any.
//
// Architecture "deepseek2" (DeepSeek-V2, V3, R1, Kimi-K2). A 3-D tensor of all experts becomes one tensor an expert, a slice of its bytes. The
// key and value halves of kv_b come joined (attn_kv_b) or apart (attn_k_b, per head transposed, and attn_v_b): config.json then says "kv_b_split".
#pragma once

#include <string>

#include "common/base/status.h"
#include "common/formats/gguf.h"
#include "common/formats/safetensors.h"

namespace hearth {

// The config.json that ParseModelConfig reads. Errors: InvalidArgument names the metadata key that is missing or of another kind, or the
// architecture that is not supported.
absl::StatusOr<std::string> GgufConfigJson(const GgufModel& model);

// The model's tensors by Hugging Face's names; those that the plan has no name for are left out. Errors: InvalidArgument names the tensor as the
// file does: a type that is not supported, experts that are no stack of as many matrices as the metadata says.
absl::StatusOr<std::map<std::string, CheckpointTensor, std::less<>>> GgufTensors(const GgufModel& model);

// The GGUF file that `path` stands for: itself, or the one model (its first part) in a directory without safetensors; "" for anything else.
// Errors: InvalidArgument when a directory holds several, NotFound when it holds later parts of one alone.
absl::StatusOr<std::string> FindGguf(const std::string& path);

}  // namespace hearth
