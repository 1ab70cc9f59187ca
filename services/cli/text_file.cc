#include "services/cli/text_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "common/formats/file_io.h"

namespace hearth {
namespace {

constexpr uint64_t kBytesMax = 16 << 20;

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path, kBytesMax);
  if (!text.ok()) return absl::InvalidArgumentError(text.status().message());
  return text;
}

absl::Status WriteTextFile(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(absl::StrCat(path, ": cannot be written: ", strerror(errno)));
}

}  // namespace hearth
