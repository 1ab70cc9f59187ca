// How the host device cuts a product of weights and tokens into kernel calls.
// Room: common/device/host. Used by linear layers and by the expert engine alike.
#pragma once

#include <cstdint>

namespace hearth {

// Tokens that a kernel is given at once: their activations stay in the second-level cache while a block of weight rows passes.
inline constexpr int64_t kTokenBlock = 32;
// Weight rows are cut in multiples of this, so that kernels work on whole groups of rows.
inline constexpr int64_t kRowAlign = 16;

}  // namespace hearth
