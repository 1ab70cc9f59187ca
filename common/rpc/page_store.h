// What a worker asks of the store about pages, as an interface: the store client in production, a fake in tests.
// Room: common/rpc. May touch: common/{shm,base}. Threads: any. All calls may be repeated (docs/shared-memory.md).
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"

namespace hearth {

struct PageRef {
  int32_t index = 0;  // in the stream
  int32_t page = 0;   // in the pool
  bool sealed = false;
};

class PageStore {
 public:
  virtual ~PageStore() = default;
  // Each waits for the store at most about a second, then Unavailable: the caller goes on with what it has and asks again.
  virtual absl::StatusOr<std::vector<PageRef>> Match(const Hash128& request, const std::vector<int32_t>& token_ids) = 0;
  // Rows for [first_index, first_index + count), ascending. Where the pool can't give all, `at_least` of them will do (0: all), from
  // first_index on without a gap; ResourceExhausted when it can't give those either.
  virtual absl::StatusOr<std::vector<PageRef>> Alloc(const Hash128& request, int32_t first_index, int32_t count, int32_t at_least = 0) = 0;
  virtual absl::Status Seal(const Hash128& request, const std::vector<int32_t>& indexes) = 0;
  virtual absl::Status Offer(const Hash128& request) = 0;
  // Empty: nothing is left of the stream. FailedPrecondition: a living worker holds it.
  virtual absl::StatusOr<std::vector<PageRef>> Take(const Hash128& request) = 0;
  virtual absl::Status Free(const Hash128& request, int32_t from_index) = 0;
};

}  // namespace hearth
