// The disk parts of an image that is larger than the shared memory it may have: made, and brought to the disk.
// Room: common/image. May touch: common/{shm,base}. Threads: one caller, which reports and looks at `cancelled`; one more works.
// Written through a mapping, as the segments are, since the parts of a record come from several places of a checkpoint, in its order; the kernel writes
// behind the copying, and what it has not yet is waited for before the image is published. So an error of the disk is the load's, not a later reader's.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/image/image_reader.h"
#include "common/shm/region.h"

namespace hearth {

// Regions in state LOADING, one for each entry of `bytes` that is not 0. Of `options` the number of threads is not used. Errors: those of
// ShmRegion::Create; Cancelled; what was made before it stays for the caller to remove.
absl::StatusOr<std::vector<std::optional<ShmRegion>>> CreateDiskParts(const RegionPlace& place, const Hash128& generation,
                                                                      const std::vector<uint64_t>& bytes, ReadOptions options);

// Every byte is on the disk afterwards. DataLoss with the file's name when the disk gives an error; Cancelled.
absl::Status FlushDiskParts(const std::vector<std::optional<ShmRegion>>& parts, ReadOptions options);

}  // namespace hearth
