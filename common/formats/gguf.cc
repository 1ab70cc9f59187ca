#include "common/formats/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/align.h"
#include "common/formats/file_io.h"

namespace hearth {
namespace {

constexpr uint64_t kStringMax = 64 << 20;
constexpr uint64_t kKeyMax = 65535;
constexpr uint64_t kNameMax = 4096;
constexpr int kRankMax = 4;
constexpr uint64_t kDimensionMax = uint64_t{1} << 40;
constexpr uint64_t kAlignmentMax = 1 << 20;

// ggml's numbers of types.
struct TensorType {
  uint32_t id;
  const char* name;
  DType dtype;
};
constexpr std::array kTensorTypes = {
    TensorType{0, "F32", DType::kF32},         TensorType{1, "F16", DType::kF16},          TensorType{2, "Q4_0", DType::kInvalid},
    TensorType{3, "Q4_1", DType::kInvalid},    TensorType{6, "Q5_0", DType::kInvalid},     TensorType{7, "Q5_1", DType::kInvalid},
    TensorType{8, "Q8_0", DType::kQ8_0},       TensorType{9, "Q8_1", DType::kInvalid},     TensorType{10, "Q2_K", DType::kInvalid},
    TensorType{11, "Q3_K", DType::kQ3_K},      TensorType{12, "Q4_K", DType::kQ4_K},       TensorType{13, "Q5_K", DType::kQ5_K},
    TensorType{14, "Q6_K", DType::kQ6_K},      TensorType{15, "Q8_K", DType::kInvalid},    TensorType{16, "IQ2_XXS", DType::kInvalid},
    TensorType{17, "IQ2_XS", DType::kInvalid}, TensorType{18, "IQ3_XXS", DType::kInvalid}, TensorType{19, "IQ1_S", DType::kInvalid},
    TensorType{20, "IQ4_NL", DType::kInvalid}, TensorType{21, "IQ3_S", DType::kInvalid},   TensorType{22, "IQ2_S", DType::kInvalid},
    TensorType{23, "IQ4_XS", DType::kInvalid}, TensorType{24, "I8", DType::kInvalid},      TensorType{25, "I16", DType::kInvalid},
    TensorType{26, "I32", DType::kInvalid},    TensorType{27, "I64", DType::kInvalid},     TensorType{28, "F64", DType::kInvalid},
    TensorType{29, "IQ1_M", DType::kInvalid},  TensorType{30, "BF16", DType::kBF16},       TensorType{34, "TQ1_0", DType::kInvalid},
    TensorType{35, "TQ2_0", DType::kInvalid},  TensorType{39, "MXFP4", DType::kInvalid},
};

enum ValueType : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64, kNumValueTypes };
constexpr uint64_t kValueBytes[kNumValueTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

// Reads forward through a file in large pieces, and knows what is left of it.
class Cursor {
 public:
  Cursor(int fd, std::string path, uint64_t file_bytes) : fd_(fd), path_(std::move(path)), file_bytes_(file_bytes) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return file_bytes_ - at_; }
  const std::string& path() const { return path_; }

  absl::Status Cut(std::string_view what, uint64_t needed) const {
    return absl::DataLossError(absl::StrCat(path_, ": at byte ", at_, ": ", Sv(what), " needs ", needed, " bytes, the file has ", left(),
                                            " more: incomplete download? fetch it again"));
  }
  absl::Status Wrong(std::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": at byte ", at_, ": ", Sv(what), ": not a sound GGUF file; fetch or convert it again"));
  }

  absl::Status Bytes(std::string_view what, void* out, uint64_t bytes) {
    if (bytes > left()) return Cut(what, bytes);
    auto* to = static_cast<char*>(out);
    while (bytes > 0) {
      if (at_ < buffer_at_ || at_ >= buffer_at_ + buffer_.size()) {
        buffer_.resize(std::min<uint64_t>(kPiece, left()));
        buffer_at_ = at_;
        RETURN_IF_ERROR(ReadExactly(fd_, path_, at_, buffer_.data(), buffer_.size()));
      }
      const uint64_t take = std::min(bytes, buffer_at_ + buffer_.size() - at_);
      std::memcpy(to, buffer_.data() + (at_ - buffer_at_), take);
      to += take;
      at_ += take;
      bytes -= take;
    }
    return absl::OkStatus();
  }
  template <typename T>
  absl::StatusOr<T> Number(std::string_view what) {
    T value;
    RETURN_IF_ERROR(Bytes(what, &value, sizeof(value)));
    return value;
  }
  absl::StatusOr<std::string> Text(std::string_view what, uint64_t bytes_max) {
    ASSIGN_OR_RETURN(const uint64_t bytes, Number<uint64_t>(what));
    if (bytes > left()) return Cut(what, bytes);
    if (bytes > bytes_max) return Wrong(absl::StrCat(Sv(what), " of ", bytes, " bytes, longer than the ", bytes_max, " allowed"));
    std::string text(bytes, '\0');
    RETURN_IF_ERROR(Bytes(what, text.data(), bytes));
    return text;
  }
  absl::Status Skip(std::string_view what, uint64_t bytes) {
    if (bytes > left()) return Cut(what, bytes);
    at_ += bytes;
    return absl::OkStatus();
  }

 private:
  static constexpr uint64_t kPiece = 1 << 20;
  const int fd_;
  const std::string path_;
  const uint64_t file_bytes_;
  uint64_t at_ = 0;
  uint64_t buffer_at_ = 0;
  std::vector<char> buffer_;
};

