// Listing and removing generations. Contract: generations.h. Room: common/shm.
#include "common/shm/generations.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <set>

#include "common/shm/kv_pool.h"
#include "common/shm/store_table.h"
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
    info.problem = attached;
    list.push_back(std::move(info));
  }
  return list;
}

std::vector<RegionOwner> LivingOwners(const RegionPlace& place) {
  std::vector<RegionOwner> owners;
  for (std::string& path : ListRegions(place)) {
    const ProcessId owner = OwnerOfRegionFile(path);
    if (owner.pid != 0 && owner != SelfProcess() && IsAlive(owner)) owners.push_back({owner, std::move(path)});
  }
  return owners;
}

absl::StatusOr<std::vector<std::string>> UsersOfRegions(const RegionPlace& place) {
  std::set<std::string> users;
  for (const RegionOwner& owner : LivingOwners(place)) users.insert(absl::StrCat("weightstore (pid ", owner.process.pid, ")"));
  for (const RegionFile& file : ListRegionFiles(place)) {
    if (!file.generation) continue;
    if (file.what == kManifestWhat) {
      const absl::Status locked = RegionLock::Acquire(file.path).status();
      if (absl::IsUnavailable(locked) && users.empty()) users.insert(std::string(locked.message()));
    }
    if (file.what != kStoreTableWhat) continue;
    const absl::StatusOr<std::shared_ptr<StoreTable>> table = StoreTable::Open(place, *file.generation, MapMode::kReadOnly);
    if (!table.ok()) {
      if (!TellsOfTheFile(table.status())) return table.status();
      continue;
    }
    for (const LeaseEntry* lease : LivingLeases(**table)) {
      users.insert(absl::StrCat(std::string(lease->name, strnlen(lease->name, sizeof(lease->name))), " (pid ", lease->pid, ")"));
    }
  }
  return std::vector<std::string>(users.begin(), users.end());
}

absl::Status RemoveGeneration(const RegionPlace& place, const Hash128& generation) {
  absl::Status status;
  const auto remove = [&](const std::string& path) {
    if (unlink(path.c_str()) == 0 || errno == ENOENT) return;
    const std::string message = absl::StrCat("removing ", path, ": ", strerror(errno));
    status.Update(errno == EACCES || errno == EPERM ? absl::PermissionDeniedError(message) : absl::InternalError(message));
  };
  std::vector<RegionFile> files = ListRegionFiles(place);
  // An image may have its disk part where a former configuration said.
  const auto image = ShmRegion::Open(place.Path(kManifestWhat, generation), RegionKind::kManifest, kManifestVersion, MapMode::kReadOnly);
  if (image.ok() && image->state() != RegionState::kLoading) {
    const absl::StatusOr<Manifest> rows = ReadManifest(image->body(), image->body_bytes());
    if (rows.ok() && !rows->disk_dir.empty() && rows->disk_dir != place.disk_dir) {
      for (RegionFile& file : ListRegionFiles({.dir = rows->disk_dir, .node = place.node})) files.push_back(std::move(file));
    }
  }
  for (const bool manifest : {true, false}) {
    for (const RegionFile& file : files) {
      if (file.generation == generation && (file.what == kManifestWhat) == manifest) remove(file.path);
    }
  }
  return status;
}

}  // namespace hearth
