// How much of a long prompt the published pages would serve: asked of the store before a path is chosen, and only where it matters.
// Room: services/router. Threads: the pool's (the store's answer may take up to a second).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/rpc/store_client.h"

namespace hearth::router {

class PrefixPeek {
 public:
  PrefixPeek(StoreClient* store, int64_t chunked_prefill_max_tokens) : store_(store), chunked_prefill_max_tokens_(chunked_prefill_max_tokens) {}
  // 0 when unknown. A store that did not answer is not asked again for two seconds: requests must not queue up behind it.
  int32_t CachedTokens(const std::vector<int32_t>& prompt_ids);

 private:
  StoreClient* store_;
  const int64_t chunked_prefill_max_tokens_;
  std::atomic<int64_t> silent_until_ns_{0};
};

}  // namespace hearth::router
