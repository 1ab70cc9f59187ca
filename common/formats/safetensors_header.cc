// The header of one safetensors file. It may come from anywhere, so nothing in it is believed before it is held against
// the file's size.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/time.h"
#include "common/formats/file_io.h"
#include "common/formats/safetensors.h"
#include "common/formats/strict_json.h"

namespace hearth {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr size_t kDimensionsMax = 8;

// Bits an element of every type that the format defines, ours or not; none for a type from the future, whose size can't
// be checked.
std::optional<uint64_t> ElementBits(std::string_view dtype) {
  struct Entry {
    std::string_view name;
    uint64_t bits;
  };
  static constexpr std::array kEntries = {
      Entry{"F32", 32}, Entry{"BF16", 16}, Entry{"F8_E4M3", 8}, Entry{"F16", 16}, Entry{"F8_E5M2", 8}, Entry{"F8_E8M0", 8},
      Entry{"F4", 4},   Entry{"F64", 64},  Entry{"BOOL", 8},    Entry{"U8", 8},   Entry{"I8", 8},      Entry{"U16", 16},
      Entry{"I16", 16}, Entry{"U32", 32},  Entry{"I32", 32},    Entry{"U64", 64}, Entry{"I64", 64},    Entry{"C64", 64},
  };
  for (const Entry& entry : kEntries) {
    if (entry.name == dtype) return entry.bits;
  }
  return std::nullopt;
}

// Turns the header's events into tensors without a tree: 100 MB of header must not become a gigabyte.
//   {"__metadata__": {text: text...}, name: {"dtype": text, "shape": [n...], "data_offsets": [begin, end]}...}
class HeaderReader : public JsonEvents {
 public:
  std::vector<CheckpointTensor> Take() { return std::move(tensors_); }

  bool null() override { return Fail("null is not allowed here"); }
  bool boolean(bool) override { return Fail("true or false is not allowed here"); }
  bool number_integer(number_integer_t) override { return Fail("a negative number is not allowed here"); }
  bool number_float(number_float_t, const string_t& text) override { return Fail(absl::StrCat(text, " is not a whole number below 2^63")); }
  bool number_unsigned(number_unsigned_t value) override {
    if (list_ == nullptr) return Fail("a number is not allowed here");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return Fail(absl::StrCat(value, " is above 2^63"));
    if (list_->size() >= kDimensionsMax) return Fail(absl::StrCat("more than ", kDimensionsMax, " numbers"));
    list_->push_back(static_cast<int64_t>(value));
    return true;
  }
  bool string(string_t& value) override {
    if (level_ == Level::kMetadata) return true;
    if (level_ != Level::kTensor || field_ != Field::kDtype) return Fail("a string is not allowed here");
    tensor_.dtype_name = value;
    return true;
  }
  bool start_object(size_t) override {
    switch (level_) {
      case Level::kOutside: level_ = Level::kTop; return true;
      case Level::kTop: level_ = in_metadata_ ? Level::kMetadata : Level::kTensor; return true;
      default: return Fail("an object is not allowed here");
    }
  }
  bool end_object() override {
    if (level_ == Level::kTensor) {
      if (!has_dtype_ || !has_shape_ || !has_offsets_) return Fail("dtype, shape and data_offsets are all required");
      if (offsets_.size() != 2) return Fail("data_offsets must be [begin, end]");
      if (offsets_[0] > offsets_[1]) return Fail(absl::StrCat("data_offsets [", offsets_[0], ", ", offsets_[1], "] run backwards"));
      tensor_.offset = static_cast<uint64_t>(offsets_[0]);
      tensor_.bytes = static_cast<uint64_t>(offsets_[1] - offsets_[0]);
      tensors_.push_back(std::move(tensor_));
    }
    level_ = level_ == Level::kTop ? Level::kDone : Level::kTop;
    return true;
  }
  bool start_array(size_t) override {
    if (level_ != Level::kTensor || list_ != nullptr || field_ == Field::kDtype) return Fail("an array is not allowed here");
    list_ = field_ == Field::kShape ? &tensor_.shape : &offsets_;
    return true;
  }
  bool end_array() override {
    list_ = nullptr;
    return true;
  }
  bool key(string_t& name) override {
    if (level_ == Level::kMetadata) return true;
    if (level_ == Level::kTop) {
      in_metadata_ = name == "__metadata__";
      if (in_metadata_ && std::exchange(has_metadata_, true)) return Fail("__metadata__ is given twice");
      place_ = name;
      tensor_ = CheckpointTensor();
      tensor_.name = std::move(name);
      offsets_.clear();
      has_dtype_ = has_shape_ = has_offsets_ = false;
      return true;
    }
    bool* seen = nullptr;
    if (name == "dtype") {
      field_ = Field::kDtype;
      seen = &has_dtype_;
    } else if (name == "shape") {
      field_ = Field::kShape;
      seen = &has_shape_;
    } else if (name == "data_offsets") {
      field_ = Field::kOffsets;
      seen = &has_offsets_;
    } else {
      return Fail(absl::StrCat("unknown field ", Quoted(name), "; a tensor has dtype, shape and data_offsets"));
    }
    if (std::exchange(*seen, true)) return Fail(absl::StrCat(name, " is given twice"));
    return true;
  }

 private:
  enum class Level { kOutside, kTop, kMetadata, kTensor, kDone };
  enum class Field { kDtype, kShape, kOffsets };

