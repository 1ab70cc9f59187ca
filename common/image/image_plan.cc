// Laying out a weight image. Contract: image_plan.h. Room: common/image.
#include "common/image/image_plan.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <numeric>

#include "common/base/align.h"
#include "common/formats/file_io.h"
#include "common/formats/tensor_plan.h"
#include "common/shm/expert_record.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

// Whether two tensors of a checkpoint hold the same bytes; reads both, up to the first difference.
absl::StatusOr<bool> AreEqual(const Checkpoint& checkpoint, const CheckpointTensor& a, const CheckpointTensor& b) {
  if (a.dtype != b.dtype || a.bytes != b.bytes) return false;
  constexpr uint64_t kStep = 4 << 20;
  std::array<std::string, 2> bytes;
  std::array<OpenedFile, 2> files;
  const std::array<const CheckpointTensor*, 2> tensors = {&a, &b};
  const auto path = [&](size_t i) -> const std::string& { return checkpoint.files()[static_cast<size_t>(tensors[i]->file)].path; };
  for (size_t i = 0; i < 2; ++i) {
    ASSIGN_OR_RETURN(files[i], OpenRegularFile(path(i)));
  }
  for (uint64_t at = 0; at < a.bytes; at += kStep) {
    for (size_t i = 0; i < 2; ++i) {
      bytes[i].resize(std::min(kStep, a.bytes - at));
      RETURN_IF_ERROR(ReadExactly(files[i].fd.get(), path(i), tensors[i]->offset + at, bytes[i].data(), bytes[i].size()));
    }
    if (bytes[0] != bytes[1]) return false;
  }
  return true;
}

// The MTP module's tensors that the image holds: all, or none where the checkpoint lacks it. A copy of a tensor of the main model, which costs
// gigabytes in a large one, is not held twice once its bytes have proved equal.
absl::StatusOr<std::vector<PlannedTensor>> PlanMtp(const Checkpoint& checkpoint, ModelConfig& config) {
  std::vector<PlannedTensor> planned = PlanMtpTensors(config);
  if (planned.empty()) return planned;
  if (!HasMtpModule(planned, checkpoint)) {
    config.notes.push_back(absl::StrCat("config.json names an MTP module (num_nextn_predict_layers = ", config.num_nextn_predict_layers,
                                        "), the checkpoint has no tensor of it: no speculation"));
    return std::vector<PlannedTensor>();
  }
  RETURN_IF_ERROR(CheckPlan(config, planned, checkpoint));
  std::vector<PlannedTensor> held;
  for (PlannedTensor& tensor : planned) {
    if (!tensor.copy_of.empty()) {
      const CheckpointTensor* copy = checkpoint.Find(tensor.name);
      if (copy == nullptr) continue;
      const CheckpointTensor* original = checkpoint.Find(tensor.copy_of);
      if (original != nullptr) {
        ASSIGN_OR_RETURN(const bool equal, AreEqual(checkpoint, *copy, *original));
        if (equal) continue;
      }
    }
    held.push_back(std::move(tensor));
  }
  return held;
}

// Which experts go to disk. Every segment's disk part begins where its resident part ends, which a second layout knows of the first.
struct Spill {
  int64_t on_disk = 0;  // of a layer's experts, as IsOnDisk spreads them
  std::vector<uint64_t> resident_bytes;
};

// Adds rows and sources to a plan, handing out places in the segments.
class Layouter {
 public:
  Layouter(ImagePlan& plan, int num_shards, const Spill& spill)
      : plan_(plan),
        num_shards_(num_shards),
        spill_(spill),
        used_(static_cast<size_t>(num_shards), 0),
        on_disk_(static_cast<size_t>(num_shards), 0) {}

