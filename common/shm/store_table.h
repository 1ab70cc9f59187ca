// The store's table in shared memory: leases, the pages' states, and which stream references which page. Only the store writes it,
// so that the next store process adopts it as it stands. docs/shared-memory.md: order of stores, and what a crash at any instruction leaves.
// Room: common/shm. May touch: common/base. Processes: one writer (the store), readers: the next store, `hearth status` for a look.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/hash.h"
#include "common/base/process.h"
#include "common/base/status.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kStoreTableVersion = 1;
inline constexpr int64_t kLeasesMax = 64;
inline constexpr int64_t kPagesPerStreamMax = 1 << 20;
inline constexpr const char* kStoreTableWhat = "table";  // hearth.<node>.table.<generation>

enum class LeaseState : uint32_t { kFree = 0, kLive = 1, kDead = 2 };  // "suspect" is not stored: it is a live lease without a beat
enum class LeaseKind : uint32_t { kPrefill = 1, kDecode = 2 };         // the router holds no rows and needs no entry

// One lease. All fields but `state` are written before `state` becomes kLive (release), and not changed after, except where said.
struct LeaseEntry {
  std::atomic<uint32_t> state;  // LeaseState; the last store of an entry's making, the first of its end
  LeaseKind kind;
  uint64_t lease_id;  // random, never reused
  int32_t pid;
  uint32_t reserved;
  uint64_t start_ticks;
  Hash128 generation;
  uint64_t numerics;
  std::atomic<int64_t> dead_since_ns;  // CLOCK_MONOTONIC; stored before state becomes kDead
  char name[32];                       // "decode.0", zero-terminated
  uint8_t pad[32];
};
static_assert(sizeof(LeaseEntry) == 128 && offsetof(LeaseEntry, lease_id) == 8 && offsetof(LeaseEntry, generation) == 32 &&
              offsetof(LeaseEntry, dead_since_ns) == 56 && offsetof(LeaseEntry, name) == 64);

enum class PageState : uint32_t { kFree = 0, kOpen = 1, kSealed = 2 };
inline constexpr uint32_t kPageDecodeWritten = 1;  // a decode token in it or in a parent
inline constexpr uint32_t kPageUnindexed = 2;      // an equal page is indexed: this one goes with its last row
inline constexpr uint32_t kPageMixed = 4;          // writers of two numerics ids, in it or in a parent: never indexed, goes with its last row

// One page of the pool. kSealed is authoritative; kOpen against kFree is derived from the rows at adoption.
struct PageEntry {
  std::atomic<uint32_t> state;     // PageState
  uint32_t flags;                  // written before state becomes kSealed
  Hash128 hash;                    // XXH3-128 of parent hash, fingerprint, KV dtype, numerics, decode-written flag, 64 token ids
  Hash128 parent;                  // zero for the first page of a stream
  uint64_t numerics;               // of the lease that the page was given to: stored by Alloc, before the row
  std::atomic<uint64_t> last_use;  // a counter of the store: least recently used goes first
  uint8_t pad[8];
};
static_assert(sizeof(PageEntry) == 64 && offsetof(PageEntry, hash) == 8 && offsetof(PageEntry, last_use) == 48);

enum class RowState : uint32_t { kFree = 0, kHeld = 1, kOffered = 2 };

// One reference: a stream's page index -> a page. There is no counter: a page is referenced while a row exists.
struct RowEntry {
  std::atomic<uint32_t> state;  // RowState; the last store of a row's making, the first of its end
  int32_t page;
  std::atomic<uint64_t> lease_id;  // the holder, the page's one writer while it is kOpen; changed by Take in one store
  Hash128 request;
  int32_t index;  // of the page in the stream
  uint32_t reserved;
  uint64_t call;  // number of the call that made it, for the log
  uint8_t pad[16];
};
static_assert(sizeof(RowEntry) == 64 && offsetof(RowEntry, lease_id) == 8 && offsetof(RowEntry, request) == 16 && offsetof(RowEntry, index) == 32);

// Body of the region: this, then leases, pages, rows, each array at a 64-byte boundary.
struct StoreTableHeader {
  uint64_t num_leases;
  uint64_t num_pages;
  uint64_t num_rows;
  std::atomic<uint64_t> incarnation;  // +1 by each store that takes the table over
  std::atomic<uint64_t> use_clock;    // source of PageEntry::last_use
  // Written once, before the region is READY:
  uint64_t sequence;      // of the generation on this node: the higher is the newer
  uint64_t source_stamp;  // XXH3-64 of the checkpoint's file names, sizes and times, as they were when it was loaded
  uint64_t config_stamp;  // XXH3-64 of what node.toml asked for at that time: tells a changed configuration from `hearth load`
};
static_assert(sizeof(StoreTableHeader) == 64 && offsetof(StoreTableHeader, sequence) == 40);

// What a table is made with.
struct StoreTableSpec {
  uint64_t num_pages = 0;
  uint64_t num_rows = 0;
  uint64_t sequence = 1;
  uint64_t source_stamp = 0;
  uint64_t config_stamp = 0;
};

class StoreTable;
// Leases of processes that live.
std::vector<const LeaseEntry*> LivingLeases(StoreTable& table);

// One table for each generation (it has its own KV pool): hearth.<node>.table.<generation>.
class StoreTable {
 public:
  // All free; leaves the region READY. Errors: as ShmRegion::Create; InvalidArgument for sizes beyond what fits an index.
  static absl::StatusOr<std::shared_ptr<StoreTable>> Create(const RegionPlace& place, const Hash128& generation, const StoreTableSpec& spec);
  // Errors: as ShmRegion::Open; FailedPrecondition when not READY; DataLoss for sizes that don't fit the file. Counts are copied and checked
  // once: later damage to the header moves no array.
  static absl::StatusOr<std::shared_ptr<StoreTable>> Open(const RegionPlace& place, const Hash128& generation, MapMode mode);
  virtual ~StoreTable() = default;

  virtual StoreTableHeader& header() = 0;
  virtual LeaseEntry* leases() = 0;
  virtual PageEntry* pages() = 0;
  virtual RowEntry* rows() = 0;
  virtual int32_t num_pages() const = 0;
  virtual int32_t num_rows() const = 0;
  virtual ShmRegion& region() = 0;
};

}  // namespace hearth
