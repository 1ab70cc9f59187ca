// Template source -> tokens, with Jinja2's whitespace control: trim_blocks (a newline after a block or comment tag
// goes), lstrip_blocks (blanks before a tag that starts its line go), `-` strips all whitespace on its side, `+` keeps
// it; one newline at the end of the source goes. Room: common/text/jinja. Pure. Throws Error with line and column.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

enum class TokenType : uint8_t { kData, kVariableBegin, kVariableEnd, kBlockBegin, kBlockEnd, kName, kString, kInteger, kFloat, kOperator, kEnd };

struct Token {
  TokenType type = TokenType::kEnd;
  std::string text;  // data, name, operator, or a string with its escapes resolved
  Int integer = 0;
  double number = 0;
  int line = 0;
  int column = 0;
};

std::vector<Token> Tokenize(std::string_view source);

}  // namespace hearth::jinja
