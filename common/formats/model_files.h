// What a model's path names, found and read once: a Hugging Face directory, or the header of a GGUF model. Config, tensors and tokenizer are taken from it.
// Room: common/formats. May touch: common/base. Threads: any; a plain value once read.
#pragma once

#include <optional>
#include <string>

#include "common/base/status.h"
#include "common/formats/gguf.h"

namespace hearth {

struct ModelFiles {
  std::string path;               // as it was given
  std::optional<GgufModel> gguf;  // none: a directory with config.json and safetensors
};

// `arrays`: kValues for a tokenizer, which lies in arrays. Errors: those of FindGguf and ReadGguf; a directory is not looked into any further.
absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& model_path, GgufArrays arrays = GgufArrays::kLengths);

}  // namespace hearth
