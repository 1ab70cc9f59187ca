#include "common/formats/synth.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/dtype.h"
#include "common/base/time.h"
#include "common/formats/file_io.h"
#include "common/formats/model_config.h"
#include "common/formats/synth_tokenizer.h"
#include "common/formats/synth_values.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kTokenizerBytesMax = 256 << 20;

struct SynthTensor {
  std::string name;
  std::string values_of;  // the tensor whose values it has: its own, but for copies
  std::vector<int64_t> shape;
  SynthSpec spec;
  std::string file_dtype;  // as the header spells it; empty: spec.dtype's name
  std::string literal;     // the bytes themselves, where they are no random values

  uint64_t count() const {
    uint64_t n = 1;
    for (const int64_t d : shape) n *= static_cast<uint64_t>(d);
    return n;
  }
  uint64_t bytes() const { return DTypeBytes(spec.dtype, count()); }
};

struct Shard {
  std::vector<SynthTensor> tensors;
  uint64_t bytes = 0;
  std::string file;
};

// Standard deviation of a weight that keeps its output near the size of its input: 1 / sqrt(inputs). The matrices that
// write into the residual stream are smaller still, so that the 2 x layers terms added there sum to about one.
double WeightSpread(const ModelConfig& config, const PlannedTensor& tensor) {
  const double inputs = static_cast<double>(tensor.shape.back());
  const bool writes_residual =
      tensor.name.ends_with("o_proj.weight") || tensor.name.ends_with("down_proj.weight") || tensor.role == TensorRole::kExpertDown;
  const double depth = writes_residual ? std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers)) : 1.0;
  return 1.0 / (std::sqrt(inputs) * depth);
}

// An INT4 weight as compressed-tensors packs it (safetensors.h), in the three tensors that Kimi-K2-Thinking's checkpoint has for each.
void AddInt4(const PlannedTensor& planned, double spread, std::vector<SynthTensor>& out) {
  const int64_t rows = planned.shape[0], columns = planned.shape[1], group = BlockOf(DType::kI4G32).elements;
  const Int4Names names = Int4NamesOf(planned.name);
  out.push_back({names.packed, names.packed, {rows, columns / 8}, SynthSpec::Int4Words(), "I32", ""});
  out.push_back({names.scale, names.scale, {rows, columns / group}, {DType::kBF16, spread / kInt4CodeSpread, 0.25, /*log_normal=*/true}, "", ""});
  SynthTensor shape{names.shape, names.shape, {2}, {DType::kF32}, "I32", std::string(8, '\0')};
  for (size_t i = 0; i < 2; ++i) {
    const auto side = static_cast<int32_t>(planned.shape[i]);
    std::memcpy(&shape.literal[4 * i], &side, sizeof(side));
  }
  out.push_back(std::move(shape));
}

absl::StatusOr<std::vector<SynthTensor>> DescribeTensors(const ModelConfig& config) {
  std::vector<SynthTensor> out;
  std::vector<PlannedTensor> plan = PlanTensors(config), mtp = PlanMtpTensors(config);
  plan.insert(plan.end(), std::make_move_iterator(mtp.begin()), std::make_move_iterator(mtp.end()));
  for (const PlannedTensor& planned : plan) {
    SynthTensor tensor{planned.name, planned.copy_of.empty() ? planned.name : planned.copy_of, planned.shape, {}, "", ""};
    switch (planned.role) {
      case TensorRole::kEmbedding: tensor.spec = {DType::kBF16, 0.0, 1.0}; break;
      // Logits of spread 3: clear favourites, but no certainty.
      case TensorRole::kHead: tensor.spec = {DType::kBF16, 0.0, 3.0 / std::sqrt(static_cast<double>(config.hidden_size))}; break;
      case TensorRole::kNorm: tensor.spec = {DType::kBF16, 1.0, 0.05}; break;
      case TensorRole::kGate: tensor.spec = {DType::kBF16, 0.0, WeightSpread(config, planned)}; break;
      case TensorRole::kBias: tensor.spec = {DType::kBF16, 0.0, 0.1}; break;
      case TensorRole::kGateBias: tensor.spec = {DType::kF32, 0.0, 0.02}; break;
      default: tensor.spec = {DType::kBF16, 0.0, WeightSpread(config, planned)}; break;
    }
    if (PublishedDType(config, planned) == DType::kI4G32) {
      if (planned.shape[1] % BlockOf(DType::kI4G32).elements != 0) {
        return absl::InvalidArgumentError(absl::StrCat(planned.name, " has rows of ", planned.shape[1],
                                                       " numbers, no whole groups of 32: change hidden_size or moe_intermediate_size"));
      }
      AddInt4(planned, tensor.spec.spread, out);
      continue;
    }
    if (PublishedDType(config, planned) != DType::kF8E4M3) {
      out.push_back(std::move(tensor));
      continue;
    }
    SynthTensor scale{planned.name + "_scale_inv",
                      planned.name + "_scale_inv",
                      {ScaleBlocks(planned.shape[0]), ScaleBlocks(planned.shape[1])},
                      {DType::kF32, tensor.spec.spread / kF8CodeSpread, 0.25, /*log_normal=*/true},
                      "",
                      ""};
    tensor.spec = {DType::kF8E4M3, 0.0, kF8CodeSpread};
    out.push_back(std::move(tensor));
    out.push_back(std::move(scale));
  }
  return out;
}

