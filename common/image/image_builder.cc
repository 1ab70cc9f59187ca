// The steps from checkpoint to READY image, and back to proof. Contract: image_builder.h, docs/weight-image.md.
// Room: common/image.
#include "common/image/image_builder.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "common/base/logging.h"
#include "common/base/publish_point.h"
#include "common/base/time.h"
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

// Each row's bytes against its sum, in parallel; names the first row found wrong.
absl::Status CheckSums(const ImageFiles& image, const ReadOptions& options) {
  const uint32_t targets = NumTargets(image.manifest);
  uint64_t total = 0;
  for (uint32_t t = 0; t < targets; ++t) total += RangeOfTarget(image.manifest, t).bytes;
  std::atomic<uint32_t> next{0};
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  return RunWithProgress(options, total, done, stop, [&](int) -> absl::Status {
    while (!stop.load(std::memory_order_relaxed)) {
      const uint32_t target = next.fetch_add(1);
      if (target >= targets) break;
      const TargetRange range = RangeOfTarget(image.manifest, target);
      if (range.bytes == 0) continue;
      const uint64_t sum = Xxh3_64(image.segments[range.segment].body() + range.offset, range.bytes);
      if (sum != range.sum) {
        return absl::DataLossError(absl::StrCat(ManifestTargetName(image.manifest, target), ": its ", range.bytes, " bytes at ",
                                                range.offset + kRegionHeaderBytes, " of ", image.segments[range.segment].path(),
                                                " do not have the sum of the manifest: memory or software has changed them; load the model anew"));
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
  ASSIGN_OR_RETURN(ImagePlan plan, PlanImage(options.model_dir, options.num_shards));
  Manifest& manifest = plan.manifest;

  const ReadOptions read{ReaderThreads(options.num_threads), options.progress, options.cancelled};
  ImageNeeds needs;
  for (const SegmentRow& segment : manifest.segments) needs.segment_bytes.push_back(segment.used_bytes);
  needs.manifest_bytes = ManifestBytes(manifest);
  if (options.reserve) {
    ASSIGN_OR_RETURN(needs.reserve_bytes, options.reserve(manifest));
  }
  needs.heap_bytes = static_cast<uint64_t>(read.num_threads) * kReadBufferBytes;
  RETURN_IF_ERROR(CheckRoom(options.place.dir, needs));

  manifest.generation = RandomHash128();
  const Hash128& generation = manifest.generation;
  Unpublished unpublished(options.place, generation);
  BuildResult result;
  const Topology topology = DiscoverTopology();
  result.notes = plan.config.notes;
  result.notes.insert(result.notes.end(), topology.notes.begin(), topology.notes.end());
  ASSIGN_OR_RETURN(std::vector<ShmRegion> segments, CreateSegments(options.place, generation, needs.segment_bytes, topology,
                                                                   {.progress = options.allocating, .cancelled = options.cancelled}, result.notes));
  std::vector<uint8_t*> bodies;
  for (const ShmRegion& segment : segments) bodies.push_back(segment.body());
  ASSIGN_OR_RETURN(ShmRegion manifest_region, ShmRegion::Create(options.place.Path(kManifestWhat, generation), RegionKind::kManifest,
                                                                kManifestVersion, generation, needs.manifest_bytes));

  ImageWriter writer(plan, bodies);
  RETURN_IF_ERROR(ReadSources(plan, writer, read));
  SetSums(writer.sums(), manifest);
  manifest.fingerprint = ModelFingerprint(plan, writer.digests());
  PublishPoint("image.weights");
  WriteManifest(manifest, manifest_region.body());
  PublishPoint("image.rows");
  // What workers will check is checked once here, while it can still be refused.
  RETURN_IF_ERROR(ReadManifest(manifest_region.body(), manifest_region.body_bytes()).status());
  RETURN_IF_ERROR(CancelledIf(options));
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
  result.seconds = static_cast<double>(MonotonicNowNs() - started_ns) * 1e-9;
  return result;
}

absl::Status VerifyImage(const RegionPlace& place, const Hash128& generation, const std::string& model_dir,
                         const std::function<void(const LoadProgress&)>& progress) {
  ASSIGN_OR_RETURN(const ImageFiles image, OpenImageFiles(place, generation));
  const ReadOptions options{ReaderThreads(0), progress, nullptr};
  RETURN_IF_ERROR(CheckSums(image, options));
  if (model_dir.empty()) return absl::OkStatus();

  ASSIGN_OR_RETURN(const ImagePlan plan, PlanImage(model_dir, static_cast<int>(image.segments.size())));
  RETURN_IF_ERROR(CheckSamePlan(image.manifest, plan));
  std::vector<const uint8_t*> bodies;
  for (const ShmRegion& segment : image.segments) bodies.push_back(segment.body());
  ImageComparer comparer(plan, std::move(bodies));
  RETURN_IF_ERROR(ReadSources(plan, comparer, options));
  if (ModelFingerprint(plan, comparer.digests()) != image.manifest.fingerprint) {
    return absl::DataLossError("every tensor is equal, but the manifest's fingerprint is not that of the checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace hearth
