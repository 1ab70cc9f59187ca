// Policy over one generation's table and KV pool: leases, rows, page states, the index of published pages, eviction.
// Room: services/weightstore. May touch: common/{shm,base}. Not: gRPC, clocks of its own. Threads: any; one mutex, so that the table has one writer.
// Every change is a sequence of single stores in the order of docs/shared-memory.md; `Adopt` mends what a crash between any two of them left.
// All calls may be repeated. Errors: NotFound unknown lease or stream, ResourceExhausted no page, FailedPrecondition another living writer.
//
//   page:  FREE --Alloc--> OPEN --Seal--> SEALED --evict, or the last row of an unindexed one--> FREE
//   row:   FREE --Alloc, Match--> HELD --Offer--> OFFERED --Take--> HELD --Free--> FREE
//   lease: FREE --MakeLease--> LIVE --EndLease--> DEAD --its last row is gone--> FREE
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "common/base/hash.h"
#include "common/base/process.h"
#include "common/base/publish_point.h"
#include "common/base/status.h"
#include "common/shm/kv_pool.h"
#include "common/shm/store_table.h"

namespace hearth {

struct PageTableOptions {
  Hash128 fingerprint;                // of the model: goes into every page's hash
  bool reuse_decoded_pages = true;    // false: Match and Peek see only pages that the prefill form wrote throughout
  int64_t orphan_grace_ns = 0;        // rows of a dead lease wait so long for a Take
  std::function<int64_t()> now_ns;    // CLOCK_MONOTONIC; empty: the system's
  std::function<void()> after_store;  // tests: called after each single store into shared memory
};

class PageTable {
 public:
  struct LeaseSpec {
    LeaseKind kind = LeaseKind::kDecode;
    ProcessId process;
    uint64_t numerics = 0;
    std::string name;
  };
  struct Lease {
    uint64_t id = 0;
    LeaseState state = LeaseState::kFree;
    int64_t rows = 0;
    LeaseSpec spec;
  };
  struct Row {
    int32_t index = 0;
    int32_t page = 0;
    bool sealed = false;
    friend bool operator==(const Row&, const Row&) = default;
  };
  struct Stream {
    Hash128 request;
    std::vector<int32_t> pages;
  };
  struct Counts {
    int64_t total = 0, free = 0, open = 0, sealed_referenced = 0, sealed_cached = 0, rows = 0;
  };

  // Takes over what the table holds, mended. `alive`: whether a lease's process still is. The caller has made sure that no other store is alive.
  PageTable(std::shared_ptr<StoreTable> table, std::shared_ptr<KvPool> pool, PageTableOptions options,
            const std::function<bool(const ProcessId&)>& alive);

  // `id`: never used before, not 0. ResourceExhausted when all entries are taken.
  absl::Status MakeLease(uint64_t id, const LeaseSpec& spec);
  // Its holder has exited, or has said goodbye: the rows are orphans from now on. OK for a lease that has ended already.
  void EndLease(uint64_t id);
  // The holder is back and names all that it holds: rows of the lease that are HELD and not named are freed;
  // those of a stream named without pages (its Take had no answer) are OFFERED again. NotFound, PermissionDenied (another process).
  absl::Status Reattach(uint64_t id, const ProcessId& process, const std::vector<Stream>& holds);

  absl::StatusOr<std::vector<Row>> Match(uint64_t lease, const Hash128& request, const std::vector<int32_t>& token_ids);
  int64_t Peek(const std::vector<int32_t>& token_ids) const;  // tokens; the best over the numerics of all live leases
  // Rows for [first_index, first_index + count), from the first on without a gap: those that the stream has and new OPEN ones. Where the pool
  // can't give all, `at_least` of them will do; 0: all or nothing.
  absl::StatusOr<std::vector<Row>> Alloc(uint64_t lease, const Hash128& request, int32_t first_index, int32_t count, int32_t at_least = 0);
  absl::Status Seal(uint64_t lease, const Hash128& request, const std::vector<int32_t>& indexes);
  absl::Status Offer(uint64_t lease, const Hash128& request);
  // `holder`: with FailedPrecondition, the living lease that stands in the way.
  absl::StatusOr<std::vector<Row>> Take(uint64_t lease, const Hash128& request, uint64_t* holder);
  absl::Status Free(uint64_t lease, const Hash128& request, int32_t from_index);
  // For the router, which holds nothing: offered and orphaned rows only. `holder` as for Take.
  absl::Status FreeUnheld(const Hash128& request, int32_t from_index, uint64_t* holder);