std::vector<Shard> CutShards(std::vector<SynthTensor> tensors, uint64_t shard_bytes) {
  std::vector<Shard> shards(1);
  for (SynthTensor& tensor : tensors) {
    if (!shards.back().tensors.empty() && shards.back().bytes + tensor.bytes() > shard_bytes) shards.emplace_back();
    shards.back().bytes += tensor.bytes();
    shards.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1 ? "model.safetensors" : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size());
    // Widest elements first, as the format's own writer does it: every tensor is then aligned to its element.
    std::stable_sort(shards[i].tensors.begin(), shards[i].tensors.end(),
                     [](const SynthTensor& a, const SynthTensor& b) { return DTypeBytes(a.spec.dtype, 1) > DTypeBytes(b.spec.dtype, 1); });
  }
  return shards;
}

// Length and JSON, padded with blanks so that the data starts at a multiple of 8.
std::string ShardHeader(const Shard& shard) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  uint64_t offset = 0;
  for (const SynthTensor& tensor : shard.tensors) {
    absl::StrAppend(&json, ",\"", tensor.name, R"(":{"dtype":")",
                    tensor.file_dtype.empty() ? std::string(DTypeName(tensor.spec.dtype)) : tensor.file_dtype, R"(","shape":[)",
                    absl::StrJoin(tensor.shape, ","), R"(],"data_offsets":[)", offset, ",", offset + tensor.bytes(), "]}");
    offset += tensor.bytes();
  }
  json += "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string header(8, '\0');
  for (size_t i = 0; i < 8; ++i) header[i] = static_cast<char>(static_cast<uint64_t>(json.size()) >> (8 * i));
  return header + json;
}

class ShardFile {
 public:
  static absl::StatusOr<ShardFile> Create(const std::string& path) {
    UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (fd.get() < 0) return absl::UnavailableError(absl::StrCat("can't create ", path, ": ", std::strerror(errno)));
    return ShardFile(path, std::move(fd));
  }
  absl::Status Write(const void* data, uint64_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t wrote = ::write(fd_.get(), at, bytes);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) {
        const std::string text = absl::StrCat("writing ", path_, ": ", std::strerror(errno));
        return errno == ENOSPC ? absl::ResourceExhaustedError(text) : absl::UnavailableError(text);
      }
      at += wrote;
      bytes -= static_cast<uint64_t>(wrote);
    }
    return absl::OkStatus();
  }
  absl::Status Close() {
    if (::close(fd_.Release()) != 0) return absl::UnavailableError(absl::StrCat("closing ", path_, ": ", std::strerror(errno)));
    return absl::OkStatus();
  }

 private:
  ShardFile(std::string path, UniqueFd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  std::string path_;
  UniqueFd fd_;
};

absl::Status PrepareDirectory(const std::string& dir, uint64_t bytes) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) return absl::UnavailableError(absl::StrCat("can't make ", dir, ": ", error.message()));
  const bool is_empty = fs::is_empty(dir, error);
  if (error) return absl::UnavailableError(absl::StrCat("can't list ", dir, ": ", error.message()));
  if (!is_empty) return absl::FailedPreconditionError(absl::StrCat(dir, " is not empty; name a new directory or empty it"));
  struct statvfs disk;
  if (::statvfs(dir.c_str(), &disk) == 0) {
    const uint64_t free = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
    if (free < bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("the checkpoint needs ", HumanBytes(static_cast<double>(bytes)), ", the disk of ", dir,
                                                       " has ", HumanBytes(static_cast<double>(free)), " free"));
    }
  }
  return absl::OkStatus();
}

