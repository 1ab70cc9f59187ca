// How Python writes values: str(), repr(), float's shortest form, and `format % values`.
// Room: common/text/jinja. Pure functions.
#pragma once

#include <string>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

// str(value). A string is handed on as it is; a container's text is untrusted if any string in it is.
Text ToText(const Value& value);
std::string Repr(const Value& value);
std::string IntToString(Int value);
std::string FloatRepr(double value);
// False when a string in `value` came from a caller. Numbers and none are always trusted.
bool IsTrusted(const Value& value);
// 'single quoted', as repr() writes a string.
std::string ReprString(std::string_view text);

// printf-style formatting of Python: `format % values`.
Text PercentFormat(const Text& format, const Value& values);
// str.format with {}, {0}, {name} and the common format specifications.
Text BraceFormat(const Text& format, const Args& args);

}  // namespace hearth::jinja
