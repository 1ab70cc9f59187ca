// Which generations lie in a node's directory, and how one is removed: the store adopts and cleans by these two calls.
// Room: common/shm. May touch: common/base. Processes: only the store removes; anybody may list.
// If the process dies while removing: the manifest went first, so what is left is listed as incomplete and can be
// removed again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/process.h"
#include "common/base/status.h"
#include "common/shm/region.h"

namespace hearth {

struct GenerationInfo {
  Hash128 generation;
  RegionState state = RegionState::kLoading;  // the manifest's; kLoading where it is missing or unreadable
  ProcessId owner;                            // of the manifest, else of any part; pid 0: nobody is named
  uint64_t bytes = 0;                         // of all its files, KV pool included
  bool has_kv_pool = false;
  // READY, and WeightImage::Attach takes it. False with READY: damaged, or of another version; `problem` says which.
  bool complete = false;
  absl::Status problem;  // why it is not complete; TellsOfTheFile (region.h) says whether the files are to blame
};

// Every generation of which at least one file is there, sorted by hex. Reads headers and manifests, no weight.
std::vector<GenerationInfo> ListGenerations(const RegionPlace& place);

// Living processes, other than this, that own regions of the node by their headers: one entry a region.
struct RegionOwner {
  ProcessId process;
  std::string path;
};
std::vector<RegionOwner> LivingOwners(const RegionPlace& place);

// Living processes that own or use the node's regions, each as a few words; empty: nobody. Whoever removes must ask first.
// Errors: what of the regions can't be looked at, for a reason that says nothing of them.
absl::StatusOr<std::vector<std::string>> UsersOfRegions(const RegionPlace& place);

// Unlinks all files of one generation; who still maps them keeps them. Files of other generations, nodes and programs
// stay. OK also when there were none. Errors: PermissionDenied or Internal, after trying every file.
absl::Status RemoveGeneration(const RegionPlace& place, const Hash128& generation);

}  // namespace hearth
