// Temporary directories and hand-made safetensors files for the tests of this folder.
//
// Room: common/formats, tests only.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_join.h"
#include "common/base/status.h"

namespace hearth {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hearth_formats_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string At(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

inline void WriteFile(const std::string& path, std::string_view text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  ASSERT_TRUE(out.good()) << path;
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

inline std::string ReadSlice(const std::string& path, uint64_t offset, uint64_t bytes) {
  std::ifstream in(path, std::ios::binary);
  std::string text(bytes, '\0');
  in.seekg(static_cast<std::streamoff>(offset));
  in.read(text.data(), static_cast<std::streamsize>(bytes));
  EXPECT_TRUE(in.good()) << path;
  return text;
}

// Length, header and data as one file's bytes.
inline std::string SafetensorsBytes(std::string_view header, uint64_t data_bytes, uint64_t claimed_header_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(claimed_header_bytes >> (8 * i));
  file += header;
  file.append(data_bytes, '\x01');
  return file;
}
inline std::string SafetensorsBytes(std::string_view header, uint64_t data_bytes) { return SafetensorsBytes(header, data_bytes, header.size()); }

struct FakeTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t bytes;
};

// A correct file of these tensors, one after the other.
inline std::string SafetensorsOf(const std::vector<FakeTensor>& tensors) {
  std::string header = "{";
  uint64_t offset = 0;
  for (const FakeTensor& t : tensors) {
    absl::StrAppend(&header, header.size() == 1 ? "\"" : ",\"", t.name, R"(":{"dtype":")", t.dtype, R"(","shape":[)", absl::StrJoin(t.shape, ","),
                    R"(],"data_offsets":[)", offset, ",", offset + t.bytes, "]}");
    offset += t.bytes;
  }
  return SafetensorsBytes(absl::StrCat(header, "}"), offset);
}

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

inline std::string SourceDir() {
  const char* dir = std::getenv("HEARTH_SOURCE_DIR");
  return dir ? dir : ".";
}
// The outside reference models; tests that need them skip where they are not.
inline std::string OracleModels() {
  const char* dir = std::getenv("HEARTH_SHARED_DIR");
  return (dir ? std::string(dir) : SourceDir() + "/../shared") + "/oracles/models";
}

}  // namespace hearth
