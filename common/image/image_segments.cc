// Segments on their nodes. Contract: image_segments.h. Room: common/image.
#include "common/image/image_segments.h"

#include <algorithm>
#include <optional>
#include <set>
#include <thread>

#include "common/base/time.h"
#include "common/numa/placement.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

size_t MemoryNodes(const Topology& topology) {
  return static_cast<size_t>(std::count_if(topology.nodes.begin(), topology.nodes.end(),
                                           [](const NumaNode& node) { return node.memory_bytes > 0; }));
}

bool Placeable(const Topology& topology) {
  return !topology.pretended && MemoryNodes(topology) > 1;
}

// Room on each node against what its shards need: only a note, since the kernel takes the rest from another node.
void NoteRoom(const std::vector<ShardHome>& homes, const std::vector<uint64_t>& bytes, const Topology& topology,
              std::vector<std::string>& notes) {
  for (const NumaNode& node : topology.nodes) {
    uint64_t needed = 0;
    for (size_t i = 0; i < homes.size(); ++i) needed += homes[i].node == node.id ? bytes[i] : 0;
    if (needed <= node.free_bytes) continue;
    notes.push_back(absl::StrCat("NUMA node ", node.id, ": needed ", HumanBytes(static_cast<double>(needed)), ", free ",
                                 HumanBytes(static_cast<double>(node.free_bytes)),
                                 ": the rest lies on other nodes and is read more slowly"));
  }
}

}  // namespace

absl::StatusOr<std::vector<ShmRegion>> CreateSegments(const RegionPlace& place, const Hash128& generation,
                                                      const std::vector<uint64_t>& bytes, const Topology& topology,
                                                      std::vector<std::string>& notes) {
  const std::vector<ShardHome> homes = PlaceShards(topology, static_cast<int>(bytes.size()));
  const bool placeable = Placeable(topology);
  if (placeable) NoteRoom(homes, bytes, topology, notes);
  std::vector<absl::StatusOr<ShmRegion>> made;
  std::vector<std::string> thread_notes(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) made.emplace_back(absl::UnknownError("not made"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto make = [&, i] {
      std::optional<PreferNode> prefer;
      if (placeable) thread_notes[i] = prefer.emplace(homes[i].node).note();
      made[i] = ShmRegion::Create(place.Path(SegmentWhat(static_cast<int64_t>(i)), generation), RegionKind::kSegment,
                                  kSegmentVersion, generation, bytes[i]);
    };
    if (placeable) {
      threads.emplace_back(make);  // nodes allocate side by side; a thread of its own carries each policy
    } else {
      make();
      if (!made[i].ok()) break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::string> distinct(thread_notes.begin(), thread_notes.end());
  distinct.erase("");
  notes.insert(notes.end(), distinct.begin(), distinct.end());
  std::vector<ShmRegion> segments;
  for (absl::StatusOr<ShmRegion>& region : made) {
    if (!region.ok()) return region.status();
    segments.push_back(*std::move(region));
  }
  return segments;
}

void NotePlacement(const std::vector<ShmRegion>& segments, const Topology& topology, std::vector<std::string>& notes) {
  if (!Placeable(topology)) return;
  const std::vector<ShardHome> homes = PlaceShards(topology, static_cast<int>(segments.size()));
  for (size_t i = 0; i < segments.size(); ++i) {
    const absl::StatusOr<std::map<int, uint64_t>> pages =
        SamplePagesPerNode(segments[i].body(), segments[i].body_bytes(), 1000);
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
    notes.push_back(
        absl::StrCat("segment ", i, ": only ", home * 100 / all, " % of its pages lie on NUMA node ", homes[i].node));
  }
}

}  // namespace hearth