template <typename Stored>
absl::Status ReadIntegers(Cursor& in, const std::string& what, GgufArray& array) {
  for (uint64_t i = 0; i < array.length; ++i) {
    ASSIGN_OR_RETURN(const Stored value, in.Number<Stored>(what));
    if (!std::in_range<int64_t>(value)) return in.Wrong(absl::StrCat(what, " holds ", value, ", more than any number that is asked for"));
    array.integers.push_back(static_cast<int64_t>(value));
  }
  return absl::OkStatus();
}

// Skips what holds no integers.
absl::Status ReadNumbers(Cursor& in, uint32_t type, const std::string& what, GgufArray& array) {
  switch (type) {
    case kU8: return ReadIntegers<uint8_t>(in, what, array);
    case kI8: return ReadIntegers<int8_t>(in, what, array);
    case kU16: return ReadIntegers<uint16_t>(in, what, array);
    case kI16: return ReadIntegers<int16_t>(in, what, array);
    case kU32: return ReadIntegers<uint32_t>(in, what, array);
    case kI32: return ReadIntegers<int32_t>(in, what, array);
    case kU64: return ReadIntegers<uint64_t>(in, what, array);
    case kI64: return ReadIntegers<int64_t>(in, what, array);
    default: return in.Skip(what, array.length * kValueBytes[type]);
  }
}

absl::StatusOr<GgufValue> ReadArray(Cursor& in, const std::string& key, GgufArrays arrays) {
  const std::string what = absl::StrCat("the array of ", Quoted(key));
  ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>(what));
  GgufArray array;
  ASSIGN_OR_RETURN(array.length, in.Number<uint64_t>(what));
  if (type >= kNumValueTypes || type == kArray) return in.Wrong(absl::StrCat(what, " holds values of type ", type));
  const uint64_t bytes_min = type == kString ? sizeof(uint64_t) : kValueBytes[type];
  if (array.length > in.left() / bytes_min)
    return in.Cut(what, std::numeric_limits<uint64_t>::max() / 16 < array.length ? array.length : array.length * bytes_min);
  const bool values = arrays == GgufArrays::kValues && array.length <= kGgufArrayKeptMax;
  if (type == kString) {
    for (uint64_t i = 0; i < array.length; ++i) {
      if (values) {
        ASSIGN_OR_RETURN(array.strings.emplace_back(), in.Text(what, kStringMax));
      } else {
        ASSIGN_OR_RETURN(const uint64_t bytes, in.Number<uint64_t>(what));
        RETURN_IF_ERROR(in.Skip(what, bytes));
      }
    }
  } else if (values) {
    RETURN_IF_ERROR(ReadNumbers(in, type, what, array));
  } else {
    RETURN_IF_ERROR(in.Skip(what, array.length * kValueBytes[type]));
  }
  return GgufValue(std::move(array));
}

