#include "common/plan/planned_kv.h"

#include <numeric>

#include "common/base/ceil_div.h"

namespace hearth {

absl::StatusOr<PlannedKv> PlannedKv::Of(const Model& model, int64_t tokens) {
  KvGeometry geometry = model.kv_geometry();
  geometry.num_pages = static_cast<uint64_t>(CeilDiv(tokens, kPageTokens));
  PlannedKv kv;
  ASSIGN_OR_RETURN(kv.pool, KvPool::Private(geometry));
  kv.pages.resize(geometry.num_pages);
  std::iota(kv.pages.begin(), kv.pages.end(), 0);
  return kv;
}

}  // namespace hearth
