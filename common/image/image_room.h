// Whether an image fits before its first byte is read: shared memory, the machine's memory, the cgroup's limit.
// Room: common/image. May touch: common/{shm,base}. Threads: any.
// Page cache counts as free (it goes when asked), tmpfs does not: MemAvailable and the cgroup's file counters say
// exactly that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace hearth {

struct ImageNeeds {
  std::vector<uint64_t> segment_bytes;
  uint64_t manifest_bytes = 0;
  uint64_t reserve_bytes = 0;  // must stay free in the directory: KV pool, rings
  uint64_t heap_bytes = 0;     // private memory while loading: read buffers
  uint64_t disk_bytes = 0;     // of all disk parts
};

// What a cgroup lets this process still allocate; nullopt without a limit. `root` is "/" outside of tests.
struct MemoryLimit {
  uint64_t available_bytes = 0;
  std::string cgroup;
};
std::vector<MemoryLimit> CgroupMemoryLimits(const std::string& root);

// Errors: ResourceExhausted with needed and available of the tightest place and the remedy; PermissionDenied for a directory.
absl::Status CheckRoom(const std::string& dir, const ImageNeeds& needs, const std::string& root = "/");
// The same for the disk parts. FailedPrecondition where there are some and no directory for them.
absl::Status CheckDiskRoom(const std::string& disk_dir, const ImageNeeds& needs);

}  // namespace hearth
