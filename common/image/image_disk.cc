#include "common/image/image_disk.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "common/shm/weight_image.h"

namespace hearth {
namespace {

// Between two looks at `cancelled`: a tenth of a second of a fast disk.
constexpr uint64_t kFlushStepBytes = 256 << 20;

}  // namespace

absl::StatusOr<std::vector<std::optional<ShmRegion>>> CreateDiskParts(const RegionPlace& place, const Hash128& generation,
                                                                      const std::vector<uint64_t>& bytes, ReadOptions options) {
  std::vector<std::optional<ShmRegion>> parts(bytes.size());
  const uint64_t total = std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
  if (total == 0) return parts;
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  options.num_threads = 1;
  RETURN_IF_ERROR(RunWithProgress(options, total, done, stop, [&](int) -> absl::Status {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] == 0) continue;
      uint64_t before = 0;
      const auto on_allocated = [&](uint64_t now) -> absl::Status {
        done.fetch_add(now - std::exchange(before, now), std::memory_order_relaxed);
        if (stop.load(std::memory_order_relaxed)) return absl::CancelledError("loading was cancelled");
        return absl::OkStatus();
      };
      ASSIGN_OR_RETURN(parts[i], ShmRegion::Create(place.DiskPath(DiskWhat(static_cast<int64_t>(i)), generation), RegionKind::kDiskPart,
                                                   kDiskPartVersion, generation, bytes[i], on_allocated));
    }
    return absl::OkStatus();
  }));
  return parts;
}

absl::Status FlushDiskParts(const std::vector<std::optional<ShmRegion>>& parts, ReadOptions options) {
  uint64_t total = 0;
  for (const std::optional<ShmRegion>& part : parts) total += part.has_value() ? part->bytes() : 0;
  if (total == 0) return absl::OkStatus();
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  options.num_threads = 1;
  return RunWithProgress(options, total, done, stop, [&](int) -> absl::Status {
    for (const std::optional<ShmRegion>& part : parts) {
      for (uint64_t at = 0; part.has_value() && at < part->bytes(); at += kFlushStepBytes) {
        if (stop.load(std::memory_order_relaxed)) return absl::OkStatus();
        const uint64_t step = std::min(kFlushStepBytes, part->bytes() - at);
        if (msync(part->base() + at, step, MS_SYNC) != 0) {
          return absl::DataLossError(absl::StrCat("writing ", part->path(), ": ", strerror(errno), ": look at the disk's health, or choose another ",
                                                  "weightstore.disk_dir"));
        }
        done.fetch_add(step, std::memory_order_relaxed);
      }
    }
    return absl::OkStatus();
  });
}

}  // namespace hearth
