// The little UTF-8 that rendering needs. Room: services/router.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hearth::router {

inline bool IsContinuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Bytes at the end that begin a character and could still be completed; 0 when the text ends with a whole one.
size_t UnfinishedBytes(std::string_view text);
// Of valid UTF-8.
int32_t CountCharacters(std::string_view text);
// The length of the valid character at `at`, 0 when there is none (overlong forms, surrogates and values above 10FFFF are none).
size_t CharacterLength(std::string_view text, size_t at);
bool IsValidUtf8(std::string_view text);
// Invalid bytes become U+FFFD, one for each maximal part of a character.
std::string ReplaceInvalidUtf8(std::string_view text);

}  // namespace hearth::router