  Level level_ = Level::kOutside;
  Field field_ = Field::kDtype;
  bool in_metadata_ = false;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  CheckpointTensor tensor_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t>* list_ = nullptr;
  std::vector<CheckpointTensor> tensors_;
};

// shape x element size, or an error when it overflows or is no whole number of bytes.
absl::Status CheckBytes(const CheckpointTensor& tensor) {
  const std::optional<uint64_t> bits = ElementBits(tensor.dtype_name);
  if (!bits) return absl::OkStatus();
  uint64_t count = 1;
  bool overflow = false;
  for (const int64_t d : tensor.shape) overflow |= __builtin_mul_overflow(count, static_cast<uint64_t>(d), &count);
  // A zero anywhere makes the tensor empty, whatever the other dimensions claim.
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) {
    count = 0;
    overflow = false;
  }
  uint64_t total_bits = 0;
  overflow |= __builtin_mul_overflow(count, *bits, &total_bits);
  if (overflow || total_bits % 8 != 0 || total_bits / 8 != tensor.bytes) {
    const std::string need = overflow ? "more than 2^64 bits" : absl::StrCat((total_bits + 7) / 8, " bytes");
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(tensor.name), ": ", Quoted(tensor.dtype_name), " [",
                                                   absl::StrJoin(tensor.shape, ", "), "] needs ", need, ", data_offsets give ", tensor.bytes));
  }
  return absl::OkStatus();
}

// Sorts by offset and demands that the tensors tile the data exactly, so that no byte has two meanings or none.
absl::Status CheckTiling(std::vector<CheckpointTensor>& tensors, uint64_t data_bytes) {
  std::sort(tensors.begin(), tensors.end(),
            [](const CheckpointTensor& a, const CheckpointTensor& b) { return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes); });
  uint64_t end = 0;
  const CheckpointTensor* before = nullptr;
  for (const CheckpointTensor& tensor : tensors) {
    if (tensor.offset != end) {
      const std::string neighbour = before ? absl::StrCat("tensor ", Quoted(before->name), " ends") : "the data starts";
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(tensor.name), " starts at data byte ", tensor.offset, " but ", neighbour,
                                                     " at ", end, ": ", tensor.offset < end ? "they overlap" : "there is a gap"));
    }
    end += tensor.bytes;
    before = &tensor;
  }
  if (end > data_bytes) {
    return absl::DataLossError(
        absl::StrCat("the header describes ", end, " bytes of data, the file holds ", data_bytes, ": truncated, incomplete download?"));
  }
  if (end < data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header describes ", end, " bytes of data, the file holds ", data_bytes, ": bytes left over at the end"));
  }
  return absl::OkStatus();
}

absl::Status CheckNamesDiffer(const std::vector<CheckpointTensor>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const CheckpointTensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(*twice), " is given twice"));
}

absl::StatusOr<std::vector<CheckpointTensor>> ReadHeader(const std::string& path) {
  ASSIGN_OR_RETURN(const OpenedFile file, OpenRegularFile(path));
  if (file.bytes < kLengthBytes) {
    return absl::DataLossError(absl::StrCat("has ", file.bytes, " bytes, too few for a safetensors file: incomplete download?"));
  }
  std::array<uint8_t, kLengthBytes> little_endian;
  RETURN_IF_ERROR(ReadExactly(file.fd.get(), path, 0, little_endian.data(), kLengthBytes));
  uint64_t header_bytes = 0;
  for (size_t i = kLengthBytes; i-- > 0;) header_bytes = header_bytes << 8 | little_endian[i];

  if (header_bytes > kSafetensorsHeaderMax) {
    return absl::InvalidArgumentError(absl::StrCat("header length ", header_bytes, " is above the format's cap of ", kSafetensorsHeaderMax,
                                                   " bytes: not a safetensors file, or one to be split into shards"));
  }
  if (header_bytes < 2) return absl::InvalidArgumentError(absl::StrCat("header length ", header_bytes, " leaves no room for \"{}\""));
  if (header_bytes > file.bytes - kLengthBytes) {
    return absl::DataLossError(
        absl::StrCat("header length ", header_bytes, " reaches past the end of the file (", file.bytes, " bytes): truncated, incomplete download?"));
  }
  std::string header(header_bytes, '\0');
  RETURN_IF_ERROR(ReadExactly(file.fd.get(), path, kLengthBytes, header.data(), header_bytes));
  // The format demands it, so that a file can be recognised by its ninth byte.
  if (header[0] != '{') return absl::InvalidArgumentError("the header does not start with '{': not a safetensors file");

  HeaderReader reader;
  RETURN_IF_ERROR(ParseJsonEvents("header", header, reader));
  std::vector<CheckpointTensor> tensors = reader.Take();
  for (CheckpointTensor& tensor : tensors) {
    tensor.dtype = DTypeFromName(tensor.dtype_name).value_or(DType::kInvalid);
    RETURN_IF_ERROR(CheckBytes(tensor));
  }
  RETURN_IF_ERROR(CheckNamesDiffer(tensors));
  RETURN_IF_ERROR(CheckTiling(tensors, file.bytes - kLengthBytes - header_bytes));
  for (CheckpointTensor& tensor : tensors) tensor.offset += kLengthBytes + header_bytes;
  return tensors;
}

}  // namespace

absl::StatusOr<std::vector<CheckpointTensor>> ReadSafetensorsHeader(const std::string& path) {
  absl::StatusOr<std::vector<CheckpointTensor>> tensors = ReadHeader(path);
  if (!tensors.ok()) return Annotate(tensors.status(), path);
  return tensors;
}

}  // namespace hearth
