// A Hugging Face checkpoint's weights once more, quantized: as a GGUF file, as packed INT4, and as the plain floats that the quantized numbers stand for.
// The quantizers are plain and good enough to compute with: what is tested is that Hearth reads what they wrote. Room: tests.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "common/formats/tensor_plan.h"

namespace hearth {

// Which dtype a tensor of the plan gets; F32 for what stays as it is.
using DTypeChoice = std::function<DType(const PlannedTensor&)>;
// What a row's length allows, of what was wanted; as llama.cpp's quantizer falls back.
DType Fitting(const PlannedTensor& planned, DType wanted);

struct QuantizedModels {
  std::string quantized;  // path of the GGUF file, or the directory of an INT4 checkpoint
  std::string plain;      // directory of the same numbers in F32
};

// Everything under GGUF's names, the tokenizer in the metadata; `split_kv_b`: kv_b's halves apart, keys transposed.
absl::StatusOr<QuantizedModels> WriteGgufModels(const std::string& model_dir, const std::string& to, const DTypeChoice& choice, bool split_kv_b);
// kI4G32 where `choice` says so, BF16 elsewhere.
absl::StatusOr<QuantizedModels> WriteInt4Models(const std::string& model_dir, const std::string& to, const DTypeChoice& choice);

}  // namespace hearth
