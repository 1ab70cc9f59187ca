// The calls; adoption is in page_table_adopt.cc. Order of stores: docs/shared-memory.md, "Rows and pages".
#include "services/weightstore/page_table.h"

#include <string.h>

#include <algorithm>

#include "common/base/check.h"
#include "common/base/time.h"

namespace hearth {
namespace {

// Prefixes fork where one stream's decode-written page and another's prefill-written one hold equal tokens; more forks than this are not followed.
constexpr size_t kForksMax = 16;

PageTableOptions WithClock(PageTableOptions options) {
  if (!options.now_ns) options.now_ns = MonotonicNowNs;
  return options;
}

template <typename Enum>
Enum StateOf(const std::atomic<uint32_t>& word) {
  return static_cast<Enum>(word.load(std::memory_order_acquire));
}

}  // namespace

PageTable::PageTable(std::shared_ptr<StoreTable> table, std::shared_ptr<KvPool> pool, PageTableOptions options,
                     const std::function<bool(const ProcessId&)>& alive)
    : table_(std::move(table)),
      pool_(std::move(pool)),
      options_(WithClock(std::move(options))),
      pages_(table_->pages()),
      rows_(table_->rows()),
      leases_(table_->leases()) {
  HEARTH_CHECK(static_cast<uint64_t>(table_->num_pages()) == pool_->geometry().num_pages);
  std::lock_guard lock(mutex_);
  Adopt(alive);
}

// ---- Leases ----

absl::Status PageTable::MakeLease(uint64_t id, const LeaseSpec& spec) {
  std::lock_guard lock(mutex_);
  if (FindLive(id) != nullptr) return absl::OkStatus();
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    LeaseEntry& lease = leases_[i];
    if (StateOf<LeaseState>(lease.state) != LeaseState::kFree) continue;
    Put(lease.kind, spec.kind);
    Put(lease.lease_id, id);
    Put(lease.pid, spec.process.pid);
    Put(lease.start_ticks, spec.process.start_ticks);
    Put(lease.generation, table_->region().header().generation);
    Put(lease.numerics, spec.numerics);
    Put(lease.dead_since_ns, 0);
    memset(lease.name, 0, sizeof(lease.name));
    memcpy(lease.name, spec.name.data(), std::min(spec.name.size(), sizeof(lease.name) - 1));
    Put(lease.state, LeaseState::kLive);
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat("all ", kLeasesMax, " leases of this generation are taken"));
}

void PageTable::EndLease(uint64_t id) {
  std::lock_guard lock(mutex_);
  LeaseEntry* lease = FindLive(id);
  if (lease == nullptr) return;
  Put(lease->dead_since_ns, options_.now_ns());
  Put(lease->state, LeaseState::kDead);
}

absl::Status PageTable::Reattach(uint64_t id, const ProcessId& process, const std::vector<Stream>& holds) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const LeaseEntry* lease, LiveLease(id));
  if (lease->pid != process.pid || lease->start_ticks != process.start_ticks) {
    return absl::PermissionDeniedError(absl::StrCat("lease ", id, " is process ", lease->pid, "'s, this is process ", process.pid));
  }
  absl::flat_hash_set<std::pair<Hash128, int32_t>> named;
  absl::flat_hash_set<Hash128> unsure;
  for (const Stream& stream : holds) {
    if (stream.pages.empty()) unsure.insert(stream.request);
    for (const int32_t page : stream.pages) named.emplace(stream.request, page);
  }
  // What it has offered (the answer may have got lost) stays offered, named or not.
  for (const Hash128& request : unsure) {
    const auto stream = streams_.find(request);
    if (stream == streams_.end()) continue;
    for (const auto& [index, row] : stream->second) {
      RowEntry& r = rows_[row];
      if (StateOf<RowState>(r.state) != RowState::kHeld || r.lease_id != id || named.contains({request, r.page})) continue;
      Put(r.state, RowState::kOffered);
      offered_at_[request] = options_.now_ns();
    }
  }
  FreeFromTheBack([&](const RowEntry& r) {
    return StateOf<RowState>(r.state) == RowState::kHeld && r.lease_id == id && !named.contains({r.request, r.page});
  });
  return absl::OkStatus();
}

LeaseEntry* PageTable::FindLive(uint64_t id) const {
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    if (leases_[i].lease_id == id && StateOf<LeaseState>(leases_[i].state) == LeaseState::kLive) return &leases_[i];
  }
  return nullptr;
}

