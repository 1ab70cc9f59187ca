// A whole checkpoint directory: which files belong to it, and that index and files tell one story.
#include "common/formats/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/formats/file_io.h"
#include "common/formats/gguf_model.h"
#include "common/formats/model_files.h"
#include "common/formats/strict_json.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

using WeightMap = std::map<std::string, std::string, std::less<>>;  // tensor -> file name

bool Exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// {"metadata": {...}, "weight_map": {tensor: file...}}; everything but weight_map is skipped (published total_size
// values are often wrong).
class IndexReader : public JsonEvents {
 public:
  bool null() override { return Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(number_integer_t) override { return Other(); }
  bool number_unsigned(number_unsigned_t) override { return Other(); }
  bool number_float(number_float_t, const string_t&) override { return Other(); }
  bool string(string_t& file) override {
    if (!in_map_) return Other();
    // The name becomes a path: it must stay inside the model's directory.
    if (file.empty() || file == "." || file == ".." || file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return Fail(absl::StrCat(Quoted(file), " is not a plain file name"));
    }
    if (!map_.emplace(place_, std::move(file)).second) return Fail("the tensor is given twice");
    return true;
  }
  bool start_object(size_t) override { return Open(/*is_object=*/true); }
  bool start_array(size_t) override { return Open(/*is_object=*/false); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    if (depth_ == 1) {
      at_map_ = name == "weight_map";
      if (at_map_ && std::exchange(has_map_, true)) return Fail("weight_map is given twice");
    }
    place_ = std::move(name);
    return true;
  }
  bool has_map() const { return has_map_; }
  WeightMap Take() { return std::move(map_); }

 private:
  bool Other() {
    if (in_map_ || (depth_ == 1 && at_map_)) return Fail(in_map_ ? "the file must be a string" : "weight_map must be an object");
    if (depth_ == 0) return Fail("must be an object");
    return true;
  }
  bool Open(bool is_object) {
    if (in_map_) return Fail("the file must be a string");
    if (!is_object && depth_ == 0) return Fail("must be an object");
    if (depth_ == 1 && at_map_) {
      if (!is_object) return Fail("weight_map must be an object");
      in_map_ = true;
    }
    if (++depth_ > kJsonDepthMax) return Fail(absl::StrCat("nested deeper than ", kJsonDepthMax));
    return true;
  }
  bool Close() {
    --depth_;
    in_map_ = false;
    return true;
  }

  size_t depth_ = 0;
  bool at_map_ = false;
  bool in_map_ = false;
  bool has_map_ = false;
  WeightMap map_;
};

absl::StatusOr<WeightMap> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kSafetensorsHeaderMax));
  IndexReader reader;
  RETURN_IF_ERROR(ParseJsonEvents(path, text, reader));
  if (!reader.has_map()) return absl::InvalidArgumentError(absl::StrCat(path, ": key \"weight_map\" is missing"));
  WeightMap map = reader.Take();
  if (map.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map names no tensor"));
  return map;
}

absl::StatusOr<std::vector<std::string>> ListSafetensors(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".safetensors")) names.push_back(name);
  }
  if (error) return absl::UnavailableError(absl::StrCat("can't list ", dir, ": ", error.message()));
  std::sort(names.begin(), names.end());
  return names;
}

// The files to read, and the index where there is one.
struct Inventory {
  std::vector<std::string> names;
  std::optional<WeightMap> index;
};

absl::StatusOr<Inventory> TakeInventory(const std::string& dir) {
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
      return absl::PermissionDeniedError(absl::StrCat("can't look into ", dir, ": ", error.message()));
    }
    return absl::NotFoundError(absl::StrCat(dir, " is not a directory"));
  }
  const bool has_single = Exists(dir + "/" + kSingleFile);
  Inventory inventory;
  if (Exists(dir + "/" + kIndexFile)) {
    ASSIGN_OR_RETURN(inventory.index, ReadIndex(dir + "/" + kIndexFile));
    for (const auto& [tensor, file] : *inventory.index) inventory.names.push_back(file);
    std::sort(inventory.names.begin(), inventory.names.end());
    inventory.names.erase(std::unique(inventory.names.begin(), inventory.names.end()), inventory.names.end());
    if (has_single && !std::binary_search(inventory.names.begin(), inventory.names.end(), kSingleFile)) {
      return absl::InvalidArgumentError(
          absl::StrCat(dir, " holds ", kSingleFile, " and a ", kIndexFile, " that names other files: two checkpoints in one directory; remove one"));
    }
    NameList missing;
    for (const std::string& name : inventory.names) {
      if (!Exists(dir + "/" + name)) missing.Add(name);
    }
    if (!missing.empty()) {
      return absl::NotFoundError(absl::StrCat(dir, ": ", missing.size(), " of ", inventory.names.size(), " files named by ", kIndexFile,
                                              " missing: ", missing.ToString(), ": incomplete download?"));
    }
    return inventory;
  }
  if (has_single) {
    inventory.names = {kSingleFile};
    return inventory;
  }
  ASSIGN_OR_RETURN(inventory.names, ListSafetensors(dir));
  if (inventory.names.empty()) {
    return absl::NotFoundError(absl::StrCat(dir, " holds no ", kSingleFile, ", no ", kIndexFile, ", no other *.safetensors file and no *.gguf"));
  }
  return inventory;
}

using TensorMap = std::map<std::string, CheckpointTensor, std::less<>>;

