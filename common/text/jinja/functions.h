// What a template can call without being given it: range, dict, namespace, cycler, joiner, raise_exception,
// strftime_now. Room: common/text/jinja.
#pragma once

#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/value.h"

namespace hearth::jinja {

// Anything that is just called.
class FunctionObject : public Object {
 public:
  using Body = std::function<Value(Interpreter&, Args&)>;
  FunctionObject(std::string name, Body body) : name_(std::move(name)), body_(std::move(body)) {}
  std::string_view type_name() const override { return "builtin_function_or_method"; }
  std::string Repr() const override { return Cat("<function ", name_, ">"); }
  bool callable() const override { return true; }
  Value Call(Interpreter& interpreter, Args& args) override { return body_(interpreter, args); }

 private:
  const std::string name_;
  const Body body_;
};

std::optional<Value> GlobalFunction(std::string_view name);

// A method taken from its object: `message.get`.
Value BindMethod(const Value& self, std::string_view name);

// datetime.now().strftime(format): the C locale, whatever the process uses.
std::string FormatTime(std::string_view format, const std::tm& time);

}  // namespace hearth::jinja