absl::StatusOr<LeaseEntry*> PageTable::LiveLease(uint64_t id) const {
  LeaseEntry* lease = FindLive(id);
  if (lease == nullptr) return absl::NotFoundError(absl::StrCat("lease ", id, " is not known or has ended: attach anew"));
  return lease;
}

// ---- The index ----

Hash128 PageTable::HashOf(const Hash128& parent, uint64_t numerics, bool decode_written, const int32_t* ids) const {
  Hasher128 hasher;
  hasher.UpdateValue(parent);
  hasher.UpdateValue(options_.fingerprint);
  hasher.UpdateValue(static_cast<uint32_t>(pool_->geometry().dtype));
  hasher.UpdateValue(numerics);
  hasher.UpdateValue(static_cast<uint32_t>(decode_written));
  hasher.Update(ids, kPageTokens * sizeof(int32_t));
  return hasher.Digest();
}

bool PageTable::IsFull(int32_t page) const { return pool_->header(page).tokens_valid.load(std::memory_order_acquire) == kPageTokens; }

// The longest chain of published pages that holds the prompt's first pages. At each depth a page with these ids may exist in two
// forms (written by prefill throughout, or not); the longest wins, then the one that leaves the prefill form latest.
std::vector<int32_t> PageTable::LongestChain(uint64_t numerics, const std::vector<int32_t>& token_ids) const {
  struct Node {
    Hash128 hash;
    bool decode_written;
    int32_t page;
    int previous;  // in `nodes`
  };
  // The last token is never served from the cache: its logits are what the request is about.
  const int64_t pages_max = token_ids.empty() ? 0 : (static_cast<int64_t>(token_ids.size()) - 1) / kPageTokens;
  std::vector<Node> nodes = {{Hash128{}, false, -1, -1}};
  size_t level_begin = 0;
  for (int64_t depth = 0; depth < pages_max; ++depth) {
    const size_t level_end = nodes.size();
    const int32_t* ids = token_ids.data() + depth * kPageTokens;
    for (size_t n = level_begin; n < level_end && nodes.size() - level_end < kForksMax; ++n) {
      const Node parent = nodes[n];
      for (const bool decode_written : {false, true}) {
        if (parent.decode_written && !decode_written) continue;
        if (decode_written && !options_.reuse_decoded_pages) continue;
        const Hash128 hash = HashOf(parent.hash, numerics, decode_written, ids);
        const auto it = index_.find(hash);
        if (it == index_.end()) continue;
        const PageEntry& entry = pages_[it->second];
        // A hit is believed after comparing what the hash stands for.
        if (entry.numerics != numerics || entry.parent != parent.hash || !IsFull(it->second) ||
            memcmp(pool_->header(it->second).token_ids, ids, kPageTokens * sizeof(int32_t)) != 0) {
          continue;
        }
        nodes.push_back({hash, decode_written, it->second, static_cast<int>(n)});
      }
    }
    if (nodes.size() == level_end) break;
    level_begin = level_end;
  }
  std::vector<int32_t> chain;
  for (int n = static_cast<int>(level_begin); nodes[static_cast<size_t>(n)].page >= 0; n = nodes[static_cast<size_t>(n)].previous) {
    chain.push_back(nodes[static_cast<size_t>(n)].page);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

int64_t PageTable::Peek(const std::vector<int32_t>& token_ids) const {
  std::lock_guard lock(mutex_);
  std::set<uint64_t> numerics;
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    if (StateOf<LeaseState>(leases_[i].state) == LeaseState::kLive) numerics.insert(leases_[i].numerics);
  }
  size_t best = 0;
  for (const uint64_t id : numerics) best = std::max(best, LongestChain(id, token_ids).size());
  return static_cast<int64_t>(best) * kPageTokens;
}

absl::StatusOr<std::vector<PageTable::Row>> PageTable::Match(uint64_t lease_id, const Hash128& request, const std::vector<int32_t>& token_ids) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const LeaseEntry* lease, LiveLease(lease_id));
  RowsByIndex existing;
  if (const auto it = streams_.find(request); it != streams_.end()) existing = it->second;
  for (const auto& [index, row] : existing) {
    if (rows_[row].lease_id != lease_id || StateOf<RowState>(rows_[row].state) != RowState::kHeld) {
      return absl::FailedPreconditionError(absl::StrCat("stream ", request.ToHex(), " has rows of another lease, or offered ones: Take it first"));
    }
  }
  // A repeated call finds the rows of the first one, and only what is missing behind them is looked for.
  const std::vector<int32_t> chain = LongestChain(lease->numerics, token_ids);
  int64_t missing = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(chain.size()); ++i) missing += existing.contains(i) ? 0 : 1;
  RETURN_IF_ERROR(NeedRows(missing, "Match"));
  ++call_;
  std::vector<Row> result;
  for (int32_t i = 0; i < static_cast<int32_t>(chain.size()); ++i) {
    const int32_t page = chain[static_cast<size_t>(i)];
    if (const auto it = existing.find(i); it != existing.end()) {
      const Row row = RowAt(it->second);
      if (!row.sealed || memcmp(pool_->header(row.page).token_ids, token_ids.data() + i * kPageTokens, kPageTokens * sizeof(int32_t)) != 0) break;
      result.push_back(row);
      continue;
    }
    MakeRow(*lease, request, i, page);
    Put(pages_[page].last_use, NextUse());
    result.push_back({i, page, true});
  }
  return result;
}