// The tokenizer files to write, read or made before anything is written, so that a wrong tokenizer_dir fails in a
// moment.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> TokenizerFiles(const ModelConfig& config, const std::string& from) {
  std::vector<std::pair<std::string, std::string>> files;
  if (from.empty()) {
    if (config.vocab_size < kByteTokenizerIds) {
      return absl::InvalidArgumentError(absl::StrCat("vocab_size ", config.vocab_size, " is too small for the byte-level tokenizer, which needs ",
                                                     kByteTokenizerIds, "; raise it or name a tokenizer_dir"));
    }
    files.emplace_back("tokenizer.json", ByteTokenizerJson(config.vocab_size));
    files.emplace_back("tokenizer_config.json", ByteTokenizerConfigJson(config.max_position_embeddings));
    return files;
  }
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    absl::StatusOr<std::string> text = ReadSmallFile(absl::StrCat(from, "/", name), kTokenizerBytesMax);
    if (absl::IsNotFound(text.status()) && std::string_view(name) == "chat_template.jinja") continue;
    if (!text.ok()) return Annotate(text.status(), "tokenizer_dir");
    files.emplace_back(name, *std::move(text));
  }
  return files;
}

std::string GenerationConfigJson(const ModelConfig& config) {
  nlohmann::ordered_json json = {{"_from_model_config", true}};
  if (config.bos_token_id) json["bos_token_id"] = *config.bos_token_id;
  if (config.eos_token_ids.size() == 1) json["eos_token_id"] = config.eos_token_ids[0];
  if (config.eos_token_ids.size() > 1) json["eos_token_id"] = config.eos_token_ids;
  return json.dump(1) + "\n";
}

std::string IndexJson(const std::vector<Shard>& shards, uint64_t total) {
  std::string map;
  for (const Shard& shard : shards) {
    for (const SynthTensor& tensor : shard.tensors) {
      absl::StrAppend(&map, map.empty() ? "" : ",", "\n  \"", tensor.name, "\": \"", shard.file, "\"");
    }
  }
  return absl::StrCat("{\n \"metadata\": {\"total_size\": ", total, "},\n \"weight_map\": {", map, "\n }\n}\n");
}

}  // namespace

absl::Status WriteSynthCheckpoint(const std::string& config_json, const SynthOptions& options) {
  ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(config_json, ""));
  if (options.out_dir.empty()) return absl::InvalidArgumentError("out_dir is missing");
  ASSIGN_OR_RETURN(const auto tokenizer_files, TokenizerFiles(config, options.tokenizer_dir));
  ASSIGN_OR_RETURN(std::vector<SynthTensor> tensors, DescribeTensors(config));
  const std::vector<Shard> shards = CutShards(std::move(tensors), options.shard_bytes);
  uint64_t total = 0;
  for (const Shard& shard : shards) total += shard.bytes;
  RETURN_IF_ERROR(PrepareDirectory(options.out_dir, total));

  SynthValues values(options.seed);
  uint64_t done = 0;
  for (const Shard& shard : shards) {
    ASSIGN_OR_RETURN(ShardFile file, ShardFile::Create(options.out_dir + "/" + shard.file));
    const std::string header = ShardHeader(shard);
    RETURN_IF_ERROR(file.Write(header.data(), header.size()));
    for (const SynthTensor& tensor : shard.tensors) {
      const auto write = [&](const void* data, uint64_t bytes) {
        RETURN_IF_ERROR(file.Write(data, bytes));
        done += bytes;
        if (options.progress) options.progress(done, total);
        return absl::OkStatus();
      };
      RETURN_IF_ERROR(tensor.literal.empty() ? values.Stream(tensor.values_of, tensor.spec, tensor.count(), write)
                                             : write(tensor.literal.data(), tensor.literal.size()));
    }
    RETURN_IF_ERROR(file.Close());
  }
  const std::string prefix = options.out_dir + "/";
  if (shards.size() > 1) RETURN_IF_ERROR(WriteSmallFile(prefix + "model.safetensors.index.json", IndexJson(shards, total)));
  for (const auto& [name, text] : tokenizer_files) RETURN_IF_ERROR(WriteSmallFile(prefix + name, text));
  RETURN_IF_ERROR(WriteSmallFile(prefix + "generation_config.json", GenerationConfigJson(config)));
  // Last, because a directory without config.json is no model: an interrupted run can't be taken for a whole one.
  return WriteSmallFile(prefix + "config.json", config_json);
}

}  // namespace hearth
