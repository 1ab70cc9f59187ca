// tokenizer.json writes its patterns for Oniguruma (Ruby syntax); this rewrites one for PCRE2 so that it matches the
// same text. Room: common/text. May touch: common/base. Threads: any; a pure function. What differs and is rewritten:
// \s \w \d \h \v \b and their opposites, \p{script}, long names, POSIX brackets, nested classes, class intersection
// (&&), {,n}, and (?m). All else is the same in both and copied.
#pragma once

#include <string>
#include <string_view>

#include "common/base/status.h"

namespace hearth {

// Errors: InvalidArgument for a class that never ends. What PCRE2 can't parse is left to its own compiler to refuse.
absl::StatusOr<std::string> PcreFromOniguruma(std::string_view pattern);

}  // namespace hearth
