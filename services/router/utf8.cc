#include "services/router/utf8.h"

#include <algorithm>

namespace hearth::router {
namespace {

// Length that a lead byte promises and the allowed range of the byte behind it (Unicode 15, table 3-7); 0 for no lead byte.
struct Lead {
  size_t length;
  unsigned char low, high;
};
Lead LeadOf(unsigned char byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// How many bytes at `at` are a prefix of some character, and whether they are the whole of one.
size_t ValidPart(std::string_view text, size_t at, bool* whole) {
  *whole = false;
  const Lead lead = LeadOf(static_cast<unsigned char>(text[at]));
  if (lead.length == 0) return 0;
  size_t n = 1;
  while (n < lead.length && at + n < text.size()) {
    const auto byte = static_cast<unsigned char>(text[at + n]);
    if (n == 1 ? (byte < lead.low || byte > lead.high) : (byte & 0xC0) != 0x80) return n;
    ++n;
  }
  *whole = n == lead.length;
  return n;
}

}  // namespace

size_t CharacterLength(std::string_view text, size_t at) {
  bool whole = false;
  const size_t n = ValidPart(text, at, &whole);
  return whole ? n : 0;
}

size_t UnfinishedBytes(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    if (IsContinuation(text[text.size() - back])) continue;
    bool whole = false;
    return ValidPart(text, text.size() - back, &whole) == back && !whole ? back : 0;
  }
  return 0;
}

int32_t CountCharacters(std::string_view text) {
  return static_cast<int32_t>(std::count_if(text.begin(), text.end(), [](char byte) { return !IsContinuation(byte); }));
}

bool IsValidUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t n = CharacterLength(text, at);
    if (n == 0) return false;
    at += n;
  }
  return true;
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    bool whole = false;
    const size_t n = ValidPart(text, at, &whole);
    if (whole) {
      out.append(text, at, n);
    } else {
      out += "\xEF\xBF\xBD";
    }
    at += std::max<size_t>(n, 1);
  }
  return out;
}

}  // namespace hearth::router
