// A mapped file that may lose bytes under its readers: its disk gives an error for a page, or somebody cuts it. Unguarded, the read ends the process (SIGBUS).
// Guarded, the read goes on with zeros, and whoever reads learns of it before he uses what he made of them.
// Room: common/shm. May touch: common/base. Threads: any.
//
//   mark = Begin();  ... read through the mapping ...;  LostSince(mark): an error if any of it was not the file's.
// What overlaps such a loss fails with it, even where it read something else: a reader never knows which bytes were zeros. The next Begin maps the file's own
// pages again, so a disk that recovers is read on; while a file is cut, everything fails.
// A disk that does not answer holds its reader until the kernel gives up (30 s with an NVMe command): then that is an error as well.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/base/status.h"

namespace hearth {

class MappedFileGuard {
 public:
  // Of the first guard on, this process has a handler for SIGBUS, which passes on what happens outside of all guarded mappings.
  // `data`: `bytes` of `path` from its begin, mapped read-only; outlives the guard. Errors: NotFound, PermissionDenied, with the path; ResourceExhausted:
  // more than kMost guards, or no descriptor.
  static absl::StatusOr<std::unique_ptr<MappedFileGuard>> Make(const std::string& path, const uint8_t* data, uint64_t bytes);
  ~MappedFileGuard();

  static constexpr int kMost = 256;  // of a process: a disk part a shard, of the image and of the one before it

  uint64_t Begin();
  // DataLoss with the file's name.
  absl::Status LostSince(uint64_t mark) const;

 private:
  struct Range;
  MappedFileGuard(std::unique_ptr<Range> range, std::string path);
  static void OnBusError(int, void* info, void*);

  const std::unique_ptr<Range> range_;
  const std::string path_;
};

}  // namespace hearth
