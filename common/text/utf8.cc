// See utf8.h. The second byte's range depends on the first (Unicode table 3-7); all later ones are 80..BF.
#include "common/text/utf8.h"

#include <cstdint>
#include <cstring>

namespace hearth {

Utf8Step NextUtf8(std::string_view text) {
  using Verdict = Utf8Step::Verdict;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Verdict::kValid, 1};
  size_t length = 0;
  unsigned char second_min = 0x80;
  unsigned char second_max = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if ((lead & 0xF0) == 0xE0) {
    length = 3;
    if (lead == 0xE0) second_min = 0xA0;  // shorter forms exist below
    if (lead == 0xED) second_max = 0x9F;  // surrogates above
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) second_min = 0x90;
    if (lead == 0xF4) second_max = 0x8F;  // U+10FFFF is the last
  } else {
    return {Verdict::kInvalid, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Verdict::kIncomplete, i};
    const unsigned char min = i == 1 ? second_min : 0x80;
    const unsigned char max = i == 1 ? second_max : 0xBF;
    if (byte(i) < min || byte(i) > max) return {Verdict::kInvalid, i};
  }
  return {Verdict::kValid, length};
}

std::optional<size_t> FirstInvalidUtf8(std::string_view text) {
  size_t position = 0;
  while (position < text.size()) {
    // Eight ASCII bytes at a time: most text is.
    while (position + 8 <= text.size()) {
      uint64_t word;
      std::memcpy(&word, text.data() + position, 8);
      if (word & 0x8080808080808080u) break;
      position += 8;
    }
    if (position == text.size()) break;
    const Utf8Step step = NextUtf8(text.substr(position));
    if (step.verdict != Utf8Step::Verdict::kValid) return position;
    position += step.length;
  }
  return std::nullopt;
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Step step = NextUtf8(text);
    out += step.verdict == Utf8Step::Verdict::kValid ? text.substr(0, step.length) : kReplacementCharacter;
    text.remove_prefix(step.length);
  }
  return out;
}

char32_t DecodeUtf8(std::string_view text, size_t* position) {
  const auto next = [&] { return static_cast<unsigned char>(text[(*position)++]); };
  const char32_t lead = next();
  if (lead < 0x80) return lead;
  int num_more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
  char32_t code_point = lead & (0x3F >> num_more);
  while (num_more-- > 0) code_point = (code_point << 6) | (next() & 0x3F);
  return code_point;
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto put = [&](char32_t bits) { out->push_back(static_cast<char>(bits)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

}  // namespace hearth
