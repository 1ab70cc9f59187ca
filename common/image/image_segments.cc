// Segments on their nodes. Contract: image_segments.h. Room: common/image.
#include "common/image/image_segments.h"

#include <algorithm>
#include <optional>
#include <set>

#include "common/base/time.h"
#include "common/numa/placement.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

size_t MemoryNodes(const Topology& topology) {
  return static_cast<size_t>(std::count_if(topology.nodes.begin(), topology.nodes.end(), [](const NumaNode& node) { return node.memory_bytes > 0; }));
}

bool Placeable(const Topology& topology) { return !topology.pretended && MemoryNodes(topology) > 1; }

// Room on each node against what its shards need: only a note, since the kernel takes the rest from another node.
void NoteRoom(const std::vector<ShardHome>& homes, const std::vector<uint64_t>& bytes, const Topology& topology, std::vector<std::string>& notes) {
  for (const NumaNode& node : topology.nodes) {
    uint64_t needed = 0;
    for (size_t i = 0; i < homes.size(); ++i) needed += homes[i].node == node.id ? bytes[i] : 0;
    if (needed <= node.free_bytes) continue;
    notes.push_back(absl::StrCat("NUMA node ", node.id, ": needed ", HumanBytes(static_cast<double>(needed)), ", free ",
                                 HumanBytes(static_cast<double>(node.free_bytes)), ": the rest lies on other nodes and is read more slowly"));
  }
}

}  // namespace

absl::StatusOr<std::vector<ShmRegion>> CreateSegments(const RegionPlace& place, const Hash128& generation, const std::vector<uint64_t>& bytes,
                                                      const Topology& topology, ReadOptions options, std::vector<std::string>& notes) {
  const std::vector<ShardHome> homes = PlaceShards(topology, static_cast<int>(bytes.size()));
  const bool placeable = Placeable(topology);
  if (placeable) NoteRoom(homes, bytes, topology, notes);
  std::vector<std::optional<ShmRegion>> made(bytes.size());
  std::vector<std::string> thread_notes(bytes.size());
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  const auto make = [&](size_t i) -> absl::Status {
    std::optional<PreferNode> prefer;
    if (placeable) thread_notes[i] = prefer.emplace(homes[i].node).note();
    uint64_t before = 0;
    const auto on_allocated = [&](uint64_t now) -> absl::Status {
      done.fetch_add(now - std::exchange(before, now), std::memory_order_relaxed);
      if (stop.load(std::memory_order_relaxed)) return absl::CancelledError("loading was cancelled");
      return absl::OkStatus();
    };
    ASSIGN_OR_RETURN(made[i], ShmRegion::Create(place.Path(SegmentWhat(static_cast<int64_t>(i)), generation), RegionKind::kSegment, kSegmentVersion,
                                                generation, bytes[i], on_allocated));
    return absl::OkStatus();
  };
  uint64_t total = 0;
  for (const uint64_t b : bytes) total += b + kRegionHeaderBytes;
  // Nodes allocate side by side, since the policy is the thread's; without nodes more threads would only be in each other's way.
  options.num_threads = placeable ? static_cast<int>(bytes.size()) : 1;
  const absl::Status status = RunWithProgress(options, total, done, stop, [&](int thread) -> absl::Status {
    if (placeable) return make(static_cast<size_t>(thread));
    for (size_t i = 0; i < bytes.size(); ++i) RETURN_IF_ERROR(make(i));
    return absl::OkStatus();
  });
  std::set<std::string> distinct(thread_notes.begin(), thread_notes.end());
  distinct.erase("");
  notes.insert(notes.end(), distinct.begin(), distinct.end());
  RETURN_IF_ERROR(status);
  std::vector<ShmRegion> segments;
  for (std::optional<ShmRegion>& region : made) segments.push_back(*std::move(region));
  for (size_t i = 0; i < segments.size(); ++i) {
    const uint64_t whole = segments[i].bytes() / kHugePageBytes * kHugePageBytes;
    if (segments[i].huge_bytes() == whole) continue;
    notes.push_back(absl::StrCat("segment ", i, ": ", HumanBytes(static_cast<double>(whole - segments[i].huge_bytes())),
                                 " are in small pages, some percent slower to read (huge pages need Linux 6.1, "
                                 "/sys/kernel/mm/transparent_hugepage/shmem_enabled other than deny, and unfragmented memory)"));
  }
  return segments;
}

void NotePlacement(const std::vector<ShmRegion>& segments, const Topology& topology, std::vector<std::string>& notes) {
  if (!Placeable(topology)) return;
  const std::vector<ShardHome> homes = PlaceShards(topology, static_cast<int>(segments.size()));
  for (size_t i = 0; i < segments.size(); ++i) {
    const absl::StatusOr<std::map<int, uint64_t>> pages = SamplePagesPerNode(segments[i].body(), segments[i].body_bytes(), 1000);
    if (!pages.ok()) {
      notes.push_back(absl::StrCat("segment ", i, ": where its pages lie is unknown: ", pages.status().message()));
      continue;
    }
    uint64_t all = 0, home = 0;
    for (const auto& [node, count] : *pages) {
      all += count;
      if (node == homes[i].node) home += count;
    }
    if (all == 0 || home * 100 >= all * 95) continue;
    notes.push_back(absl::StrCat("segment ", i, ": only ", home * 100 / all, " % of its pages lie on NUMA node ", homes[i].node));
  }
}

}  // namespace hearth
