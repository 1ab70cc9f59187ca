// Characters as Python's str sees them: code points, whitespace, case and printability, over UTF-8 bytes.
// Room: common/text/jinja. Pure functions. Invalid bytes count as one character each and pass through unchanged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hearth::jinja {

// Decodes the character that starts at `pos` (which must be inside `text`) and moves `pos` behind it. An invalid byte
// gives 0xDC00 + byte, as Python's surrogateescape does.
char32_t NextCodePoint(std::string_view text, size_t& pos);
// Start of the character that ends at `pos` (> 0).
size_t PreviousCharacter(std::string_view text, size_t pos);
void AppendUtf8(char32_t code, std::string& out);

size_t CountCharacters(std::string_view text);
// Byte offset of character `index`; text.size() when there are fewer.
size_t ByteOffset(std::string_view text, size_t index);

bool IsSpace(char32_t code);      // str.isspace, what strip() and split() remove
bool IsPrintable(char32_t code);  // what repr() shows as it is
bool IsAlpha(char32_t code);
bool IsDigit(char32_t code);
bool IsUpper(char32_t code);
bool IsLower(char32_t code);
bool IsWordCharacter(char32_t code);  // \w of Python's re

std::string ToUpper(std::string_view text);
std::string ToLower(std::string_view text);
std::string Capitalize(std::string_view text);
std::string ToTitle(std::string_view text);  // str.title: every run of letters gets a capital
std::string SwapCase(std::string_view text);

}  // namespace hearth::jinja
