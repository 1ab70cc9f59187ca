#include "common/disk/read_queue.h"

namespace hearth {
namespace {

constexpr int64_t kUringDepth = 256;  // reads of a MiB: some tens of milliseconds of a disk, which it goes on with whatever our threads do
constexpr int64_t kThreads = 16;      // what a fast disk needs under way at once

}  // namespace

std::unique_ptr<ReadQueue> MakeReadQueue(std::string* note) {
  absl::StatusOr<std::unique_ptr<ReadQueue>> queue = MakeUringQueue(kUringDepth);
  *note = queue.ok() ? "" : std::string(queue.status().message());
  return queue.ok() ? *std::move(queue) : MakeThreadQueue(kThreads);
}

}  // namespace hearth
