// What rendering needs beside common/text/utf8.h (NextUtf8, ReplaceInvalidUtf8). Room: services/router.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/text/utf8.h"

namespace hearth::router {

inline bool IsContinuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Bytes at the end that begin a character and could still be completed; 0 when the text ends with a whole one.
size_t UnfinishedBytes(std::string_view text);
// Of valid UTF-8.
int32_t CountCharacters(std::string_view text);
bool IsValidUtf8(std::string_view text);

}  // namespace hearth::router