template <typename Stored, typename Kept>
absl::StatusOr<GgufValue> ReadNumber(Cursor& in, const std::string& what) {
  ASSIGN_OR_RETURN(const Stored value, in.Number<Stored>(what));
  return GgufValue(static_cast<Kept>(value));
}

absl::StatusOr<GgufValue> ReadValue(Cursor& in, const std::string& key, GgufArrays arrays) {
  const std::string what = absl::StrCat("the value of ", Quoted(key));
  ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>(what));
  switch (type) {
    case kU8: return ReadNumber<uint8_t, uint64_t>(in, what);
    case kI8: return ReadNumber<int8_t, int64_t>(in, what);
    case kU16: return ReadNumber<uint16_t, uint64_t>(in, what);
    case kI16: return ReadNumber<int16_t, int64_t>(in, what);
    case kU32: return ReadNumber<uint32_t, uint64_t>(in, what);
    case kI32: return ReadNumber<int32_t, int64_t>(in, what);
    case kU64: return ReadNumber<uint64_t, uint64_t>(in, what);
    case kI64: return ReadNumber<int64_t, int64_t>(in, what);
    case kF32: return ReadNumber<float, double>(in, what);
    case kF64: return ReadNumber<double, double>(in, what);
    case kBool: {
      ASSIGN_OR_RETURN(const uint8_t value, in.Number<uint8_t>(what));
      if (value > 1) return in.Wrong(absl::StrCat(what, " is neither true nor false"));
      return GgufValue(value == 1);
    }
    case kString: {
      ASSIGN_OR_RETURN(std::string text, in.Text(what, kStringMax));
      return GgufValue(std::move(text));
    }
    case kArray: return ReadArray(in, key, arrays);
    default: return in.Wrong(absl::StrCat(what, " has the unknown type ", type));
  }
}

// Name, shape and type; `offset` counts from the data's start, which is not known yet.
absl::StatusOr<CheckpointTensor> ReadTensorInfo(Cursor& in, int file) {
  CheckpointTensor tensor;
  tensor.file = file;
  ASSIGN_OR_RETURN(tensor.name, in.Text("a tensor's name", kNameMax));
  const std::string what = absl::StrCat("tensor ", Quoted(tensor.name));
  ASSIGN_OR_RETURN(const uint32_t rank, in.Number<uint32_t>(what));
  if (rank == 0 || rank > kRankMax) return in.Wrong(absl::StrCat(what, " has ", rank, " dimensions"));
  uint64_t elements = 1;
  for (uint32_t i = 0; i < rank; ++i) {
    ASSIGN_OR_RETURN(const uint64_t dimension, in.Number<uint64_t>(what));
    if (dimension == 0 || dimension > kDimensionMax || elements > kDimensionMax / dimension)
      return in.Wrong(absl::StrCat(what, " has an impossible shape"));
    elements *= dimension;
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(dimension));
  }
  ASSIGN_OR_RETURN(const uint32_t type, in.Number<uint32_t>(what));
  ASSIGN_OR_RETURN(tensor.offset, in.Number<uint64_t>(what));
  tensor.dtype_name = absl::StrCat("ggml type ", type);
  for (const TensorType& known : kTensorTypes) {
    if (known.id != type) continue;
    tensor.dtype_name = known.name;
    tensor.dtype = known.dtype;
  }
  if (tensor.shape.back() % BlockOf(tensor.dtype).elements != 0) {
    return in.Wrong(absl::StrCat(what, ": rows of ", tensor.shape.back(), " elements are no whole ", tensor.dtype_name, " blocks of ",
                                 BlockOf(tensor.dtype).elements));
  }
  tensor.bytes = DTypeBytes(tensor.dtype, elements);
  return tensor;
}

