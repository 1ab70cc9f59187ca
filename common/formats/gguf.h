// GGUF files: metadata and tensor table of a model in one file or several, every length checked before it is believed.
// Room: common/formats. May touch: common/base. Threads: any; a plain value once read.
//
// Format (ggml's docs/gguf.md): "GGUF", version (2 or 3, little-endian), counts of tensors and of metadata pairs; the pairs (key, type, value); the
// tensors (name, dimensions innermost first, type, offset); then, from the next multiple of general.alignment, the tensors' bytes. A split model's
// files are named -00001-of-0000N.gguf; each holds some of the tensors, the first one all metadata.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/base/status.h"
#include "common/formats/safetensors.h"

namespace hearth {

// What is kept of an array at most: there are fewer tokens than that, and nothing longer is asked for.
inline constexpr uint64_t kGgufArrayKeptMax = uint64_t{1} << 24;

// Strings and numbers of any width. Arrays (token lists and the like) leave their length alone, or with it their strings or integers.
struct GgufArray {
  uint64_t length = 0;
  std::vector<std::string> strings;
  std::vector<int64_t> integers;
  friend bool operator==(const GgufArray&, const GgufArray&) = default;
};
enum class GgufArrays { kLengths, kValues };
using GgufValue = std::variant<int64_t, uint64_t, double, bool, std::string, GgufArray>;
// An integer, whichever of the file's types it has; nothing for other values and for what 63 bits do not hold.
std::optional<int64_t> GgufInteger(const GgufValue& value);

struct GgufModel {
  std::vector<CheckpointFile> files;
  std::map<std::string, GgufValue, std::less<>> metadata;
  // By GGUF's own names. Shapes outermost first; dtype kInvalid for a type that Hearth does not compute with, dtype_name says which.
  std::map<std::string, CheckpointTensor, std::less<>> tensors;
};

// `path`: the file, or any file of a split model. Errors name file, byte and remedy: NotFound for missing parts, DataLoss for what is cut short,
// InvalidArgument for what is no GGUF of a known version or contradicts itself.
absl::StatusOr<GgufModel> ReadGguf(const std::string& path, GgufArrays arrays = GgufArrays::kLengths);

bool IsGgufPath(std::string_view path);

}  // namespace hearth
