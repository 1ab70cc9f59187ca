// A shared-memory region: one plain file, one fixed header, one state word. docs/shared-memory.md is the contract.
// Room: common/shm. May touch: common/base. Processes: one creator (the weight store), any number of mappers.
// If a mapper dies: nothing here changes. If the creator dies: the file stays; the next store adopts or removes it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/hash.h"
#include "common/base/process.h"
#include "common/base/status.h"

namespace hearth {

inline constexpr uint64_t kRegionMagic = 0x3154'5245'4148'5247;  // "GRHAERT1" read as bytes: which file this is, before anything is believed
inline constexpr uint32_t kRegionFormatVersion = 1;
inline constexpr uint64_t kRegionHeaderBytes = 4096;

enum class RegionKind : uint32_t {
  kManifest = 1,
  kSegment = 2,
  kKvPool = 3,
  kStoreTable = 4,
  kExpertRing = 5,
  kGroup = 6,
  kDiskPart = 7,
  kTurnBoard = 8
};
enum class RegionState : uint32_t { kLoading = 1, kReady = 2, kRetired = 3 };

// At offset 0 of each region. The fixed part is written once, before kLoading is stored, and is covered by
// `fixed_hash`.
struct RegionHeader {
  uint64_t magic;
  uint32_t format_version;
  RegionKind kind;
  uint64_t region_bytes;  // whole file
  Hash128 generation;     // random; zero for regions that outlive generations (the store table)
  uint64_t kind_version;  // version of what follows the header (manifest layout, pool layout, ...)
  uint64_t reserved;
  uint64_t fixed_hash;  // XXH3-64 of the bytes before this field
  // Outside the hash, each validated on its own:
  std::atomic<uint32_t> state;        // RegionState; writer: the owning store; release store after what it publishes
  std::atomic<int32_t> owner_pid;     // the store that owns the region now; rewritten at adoption
  std::atomic<uint64_t> owner_start;  // its start time in clock ticks (pid reuse)
};
static_assert(offsetof(RegionHeader, fixed_hash) == 56 && offsetof(RegionHeader, state) == 64 && offsetof(RegionHeader, owner_start) == 72 &&
              sizeof(RegionHeader) == 80);
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// Where a node's regions live and how their files are called: <dir>/hearth.<node>.<what>[.<generation hex>].
struct RegionPlace {
  std::string dir;            // "/dev/shm"
  std::string node;           // config node.name
  std::string disk_dir = {};  // where the disk parts of images lie (weight_image.h), under the same kind of name; empty: there are none
  std::string Path(std::string_view what) const;
  std::string Path(std::string_view what, const Hash128& generation) const;
  std::string DiskPath(std::string_view what, const Hash128& generation) const;
};

enum class MapMode { kReadOnly, kReadWrite };

// Allocation goes in steps, each a fraction of a second: a region of hundreds of GB takes minutes, in which somebody wants
// to hear of progress, or gives up. Called after each step with the bytes so far; an error of it ends the creation.
using AllocationHook = std::function<absl::Status(uint64_t allocated_bytes)>;
inline constexpr uint64_t kHugePageBytes = 2ull << 20;
inline constexpr uint64_t kAllocationStepBytes = 256ull << 20;

class ShmRegion {
 public:
  // Makes the file (mode 0600), allocates every byte of it (fallocate: a full tmpfs is ResourceExhausted here, never
  // SIGBUS later; the message has needed and available), maps it read-write, writes the header with state kLoading and
  // this process as owner. AlreadyExists if the file is there, PermissionDenied naming the directory that refuses,
  // NotFound for a missing one, and what `on_allocated` says. After an error no file is left.
  static absl::StatusOr<ShmRegion> Create(const std::string& path, RegionKind kind, uint64_t kind_version, const Hash128& generation,
                                          uint64_t body_bytes, const AllocationHook& on_allocated = {});
  // Maps an existing file after validating its header. Errors: NotFound; FailedPrecondition for another magic or
  // version (both named; a zero magic is a creation that a crash cut short) or another kind; DataLoss for a wrong size,
  // hash or state; PermissionDenied for a file that another user may have planted.
  static absl::StatusOr<ShmRegion> Open(const std::string& path, RegionKind kind, uint64_t kind_version, MapMode mode);

  ShmRegion(ShmRegion&&) noexcept;
  ShmRegion& operator=(ShmRegion&&) noexcept;
  ~ShmRegion();  // unmaps; the file stays

  RegionHeader& header() const;
  uint8_t* base() const;  // of the file, header included
  uint8_t* body() const { return base() + kRegionHeaderBytes; }
  uint64_t bytes() const;
  uint64_t huge_bytes() const;  // of the file, in huge pages, as its maker found; 0 in other processes
  uint64_t body_bytes() const { return bytes() - kRegionHeaderBytes; }
  const std::string& path() const;

  RegionState state() const { return static_cast<RegionState>(header().state.load(std::memory_order_acquire)); }
  void SetState(RegionState state) { header().state.store(static_cast<uint32_t>(state), std::memory_order_release); }
  void SetOwner(const ProcessId& owner);  // one writer: the store that has adopted the region
  ProcessId owner() const;

 private:
  struct Impl;
  explicit ShmRegion(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Held by the store on the manifest of each generation that it serves, for as long as it lives. Owners in headers are pids, which say nothing between
// PID namespaces (containers that share the directory); the kernel's lock does.
class RegionLock {
 public:
  // Unavailable: another process holds it. Other errors as ShmRegion::Open.
  static absl::StatusOr<RegionLock> Acquire(const std::string& path);
  RegionLock(RegionLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  RegionLock& operator=(RegionLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~RegionLock();

 private:
  explicit RegionLock(int fd) : fd_(fd) {}
  int fd_;
};

// Who made or adopted the region in this file, whatever its kind, version and state; nobody (pid 0) where no owner has
// been written yet or the file is no region. Maps nothing, and believes nothing else of the header.
ProcessId OwnerOfRegionFile(const std::string& path);

// Whether an error of opening a region, or what is built of regions, says something of the file itself: cut short, damaged, another version or kind,
// missing. Anything else (no memory, no file descriptor, no permission) is passing or somebody else's, and no reason to remove the file.
bool TellsOfTheFile(const absl::Status& error);

// Bytes that may still be allocated in the file system of `dir` (statvfs; MemAvailable for a tmpfs without limit), and
// whether it is writable: checked before loading. PermissionDenied names the directory of the path that can't be
// entered or written.
absl::StatusOr<uint64_t> ShmAvailableBytes(const std::string& dir);

// A file that carries the node's name: hearth.<node>.<what>[.<generation>], taken apart.
struct RegionFile {
  std::string path;
  std::string what;
  std::optional<Hash128> generation;
};
// All of a node's regions in both directories, whatever their state, sorted by path; files of other nodes and programs are never returned, nor what somebody else may have
// put there under the node's name: other users' files (root's count as ours), and whatever is no plain file. `left_alone` is told of those, a line each.
std::vector<RegionFile> ListRegionFiles(const RegionPlace& place, std::vector<std::string>* left_alone = nullptr);
std::vector<std::string> ListRegions(const RegionPlace& place);

}  // namespace hearth