// Every indexed tensor is in the file that the index says, and the files hold nothing that the index doesn't know: a
// shard of another revision shows itself here.
absl::Status CheckIndex(const WeightMap& index, const TensorMap& tensors, const std::vector<std::string>& names) {
  NameList missing, elsewhere, unknown;
  for (const auto& [name, file] : index) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      missing.Add(absl::StrCat(name, " (", file, ")"));
    } else if (names[static_cast<size_t>(found->second.file)] != file) {
      elsewhere.Add(absl::StrCat(name, " (index: ", file, ", found in ", names[static_cast<size_t>(found->second.file)], ")"));
    }
  }
  for (const auto& [name, tensor] : tensors) {
    if (!index.contains(name)) unknown.Add(absl::StrCat(name, " (", names[static_cast<size_t>(tensor.file)], ")"));
  }
  if (!missing.empty()) {
    return absl::NotFoundError(absl::StrCat(missing.size(), " of ", index.size(), " tensors named by ", kIndexFile,
                                            " are in no file: ", missing.ToString(), ": incomplete download, or shards of two revisions?"));
  }
  if (!elsewhere.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kIndexFile, " and the files disagree about ", elsewhere.size(), " tensors: ", elsewhere.ToString()));
  }
  if (!unknown.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(unknown.size(), " tensors are not in ", kIndexFile, ": ", unknown.ToString(), ": shards of two revisions?"));
  }
  return absl::OkStatus();
}

constexpr std::string_view kPackedSuffix = "_packed";

// Lists each weight that is there as nibbles and scales as what it is.
absl::Status AddInt4Weights(TensorMap& tensors) {
  std::vector<CheckpointTensor> weights;
  for (const auto& [name, packed] : tensors) {
    if (name.ends_with(".weight_g_idx") || name.ends_with(".weight_zero_point")) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(name),
                                                     ": INT4 weights with permuted groups or zero points are not supported; "
                                                     "supported: symmetric groups of 32 neighbouring columns"));
    }
    if (!name.ends_with(".weight_packed")) continue;
    if (packed.dtype_name != "I32" || packed.shape.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(name), " is ", packed.dtype_name, " of rank ", packed.shape.size(),
                                                     "; supported: I32 of rank 2, eight weights a word"));
    }
    CheckpointTensor weight = packed;
    weight.name = name.substr(0, name.size() - kPackedSuffix.size());
    weight.dtype = DType::kI4G32;
    weight.dtype_name = std::string(DTypeName(weight.dtype));
    weight.shape[1] = packed.shape[1] * 8;
    weights.push_back(std::move(weight));
  }
  for (CheckpointTensor& weight : weights) {
    const auto scale = tensors.find(Int4NamesOf(weight.name).scale);
    if (scale != tensors.end()) weight.bytes += scale->second.bytes;
    std::string name = weight.name;
    tensors.try_emplace(std::move(name), std::move(weight));
  }
  return absl::OkStatus();
}

}  // namespace

Int4Names Int4NamesOf(std::string_view weight) {
  return {absl::StrCat(Sv(weight), Sv(kPackedSuffix)), absl::StrCat(Sv(weight), "_scale"), absl::StrCat(Sv(weight), "_shape")};
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& model_path) {
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(model_path));
  return Open(files);
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const ModelFiles& files) {
  const std::string& model_dir = files.path;
  if (files.gguf.has_value()) {
    Checkpoint checkpoint;
    checkpoint.dir_ = model_dir;
    ASSIGN_OR_RETURN(checkpoint.tensors_, GgufTensors(*files.gguf));
    checkpoint.files_ = files.gguf->files;
    return checkpoint;
  }
  ASSIGN_OR_RETURN(const Inventory inventory, TakeInventory(model_dir));
  Checkpoint checkpoint;
  checkpoint.dir_ = model_dir;
  for (const std::string& name : inventory.names) {
    const std::string path = model_dir + "/" + name;
    ASSIGN_OR_RETURN(std::vector<CheckpointTensor> tensors, ReadSafetensorsHeader(path));
    const int file = static_cast<int>(checkpoint.files_.size());
    std::error_code error;
    const uint64_t bytes = fs::file_size(path, error);
    if (error) return absl::UnavailableError(absl::StrCat(path, ": ", error.message()));
    checkpoint.files_.push_back(CheckpointFile{path, bytes});
    for (CheckpointTensor& tensor : tensors) {
      tensor.file = file;
      std::string key = tensor.name;
      const auto [at, inserted] = checkpoint.tensors_.try_emplace(std::move(key), std::move(tensor));
      if (!inserted) {
        return absl::InvalidArgumentError(absl::StrCat(model_dir, ": tensor ", Quoted(at->first), " is in both ",
                                                       inventory.names[static_cast<size_t>(at->second.file)], " and ", name));
      }
    }
  }
  if (inventory.index) {
    const absl::Status agrees = CheckIndex(*inventory.index, checkpoint.tensors_, inventory.names);
    if (!agrees.ok()) return Annotate(agrees, model_dir);
  }
  RETURN_IF_ERROR(AddInt4Weights(checkpoint.tensors_));
  return checkpoint;
}

Checkpoint Checkpoint::OfTensors(std::map<std::string, CheckpointTensor, std::less<>> tensors) {
  Checkpoint checkpoint;
  checkpoint.tensors_ = std::move(tensors);
  return checkpoint;
}

const CheckpointTensor* Checkpoint::Find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

uint64_t Checkpoint::total_bytes() const {
  uint64_t total = 0;
  for (const CheckpointFile& file : files_) total += file.bytes;
  return total;
}

}  // namespace hearth
