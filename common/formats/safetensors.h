// safetensors files and whole Hugging Face checkpoints: bytes on disk -> named tensors, every length checked before it
// is believed.
// Room: common/formats. May touch: common/base. Threads: any; const after open.
// Format: 8-byte
// little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/status.h"

namespace hearth {

struct ModelFiles;  // model_files.h

// Where a tensor's bytes lie on disk.
struct CheckpointTensor {
  std::string name;
  DType dtype = DType::kInvalid;  // kInvalid: a type that Hearth can't compute with (I64, BOOL...); harmless unless the
                                  // plan needs the tensor
  std::vector<int64_t> shape;
  int file = 0;         // index into Checkpoint::files
  uint64_t offset = 0;  // from the file's start
  uint64_t bytes = 0;
  std::string dtype_name;  // as the file spells it, for messages
};

struct CheckpointFile {
  std::string path;
  uint64_t bytes = 0;
};

// Published cap of the format's own library; above it a header is refused.
inline constexpr uint64_t kSafetensorsHeaderMax = 100'000'000;

// Reads and checks one file's header: length, JSON, duplicate names, shape x dtype == bytes, offsets inside the file,
// without gap or overlap. In order of offset. Errors name the file and the tensor: DataLoss for a file that is shorter
// than it says, else InvalidArgument.
absl::StatusOr<std::vector<CheckpointTensor>> ReadSafetensorsHeader(const std::string& path);

// compressed-tensors' "pack-quantized" INT4: the weight `x.weight` [rows, columns] is there as `x.weight_packed`, I32 [rows, columns / 8] with column
// 8 j + i in bits 4 i .. 4 i + 3 of word j as the number plus 8, and `x.weight_scale`, BF16 [rows, columns / 32]. A third, x.weight_shape [2], tells the
// shape again and is not read. Such a weight is listed as one tensor of dtype kI4G32 beside these, whose `bytes` are those of both.
struct Int4Names {
  std::string packed;
  std::string scale;
  std::string shape;
};
Int4Names Int4NamesOf(std::string_view weight);

// A Hugging Face directory: model.safetensors, or the shards that model.safetensors.index.json names, or (without an
// index) every *.safetensors there. Errors: NotFound for missing shards or indexed tensors, all of them named, "incomplete
// download?"; DataLoss for truncated files; InvalidArgument for what contradicts itself (a tensor in two files, index
// and file disagree).
// A GGUF file, any part of a split one, or a directory that holds one GGUF model and no safetensors: its tensors under the names that a Hugging
// Face checkpoint of the model has (gguf_model.h).
class Checkpoint {
 public:
  static absl::StatusOr<Checkpoint> Open(const ModelFiles& files);
  static absl::StatusOr<Checkpoint> Open(const std::string& model_path);
  // One that is only described: no file is behind its tensors.
  static Checkpoint OfTensors(std::map<std::string, CheckpointTensor, std::less<>> tensors);

  const std::string& dir() const { return dir_; }
  const std::vector<CheckpointFile>& files() const { return files_; }
  const std::map<std::string, CheckpointTensor, std::less<>>& tensors() const { return tensors_; }
  const CheckpointTensor* Find(std::string_view name) const;
  uint64_t total_bytes() const;

 private:
  std::string dir_;
  std::vector<CheckpointFile> files_;
  std::map<std::string, CheckpointTensor, std::less<>> tensors_;
};

}  // namespace hearth
