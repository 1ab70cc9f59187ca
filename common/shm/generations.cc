// Listing and removing generations. Contract: generations.h. Room: common/shm.
#include "common/shm/generations.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "common/shm/kv_pool.h"
#include "common/shm/weight_image.h"

namespace hearth {

std::vector<GenerationInfo> ListGenerations(const RegionPlace& place) {
  std::map<std::string, GenerationInfo> found;
  for (const RegionFile& file : ListRegionFiles(place)) {
    if (!file.generation) continue;
    GenerationInfo& info = found[file.generation->ToHex()];
    info.generation = *file.generation;
    struct stat st;
    if (stat(file.path.c_str(), &st) == 0) info.bytes += static_cast<uint64_t>(st.st_size);
    if (file.what == kKvPoolWhat) info.has_kv_pool = true;
    if (info.owner.pid == 0) info.owner = OwnerOfRegionFile(file.path);
  }
  std::vector<GenerationInfo> list;
  for (auto& [hex, info] : found) {
    absl::StatusOr<ShmRegion> manifest =
        ShmRegion::Open(place.Path(kManifestWhat, info.generation), RegionKind::kManifest, kManifestVersion, MapMode::kReadOnly);
    if (manifest.ok()) {
      info.state = manifest->state();
      info.owner = manifest->owner();
    }
    const absl::Status attached = WeightImage::Attach(place, info.generation).status();
    info.complete = attached.ok();
    if (!attached.ok()) info.problem = std::string(attached.message());
    list.push_back(std::move(info));
  }
  return list;
}

absl::Status RemoveGeneration(const RegionPlace& place, const Hash128& generation) {
  absl::Status status;
  const auto remove = [&](const std::string& path) {
    if (unlink(path.c_str()) == 0 || errno == ENOENT) return;
    const std::string message = absl::StrCat("removing ", path, ": ", strerror(errno));
    status.Update(errno == EACCES || errno == EPERM ? absl::PermissionDeniedError(message) : absl::InternalError(message));
  };
  remove(place.Path(kManifestWhat, generation));
  for (const RegionFile& file : ListRegionFiles(place)) {
    if (file.generation == generation) remove(file.path);
  }
  return status;
}

}  // namespace hearth
