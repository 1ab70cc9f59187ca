// A store of pages for the workers' loops in a test's or a bench's own process: it never runs out, and gives what was left to who takes it.
// Room: tests. Threads: any.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/rpc/page_store.h"

namespace hearth {

class KeepingPageStore : public PageStore {
 public:
  absl::StatusOr<std::vector<PageRef>> Match(const Hash128&, const std::vector<int32_t>&) override { return std::vector<PageRef>(); }
  absl::StatusOr<std::vector<PageRef>> Alloc(const Hash128& id, int32_t first, int32_t count, int32_t) override {
    std::lock_guard lock(mutex_);
    std::vector<PageRef> rows;
    for (int32_t i = 0; i < count; ++i) rows.push_back({first + i, next_++, false});
    std::vector<PageRef>& mine = rows_[id.ToHex()];
    mine.insert(mine.end(), rows.begin(), rows.end());
    return rows;
  }
  absl::Status Seal(const Hash128& id, const std::vector<int32_t>& indexes) override {
    std::lock_guard lock(mutex_);
    for (const int32_t index : indexes) rows_[id.ToHex()][static_cast<size_t>(index)].sealed = true;
    return absl::OkStatus();
  }
  absl::Status Offer(const Hash128&) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<PageRef>> Take(const Hash128& id) override { return Rows(id); }
  // Of a stream's end: its rows are kept here, to be looked at. Of what does not fit: dropped.
  absl::Status Free(const Hash128& id, int32_t from) override {
    std::lock_guard lock(mutex_);
    std::vector<PageRef>& rows = rows_[id.ToHex()];
    if (from > 0 && static_cast<size_t>(from) < rows.size()) rows.resize(static_cast<size_t>(from));
    return absl::OkStatus();
  }
  std::vector<PageRef> Rows(const Hash128& id) {
    std::lock_guard lock(mutex_);
    return rows_[id.ToHex()];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<PageRef>> rows_;
  int32_t next_ = 0;
};

}  // namespace hearth
