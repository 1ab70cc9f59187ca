// A KV pool for one sequence in virtual time: pages that are counted and named, and hold nothing.
// Room: common/plan. May touch: common/{model,shm,base}. Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/model/forward.h"
#include "common/shm/kv_pool.h"

namespace hearth {

struct PlannedKv {
  // Of so many tokens. Errors: those of KvPool::Private.
  static absl::StatusOr<PlannedKv> Of(const Model& model, int64_t tokens);

  std::shared_ptr<KvPool> pool;
  std::vector<int32_t> pages;  // all of the pool's, in order
};

}  // namespace hearth
