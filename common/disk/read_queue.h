// Reads of files, many at once: by io_uring, or by threads where the kernel refuses that (containers often do).
// Room: common/disk. May touch: common/base. Threads: one at a time; a queue has its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

struct QueuedRead {
  int fd = -1;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint8_t* to = nullptr;  // stays the read's until it has ended
  uint64_t tag = 0;
};

struct EndedRead {
  uint64_t tag = 0;
  int64_t result = 0;  // bytes read, fewer than asked for at times; or -errno
};

class ReadQueue {
 public:
  // Waits for what is under way: nothing can take the memory back from a disk that writes into it.
  virtual ~ReadQueue() = default;
  virtual std::string_view kind() const = 0;  // "io_uring", "threads"
  virtual int64_t depth() const = 0;          // reads that may be under way
  // Returns at once. Fewer than depth() are under way.
  virtual void Begin(const QueuedRead& read) = 0;
  // Appends those that have ended; waits for one until `timeout_ns` has passed (0: only looks), or for no reason.
  virtual void AwaitEnded(int64_t timeout_ns, std::vector<EndedRead>& ended) = 0;
};

// Errors: Unavailable with the reason, where the kernel has no io_uring, or lets nobody use it.
absl::StatusOr<std::unique_ptr<ReadQueue>> MakeUringQueue(int64_t depth);
std::unique_ptr<ReadQueue> MakeThreadQueue(int64_t depth);

// The first that works. `note`: why it is not io_uring; empty if it is.
std::unique_ptr<ReadQueue> MakeReadQueue(std::string* note);

}  // namespace hearth
