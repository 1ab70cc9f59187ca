// How the host device cuts a product of weights and tokens into kernel calls.
// Room: common/device/host. Used by linear layers, attention and the expert engine alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/base/ceil_div.h"
#include "common/device/ops.h"

namespace hearth {

// Weight rows are cut in multiples of this, so that kernels work on whole groups of rows.
inline constexpr int64_t kRowAlign = 64;

// Tokens that the form's kernel is given at once, of `tokens` that share the weights: even parts, the last one not much smaller.
inline int64_t TokensAtOnce(Form form, int64_t tokens, int terms) {
  // Decode form: their activations stay in the second-level cache while a block of weight rows passes. Prefill form: what weights are converted for
  // once; the more, the less that costs.
  const int64_t most = form == Form::kPrefill ? 504 / terms : 32;
  return tokens <= most ? std::max<int64_t>(tokens, 1) : CeilDiv(tokens, CeilDiv(tokens, most));
}

}  // namespace hearth
