// The `loop` variable of a for loop: where the loop stands, its neighbours, and itself as a function in recursive
// loops. Room: common/text/jinja. Lives as long as something in the rendering refers to it.
#pragma once

#include <string>
#include <vector>

#include "common/text/jinja/interpreter.h"

namespace hearth::jinja {

class Loop : public Object {
 public:
  Loop(const Statement& statement, Scope* outer, std::vector<Value> items, int depth)
      : statement_(statement), outer_(outer), items_(std::move(items)), depth_(depth) {}

  const std::vector<Value>& items() const { return items_; }
  void MoveTo(size_t index) { index_ = index; }

  std::string_view type_name() const override { return "LoopContext"; }
  std::string Repr() const override;
  std::optional<Value> Attribute(std::string_view name) override;
  bool callable() const override { return statement_.recursive; }
  Value Call(Interpreter& interpreter, Args& args) override;

 private:
  Value Cycle(const Args& args) const;
  Value Changed(const Args& args);

  const Statement& statement_;
  Scope* const outer_;
  const std::vector<Value> items_;
  const int depth_;
  size_t index_ = 0;
  std::vector<Value> last_changed_;
  bool changed_called_ = false;
};

}  // namespace hearth::jinja
