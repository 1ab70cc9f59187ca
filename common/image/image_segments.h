// Makes an image's segments, each on the NUMA node of its shard as far as the machine has one and lets us choose.
// Room: common/image. May touch: common/{shm,numa,base}. Threads: one caller, which reports and looks at
// `cancelled`; one more that allocates, or one for each segment where there are several nodes. tmpfs places a page when fallocate allocates it, by the policy of the allocating thread: so
// the policy is set before the region is made. Hundreds of GB take minutes, in which the caller hears of progress.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/image/image_reader.h"
#include "common/numa/topology.h"
#include "common/shm/region.h"

namespace hearth {

// Regions in state LOADING, one for each entry of `bytes`. `notes` gets what an operator should know: shards that share
// a node, nodes without room, a container that forbids placing. Of `options` the number of threads is not used. Errors:
// those of ShmRegion::Create; Cancelled; regions made before it stay for the caller to remove.
absl::StatusOr<std::vector<ShmRegion>> CreateSegments(const RegionPlace& place, const Hash128& generation, const std::vector<uint64_t>& bytes,
                                                      const Topology& topology, ReadOptions options, std::vector<std::string>& notes);

// Where the pages lie in the end, from a sample: one note for each segment of which more than 5 % lie elsewhere. Silent
// on one node.
void NotePlacement(const std::vector<ShmRegion>& segments, const Topology& topology, std::vector<std::string>& notes);

}  // namespace hearth
