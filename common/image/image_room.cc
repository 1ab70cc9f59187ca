// Need against have. Contract: image_room.h. Room: common/image.
#include "common/image/image_room.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/time.h"
#include "common/shm/region.h"

namespace hearth {
namespace {

// "key value" lines, as meminfo and memory.stat have them; 0 when the key is missing.
uint64_t Counter(const std::string& path, std::string_view key) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return 0;
}

// The number in a file of one number; false for "max", a missing file, or anything else.
bool ReadNumber(const std::string& path, uint64_t& value) {
  std::ifstream in(path);
  std::string word;
  return in >> word && absl::SimpleAtoi(word, &value);
}

// One directory's limit: v2 counts in memory.current, v1 in memory.usage_in_bytes. File pages can be dropped, shared
// memory is on the anonymous lists and can't.
void AddLimit(const std::string& dir, bool v2, std::vector<MemoryLimit>& limits) {
  uint64_t limit = 0, used = 0;
  if (!ReadNumber(dir + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), limit)) return;
  if (!ReadNumber(dir + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), used)) return;
  if (limit >= (uint64_t{1} << 60)) return;  // v1 writes "none" as the largest number of pages
  const std::string stat = dir + "/memory.stat";
  const std::string prefix = v2 ? "" : "total_";
  const uint64_t cache = Counter(stat, prefix + "inactive_file") + Counter(stat, prefix + "active_file");
  used -= std::min(used, cache);
  limits.push_back({limit - std::min(limit, used), dir});
}

std::string Amount(uint64_t bytes) { return absl::StrCat(HumanBytes(static_cast<double>(bytes)), " (", bytes, " bytes)"); }

}  // namespace

std::vector<MemoryLimit> CgroupMemoryLimits(const std::string& root) {
  std::vector<MemoryLimit> limits;
  std::ifstream in(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    const bool v2 = fields[0] == "0" && fields[1].empty();
    if (!v2 && std::find(controllers.begin(), controllers.end(), "memory") == controllers.end()) continue;
    const std::string mount = root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    // Every ancestor limits too. In a container the path may name directories outside of it: those just are not there.
    for (std::string path = fields[2];; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      AddLimit(mount + path, v2, limits);
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return limits;
}

absl::Status CheckRoom(const std::string& dir, const ImageNeeds& needs, const std::string& root) {
  ASSIGN_OR_RETURN(const uint64_t in_directory, ShmAvailableBytes(dir));
  const uint64_t segments = std::accumulate(needs.segment_bytes.begin(), needs.segment_bytes.end(), uint64_t{0});
  // Sums that wrap would let anything through; a reserve comes from a file that people write.
  const auto saturating = [](uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; };
  const uint64_t shared =
      saturating(saturating(segments, needs.manifest_bytes + (needs.segment_bytes.size() + 1) * kRegionHeaderBytes), needs.reserve_bytes);
  const std::string parts = absl::StrCat(needs.segment_bytes.size(), needs.segment_bytes.size() == 1 ? " segment of " : " segments of ",
                                         absl::StrJoin(needs.segment_bytes, " + "), " bytes, manifest ", needs.manifest_bytes,
                                         ", kept free for KV pool and rings ", needs.reserve_bytes);
  if (shared > in_directory) {
    return absl::ResourceExhaustedError(absl::StrCat("the weight image does not fit into ", dir, ": needed ", Amount(shared), ", available ",
                                                     Amount(in_directory), " [", parts,
                                                     "]; remove another generation, raise the size of that file system, or leave a part of the ",
                                                     "experts on disk (weightstore.image_bytes_max)"));
  }
  const uint64_t memory = saturating(shared, needs.heap_bytes);
  const uint64_t available = Counter(root + "/proc/meminfo", "MemAvailable:") * 1024;
  if (available > 0 && memory > available) {
    return absl::ResourceExhaustedError(absl::StrCat("the weight image does not fit into this machine's memory: needed ", Amount(memory),
                                                     ", available ", Amount(available), " [", parts,
                                                     "]; stop other programs, choose a smaller model or a smaller kv pool, or leave a part of the ",
                                                     "experts on disk (weightstore.image_bytes_max)"));
  }
  for (const MemoryLimit& limit : CgroupMemoryLimits(root)) {
    if (memory <= limit.available_bytes) continue;
    return absl::ResourceExhaustedError(absl::StrCat("the weight image does not fit under the memory limit of ", limit.cgroup, ": needed ",
                                                     Amount(memory), ", available ", Amount(limit.available_bytes), " [", parts,
                                                     "]; raise or remove that limit (systemd: MemoryMax=infinity)"));
  }
  return absl::OkStatus();
}

absl::Status CheckDiskRoom(const std::string& disk_dir, const ImageNeeds& needs) {
  if (needs.disk_bytes == 0) return absl::OkStatus();
  if (disk_dir.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the weight image is larger than weightstore.image_bytes_max: set weightstore.disk_dir to a directory that takes ",
                     Amount(needs.disk_bytes)));
  }
  ASSIGN_OR_RETURN(const uint64_t available, ShmAvailableBytes(disk_dir));
  const uint64_t needed = needs.disk_bytes + needs.segment_bytes.size() * kRegionHeaderBytes;
  if (needed <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the disk part of the weight image does not fit into ", disk_dir, ": needed ", Amount(needed),
                                                   ", available ", Amount(available),
                                                   "; make room there, raise weightstore.image_bytes_max, or choose another weightstore.disk_dir"));
}

}  // namespace hearth