// ---- Pages ----

uint64_t PageTable::NextUse() {
  const uint64_t next = table_->header().use_clock.load(std::memory_order_relaxed) + 1;
  Put(table_->header().use_clock, next);
  return next;
}

absl::Status PageTable::NeedRows(int64_t count, const char* what) const {
  if (static_cast<int64_t>(free_rows_.size()) >= count) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(what, " needs ", count, " rows, ", free_rows_.size(), " of ", table_->num_rows(), " are free"));
}

absl::StatusOr<std::vector<PageTable::Row>> PageTable::Alloc(uint64_t lease_id, const Hash128& request, int32_t first_index, int32_t count,
                                                             int32_t at_least) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const LeaseEntry* lease, LiveLease(lease_id));
  if (first_index < 0 || count < 1 || static_cast<int64_t>(first_index) + count > kPagesPerStreamMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("Alloc of pages [", first_index, ", +", count, "): a stream has pages 0 to ", kPagesPerStreamMax - 1));
  }
  if (at_least < 0 || at_least > count) return absl::InvalidArgumentError(absl::StrCat("Alloc of at least ", at_least, " of ", count, " pages"));
  if (at_least == 0) at_least = count;
  const auto stream = streams_.find(request);
  if (stream != streams_.end()) {
    for (const auto& [index, row] : stream->second) {
      if (rows_[row].lease_id != lease_id || StateOf<RowState>(rows_[row].state) != RowState::kHeld) {
        return absl::FailedPreconditionError(absl::StrCat("stream ", request.ToHex(), " has rows of another lease, or offered ones: Take it first"));
      }
    }
  }
  // How far one gets from the first index on, and what would be missing for all that must be.
  const auto available = static_cast<int64_t>(free_pages_.size() + unused_.size());
  const auto free_rows = static_cast<int64_t>(free_rows_.size());
  int32_t end = first_index;
  int64_t fresh = 0, needed = 0;
  for (int32_t index = first_index; index < first_index + count; ++index) {
    const int64_t missing = stream != streams_.end() && stream->second.contains(index) ? 0 : 1;
    if (index < first_index + at_least) needed += missing;
    if (index > end || fresh + missing > std::min(available, free_rows)) continue;
    fresh += missing;
    end = index + 1;
  }
  if (end < first_index + at_least) {
    refused_at_ns_ = options_.now_ns();
    RETURN_IF_ERROR(NeedRows(needed, "Alloc"));
    return absl::ResourceExhaustedError(absl::StrCat("needed ", needed, " KV pages, ", available, " of ", table_->num_pages(),
                                                     " are free or unused: free streams, or raise weightstore.kv_pool_tokens"));
  }
  ++call_;
  std::vector<Row> result;
  for (int32_t index = first_index; index < end; ++index) {
    if (const auto it = streams_.find(request); it != streams_.end() && it->second.contains(index)) {
      result.push_back(RowAt(it->second.at(index)));
      continue;
    }
    const int32_t page = TakeFreePage();
    KvPageHeader& header = pool_->header(page);
    Put(header.tokens_valid, 0);
    Put(header.prefill_tokens, 0);
    Put(header.progress, 0);
    Put(pages_[page].flags, uint32_t{0});
    Put(pages_[page].numerics, lease->numerics);
    MakeRow(*lease, request, index, page);
    Put(pages_[page].state, PageState::kOpen);
    result.push_back({index, page, false});
  }
  return result;
}

