// The link of the host device: what the ToDevice op copies over. Plain memory copies, held to a pace where one is set, so that what a real link's
// bandwidth does to a loader can be measured without one.
// Room: common/device/host. May touch: common/base. Threads: any; copies of several streams share the pace piece by piece.
#pragma once

#include <cstdint>
#include <mutex>

#include "common/device/device.h"

namespace hearth {

class HostLink {
 public:
  explicit HostLink(int64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  // Returns when the link is through with the last byte, or soon after `stop` (may be null) is set, with the rest not copied.
  void Copy(const void* from, void* to, uint64_t bytes, const StopToken* stop);

 private:
  // When the link is through with `bytes` more.
  int64_t Book(uint64_t bytes);

  const int64_t bytes_per_s_;  // 0: no pace
  std::mutex mutex_;
  int64_t free_ns_ = 0;  // guarded by mutex_: when the link is through with all that was booked
};

}  // namespace hearth