  absl::Status AddDense(const PlannedTensor& planned) {
    ASSIGN_OR_RETURN(const CheckpointTensor* tensor, Find(planned.name));
    if (tensor->shape.empty() || tensor->shape.size() > kManifestRankMax) {
      return absl::InvalidArgumentError(absl::StrCat(planned.name, ": tensors of rank ", tensor->shape.size(), " are not supported"));
    }
    const uint32_t segment = planned.layer < 0 ? 0 : static_cast<uint32_t>(planned.layer % num_shards_);
    const uint32_t target = static_cast<uint32_t>(plan_.manifest.tensors.size());
    TensorRow row{};
    row.dtype = static_cast<uint32_t>(tensor->dtype);
    row.rank = static_cast<uint32_t>(tensor->shape.size());
    for (uint32_t i = 0; i < kManifestRankMax; ++i) row.dims[i] = i < row.rank ? tensor->shape[i] : 1;
    row.segment = segment;
    uint64_t elements = 1;
    for (const int64_t side : tensor->shape) elements *= static_cast<uint64_t>(side);
    row.bytes = DTypeBytes(tensor->dtype, elements);
    uint64_t end = row.bytes;
    const CheckpointTensor* scales = nullptr;
    if (tensor->dtype == DType::kF8E4M3) {
      ASSIGN_OR_RETURN(scales, Find(planned.name + "_scale_inv"));
      row.scale_rows = static_cast<uint32_t>(ScaleBlocks(row.dims[0]));
      row.scale_cols = static_cast<uint32_t>(ScaleBlocks(row.dims[1]));
      row.scale_bytes = uint64_t{row.scale_rows} * row.scale_cols * sizeof(float);
      row.scale_offset = AlignUp(end, kRecordPartAlign);
      end = row.scale_offset + row.scale_bytes;
    }
    row.offset = Take(segment, end);
    if (scales != nullptr) row.scale_offset += row.offset;
    if (tensor->dtype == DType::kI4G32) {
      ASSIGN_OR_RETURN(const std::vector<Part> parts, PartsOf(*tensor));
      for (const Part& part : parts) {
        const uint64_t rows = elements / static_cast<uint64_t>(tensor->shape.back()), width = part.Bytes(static_cast<uint64_t>(tensor->shape.back()));
        const uint64_t stride = DTypeBytes(tensor->dtype, static_cast<uint64_t>(tensor->shape.back()));
        AddRect(part.source, CopyRect{target, segment, 0, rows, 0, width, row.offset + part.to, stride});
      }
    } else {
      AddWhole(*tensor, false, target, segment, row.offset);
    }
    if (scales != nullptr) AddWhole(*scales, true, target, segment, row.scale_offset);
    plan_.manifest.tensors.push_back(row);
    plan_.manifest.tensor_names.push_back(planned.name);
    return absl::OkStatus();
  }

