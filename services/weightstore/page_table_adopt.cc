// What a store does with the table of the one before it. Rows decide: a page is OPEN because a row of a known lease says so.
// Nothing read here is believed before it is checked; what can't be right is let go and noted.
#include <string.h>

#include <algorithm>

#include "services/weightstore/page_table.h"

namespace hearth {

void PageTable::Adopt(const std::function<bool(const ProcessId&)>& alive) {
  const int64_t now = options_.now_ns();
  const int32_t num_pages = table_->num_pages();
  const int32_t num_rows = table_->num_rows();
  int64_t bad_leases = 0, bad_rows = 0, bad_pages = 0;
  Put(table_->header().incarnation, table_->header().incarnation.load() + 1);

  absl::flat_hash_set<uint64_t> known;
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    LeaseEntry& lease = leases_[i];
    const uint32_t state = lease.state.load(std::memory_order_acquire);
    if (state == static_cast<uint32_t>(LeaseState::kFree)) continue;
    if (state > static_cast<uint32_t>(LeaseState::kDead) || lease.lease_id == 0 || !known.insert(lease.lease_id).second) {
      ++bad_leases;
      Put(lease.state, LeaseState::kFree);
      continue;
    }
    if (state == static_cast<uint32_t>(LeaseState::kLive) && !alive({lease.pid, lease.start_ticks})) {
      Put(lease.dead_since_ns, now);
      Put(lease.state, LeaseState::kDead);
    } else if (state == static_cast<uint32_t>(LeaseState::kDead) && lease.dead_since_ns.load() > now) {
      Put(lease.dead_since_ns, now);
    }
  }

  page_rows_.assign(static_cast<size_t>(num_pages), 0);
  std::vector<int32_t> wanted_rows;
  for (int32_t row = num_rows - 1; row >= 0; --row) {
    RowEntry& r = rows_[row];
    const uint32_t state = r.state.load(std::memory_order_acquire);
    bool good = state == static_cast<uint32_t>(RowState::kHeld) || state == static_cast<uint32_t>(RowState::kOffered);
    if (good) {
      const bool in_bounds = r.page >= 0 && r.page < num_pages && r.index >= 0 && r.index < kPagesPerStreamMax && known.contains(r.lease_id);
      // An OPEN page has one stream, a stream has one page at an index.
      const bool sealed = in_bounds && pages_[r.page].state.load(std::memory_order_acquire) == static_cast<uint32_t>(PageState::kSealed);
      good = in_bounds && (sealed || page_rows_[static_cast<size_t>(r.page)] == 0) && streams_[r.request].emplace(r.index, row).second;
      if (!good) ++bad_rows;
      if (in_bounds && streams_[r.request].empty()) streams_.erase(r.request);
    }
    if (!good) {
      if (state != static_cast<uint32_t>(RowState::kFree)) Put(r.state, RowState::kFree);
      free_rows_.push_back(row);
      continue;
    }
    ++page_rows_[static_cast<size_t>(r.page)];
    ++rows_of_lease_[r.lease_id];
    if (state == static_cast<uint32_t>(RowState::kOffered)) offered_at_[r.request] = now;
  }

  uint64_t last_use = table_->header().use_clock.load();
  for (int32_t page = num_pages - 1; page >= 0; --page) {
    PageEntry& entry = pages_[page];
    const uint32_t state = entry.state.load(std::memory_order_acquire);
    const bool has_rows = page_rows_[static_cast<size_t>(page)] > 0;
    bool sealed = state == static_cast<uint32_t>(PageState::kSealed);
    last_use = std::max(last_use, entry.last_use.load());
    if (state > static_cast<uint32_t>(PageState::kSealed)) ++bad_pages;
    if (sealed) {
      const bool intact = IsFull(page) && ((entry.flags & kPageMixed) != 0 ||
                                           entry.hash == HashOf(entry.parent, entry.numerics, (entry.flags & kPageDecodeWritten) != 0,
                                                                pool_->header(page).token_ids));
      if (!intact) ++bad_pages;
      const bool findable = intact && (entry.flags & (kPageUnindexed | kPageMixed)) == 0 && index_.emplace(entry.hash, page).second;
      if (!findable && (entry.flags & (kPageUnindexed | kPageMixed)) == 0) Put(entry.flags, entry.flags | kPageUnindexed);
      if (findable && !has_rows) unused_.emplace(entry.last_use, page);
      if (!findable && !has_rows) sealed = false;
    }
    if (sealed) continue;
    const PageState derived = has_rows ? PageState::kOpen : PageState::kFree;
    if (state != static_cast<uint32_t>(derived)) Put(entry.state, derived);
    if (!has_rows) free_pages_.push_back(page);
  }
  Put(table_->header().use_clock, last_use);

  for (int64_t i = 0; i < kLeasesMax; ++i) {
    LeaseEntry& lease = leases_[i];
    if (lease.state.load() == static_cast<uint32_t>(LeaseState::kDead) && !rows_of_lease_.contains(lease.lease_id))
      Put(lease.state, LeaseState::kFree);
  }
  if (bad_leases + bad_rows + bad_pages > 0) {
    notes_.push_back(absl::StrCat("the table held ", bad_leases, " leases, ", bad_rows, " rows and ", bad_pages,
                                  " pages that can't be right: a bug of a worker or of the store before; they were let go"));
  }
}

}  // namespace hearth
