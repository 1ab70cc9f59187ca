// The byte-level alphabet: vocabularies of this kind spell every byte as one printable character, so that any text is a
// sequence of known characters. Printable Latin-1 bytes stand for themselves, the other 68 are U+0100 and up, in byte
// order. Room: common/text. May touch: utf8.h. Threads: any; pure functions over a constant table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hearth {

// The character (as UTF-8) that spells `byte`.
std::string_view ByteLevelCharacter(uint8_t byte);

// The spelling of `bytes`.
std::string ToByteLevel(std::string_view bytes);

// The bytes that `spelling` (valid UTF-8) stands for; nothing if a character of it is outside the alphabet.
std::optional<std::string> FromByteLevel(std::string_view spelling);

}  // namespace hearth