  // `parts`: gate, up, down of one expert. Its target numbers begin at `first_target`.
  absl::Status AddExpert(int64_t layer, int64_t expert, const std::array<std::string, 3>& parts, uint32_t first_target) {
    std::array<const CheckpointTensor*, 3> weights;
    std::array<const CheckpointTensor*, 3> scales{};
    for (size_t i = 0; i < parts.size(); ++i) {
      ASSIGN_OR_RETURN(weights[i], Find(parts[i]));
      if ((weights[i]->dtype == DType::kF8E4M3) != (weights[0]->dtype == DType::kF8E4M3)) {
        return absl::InvalidArgumentError(absl::StrCat(parts[i], " is ", Sv(DTypeName(weights[i]->dtype)), ", but ", parts[0], " is ",
                                                       Sv(DTypeName(weights[0]->dtype)), ": an expert's three matrices must all be FP8, or none"));
      }
      if (weights[0]->dtype == DType::kF8E4M3) {
        ASSIGN_OR_RETURN(scales[i], Find(parts[i] + "_scale_inv"));
      }
    }
    const ExpertDTypes dtypes(weights[0]->dtype, weights[1]->dtype, weights[2]->dtype);
    const int64_t hidden = plan_.config.hidden_size;
    const int64_t intermediate = plan_.config.moe_intermediate_size;
    if (hidden > kRecordSideMax || intermediate > kRecordSideMax) {
      return absl::InvalidArgumentError(absl::StrCat("hidden_size and moe_intermediate_size must be at most ", kRecordSideMax));
    }
    std::array<std::vector<Part>, 3> weight_parts;
    std::array<size_t, 3> scale_sources{};
    for (size_t i = 0; i < 3; ++i) {
      ASSIGN_OR_RETURN(weight_parts[i], PartsOf(*weights[i]));
      if (scales[i] != nullptr) scale_sources[i] = AddSource(*scales[i], true, static_cast<uint64_t>(scales[i]->shape[1]) * sizeof(float));
    }
    for (int shard = 0; shard < num_shards_; ++shard) {
      const ShardRange range = ExpertShard(intermediate, shard, num_shards_, ExpertShardBlock(dtypes));
      const uint32_t segment = static_cast<uint32_t>(shard);
      const ExpertRecordLayout layout = ExpertRecordLayout::Of(dtypes, range.count, hidden);
      ExpertRow row{};
      row.layer = static_cast<uint32_t>(layer);
      row.expert = static_cast<uint32_t>(expert);
      row.shard = segment;
      row.segment = segment;
      row.bytes = layout.bytes;
      row.begin = range.begin;
      row.count = range.count;
      row.gate_dtype = static_cast<uint8_t>(dtypes.gate);
      row.up_dtype = static_cast<uint8_t>(dtypes.up);
      row.down_dtype = static_cast<uint8_t>(dtypes.down);
      row.hidden = static_cast<uint32_t>(hidden);
      if (range.count > 0) {
        row.offset = IsOnDisk(expert, spill_.on_disk, plan_.config.n_routed_experts) ? TakeOnDisk(segment, row.bytes) : Take(segment, row.bytes);
      }
      plan_.manifest.experts.push_back(row);
      if (range.count == 0) continue;
      const uint32_t target = first_target + static_cast<uint32_t>(shard);
      // `columns`: the shard takes columns of the source (down) instead of rows (gate, up).
      const auto cut = [&](const Part& part, bool columns, uint64_t begin, uint64_t count, uint64_t other, uint64_t to) {
        CopyRect rect;
        rect.target = target;
        rect.segment = segment;
        rect.row_begin = columns ? 0 : begin;
        rect.rows = columns ? other : count;
        rect.col_begin = columns ? part.Bytes(begin) : 0;
        rect.col_bytes = part.Bytes(columns ? count : other);
        rect.to = row.offset + to + part.to;
        rect.to_stride = part.PlacedBytes(columns ? count : other);
        AddRect(part.source, rect);
      };
      const uint64_t begin = static_cast<uint64_t>(range.begin), count = static_cast<uint64_t>(range.count);
      const uint64_t width = static_cast<uint64_t>(hidden);
      for (const Part& part : weight_parts[0]) cut(part, false, begin, count, width, layout.gate);
      for (const Part& part : weight_parts[1]) cut(part, false, begin, count, width, layout.up);
      for (const Part& part : weight_parts[2]) cut(part, true, begin, count, width, layout.down);
      if (dtypes.gate != DType::kF8E4M3) continue;
      const uint64_t begin_block = begin / kScaleBlock, count_blocks = static_cast<uint64_t>(ScaleBlocks(range.count));
      const uint64_t width_blocks = static_cast<uint64_t>(ScaleBlocks(hidden));
      const auto scales_of = [&](size_t source) {
        return Part{.source = source, .columns = 1, .bytes = sizeof(float), .placed_bytes = sizeof(float)};
      };
      cut(scales_of(scale_sources[0]), false, begin_block, count_blocks, width_blocks, layout.gate_scales);
      cut(scales_of(scale_sources[1]), false, begin_block, count_blocks, width_blocks, layout.up_scales);
      cut(scales_of(scale_sources[2]), true, begin_block, count_blocks, width_blocks, layout.down_scales);
    }
    return absl::OkStatus();
  }

  void Finish() {
    for (size_t i = 0; i < used_.size(); ++i) plan_.manifest.segments.push_back(SegmentRow{used_[i], on_disk_[i]});
    std::sort(plan_.sources.begin(), plan_.sources.end(), [](const ImageSource& a, const ImageSource& b) {
      return std::pair(a.tensor->file, a.tensor->offset) < std::pair(b.tensor->file, b.tensor->offset);
    });
    for (const ImageSource& source : plan_.sources) plan_.read_bytes += source.tensor->bytes;
  }

