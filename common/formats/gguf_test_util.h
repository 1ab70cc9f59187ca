// Writes GGUF files for tests: any metadata, any tensors.
// Room: common/formats, tests only.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/dtype.h"

namespace hearth {

class GgufTestWriter {
 public:
  explicit GgufTestWriter(uint32_t version = 3) : version_(version) {}

  void String(const std::string& key, const std::string& value) { Pair(key, 8, Sized(value)); }
  void Uint32(const std::string& key, uint32_t value) { Pair(key, 4, Raw(value)); }
  void Uint16(const std::string& key, uint16_t value) { Pair(key, 2, Raw(value)); }
  void Float(const std::string& key, float value) { Pair(key, 6, Raw(value)); }
  void Bool(const std::string& key, bool value) { Pair(key, 7, Raw(static_cast<uint8_t>(value))); }
  void Strings(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes = Raw(uint32_t{8}) + Raw(static_cast<uint64_t>(values.size()));
    for (const std::string& value : values) bytes += Sized(value);
    Pair(key, 9, bytes);
  }
  void Int32s(const std::string& key, const std::vector<int32_t>& values) {
    std::string bytes = Raw(uint32_t{5}) + Raw(static_cast<uint64_t>(values.size()));
    for (const int32_t value : values) bytes += Raw(value);
    Pair(key, 9, bytes);
  }
  // A value as it stands in the file, for what no sound writer would write.
  void Pair(const std::string& key, uint32_t type, const std::string& bytes) {
    pairs_ += Sized(key) + Raw(type) + bytes;
    ++num_pairs_;
  }
  // `shape` outermost first.
  void Tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape, const std::string& data) {
    Tensor(name, GgmlType(dtype), shape, data);
  }
  void Tensor(const std::string& name, uint32_t type, const std::vector<int64_t>& shape, const std::string& data) {
    infos_ += Sized(name) + Raw(static_cast<uint32_t>(shape.size()));
    for (auto side = shape.rbegin(); side != shape.rend(); ++side) infos_ += Raw(static_cast<uint64_t>(*side));
    infos_ += Raw(type) + Raw(static_cast<uint64_t>(data_.size()));
    data_ += data;
    data_.resize((data_.size() + kAlignment - 1) / kAlignment * kAlignment, '\0');
    ++num_tensors_;
  }

  std::string Bytes() const {
    std::string out = "GGUF" + Raw(version_) + Raw(num_tensors_) + Raw(num_pairs_) + pairs_ + infos_;
    out.resize((out.size() + kAlignment - 1) / kAlignment * kAlignment, '\0');
    return out + data_;
  }
  void Write(const std::string& path) const { std::ofstream(path, std::ios::binary) << Bytes(); }

  template <typename T>
  static std::string Raw(T value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  static std::string Sized(const std::string& text) { return Raw(static_cast<uint64_t>(text.size())) + text; }

 private:
  static constexpr size_t kAlignment = 32;
  static uint32_t GgmlType(DType dtype) {
    switch (dtype) {
      case DType::kF16: return 1;
      case DType::kQ8_0: return 8;
      case DType::kQ3_K: return 11;
      case DType::kQ4_K: return 12;
      case DType::kQ5_K: return 13;
      case DType::kQ6_K: return 14;
      case DType::kBF16: return 30;
      default: return 0;
    }
  }

  const uint32_t version_;
  uint64_t num_pairs_ = 0, num_tensors_ = 0;
  std::string pairs_, infos_, data_;
};

}  // namespace hearth
