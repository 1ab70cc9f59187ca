#include "services/router/prefix_peek.h"

#include "common/base/time.h"

namespace hearth::router {

int32_t PrefixPeek::CachedTokens(const std::vector<int32_t>& prompt_ids) {
  if (static_cast<int64_t>(prompt_ids.size()) - 1 <= from_tokens()) return 0;
  const StoreView view = store_->View();
  if (!view.attached || !view.generation || MonotonicNowNs() < silent_until_ns_.load()) return 0;
  const auto tokens = store_->Peek(*view.generation, prompt_ids);
  if (!tokens.ok()) {
    silent_until_ns_.store(MonotonicNowNs() + 2'000'000'000);
    return 0;
  }
  return *tokens;
}

}  // namespace hearth::router
