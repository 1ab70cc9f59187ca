// The tests of Jinja2 (`value is name`, `select("name", argument)`).
// Room: common/text/jinja. Pure functions.
#pragma once

#include <string_view>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

using TestFunction = bool (*)(Interpreter& interpreter, const Value& input, const Args& args);

// Null when there is no such test.
TestFunction FindTest(std::string_view name);

}  // namespace hearth::jinja
