#include "common/text/jinja/tests.h"

#include <unordered_map>

#include "common/text/jinja/error.h"
#include "common/text/jinja/filters.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/operators.h"
#include "common/text/jinja/python_format.h"

namespace hearth::jinja {
namespace {

const Value& Argument(const Args& args, std::string_view test) {
  if (args.positional.size() != 1) Fail("the test '", test, "' takes one argument, got ", args.positional.size());
  return args.positional[0];
}

bool IsIterable(const Value& value) { return value.is_string() || value.is_sequence() || value.is_dict() || value.is_undefined(); }

bool Odd(const Value& value) {
  const Value rest = Arithmetic('%', value, Value::OfInt(2));
  return Equal(rest, Value::OfInt(1));
}

bool Same(const Value& left, const Value& right) {
  if (left.kind() != right.kind()) return false;
  switch (left.kind()) {
    case Kind::kSequence: return left.sequence() == right.sequence();
    case Kind::kDict: return left.dict() == right.dict();
    case Kind::kUndefined: return false;
    default: return Equal(left, right);
  }
}

bool AsksText(Interpreter& interpreter, const Value& value, std::string_view method) {
  Args none;
  return FindStringMethod(method)(interpreter, Value::OfText(ToText(value)), none).Truthy();
}

#define TEST_OF(expression)                                                            \
  [](Interpreter& interpreter, const Value& value, const Args& args) -> bool {         \
    static_cast<void>(interpreter), static_cast<void>(value), static_cast<void>(args); \
    return expression;                                                                 \
  }

const std::unordered_map<std::string_view, TestFunction>& Table() {
  static constexpr TestFunction kEqual = TEST_OF(Equal(value, Argument(args, "eq")));
  static constexpr TestFunction kUnequal = TEST_OF(!Equal(value, Argument(args, "ne")));
  static constexpr TestFunction kLess = TEST_OF(Compare(value, Argument(args, "lt"), "<") < 0);
  static constexpr TestFunction kAtMost = TEST_OF(Compare(value, Argument(args, "le"), "<=") <= 0);
  static constexpr TestFunction kGreater = TEST_OF(Compare(value, Argument(args, "gt"), ">") > 0);
  static constexpr TestFunction kAtLeast = TEST_OF(Compare(value, Argument(args, "ge"), ">=") >= 0);
  static const auto* const kTable = new std::unordered_map<std::string_view, TestFunction>{
      {"defined", TEST_OF(!value.is_undefined())},
      {"undefined", TEST_OF(value.is_undefined())},
      {"none", TEST_OF(value.is_none())},
      {"boolean", TEST_OF(value.is_bool())},
      {"true", TEST_OF(value.is_bool() && value.boolean())},
      {"false", TEST_OF(value.is_bool() && !value.boolean())},
      {"integer", TEST_OF(value.kind() == Kind::kInt)},
      {"float", TEST_OF(value.kind() == Kind::kFloat)},
      {"number", TEST_OF(value.is_number())},
      {"string", TEST_OF(value.is_string())},
      {"mapping", TEST_OF(value.is_dict())},
      {"iterable", TEST_OF(IsIterable(value))},
      {"sequence", TEST_OF(value.is_undefined() || value.is_string() || value.is_dict() || (value.is_sequence() && value.sequence()->indexable()))},
      {"callable", TEST_OF(value.is_object() && value.object()->callable())},
      {"sameas", TEST_OF(Same(value, Argument(args, "sameas")))},
      {"escaped", TEST_OF(value.is_string() && value.text().markup())},
      {"odd", TEST_OF(Odd(value))},
      {"even", TEST_OF(!Odd(value))},
      {"divisibleby", TEST_OF(Equal(Arithmetic('%', value, Argument(args, "divisibleby")), Value::OfInt(0)))},
      {"in", TEST_OF(Contains(Argument(args, "in"), value))},
      {"lower", TEST_OF(AsksText(interpreter, value, "islower"))},
      {"upper", TEST_OF(AsksText(interpreter, value, "isupper"))},
      {"filter", TEST_OF(value.is_string() && FindFilter(value.view()) != nullptr)},
      {"test", TEST_OF(value.is_string() && FindTest(value.view()) != nullptr)},
      {"eq", kEqual},
      {"equalto", kEqual},
      {"==", kEqual},
      {"ne", kUnequal},
      {"!=", kUnequal},
      {"lt", kLess},
      {"lessthan", kLess},
      {"<", kLess},
      {"le", kAtMost},
      {"<=", kAtMost},
      {"gt", kGreater},
      {"greaterthan", kGreater},
      {">", kGreater},
      {"ge", kAtLeast},
      {">=", kAtLeast},
  };
  return *kTable;
}

#undef TEST_OF

}  // namespace

TestFunction FindTest(std::string_view name) {
  const auto at = Table().find(name);
  return at == Table().end() ? nullptr : at->second;
}

}  // namespace hearth::jinja
