// See decode_style.h.
#include "common/text/decode_style.h"

#include <algorithm>
#include <utility>

namespace hearth {
namespace {

// In the order in which the reference applies them, each to the result of the one before.
constexpr std::pair<std::string_view, std::string_view> kCleanUps[] = {
    {" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
};

}  // namespace

std::string StreamReplacer::Push(std::string_view text) {
  pending_ += text;
  std::string out;
  size_t done = 0;
  for (size_t found; (found = pending_.find(from_, done)) != std::string::npos; done = found + from_.size()) {
    out.append(pending_, done, found - done);
    out += to_;
  }
  // Keep the longest end that begins `from_`.
  const size_t left = pending_.size() - done;
  size_t keep = std::min(left, from_.size() - 1);
  while (keep > 0 && pending_.compare(pending_.size() - keep, keep, from_, 0, keep) != 0) --keep;
  out.append(pending_, done, left - keep);
  pending_.erase(0, pending_.size() - keep);
  return out;
}

std::string StreamReplacer::Finish() { return std::exchange(pending_, {}); }

TextStyler::TextStyler(const DecodeStyle& style)
    : strip_content_(style.strip_content), strip_left_(style.strip_content.empty() ? 0 : style.strip_left_max) {
  if (!style.clean_up_spaces) return;
  for (const auto& [from, to] : kCleanUps) replacers_.emplace_back(from, to);
}

std::string TextStyler::StripLeft(std::string_view text, bool at_end) {
  if (strip_left_ == 0) return std::string(text);
  strip_pending_ += text;
  while (strip_left_ > 0) {
    if (strip_pending_.size() >= strip_content_.size()) {
      if (strip_pending_.compare(0, strip_content_.size(), strip_content_) != 0) {
        strip_left_ = 0;
        break;
      }
      strip_pending_.erase(0, strip_content_.size());
      --strip_left_;
    } else if (at_end || strip_content_.compare(0, strip_pending_.size(), strip_pending_) != 0) {
      strip_left_ = 0;
    } else {
      return "";  // may become another copy
    }
  }
  return std::exchange(strip_pending_, {});
}

std::string TextStyler::Push(std::string_view text) {
  std::string current = StripLeft(text, false);
  for (StreamReplacer& replacer : replacers_) current = replacer.Push(current);
  return current;
}

std::string TextStyler::Finish() {
  std::string current = StripLeft("", true);
  for (StreamReplacer& replacer : replacers_) {
    current = replacer.Push(current);
    current += replacer.Finish();
  }
  return current;
}

}  // namespace hearth
