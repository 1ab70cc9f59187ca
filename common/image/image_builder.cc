// The steps from checkpoint to READY image, and back to proof. Contract: image_builder.h, docs/weight-image.md.
// Room: common/image.
#include "common/image/image_builder.h"

#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "common/base/align.h"
#include "common/base/logging.h"
#include "common/base/publish_point.h"
#include "common/base/time.h"
#include "common/disk/disk_reader.h"
#include "common/image/image_disk.h"
#include "common/image/image_plan.h"
#include "common/image/image_reader.h"
#include "common/image/image_room.h"
#include "common/image/image_segments.h"
#include "common/image/image_writer.h"
#include "common/numa/topology.h"
#include "common/shm/generations.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

// Removes a generation that was not published: no half image outlives an error.
class Unpublished {
 public:
  Unpublished(const RegionPlace& place, const Hash128& generation) : place_(place), generation_(generation) {}
  Unpublished(const Unpublished&) = delete;
  Unpublished& operator=(const Unpublished&) = delete;
  ~Unpublished() {
    if (published_) return;
    if (absl::Status status = RemoveGeneration(place_, generation_); !status.ok()) {
      spdlog::warn("left-overs of an image that was not finished: {}", std::string(status.message()));
    }
  }
  void Published() { published_ = true; }

 private:
  const RegionPlace place_;
  const Hash128 generation_;
  bool published_ = false;
};

absl::Status CancelledIf(const BuildOptions& options) {
  if (options.cancelled && options.cancelled()) return absl::CancelledError("loading was cancelled");
  return absl::OkStatus();
}

void SetSums(const std::vector<uint64_t>& sums, Manifest& manifest) {
  for (size_t i = 0; i < manifest.tensors.size(); ++i) manifest.tensors[i].sum = sums[i];
  for (size_t i = 0; i < manifest.experts.size(); ++i) manifest.experts[i].sum = sums[manifest.tensors.size() + i];
}

