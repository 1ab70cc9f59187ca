// See json_access.h.
#include "common/text/json_access.h"

#include <fstream>
#include <sstream>

namespace hearth {
namespace {

// Ten times the largest tokenizer.json in the field; what is bigger is some other file.
constexpr std::streamoff kFileBytesMax = 256 << 20;

}  // namespace

absl::StatusOr<std::string> ReadTokenizerFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened; is it there and readable?"));
  const std::streamoff num_bytes = file.tellg();
  if (num_bytes < 0 || num_bytes > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", num_bytes, " bytes; at most ", kFileBytesMax, " are read"));
  }
  std::string text(static_cast<size_t>(num_bytes), '\0');
  file.seekg(0);
  if (!file.read(text.data(), num_bytes)) return absl::DataLossError(absl::StrCat(path, ": could not be read to its end"));
  return text;
}

absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTokenizerFile(path));
  return ParseJson(text, path);
}

absl::StatusOr<nlohmann::json> ParseJson(const std::string& text, const std::string& where) {
  // The library takes it for the end of the text.
  if (text.find('\0') != std::string::npos) return absl::InvalidArgumentError(absl::StrCat(where, ": not valid JSON: it has a zero byte"));
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": not valid JSON: ", error.what()));
  }
}

}  // namespace hearth