int32_t PageTable::TakeFreePage() {
  if (free_pages_.empty()) {
    const int32_t page = unused_.begin()->second;
    unused_.erase(unused_.begin());
    index_.erase(pages_[page].hash);
    Put(pages_[page].state, PageState::kFree);
    return page;
  }
  const int32_t page = free_pages_.back();
  free_pages_.pop_back();
  return page;
}

int32_t PageTable::MakeRow(const LeaseEntry& lease, const Hash128& request, int32_t index, int32_t page) {
  const int32_t row = free_rows_.back();
  free_rows_.pop_back();
  RowEntry& r = rows_[row];
  Put(r.page, page);
  Put(r.lease_id, lease.lease_id);
  Put(r.request, request);
  Put(r.index, index);
  Put(r.call, call_);
  Put(r.state, RowState::kHeld);
  streams_[request][index] = row;
  ++rows_of_lease_[lease.lease_id];
  if (page_rows_[static_cast<size_t>(page)]++ == 0) unused_.erase({pages_[page].last_use, page});
  return row;
}

void PageTable::FreeRow(int32_t row) {
  RowEntry& r = rows_[row];
  const int32_t page = r.page;
  const Hash128 request = r.request;
  Put(r.state, RowState::kFree);
  free_rows_.push_back(row);
  if (--rows_of_lease_[r.lease_id] == 0) rows_of_lease_.erase(r.lease_id.load());
  const auto stream = streams_.find(request);
  stream->second.erase(r.index);
  if (stream->second.empty()) {
    streams_.erase(stream);
    offered_at_.erase(request);
  }
  if (--page_rows_[static_cast<size_t>(page)] == 0) DropIfUnused(page);
}

// The page's last row is gone: an OPEN page is nobody's, a SEALED one stays as cache if it can be found.
void PageTable::DropIfUnused(int32_t page) {
  PageEntry& entry = pages_[page];
  if (StateOf<PageState>(entry.state) == PageState::kSealed && (entry.flags & (kPageUnindexed | kPageMixed)) == 0) {
    Put(entry.last_use, NextUse());
    unused_.emplace(entry.last_use, page);
    return;
  }
  if (StateOf<PageState>(entry.state) != PageState::kFree) Put(entry.state, PageState::kFree);
  free_pages_.push_back(page);
}

absl::Status PageTable::Seal(uint64_t lease_id, const Hash128& request, const std::vector<int32_t>& indexes) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const LeaseEntry* lease, LiveLease(lease_id));
  const auto stream = streams_.find(request);
  const auto row_of = [&](int32_t index) -> int32_t {
    if (stream == streams_.end()) return -1;
    const auto it = stream->second.find(index);
    return it == stream->second.end() ? -1 : it->second;
  };
  for (size_t i = 0; i < indexes.size(); ++i) {
    const int32_t index = indexes[i];
    if (i > 0 && index != indexes[i - 1] + 1) return absl::InvalidArgumentError("Seal: indexes must be consecutive");
    const int32_t row = row_of(index);
    if (row < 0) return absl::NotFoundError(absl::StrCat("stream ", request.ToHex(), " has no page ", index));
    if (rows_[row].lease_id != lease_id || StateOf<RowState>(rows_[row].state) != RowState::kHeld) {
      return absl::FailedPreconditionError(absl::StrCat("page ", index, " of stream ", request.ToHex(), " is not held by this lease"));
    }
    const int32_t page = rows_[row].page;
    PageEntry& entry = pages_[page];
    if (StateOf<PageState>(entry.state) == PageState::kSealed) continue;
    const KvPageHeader& header = pool_->header(page);
    if (!IsFull(page)) {
      return absl::FailedPreconditionError(absl::StrCat("page ", index, " of stream ", request.ToHex(), " holds ", header.tokens_valid.load(), " of ",
                                                        kPageTokens, " tokens: only full pages are sealed"));
    }
    Hash128 parent;
    uint32_t inherited = 0;
    if (index > 0) {
      const int32_t parent_row = row_of(index - 1);
      if (parent_row < 0 || StateOf<PageState>(pages_[rows_[parent_row].page].state) != PageState::kSealed) {
        return absl::FailedPreconditionError(absl::StrCat("page ", index - 1, " of stream ", request.ToHex(), " must be sealed before page ", index));
      }
      const PageEntry& p = pages_[rows_[parent_row].page];
      parent = p.hash;
      inherited = p.flags & (kPageDecodeWritten | kPageMixed);
      if (p.numerics != lease->numerics) inherited |= kPageMixed;
    }
    uint32_t flags = inherited;
    if (header.prefill_tokens.load(std::memory_order_acquire) < kPageTokens) flags |= kPageDecodeWritten;
    if (entry.numerics != lease->numerics) flags |= kPageMixed;
    const Hash128 hash = HashOf(parent, lease->numerics, (flags & kPageDecodeWritten) != 0, header.token_ids);
    if (index_.contains(hash)) flags |= kPageUnindexed;
    Put(entry.hash, hash);
    Put(entry.parent, parent);
    Put(entry.flags, flags);
    Put(entry.last_use, NextUse());
    Put(entry.state, PageState::kSealed);
    if ((flags & (kPageUnindexed | kPageMixed)) == 0) index_[hash] = page;
  }
  return absl::OkStatus();
}

