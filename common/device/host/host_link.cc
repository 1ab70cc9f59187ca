#include "common/device/host/host_link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/base/time.h"

namespace hearth {
namespace {

constexpr uint64_t kPieceBytes = 256 * 1024;  // how long another stream's copy waits at most, and how soon a stop is seen
constexpr int64_t kLookNs = 1'000'000;
// A sleep ends late by 50 us and more: so much of what was missed is caught up, and the pace holds on average.
constexpr int64_t kBehindNs = 2'000'000;

bool Stopped(const StopToken* stop) { return stop != nullptr && stop->stopped(); }

}  // namespace

void HostLink::Copy(const void* from, void* to, uint64_t bytes, const StopToken* stop) {
  if (bytes_per_s_ == 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (uint64_t at = 0; at < bytes && !Stopped(stop); at += kPieceBytes) {
    const uint64_t piece = std::min(kPieceBytes, bytes - at);
    const int64_t done_ns = Book(piece);
    std::memcpy(static_cast<uint8_t*>(to) + at, static_cast<const uint8_t*>(from) + at, piece);
    for (int64_t left = done_ns - MonotonicNowNs(); left > 0 && !Stopped(stop); left = done_ns - MonotonicNowNs()) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(left, kLookNs)));
    }
  }
}

int64_t HostLink::Book(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const int64_t begin_ns = std::max(free_ns_, MonotonicNowNs() - kBehindNs);
  free_ns_ = begin_ns + static_cast<int64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(bytes_per_s_));
  return free_ns_;
}

}  // namespace hearth