 private:
  // A source that brings a matrix or a part of each of its blocks: `bytes` of it for every `columns`, which stand in `placed_bytes` of the target.
  struct Part {
    size_t source = 0;
    uint64_t columns = 1;
    uint64_t bytes = 0;
    uint64_t placed_bytes = 0;
    uint64_t to = 0;  // where in a block its bytes begin
    uint64_t Bytes(uint64_t n) const { return n / columns * bytes; }
    uint64_t PlacedBytes(uint64_t n) const { return n / columns * placed_bytes; }
  };

  // The sources of a weight [rows, columns]: itself, or for INT4 its nibbles and its scales.
  absl::StatusOr<std::vector<Part>> PartsOf(const CheckpointTensor& tensor) {
    const DTypeBlock block = BlockOf(tensor.dtype);
    const uint64_t columns = static_cast<uint64_t>(block.elements), bytes = static_cast<uint64_t>(block.bytes);
    const uint64_t width = static_cast<uint64_t>(tensor.shape.back());
    if (tensor.dtype != DType::kI4G32) {
      return std::vector<Part>{
          {.source = AddSource(tensor, false, DTypeBytes(tensor.dtype, width)), .columns = columns, .bytes = bytes, .placed_bytes = bytes}};
    }
    const Int4Names names = Int4NamesOf(tensor.name);
    std::vector<Part> parts = {{.columns = columns, .bytes = sizeof(bf16), .placed_bytes = bytes, .to = 0},
                               {.columns = columns, .bytes = bytes - sizeof(bf16), .placed_bytes = bytes, .to = sizeof(bf16)}};
    for (size_t i = 0; i < parts.size(); ++i) {
      ASSIGN_OR_RETURN(const CheckpointTensor* source, Find(i == 0 ? names.scale : names.packed));
      parts[i].source = AddSource(*source, false, parts[i].Bytes(width));
      plan_.sources[parts[i].source].run_bytes = parts[i].bytes;
      plan_.sources[parts[i].source].run_stride = bytes;
    }
    return parts;
  }

  absl::StatusOr<const CheckpointTensor*> Find(const std::string& name) const {
    const CheckpointTensor* tensor = plan_.checkpoint.Find(name);
    if (tensor == nullptr) return absl::NotFoundError(absl::StrCat("tensor ", name, " is missing in ", plan_.checkpoint.dir()));
    return tensor;
  }

  uint64_t Take(uint32_t segment, uint64_t bytes) {
    const uint64_t begin = used_[segment];
    used_[segment] = AlignUp(begin + bytes, kImageAlign);
    return begin;
  }

  uint64_t TakeOnDisk(uint32_t segment, uint64_t bytes) {
    const uint64_t begin = on_disk_[segment];
    on_disk_[segment] = AlignUp(begin + bytes, kImageAlign);
    return spill_.resident_bytes[segment] + begin;
  }

  // Returns its index: the vector moves while it grows.
  size_t AddSource(const CheckpointTensor& tensor, bool is_scale, uint64_t row_bytes) {
    ImageSource source;
    source.tensor = &tensor;
    source.is_scale = is_scale;
    source.widen = is_scale && tensor.dtype == DType::kBF16;
    source.row_bytes = row_bytes;
    plan_.sources.push_back(std::move(source));
    return plan_.sources.size() - 1;
  }

  void AddRect(size_t source, const CopyRect& rect) {
    if (plan_.target_parts.size() <= rect.target) plan_.target_parts.resize(rect.target + 1, 0);
    ++plan_.target_parts[rect.target];
    plan_.sources[source].rects.push_back(rect);
  }

  void AddWhole(const CheckpointTensor& tensor, bool is_scale, uint32_t target, uint32_t segment, uint64_t to) {
    const uint64_t bytes = is_scale ? tensor.bytes / DTypeBytes(tensor.dtype, 1) * sizeof(float) : tensor.bytes;
    AddRect(AddSource(tensor, is_scale, bytes), CopyRect{target, segment, 0, 1, 0, bytes, to, bytes});
  }