// ---- Streams ----

PageTable::Row PageTable::RowAt(int32_t row) const {
  const RowEntry& r = rows_[row];
  return {r.index, r.page, StateOf<PageState>(pages_[r.page].state) == PageState::kSealed};
}

std::vector<PageTable::Row> PageTable::RowsOf(const RowsByIndex& rows) const {
  std::vector<Row> result;
  result.reserve(rows.size());
  for (const auto& [index, row] : rows) result.push_back(RowAt(row));
  return result;
}

absl::Status PageTable::Offer(uint64_t lease_id, const Hash128& request) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(LiveLease(lease_id).status());
  const auto stream = streams_.find(request);
  if (stream == streams_.end()) return absl::NotFoundError(absl::StrCat("stream ", request.ToHex(), " has no rows"));
  // Rows of another lease: the offer was made before, and somebody has taken the stream since.
  for (const auto& [index, row] : stream->second) {
    if (rows_[row].lease_id == lease_id && StateOf<RowState>(rows_[row].state) == RowState::kHeld) Put(rows_[row].state, RowState::kOffered);
  }
  offered_at_[request] = options_.now_ns();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PageTable::Row>> PageTable::Take(uint64_t lease_id, const Hash128& request, uint64_t* holder) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(LiveLease(lease_id).status());
  const auto stream = streams_.find(request);
  if (stream == streams_.end()) return std::vector<Row>();
  for (const auto& [index, row] : stream->second) {
    const uint64_t other = rows_[row].lease_id;
    if (other == lease_id || StateOf<RowState>(rows_[row].state) == RowState::kOffered || !IsLive(other)) continue;
    *holder = other;
    return absl::FailedPreconditionError(absl::StrCat("stream ", request.ToHex(), " is held by living lease ", other, " (", FindLive(other)->name,
                                                      ", process ", FindLive(other)->pid, ")"));
  }
  for (const auto& [index, row] : stream->second) {
    RowEntry& r = rows_[row];
    if (r.lease_id != lease_id) {
      if (--rows_of_lease_[r.lease_id] == 0) rows_of_lease_.erase(r.lease_id.load());
      ++rows_of_lease_[lease_id];
      Put(r.lease_id, lease_id);
    }
    if (StateOf<RowState>(r.state) != RowState::kHeld) Put(r.state, RowState::kHeld);
  }
  offered_at_.erase(request);
  return RowsOf(stream->second);
}

absl::Status PageTable::Free(uint64_t lease_id, const Hash128& request, int32_t from_index) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(LiveLease(lease_id).status());
  const auto stream = streams_.find(request);
  if (stream == streams_.end()) return absl::OkStatus();
  for (auto it = stream->second.lower_bound(from_index); it != stream->second.end(); ++it) {
    if (rows_[it->second].lease_id != lease_id) {
      return absl::FailedPreconditionError(absl::StrCat("stream ", request.ToHex(), " is not this lease's: Take it first"));
    }
  }
  FreeRows(request, from_index);
  return absl::OkStatus();
}

absl::Status PageTable::FreeUnheld(const Hash128& request, int32_t from_index, uint64_t* holder) {
  std::lock_guard lock(mutex_);
  const auto stream = streams_.find(request);
  if (stream == streams_.end()) return absl::OkStatus();
  for (auto it = stream->second.lower_bound(from_index); it != stream->second.end(); ++it) {
    const RowEntry& r = rows_[it->second];
    if (StateOf<RowState>(r.state) == RowState::kHeld && IsLive(r.lease_id)) {
      *holder = r.lease_id;
      return absl::FailedPreconditionError(absl::StrCat("stream ", request.ToHex(), " is held by living lease ", r.lease_id.load(), " (",
                                                        FindLive(r.lease_id)->name, "): cancel it there"));
    }
  }
  FreeRows(request, from_index);
  return absl::OkStatus();
}

