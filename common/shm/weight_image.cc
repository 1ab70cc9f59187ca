// Attaching to a published image: check, map, look up. Contract: weight_image.h. Room: common/shm.
#include "common/shm/weight_image.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "common/base/check.h"
#include "common/base/time.h"
#include "common/shm/expert_record.h"
#include "common/shm/manifest.h"
#include "common/shm/mapped_file_guard.h"

namespace hearth {
namespace {

// Addresses without memory behind them: reads give zeros, and the first read of a page costs no memory either.
class EmptySegment {
 public:
  static absl::StatusOr<EmptySegment> Make(uint64_t bytes) {
    bytes = std::max<uint64_t>(bytes, 1);
    void* data = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("no ", HumanBytes(static_cast<double>(bytes)), " of addresses for an image without weights: ",
                                                       strerror(errno), "; raise the limit of address space (ulimit -v)"));
    }
    return EmptySegment(data, bytes);
  }
  EmptySegment(EmptySegment&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(o.bytes_) {}
  ~EmptySegment() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  const uint8_t* body() const { return static_cast<const uint8_t*>(data_); }

 private:
  EmptySegment(void* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Segment: what has a body().
template <typename Segment>
class MappedImage : public WeightImage {
 public:
  MappedImage(Manifest manifest, std::vector<Segment> segments, std::vector<std::optional<ShmRegion>> disk_parts = {},
              std::vector<std::unique_ptr<MappedFileGuard>> guards = {})
      : manifest_(std::move(manifest)), segments_(std::move(segments)), disk_parts_(std::move(disk_parts)), guards_(std::move(guards)) {
    for (size_t i = 0; i < segments_.size(); ++i) {
      const bool on_disk = i < disk_parts_.size() && disk_parts_[i].has_value();
      bytes_.push_back({segments_[i].body(), manifest_.segments[i].used_bytes, on_disk ? disk_parts_[i]->body() : nullptr});
    }
    for (size_t i = 0; i < manifest_.tensor_names.size(); ++i) by_name_.emplace(manifest_.tensor_names[i], i);
    const size_t layer_rows = LayerRows();
    for (size_t i = 0; i < manifest_.experts.size(); i += layer_rows) {
      const size_t layer = manifest_.experts[i].layer;
      if (first_row_.size() <= layer) first_row_.resize(layer + 1, -1);
      first_row_[layer] = static_cast<int64_t>(i);
    }
  }

  const Hash128& generation() const override { return manifest_.generation; }
  const Hash128& fingerprint() const override { return manifest_.fingerprint; }
  const std::string& config_json() const override { return manifest_.config_json; }
  const std::string& generation_config_json() const override { return manifest_.generation_config_json; }
  const std::string& model_dir() const override { return manifest_.model_dir; }
  int64_t num_shards() const override { return static_cast<int64_t>(segments_.size()); }
  uint64_t total_bytes() const override {
    uint64_t bytes = 0;
    for (const SegmentRow& segment : manifest_.segments) bytes += segment.used_bytes + segment.disk_bytes;
    return bytes;
  }
  uint64_t disk_bytes() const override {
    uint64_t bytes = 0;
    for (const SegmentRow& segment : manifest_.segments) bytes += segment.disk_bytes;
    return bytes;
  }
  std::vector<DiskPart> disk_parts() const override {
    std::vector<DiskPart> parts(segments_.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      if (bytes_[i].disk != nullptr) parts[i] = {disk_parts_[i]->path(), manifest_.segments[i].disk_bytes};
    }
    return parts;
  }
  std::vector<uint64_t> disk_record_bytes_max() const override {
    std::vector<uint64_t> most(segments_.size(), 0);
    for (const ExpertRow& row : manifest_.experts) {
      if (row.offset >= manifest_.segments[row.segment].used_bytes) most[row.segment] = std::max(most[row.segment], row.bytes);
    }
    return most;
  }
  const std::string& disk_dir() const override { return manifest_.disk_dir; }
  uint64_t image_bytes_max() const override { return manifest_.image_bytes_max; }
  std::vector<uint64_t> segment_bytes() const override {
    std::vector<uint64_t> bytes;
    for (const SegmentRow& segment : manifest_.segments) bytes.push_back(segment.used_bytes);
    return bytes;
  }
  const uint8_t* segment_data(int64_t shard) const override { return bytes_[static_cast<size_t>(shard)].resident; }

  Mark BeginReads() const override {
    Mark mark;
    for (const auto& guard : guards_) mark.push_back(guard->Begin());
    return mark;
  }
  absl::Status LostSince(const Mark& mark) const override {
    for (size_t i = 0; i < guards_.size(); ++i) RETURN_IF_ERROR(guards_[i]->LostSince(mark[i]));
    return absl::OkStatus();
  }

  absl::StatusOr<ImageTensor> Tensor(std::string_view name) const override {
    const auto it = by_name_.find(Sv(name));
    if (it == by_name_.end()) {
      return absl::NotFoundError(absl::StrCat("the weight image holds no tensor ", Sv(name), " (routed experts are found by Expert)"));
    }
    const TensorRow& row = manifest_.tensors[it->second];
    const uint8_t* base = bytes_[row.segment].resident;
    ImageTensor tensor;
    tensor.data = base + row.offset;
    tensor.dtype = static_cast<DType>(row.dtype);
    tensor.shape.assign(row.dims, row.dims + row.rank);
    if (row.scale_bytes > 0) {
      tensor.scales = reinterpret_cast<const float*>(base + row.scale_offset);
      tensor.scale_stride = row.scale_cols;
    }
    return tensor;
  }

  absl::StatusOr<ImageExpert> Expert(int64_t layer, int64_t expert, int64_t shard) const override {
    if (layer < 0 || layer >= static_cast<int64_t>(first_row_.size()) || first_row_[static_cast<size_t>(layer)] < 0) {
      return absl::NotFoundError(absl::StrCat("layer ", layer, " has no routed experts in the weight image"));
    }
    if (expert < 0 || expert >= manifest_.num_experts || shard < 0 || shard >= num_shards()) {
      return absl::NotFoundError(absl::StrCat("layer ", layer, " has no expert ", expert, ", shard ", shard, ": there are ", manifest_.num_experts,
                                              " experts of ", num_shards(), " shards"));
    }
    const size_t index = static_cast<size_t>(first_row_[static_cast<size_t>(layer)] + expert * num_shards() + shard);
    const ExpertRow& row = manifest_.experts[index];
    ImageExpert out;
    out.dtypes = DTypesOf(row);
    out.begin = row.begin;
    out.count = row.count;
    if (row.count == 0) return out;
    const SegmentBytes<const uint8_t>& bytes = bytes_[row.segment];
    const uint8_t* record = bytes.At(row.offset);
    if (row.offset >= bytes.resident_bytes) out.disk_offset = kRegionHeaderBytes + (row.offset - bytes.resident_bytes);
    const ExpertRecordLayout layout = ExpertRecordLayout::Of(out.dtypes, row.count, row.hidden);
    out.record = record;
    out.record_bytes = layout.bytes;
    out.gate = record + layout.gate;
    out.up = record + layout.up;
    out.down = record + layout.down;
    if (out.dtypes.gate == DType::kF8E4M3) {
      out.gate_scales = reinterpret_cast<const float*>(record + layout.gate_scales);
      out.up_scales = reinterpret_cast<const float*>(record + layout.up_scales);
      out.down_scales = reinterpret_cast<const float*>(record + layout.down_scales);
    }
    return out;
  }

 private:
  size_t LayerRows() const { return std::max<size_t>(1, manifest_.num_experts * segments_.size()); }

  const Manifest manifest_;
  const std::vector<Segment> segments_;
  const std::vector<std::optional<ShmRegion>> disk_parts_;      // by segment; may be shorter
  const std::vector<std::unique_ptr<MappedFileGuard>> guards_;  // of those that there are; behind the mappings, before which they go
  std::vector<SegmentBytes<const uint8_t>> bytes_;              // by segment
  absl::flat_hash_map<std::string, size_t> by_name_;
  std::vector<int64_t> first_row_;  // by layer; -1: no routed experts
};

std::string_view StateName(RegionState state) {
  switch (state) {
    case RegionState::kLoading: return "LOADING";
    case RegionState::kReady: return "READY";
    case RegionState::kRetired: return "RETIRED";
  }
  return "unknown";
}

absl::Status CheckBelongs(const ShmRegion& region, const Hash128& generation) {
  if (region.header().generation == generation) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(region.path(), ": belongs to generation ", region.header().generation.ToHex()));
}

absl::Status NotReady(const ShmRegion& region, RegionState state) {
  return absl::FailedPreconditionError(
      absl::StrCat(region.path(), ": is ", Sv(StateName(state)), ", not READY",
                   state == RegionState::kLoading ? ": still loading, or left over by a store that died" : ": a newer image replaces it"));
}

// A part of a READY image, at least as long as its manifest has it.
absl::StatusOr<ShmRegion> OpenPart(const std::string& path, RegionKind kind, uint64_t kind_version, const Hash128& generation, uint64_t bytes) {
  absl::StatusOr<ShmRegion> part = ShmRegion::Open(path, kind, kind_version, MapMode::kReadOnly);
  if (absl::IsNotFound(part.status())) return absl::DataLossError(absl::StrCat(part.status().message(), ": a part of the image is gone"));
  RETURN_IF_ERROR(part.status());
  RETURN_IF_ERROR(CheckBelongs(*part, generation));
  if (const RegionState state = part->state(); state != RegionState::kReady) return NotReady(*part, state);
  if (part->body_bytes() < bytes) {
    return absl::DataLossError(absl::StrCat(path, ": has ", part->body_bytes(), " bytes, the manifest needs ", bytes));
  }
  return part;
}

}  // namespace

ShardRange ExpertShard(int64_t intermediate, int64_t shard, int64_t num_shards, int64_t block) {
  HEARTH_CHECK(intermediate >= 0 && num_shards > 0 && shard >= 0 && shard < num_shards);
  const int64_t blocks = (intermediate + block - 1) / block;
  const int64_t begin = std::min(intermediate, shard * blocks / num_shards * block);
  const int64_t end = std::min(intermediate, (shard + 1) * blocks / num_shards * block);
  return {begin, end - begin};
}

std::string SegmentWhat(int64_t index) { return absl::StrCat("segment", index); }
std::string DiskWhat(int64_t index) { return absl::StrCat("disk", index); }

std::vector<SegmentBytes<const uint8_t>> ImageFiles::bytes() const {
  std::vector<SegmentBytes<const uint8_t>> bytes;
  for (size_t i = 0; i < segments.size(); ++i) {
    bytes.push_back({segments[i].body(), manifest.segments[i].used_bytes, disk_parts[i].has_value() ? disk_parts[i]->body() : nullptr});
  }
  return bytes;
}

std::string ImageFiles::PlaceOf(uint32_t segment, uint64_t offset) const {
  const uint64_t resident = manifest.segments[segment].used_bytes;
  const bool on_disk = offset >= resident && disk_parts[segment].has_value();
  return absl::StrCat((on_disk ? offset - resident : offset) + kRegionHeaderBytes, " of ",
                      on_disk ? disk_parts[segment]->path() : segments[segment].path());
}

absl::StatusOr<ImageFiles> OpenImageFiles(const RegionPlace& place, const Hash128& generation) {
  ASSIGN_OR_RETURN(ShmRegion region,
                   ShmRegion::Open(place.Path(kManifestWhat, generation), RegionKind::kManifest, kManifestVersion, MapMode::kReadOnly));
  RETURN_IF_ERROR(CheckBelongs(region, generation));
  if (const RegionState state = region.state(); state != RegionState::kReady) return NotReady(region, state);
  absl::StatusOr<Manifest> manifest = ReadManifest(region.body(), region.body_bytes());
  if (!manifest.ok()) return Annotate(manifest.status(), region.path());
  if (manifest->generation != generation) {
    return absl::DataLossError(absl::StrCat(region.path(), ": its rows belong to generation ", manifest->generation.ToHex()));
  }
  ImageFiles files;
  const RegionPlace on_disk{.dir = manifest->disk_dir, .node = place.node};
  for (size_t i = 0; i < manifest->segments.size(); ++i) {
    const SegmentRow& row = manifest->segments[i];
    const int64_t index = static_cast<int64_t>(i);
    ASSIGN_OR_RETURN(ShmRegion segment,
                     OpenPart(place.Path(SegmentWhat(index), generation), RegionKind::kSegment, kSegmentVersion, generation, row.used_bytes));
    files.segments.push_back(std::move(segment));
    std::optional<ShmRegion> part;
    if (row.disk_bytes > 0) {
      ASSIGN_OR_RETURN(part,
                       OpenPart(on_disk.Path(DiskWhat(index), generation), RegionKind::kDiskPart, kDiskPartVersion, generation, row.disk_bytes));
    }
    files.disk_parts.push_back(std::move(part));
  }
  files.manifest = *std::move(manifest);
  return files;
}

absl::StatusOr<std::shared_ptr<const WeightImage>> WeightImage::Attach(const RegionPlace& place, const Hash128& generation) {
  ASSIGN_OR_RETURN(ImageFiles files, OpenImageFiles(place, generation));
  std::vector<std::unique_ptr<MappedFileGuard>> guards;
  for (const std::optional<ShmRegion>& part : files.disk_parts) {
    if (!part.has_value()) continue;
    ASSIGN_OR_RETURN(std::unique_ptr<MappedFileGuard> guard, MappedFileGuard::Make(part->path(), part->base(), part->bytes()));
    guards.push_back(std::move(guard));
  }
  return std::make_shared<MappedImage<ShmRegion>>(std::move(files.manifest), std::move(files.segments), std::move(files.disk_parts),
                                                  std::move(guards));
}

absl::StatusOr<std::shared_ptr<const WeightImage>> WeightImage::WithoutWeights(Manifest manifest) {
  std::vector<EmptySegment> segments;
  for (const SegmentRow& row : manifest.segments) {
    ASSIGN_OR_RETURN(EmptySegment segment, EmptySegment::Make(row.used_bytes));
    segments.push_back(std::move(segment));
  }
  return std::make_shared<MappedImage<EmptySegment>>(std::move(manifest), std::move(segments));
}

}  // namespace hearth