  ImagePlan& plan_;
  const int num_shards_;
  const Spill spill_;
  std::vector<uint64_t> used_;
  std::vector<uint64_t> on_disk_;
};

// Rows and sources of all planned tensors, into a plan that has its config and checkpoint.
absl::Status LayOut(const std::vector<PlannedTensor>& planned, int num_shards, const Spill& spill, ImagePlan& plan) {
  Layouter layouter(plan, num_shards, spill);
  std::map<std::pair<int64_t, int64_t>, std::array<std::string, 3>> experts;
  uint32_t num_dense = 0;
  for (const PlannedTensor& tensor : planned) num_dense += tensor.expert < 0;
  // Dense tensors first, then the experts layer by layer, so that a pass walks each segment from front to back.
  for (const PlannedTensor& tensor : planned) {
    if (tensor.expert < 0) {
      RETURN_IF_ERROR(layouter.AddDense(tensor));
      continue;
    }
    const size_t part = tensor.role == TensorRole::kExpertGate ? 0 : tensor.role == TensorRole::kExpertUp ? 1 : 2;
    experts[{tensor.layer, tensor.expert}][part] = tensor.name;
  }
  plan.manifest.num_experts = static_cast<uint32_t>(plan.config.n_routed_experts);
  uint32_t target = num_dense;
  for (const auto& [key, parts] : experts) {
    RETURN_IF_ERROR(layouter.AddExpert(key.first, key.second, parts, target));
    target += static_cast<uint32_t>(num_shards);
  }
  layouter.Finish();
  plan.target_parts.resize(target, 0);
  return absl::OkStatus();
}

// What must go to disk of an image that was laid out without a limit.
absl::StatusOr<Spill> SpillOf(const ImagePlan& plan, uint64_t image_bytes_max) {
  const int64_t num_experts = plan.config.n_routed_experts;
  std::vector<std::vector<uint64_t>> bytes(static_cast<size_t>(num_experts), std::vector<uint64_t>(plan.manifest.segments.size()));  // [id, segment]
  for (const ExpertRow& row : plan.manifest.experts) bytes[row.expert][row.segment] += AlignUp(row.bytes, kImageAlign);
  uint64_t resident = 0;
  for (int64_t on_disk = 0; on_disk <= num_experts; ++on_disk) {
    Spill spill{.on_disk = on_disk, .resident_bytes = {}};
    for (const SegmentRow& segment : plan.manifest.segments) spill.resident_bytes.push_back(segment.used_bytes);
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      for (size_t s = 0; IsOnDisk(expert, on_disk, num_experts) && s < spill.resident_bytes.size(); ++s) {
        spill.resident_bytes[s] -= bytes[static_cast<size_t>(expert)][s];
      }
    }
    resident = std::accumulate(spill.resident_bytes.begin(), spill.resident_bytes.end(), uint64_t{0});
    if (resident <= image_bytes_max) return spill;
  }
  return absl::InvalidArgumentError(absl::StrCat("weightstore.image_bytes_max = ", image_bytes_max, " holds less than what must be in memory: ",
                                                 resident, " bytes of all that is no routed expert; raise it"));
}

absl::Status CheckShards(int num_shards) {
  if (num_shards >= 1 && num_shards <= static_cast<int>(kManifestSegmentsMax)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(num_shards, " shards: supported are 1 to ", kManifestSegmentsMax));
}

}  // namespace

uint64_t ImagePlan::segment_bytes() const {
  return std::accumulate(manifest.segments.begin(), manifest.segments.end(), uint64_t{0},
                         [](uint64_t sum, const SegmentRow& row) { return sum + row.used_bytes + row.disk_bytes; });
}

uint64_t ImagePlan::expert_bytes() const {
  return std::accumulate(manifest.experts.begin(), manifest.experts.end(), uint64_t{0},
                         [](uint64_t sum, const ExpertRow& row) { return sum + AlignUp(row.bytes, kImageAlign); });
}

