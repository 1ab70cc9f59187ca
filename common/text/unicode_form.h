// Unicode normalisation forms over UTF-8.
// Room: common/text. May touch: utf8proc. Threads: any; pure functions.
// utf8proc orders combining marks by insertion, quadratic in their number; here they are sorted, so that a text made of
// nothing but marks takes no longer than another.
#pragma once

#include <string>
#include <string_view>

#include "common/base/status.h"

namespace hearth {

enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };

// `text` must be valid UTF-8.
absl::StatusOr<std::string> ToUnicodeForm(std::string_view text, UnicodeForm form);

}  // namespace hearth