// What of a record's bytes lies on disk, read by calls that return an error where a mapping would end the process. One thread's.
class DiskBytes {
 public:
  explicit DiskBytes(const ImageFiles& image) : image_(image) {}
  // The bytes of a target in the disk part of its segment, until the next call.
  absl::StatusOr<const uint8_t*> Read(const TargetRange& range) {
    if (reader_ == nullptr) {
      std::vector<std::string> paths;
      for (const std::optional<ShmRegion>& part : image_.disk_parts) paths.push_back(part.has_value() ? part->path() : "");
      ASSIGN_OR_RETURN(reader_, DiskReader::Open(paths));
    }
    const uint64_t room = AlignUp(range.bytes, kDiskAlign);
    if (room > room_) {
      buffer_.reset(static_cast<uint8_t*>(aligned_alloc(kDiskAlign, room)));
      room_ = room;
      if (buffer_ == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no memory for a record of ", range.bytes, " bytes"));
    }
    const uint64_t offset = kRegionHeaderBytes + range.offset - image_.manifest.segments[range.segment].used_bytes;
    RETURN_IF_ERROR(reader_->Read(range.segment, offset, range.bytes, buffer_.get(), [] { return false; }));
    return buffer_.get();
  }

 private:
  struct FreeDeleter {
    void operator()(void* p) const { free(p); }
  };
  const ImageFiles& image_;
  uint64_t room_ = 0;
  std::unique_ptr<uint8_t, FreeDeleter> buffer_;
  std::unique_ptr<DiskReader> reader_;  // behind the buffer, which it reads into: gone first
};

// Each row's bytes against its sum, in parallel; names the first row found wrong.
absl::Status CheckSums(const ImageFiles& image, const ReadOptions& options) {
  const uint32_t targets = NumTargets(image.manifest);
  uint64_t total = 0;
  for (uint32_t t = 0; t < targets; ++t) total += RangeOfTarget(image.manifest, t).bytes;
  const std::vector<SegmentBytes<const uint8_t>> bytes = image.bytes();
  std::atomic<uint32_t> next{0};
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  return RunWithProgress(options, total, done, stop, [&](int) -> absl::Status {
    DiskBytes disk(image);
    while (!stop.load(std::memory_order_relaxed)) {
      const uint32_t target = next.fetch_add(1);
      if (target >= targets) break;
      const TargetRange range = RangeOfTarget(image.manifest, target);
      if (range.bytes == 0) continue;
      const uint8_t* data = bytes[range.segment].At(range.offset);
      if (range.offset >= bytes[range.segment].resident_bytes) {
        ASSIGN_OR_RETURN(data, disk.Read(range));
      }
      const uint64_t sum = Xxh3_64(data, range.bytes);
      if (sum != range.sum) {
        return absl::DataLossError(
            absl::StrCat(ManifestTargetName(image.manifest, target), ": its ", range.bytes, " bytes at ", image.PlaceOf(range.segment, range.offset),
                         " do not have the sum of the manifest: memory, disk or software has changed them; load the model anew"));
      }
      done.fetch_add(range.bytes, std::memory_order_relaxed);
    }
    return absl::OkStatus();
  });
}

// The image is of this very layout and these names: otherwise the comparison of bytes would be one of apples with
// pears.
absl::Status CheckSamePlan(const Manifest& image, const ImagePlan& plan) {
  const Manifest& fresh = plan.manifest;
  const auto differs = [&](const std::string& what) {
    return absl::DataLossError(absl::StrCat("image and checkpoint ", plan.checkpoint.dir(), " differ: ", what));
  };
  if (image.config_json != fresh.config_json) return differs("config.json is another");
  if (image.segments.size() != fresh.segments.size() || image.tensors.size() != fresh.tensors.size() ||
      image.experts.size() != fresh.experts.size()) {
    return differs("number of tensors");
  }
  for (size_t i = 0; i < fresh.tensors.size(); ++i) {
    const TensorRow &a = image.tensors[i], &b = fresh.tensors[i];
    if (image.tensor_names[i] != fresh.tensor_names[i]) return differs(absl::StrCat(image.tensor_names[i], " against ", fresh.tensor_names[i]));
    if (a.dtype != b.dtype || a.rank != b.rank || !std::equal(a.dims, a.dims + kManifestRankMax, b.dims) || a.segment != b.segment ||
        a.offset != b.offset || a.scale_offset != b.scale_offset) {
      return differs(absl::StrCat("tensor ", fresh.tensor_names[i], " has another dtype, shape or place"));
    }
  }
  for (size_t i = 0; i < fresh.experts.size(); ++i) {
    const ExpertRow &a = image.experts[i], &b = fresh.experts[i];
    if (a.layer != b.layer || a.expert != b.expert || a.segment != b.segment || a.offset != b.offset || a.begin != b.begin || a.count != b.count ||
        DTypesOf(a) != DTypesOf(b) || a.hidden != b.hidden) {
      return differs(absl::StrCat(plan.TargetName(static_cast<uint32_t>(fresh.tensors.size() + i)), " has another dtype, shape or place"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BuildResult> BuildImage(const BuildOptions& options) {
  const int64_t started_ns = MonotonicNowNs();
  RETURN_IF_ERROR(CancelledIf(options));
  RETURN_IF_ERROR(ShmAvailableBytes(options.place.dir).status());
  ASSIGN_OR_RETURN(ImagePlan plan, PlanImage(options.model_dir, options.num_shards, options.image_bytes_max));
  Manifest& manifest = plan.manifest;

  const ReadOptions read{ReaderThreads(options.num_threads), options.progress, options.cancelled};
  ImageNeeds needs;
  std::vector<uint64_t> disk_bytes;
  for (const SegmentRow& segment : manifest.segments) {
    needs.segment_bytes.push_back(segment.used_bytes);
    disk_bytes.push_back(segment.disk_bytes);
    needs.disk_bytes += segment.disk_bytes;
  }
  if (needs.disk_bytes > 0) manifest.disk_dir = options.place.disk_dir;
  needs.manifest_bytes = ManifestBytes(manifest);
  if (options.reserve) {
    ASSIGN_OR_RETURN(needs.reserve_bytes, options.reserve(manifest));
  }
  needs.heap_bytes = static_cast<uint64_t>(read.num_threads) * kReadBufferBytes;
  RETURN_IF_ERROR(CheckRoom(options.place.dir, needs));
  RETURN_IF_ERROR(CheckDiskRoom(options.place.disk_dir, needs));

  manifest.generation = RandomHash128();
  const Hash128& generation = manifest.generation;
  Unpublished unpublished(options.place, generation);
  BuildResult result;
  const Topology topology = DiscoverTopology();
  result.notes = plan.config.notes;
  result.notes.insert(result.notes.end(), topology.notes.begin(), topology.notes.end());
  const ReadOptions allocate{.progress = options.allocating, .cancelled = options.cancelled};
  ASSIGN_OR_RETURN(std::vector<std::optional<ShmRegion>> disk_parts, CreateDiskParts(options.place, generation, disk_bytes, allocate));
  ASSIGN_OR_RETURN(std::vector<ShmRegion> segments, CreateSegments(options.place, generation, needs.segment_bytes, topology, allocate, result.notes));
  std::vector<SegmentBytes<uint8_t>> bodies;
  for (size_t i = 0; i < segments.size(); ++i) {
    bodies.push_back({segments[i].body(), needs.segment_bytes[i], disk_parts[i].has_value() ? disk_parts[i]->body() : nullptr});
  }
  ASSIGN_OR_RETURN(ShmRegion manifest_region, ShmRegion::Create(options.place.Path(kManifestWhat, generation), RegionKind::kManifest,
                                                                kManifestVersion, generation, needs.manifest_bytes));

  ImageWriter writer(plan, bodies);
  RETURN_IF_ERROR(ReadSources(plan, writer, read));
  RETURN_IF_ERROR(FlushDiskParts(disk_parts, {.progress = options.flushing, .cancelled = options.cancelled}));
  SetSums(writer.sums(), manifest);
  manifest.fingerprint = ModelFingerprint(plan, writer.digests());
  PublishPoint("image.weights");
  WriteManifest(manifest, manifest_region.body());
  PublishPoint("image.rows");
  // What workers will check is checked once here, while it can still be refused.
  RETURN_IF_ERROR(ReadManifest(manifest_region.body(), manifest_region.body_bytes()).status());
  RETURN_IF_ERROR(CancelledIf(options));
  for (std::optional<ShmRegion>& part : disk_parts) {
    if (!part.has_value()) continue;
    part->SetState(RegionState::kReady);
    PublishPoint("image.disk_ready");
  }
  for (ShmRegion& segment : segments) {
    segment.SetState(RegionState::kReady);
    PublishPoint("image.segment_ready");
  }
  if (options.before_ready) RETURN_IF_ERROR(options.before_ready(generation));
  manifest_region.SetState(RegionState::kReady);
  PublishPoint("image.ready");
  unpublished.Published();

  NotePlacement(segments, topology, result.notes);
  result.generation = generation;
  result.fingerprint = manifest.fingerprint;
  result.bytes = plan.segment_bytes();
  result.disk_bytes = needs.disk_bytes;
  result.seconds = static_cast<double>(MonotonicNowNs() - started_ns) * 1e-9;
  return result;
}

absl::Status VerifyImage(const RegionPlace& place, const Hash128& generation, const std::string& model_dir,
                         const std::function<void(const LoadProgress&)>& progress) {
  ASSIGN_OR_RETURN(const ImageFiles image, OpenImageFiles(place, generation));
  const ReadOptions options{ReaderThreads(0), progress, nullptr};
  RETURN_IF_ERROR(CheckSums(image, options));
  if (model_dir.empty()) return absl::OkStatus();

  ASSIGN_OR_RETURN(const ImagePlan plan, PlanImage(model_dir, static_cast<int>(image.segments.size()), image.manifest.image_bytes_max));
  RETURN_IF_ERROR(CheckSamePlan(image.manifest, plan));
  ImageComparer comparer(plan, image.bytes());
  RETURN_IF_ERROR(ReadSources(plan, comparer, options));
  if (ModelFingerprint(plan, comparer.digests()) != image.manifest.fingerprint) {
    return absl::DataLossError("every tensor is equal, but the manifest's fingerprint is not that of the checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace hearth
