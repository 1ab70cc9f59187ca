// Cat(a, b, ...): text of strings and integers put together; absl::StrCat that also takes std::string_view (see
// common/base/strings.h). Room: common/text.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/base/strings.h"

namespace hearth::jinja {

template <typename... Parts>
std::string Cat(const Parts&... parts) {
  const auto bridge = [](const auto& part) {
    if constexpr (std::is_convertible_v<decltype(part), std::string_view>) {
      return Sv(part);
    } else {
      return part;
    }
  };
  return absl::StrCat(absl::AlphaNum(bridge(parts)).Piece()...);
}

}  // namespace hearth::jinja
