#pragma once

#include <cstdint>

namespace hearth {

// The next multiple of `align`, which is above zero; `n` itself where it is one.
constexpr uint64_t AlignUp(uint64_t n, uint64_t align) { return (n + align - 1) / align * align; }

}  // namespace hearth
