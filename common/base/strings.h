// Bridges between std::string_view, which our interfaces speak, and absl::string_view, which is a type of its own in Debian's
// Abseil (built as C++14): StrCat, StrSplit, SimpleAtoi and absl containers take Sv(text).
// Room: common/base.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace hearth {

inline absl::string_view Sv(std::string_view text) { return absl::string_view(text.data(), text.size()); }
inline std::string_view StdSv(absl::string_view text) { return std::string_view(text.data(), text.size()); }

}  // namespace hearth