  // Frees orphans whose grace is over and offers that nobody took for kOfferMaxAgeNs, both far sooner while the pool is full; gives back the entries of
  // leases without rows.
  void Sweep();

  std::vector<Lease> Leases() const;  // live and dead
  Counts Count() const;
  bool HasStreams() const;               // any row: a restarted worker belongs here
  std::vector<std::string> TakeNotes();  // what adoption had to mend, for the log

  // The router frees a stream when its request ends. One that lost its journal never will; by then the stream is cheaper to recompute than to keep.
  static constexpr int64_t kOfferMaxAgeNs = 600'000'000'000;
  // The same while the pool is full: somebody was refused a page in the last second or so.
  static constexpr int64_t kRefusalFreshNs = 1'500'000'000;
  static constexpr int64_t kOrphanGraceWhenFullNs = 2'000'000'000;
  static constexpr int64_t kOfferMaxAgeWhenFullNs = 10'000'000'000;

 private:
  using RowsByIndex = std::map<int32_t, int32_t>;  // index in the stream -> row

  template <typename T, typename V>
  void Put(std::atomic<T>& field, V value) {
    field.store(static_cast<T>(value), std::memory_order_release);
    Stored();
  }
  template <typename T>
  void Put(T& field, const T& value) {
    field = value;
    Stored();
  }
  void Stored() {
    PublishPoint("table_store");
    if (options_.after_store) options_.after_store();
  }

  void Adopt(const std::function<bool(const ProcessId&)>& alive);
  LeaseEntry* FindLive(uint64_t id) const;
  bool IsLive(uint64_t id) const { return FindLive(id) != nullptr; }
  absl::StatusOr<LeaseEntry*> LiveLease(uint64_t id) const;
  uint64_t NextUse();
  Hash128 HashOf(const Hash128& parent, uint64_t numerics, bool decode_written, const int32_t* ids) const;
  bool IsFull(int32_t page) const;
  std::vector<int32_t> LongestChain(uint64_t numerics, const std::vector<int32_t>& token_ids) const;
  absl::Status NeedRows(int64_t count, const char* what) const;
  int32_t TakeFreePage();  // evicts if it must; the caller has checked that there is one
  int32_t MakeRow(const LeaseEntry& lease, const Hash128& request, int32_t index, int32_t page);
  void FreeRow(int32_t row);
  void DropIfUnused(int32_t page);
  void FreeFromTheBack(const std::function<bool(const RowEntry&)>& which);
  void FreeRows(const Hash128& request, int32_t from_index);
  std::vector<Row> RowsOf(const RowsByIndex& rows) const;
  Row RowAt(int32_t row) const;

  const std::shared_ptr<StoreTable> table_;
  const std::shared_ptr<KvPool> pool_;
  const PageTableOptions options_;
  PageEntry* const pages_;
  RowEntry* const rows_;
  LeaseEntry* const leases_;

  mutable std::mutex mutex_;  // all below, and every write to the table
  // Private, rebuilt at adoption:
  absl::flat_hash_map<Hash128, RowsByIndex> streams_;
  absl::flat_hash_map<Hash128, int64_t> offered_at_;
  int64_t refused_at_ns_ = 0;  // the last Alloc that found too few pages
  absl::flat_hash_map<uint64_t, int64_t> rows_of_lease_;
  absl::flat_hash_map<Hash128, int32_t> index_;    // hash -> SEALED page
  std::set<std::pair<uint64_t, int32_t>> unused_;  // SEALED, indexed, no rows: (last use, page), the next to be evicted first
  std::vector<int32_t> page_rows_;
  std::vector<int32_t> free_pages_;
  std::vector<int32_t> free_rows_;
  uint64_t call_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace hearth
