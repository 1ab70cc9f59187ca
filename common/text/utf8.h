// UTF-8 as the tokenizer and the text stream need it: one step at a time, and what is invalid replaced by U+FFFD.
// Room: common/text. May touch: nothing. Threads: any; pure functions.
// "Replaced" means the Unicode practice that Python's errors="replace" and Rust's from_utf8_lossy follow: one U+FFFD
// for each maximal subpart, that is for the longest prefix of a character that bytes could still have completed.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace hearth {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

struct Utf8Step {
  enum class Verdict {
    kValid,       // `length` bytes are one character
    kInvalid,     // `length` bytes (at least one) are a maximal subpart: one U+FFFD
    kIncomplete,  // the text ends inside a character that more bytes could complete; `length` is what is left
  };
  Verdict verdict;
  size_t length;
};

// The front of `text`, which must not be empty.
Utf8Step NextUtf8(std::string_view text);

// The byte offset of the first invalid or unfinished character.
std::optional<size_t> FirstInvalidUtf8(std::string_view text);

std::string ReplaceInvalidUtf8(std::string_view text);

// The code point at *position of valid UTF-8; moves *position behind it.
char32_t DecodeUtf8(std::string_view text, size_t* position);

void AppendUtf8(char32_t code_point, std::string* out);

}  // namespace hearth