std::optional<uint64_t> Unsigned(const std::map<std::string, GgufValue, std::less<>>& metadata, std::string_view key) {
  const auto it = metadata.find(key);
  if (it == metadata.end()) return std::nullopt;
  const std::optional<int64_t> value = GgufInteger(it->second);
  return value && *value >= 0 ? std::optional<uint64_t>(*value) : std::nullopt;
}

// One file's part of a model.
struct Part {
  CheckpointFile file;
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::vector<CheckpointTensor> tensors;  // offsets from the file's start, ascending
};

absl::StatusOr<Part> ReadPart(const std::string& path, int index, GgufArrays arrays) {
  ASSIGN_OR_RETURN(const OpenedFile opened, OpenRegularFile(path));
  Part part;
  part.file = {path, opened.bytes};
  Cursor in(opened.fd.get(), path, opened.bytes);
  char magic[4];
  RETURN_IF_ERROR(in.Bytes("the magic", magic, sizeof(magic)));
  if (std::string_view(magic, 4) != "GGUF") return absl::InvalidArgumentError(absl::StrCat(path, ": does not begin with \"GGUF\": not a GGUF file"));
  ASSIGN_OR_RETURN(const uint32_t version, in.Number<uint32_t>("the version"));
  if (version != 2 && version != 3) {
    const bool swapped = version == 0x02000000 || version == 0x03000000;
    return absl::InvalidArgumentError(absl::StrCat(path, ": is GGUF ", swapped ? "in big-endian order" : absl::StrCat("version ", version),
                                                   "; supported: versions 2 and 3, little-endian; convert it with a current gguf-py"));
  }
  ASSIGN_OR_RETURN(const uint64_t num_tensors, in.Number<uint64_t>("the number of tensors"));
  ASSIGN_OR_RETURN(const uint64_t num_pairs, in.Number<uint64_t>("the number of metadata pairs"));
  constexpr uint64_t kTensorBytesMin = 8 + 4 + 8 + 4 + 8, kPairBytesMin = 8 + 4 + 1;
  if (num_pairs > in.left() / kPairBytesMin) return in.Wrong(absl::StrCat(num_pairs, " metadata pairs do not fit the file"));
  if (num_tensors > in.left() / kTensorBytesMin) return in.Wrong(absl::StrCat(num_tensors, " tensors do not fit the file"));
  for (uint64_t i = 0; i < num_pairs; ++i) {
    ASSIGN_OR_RETURN(std::string key, in.Text("a metadata key", kKeyMax));
    ASSIGN_OR_RETURN(GgufValue value, ReadValue(in, key, arrays));
    const auto [it, added] = part.metadata.emplace(std::move(key), std::move(value));
    if (!added) return in.Wrong(absl::StrCat("metadata key ", Quoted(it->first), " is given twice"));
  }
  for (uint64_t i = 0; i < num_tensors; ++i) {
    ASSIGN_OR_RETURN(CheckpointTensor tensor, ReadTensorInfo(in, index));
    part.tensors.push_back(std::move(tensor));
  }
  uint64_t alignment = 32;
  if (part.metadata.contains("general.alignment")) {
    alignment = Unsigned(part.metadata, "general.alignment").value_or(0);
    if (alignment == 0 || alignment > kAlignmentMax || alignment % 8 != 0) return in.Wrong("general.alignment is no sensible alignment");
  }
  const uint64_t data_begin = AlignUp(in.at(), alignment);
  std::sort(part.tensors.begin(), part.tensors.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  uint64_t end = data_begin;
  std::string before = "the header";
  for (CheckpointTensor& tensor : part.tensors) {
    const auto wrong = [&](std::string_view what) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor ", Quoted(tensor.name), ", ", tensor.bytes, " bytes at data offset ", tensor.offset, ": ", Sv(what)));
    };
    if (tensor.offset % alignment != 0) return wrong(absl::StrCat("not on a multiple of general.alignment ", alignment));
    if (data_begin > opened.bytes || tensor.offset > opened.bytes - data_begin || tensor.bytes > opened.bytes - data_begin - tensor.offset) {
      return absl::DataLossError(absl::StrCat(path, ": tensor ", Quoted(tensor.name), ", ", tensor.bytes, " bytes at byte ", data_begin, " + ",
                                              tensor.offset, ", ends behind the file's ", opened.bytes,
                                              " bytes: incomplete download? fetch it again"));
    }
    tensor.offset += data_begin;
    if (tensor.offset < end) return wrong(absl::StrCat("overlaps ", before));
    end = tensor.offset + tensor.bytes;
    before = Quoted(tensor.name);
  }
  return part;
}