// Each stream's rows that are meant, the highest index first: a crash in the middle leaves no hole in it.
void PageTable::FreeFromTheBack(const std::function<bool(const RowEntry&)>& which) {
  std::vector<int32_t> rows;
  for (const auto& [request, stream] : streams_) {
    for (auto it = stream.rbegin(); it != stream.rend(); ++it) {
      if (which(rows_[it->second])) rows.push_back(it->second);
    }
  }
  for (const int32_t row : rows) FreeRow(row);
}

// From the back, for the same reason.
void PageTable::FreeRows(const Hash128& request, int32_t from_index) {
  std::vector<int32_t> rows;
  RowsByIndex& stream = streams_.at(request);
  for (auto it = stream.lower_bound(from_index); it != stream.end(); ++it) rows.push_back(it->second);
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) FreeRow(*row);
}

void PageTable::Sweep() {
  std::lock_guard lock(mutex_);
  const int64_t now = options_.now_ns();
  // While somebody is refused a page, what nobody holds waits for its next holder only shortly: that one can recompute it, and the others can't go on
  // without.
  const bool short_of_pages = refused_at_ns_ != 0 && now - refused_at_ns_ <= kRefusalFreshNs;
  const int64_t orphan_grace_ns = short_of_pages ? std::min(options_.orphan_grace_ns, kOrphanGraceWhenFullNs) : options_.orphan_grace_ns;
  const int64_t offer_max_age_ns = short_of_pages ? kOfferMaxAgeWhenFullNs : kOfferMaxAgeNs;
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    LeaseEntry& lease = leases_[i];
    if (StateOf<LeaseState>(lease.state) != LeaseState::kDead) continue;
    if (rows_of_lease_.contains(lease.lease_id) && now - lease.dead_since_ns.load() >= orphan_grace_ns) {
      FreeFromTheBack([&](const RowEntry& r) { return r.lease_id == lease.lease_id; });
    }
    if (!rows_of_lease_.contains(lease.lease_id)) Put(lease.state, LeaseState::kFree);
  }
  std::vector<Hash128> stale;
  for (const auto& [request, since] : offered_at_) {
    if (now - since >= offer_max_age_ns) stale.push_back(request);
  }
  for (const Hash128& request : stale) {
    offered_at_.erase(request);
    std::vector<int32_t> rows;
    for (const auto& [index, row] : streams_.at(request)) {
      if (StateOf<RowState>(rows_[row].state) == RowState::kOffered) rows.push_back(row);
    }
    for (auto row = rows.rbegin(); row != rows.rend(); ++row) FreeRow(*row);
  }
}

// ---- Views ----

std::vector<PageTable::Lease> PageTable::Leases() const {
  std::lock_guard lock(mutex_);
  std::vector<Lease> result;
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    const LeaseEntry& lease = leases_[i];
    const auto state = StateOf<LeaseState>(lease.state);
    if (state == LeaseState::kFree) continue;
    const auto rows = rows_of_lease_.find(lease.lease_id);
    result.push_back(
        {lease.lease_id,
         state,
         rows == rows_of_lease_.end() ? 0 : rows->second,
         {lease.kind, {lease.pid, lease.start_ticks}, lease.numerics, std::string(lease.name, strnlen(lease.name, sizeof(lease.name)))}});
  }
  return result;
}

PageTable::Counts PageTable::Count() const {
  std::lock_guard lock(mutex_);
  Counts counts;
  counts.total = table_->num_pages();
  counts.rows = table_->num_rows() - static_cast<int64_t>(free_rows_.size());
  for (int32_t page = 0; page < table_->num_pages(); ++page) {
    switch (StateOf<PageState>(pages_[page].state)) {
      case PageState::kFree: ++counts.free; break;
      case PageState::kOpen: ++counts.open; break;
      case PageState::kSealed: ++(page_rows_[static_cast<size_t>(page)] > 0 ? counts.sealed_referenced : counts.sealed_cached); break;
    }
  }
  return counts;
}

bool PageTable::HasStreams() const {
  std::lock_guard lock(mutex_);
  return !streams_.empty();
}

std::vector<std::string> PageTable::TakeNotes() {
  std::lock_guard lock(mutex_);
  return std::exchange(notes_, {});
}

}  // namespace hearth
