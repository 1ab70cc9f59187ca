#include "common/base/time.h"

#include <ctime>

#include "absl/strings/str_format.h"

namespace hearth {

int64_t MonotonicNowNs() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<int64_t>(ts.tv_sec) * 1'000'000'000 + ts.tv_nsec;
}

int64_t UnixNowSeconds() { return static_cast<int64_t>(::time(nullptr)); }

std::string HumanDuration(double seconds) {
  if (seconds < 1.0) return absl::StrFormat("%.0f ms", seconds * 1e3);
  if (seconds < 60.0) return absl::StrFormat("%.1f s", seconds);
  const int64_t whole = static_cast<int64_t>(seconds);
  if (whole < 3600) return absl::StrFormat("%d min %02d s", whole / 60, whole % 60);
  return absl::StrFormat("%d h %02d min", whole / 3600, whole / 60 % 60);
}

std::string HumanBytes(double bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 1000.0 && unit < 4) {
    bytes /= 1000.0;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes) : absl::StrFormat("%.3g %s", bytes, kUnits[unit]);
}

}  // namespace hearth