std::string ManifestTargetName(const Manifest& manifest, uint32_t target) {
  if (target < manifest.tensors.size()) return manifest.tensor_names[target];
  const ExpertRow& row = manifest.experts[target - manifest.tensors.size()];
  return absl::StrCat("model.layers.", row.layer, ".mlp.experts.", row.expert, ", shard ", row.shard, " of ", manifest.segments.size());
}

std::string ImagePlan::TargetName(uint32_t target) const { return ManifestTargetName(manifest, target); }

absl::StatusOr<ImagePlan> PlanImage(const std::string& model_path, int num_shards, uint64_t image_bytes_max) {
  RETURN_IF_ERROR(CheckShards(num_shards));
  ImagePlan plan;
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(model_path));
  ASSIGN_OR_RETURN(ModelTexts texts, ReadModelTexts(files));
  plan.manifest.config_json = std::move(texts.config_json);
  plan.manifest.generation_config_json = std::move(texts.generation_config_json);
  plan.manifest.model_dir = model_path;
  absl::StatusOr<ModelConfig> config = ParseModelConfig(plan.manifest.config_json, plan.manifest.generation_config_json);
  if (!config.ok()) return Annotate(config.status(), model_path);
  plan.config = *std::move(config);
  ASSIGN_OR_RETURN(plan.checkpoint, Checkpoint::Open(files));
  std::vector<PlannedTensor> planned = PlanTensors(plan.config);
  RETURN_IF_ERROR(CheckPlan(plan.config, planned, plan.checkpoint));
  ASSIGN_OR_RETURN(std::vector<PlannedTensor> mtp, PlanMtp(plan.checkpoint, plan.config));
  planned.insert(planned.end(), std::make_move_iterator(mtp.begin()), std::make_move_iterator(mtp.end()));

  plan.manifest.image_bytes_max = image_bytes_max;
  if (image_bytes_max == 0) {
    RETURN_IF_ERROR(LayOut(planned, num_shards, {}, plan));
    return plan;
  }
  ImagePlan whole = plan;  // laid out without a limit: all sizes are known only then
  RETURN_IF_ERROR(LayOut(planned, num_shards, {}, whole));
  if (whole.segment_bytes() <= image_bytes_max) return whole;
  ASSIGN_OR_RETURN(const Spill spill, SpillOf(whole, image_bytes_max));
  RETURN_IF_ERROR(LayOut(planned, num_shards, spill, plan));
  return plan;
}

absl::StatusOr<Manifest> DescribeImage(const ModelTexts& texts, int num_shards) {
  RETURN_IF_ERROR(CheckShards(num_shards));
  ImagePlan plan;
  plan.manifest.config_json = texts.config_json;
  plan.manifest.generation_config_json = texts.generation_config_json;
  ASSIGN_OR_RETURN(plan.config, ParseModelConfig(texts.config_json, texts.generation_config_json));
  plan.checkpoint = DescribeCheckpoint(plan.config);
  RETURN_IF_ERROR(LayOut(PlanTensors(plan.config), num_shards, {}, plan));
  return std::move(plan.manifest);
}

Hash128 ModelFingerprint(const ImagePlan& plan, const std::vector<Hash128>& digests) {
  std::vector<size_t> order(plan.sources.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return plan.sources[a].tensor->name < plan.sources[b].tensor->name; });
  Hasher128 hasher;
  const auto text = [&](const std::string& s) {  // with its length, so that no two lists of texts run together alike
    hasher.UpdateValue(static_cast<uint64_t>(s.size()));
    hasher.Update(s);
  };
  text("hearth model 1");
  text(plan.manifest.config_json);
  for (const size_t i : order) {
    const CheckpointTensor& tensor = *plan.sources[i].tensor;
    text(tensor.name);
    hasher.UpdateValue(static_cast<uint32_t>(tensor.dtype));
    hasher.UpdateValue(static_cast<uint32_t>(tensor.shape.size()));
    for (const int64_t dim : tensor.shape) hasher.UpdateValue(dim);
    hasher.UpdateValue(digests[i]);
  }
  return hasher.Digest();
}

}  // namespace hearth
