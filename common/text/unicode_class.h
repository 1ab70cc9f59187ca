// Two questions about a character that added tokens and normalisers ask.
// Room: common/text. May touch: utf8proc. Threads: any; pure functions.
#pragma once

namespace hearth {

// The White_Space property.
bool IsWhiteSpace(char32_t code_point);
// A letter, mark, decimal digit, letter number or connector: what \w means in Unicode.
bool IsWordCharacter(char32_t code_point);

}  // namespace hearth
