// Methods of Python's str, list and dict that templates call: `content.split('</think>')`, `message.get('name')`,
// `ids.append(x)`. Room: common/text/jinja. A method changes nothing but its own list or dict.
#pragma once

#include <string_view>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

using MethodFunction = Value (*)(Interpreter& interpreter, const Value& self, Args& args);

// Null when values of this kind have no such method.
MethodFunction FindMethod(const Value& self, std::string_view name);
MethodFunction FindStringMethod(std::string_view name);
MethodFunction FindSequenceMethod(const Value& self, std::string_view name);
MethodFunction FindDictMethod(std::string_view name);

// The pieces of string handling that filters share with methods; all keep trust exactly.
Text Strip(const Text& text, std::string_view characters, bool by_whitespace, bool left, bool right);
Text Replace(const Text& text, std::string_view from, const Text& to, Int limit);
Text Join(const Text& separator, const std::vector<Text>& parts);
std::vector<Text> SplitLines(const Text& text, bool keep_ends);
// str.split with a separator, or at runs of whitespace when it is empty; limit < 0: no limit.
std::vector<Text> Split(const Text& text, std::string_view separator, Int limit);
std::vector<Text> SplitFromRight(const Text& text, std::string_view separator, Int limit);
// Throws "expected str instance, int found" and the like.
const Text& RequireText(const Value& value, std::string_view what);

}  // namespace hearth::jinja
