#include "services/router/utf8.h"

#include <algorithm>

namespace hearth::router {

size_t UnfinishedBytes(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    if (IsContinuation(text[text.size() - back])) continue;
    return NextUtf8(text.substr(text.size() - back)).verdict == Utf8Step::Verdict::kIncomplete ? back : 0;
  }
  return 0;
}

int32_t CountCharacters(std::string_view text) {
  return static_cast<int32_t>(std::count_if(text.begin(), text.end(), [](char byte) { return !IsContinuation(byte); }));
}

bool IsValidUtf8(std::string_view text) { return !FirstInvalidUtf8(text).has_value(); }

}  // namespace hearth::router
