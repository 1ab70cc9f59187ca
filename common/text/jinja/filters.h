// The filters of Jinja2 (`value | name(arguments)`), one table; text filters and sequence filters have a file each.
// Room: common/text/jinja. Pure functions of their arguments; what they cost is charged to the interpreter.
#pragma once

#include <string_view>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

using FilterFunction = Value (*)(Interpreter& interpreter, const Value& input, Args& args);

struct FilterEntry {
  std::string_view name;
  FilterFunction function;
};

// Null when there is no such filter.
FilterFunction FindFilter(std::string_view name);
FilterFunction FindTextFilter(std::string_view name);
FilterFunction FindSequenceFilter(std::string_view name);

}  // namespace hearth::jinja