// "x-00002-of-00005.gguf" -> "x", 2, 5.
struct SplitName {
  std::string prefix;
  uint32_t number = 0, count = 0;
  std::string Path(uint32_t part) const { return absl::StrFormat("%s-%05d-of-%05d.gguf", prefix, part, count); }
};
std::optional<SplitName> ParseSplitName(const std::string& path) {
  constexpr size_t kTail = sizeof("-00001-of-00005.gguf") - 1;
  if (path.size() <= kTail) return std::nullopt;
  const std::string tail = path.substr(path.size() - kTail);
  SplitName name{path.substr(0, path.size() - kTail)};
  const auto number = [&](size_t at, uint32_t& out) {
    for (size_t i = at; i < at + 5; ++i) {
      if (tail[i] < '0' || tail[i] > '9') return false;
      out = 10 * out + static_cast<uint32_t>(tail[i] - '0');
    }
    return true;
  };
  if (tail[0] != '-' || !number(1, name.number) || tail.substr(6, 4) != "-of-" || !number(10, name.count)) return std::nullopt;
  if (name.count == 0 || name.number == 0 || name.number > name.count) return std::nullopt;
  return name;
}

}  // namespace

std::optional<int64_t> GgufInteger(const GgufValue& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) return *number;
  if (const auto* number = std::get_if<uint64_t>(&value); number != nullptr && std::in_range<int64_t>(*number)) return static_cast<int64_t>(*number);
  return std::nullopt;
}

bool IsGgufPath(std::string_view path) { return path.ends_with(".gguf"); }

absl::StatusOr<GgufModel> ReadGguf(const std::string& path, GgufArrays arrays) {
  const std::optional<SplitName> split = ParseSplitName(path);
  const uint32_t count = split ? split->count : 1;
  GgufModel model;
  NameList missing;
  for (uint32_t part_number = 1; part_number <= count; ++part_number) {
    const std::string part_path = split ? split->Path(part_number) : path;
    absl::StatusOr<Part> part = ReadPart(part_path, static_cast<int>(part_number - 1), arrays);
    if (absl::IsNotFound(part.status()) && split) {
      missing.Add(part_path);
      continue;
    }
    if (!part.ok()) return part.status();
    const uint64_t says_count = Unsigned(part->metadata, "split.count").value_or(0);
    const uint64_t says_number = Unsigned(part->metadata, "split.no").value_or(0);
    if (std::max<uint64_t>(says_count, 1) != count || (count > 1 && says_number + 1 != part_number)) {
      return absl::InvalidArgumentError(absl::StrCat(part_path, ": says it is part ", says_number + 1, " of ", std::max<uint64_t>(says_count, 1),
                                                     ", its name says part ", part_number, " of ", count, ": restore its name"));
    }
    model.files.push_back(part->file);
    if (part_number == 1) model.metadata = std::move(part->metadata);
    for (CheckpointTensor& tensor : part->tensors) {
      std::string name = tensor.name;
      const auto [it, added] = model.tensors.emplace(std::move(name), std::move(tensor));
      if (!added) return absl::InvalidArgumentError(absl::StrCat(part_path, ": tensor ", Quoted(it->first), " is there twice"));
    }
  }
  if (!missing.empty()) {
    return absl::NotFoundError(absl::StrCat(missing.size(), " of ", count, " parts missing: ", missing.ToString(), ": incomplete download?"));
  }
  return model;
}

}  // namespace hearth
