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
  // Of prompts with more tokens than `from_tokens` to compute: the paths of shorter ones do not depend on it.
  PrefixPeek(StoreClient* store, int64_t from_tokens) : store_(store), from_tokens_(from_tokens) {}
  // 0 when unknown. A store that did not answer is not asked again for two seconds: requests must not queue up behind it.
  int32_t CachedTokens(const std::vector<int32_t>& prompt_ids);
  int64_t from_tokens() const { return from_tokens_.load(std::memory_order_relaxed); }
  void set_from_tokens(int64_t tokens) { from_tokens_.store(tokens, std::memory_order_relaxed); }

 private:
  StoreClient* store_;
  std::atomic<int64_t> from_tokens_;
  std::atomic<int64_t> silent_until_ns_{0};
};

}  // namespace hearth::router
