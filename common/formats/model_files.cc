#include "common/formats/model_files.h"

#include <utility>

#include "common/formats/gguf_model.h"

namespace hearth {

absl::StatusOr<ModelFiles> OpenModelFiles(const std::string& model_path, GgufArrays arrays) {
  ModelFiles files{model_path, std::nullopt};
  ASSIGN_OR_RETURN(const std::string gguf, FindGguf(model_path));
  if (gguf.empty()) return files;
  ASSIGN_OR_RETURN(files.gguf, ReadGguf(gguf, arrays));
  return files;
}

}  // namespace hearth
