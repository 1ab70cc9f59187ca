// Runs a parsed template over a context: scopes as Jinja2's compiler lays them out, output as Text with trust, and a
// budget of work so that no template and no request can keep a thread busy for long. Room: common/text/jinja. Threads:
// one Interpreter per rendering; the Template is shared. Throws Error.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/text/jinja/ast.h"
#include "common/text/jinja/value.h"

namespace hearth::jinja {

// Names of one frame. Frames belong to the interpreter and die with it, so macros may keep a pointer to the one they
// were defined in.
struct Scope {
  Scope* parent = nullptr;
  bool captured = false;  // a macro was defined here or further in: the frame must not be reused

  Value* Find(NameId name);  // null: not set in this frame
  void Set(NameId name, Value value);
  void Clear();
  void Capture();

 private:
  static constexpr size_t kSearchedMax = 16;  // frames have a handful of names, which a search finds fastest
  std::vector<std::pair<NameId, Value>> names_;
  std::unordered_map<NameId, size_t> places_;  // of all names where they are more than that
};

// Work is counted in nodes evaluated, plus one for each 16 bytes handled. A long conversation takes some hundred
// thousand; this much is a few seconds of one core.
inline constexpr size_t kMaxWork = 100'000'000;

class Interpreter {
 public:
  // `local_time` is what strftime_now writes.
  Interpreter(const Template& parsed, const std::tm& local_time, size_t work_max = kMaxWork);
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  void SetVariable(std::string_view name, const Value& value);
  Text Run();
  int current_line() const { return line_; }

  // For filters, tests, methods and functions.
  Value Attribute(const Value& object, std::string_view name);  // object.name
  Value Item(const Value& object, const Value& key);            // object[key]
  Value Call(const Value& callee, Args& args);
  Value ApplyFilter(std::string_view name, const Value& input, Args& args);
  bool ApplyTest(std::string_view name, const Value& input, const Args& args);
  std::vector<Value> Iterate(const Value& value);  // consumes a generator
  void Charge(size_t units);                       // throws when the work of this rendering is used up
  void ChargeBytes(size_t bytes) { Charge(bytes / 16 + 1); }
  // A container or object that was changed after it was made may lie on a cycle: it is emptied at the end.
  void Track(const Value& value);
  const std::tm& local_time() const { return local_time_; }

  Text CallMacro(const MacroBody& macro, Scope* defined_in, Args& args);
  Text CallLoop(const Statement& loop, Scope* outer, const Value& iterable,
                int depth);  // loop(...) of a recursive loop

 private:
  enum class Flow : uint8_t { kNormal, kBreak, kContinue };

  Flow Execute(const Block& block, Scope* scope);
  Flow ExecuteOne(const Statement& statement, Scope* scope);
  Flow ExecuteIf(const Statement& statement, Scope* scope);
  void ExecuteSet(const Statement& statement, Scope* scope);
  void ExecuteCallBlock(const Statement& statement, Scope* scope);
  void ExecuteWith(const Statement& statement, Scope* scope);
  Flow RunLoop(const Statement& loop, Scope* outer, const Value& iterable, int depth);
  Text Capture(const Block& block, Scope* scope);
  void Assign(const Target& target, const Value& value, Scope* scope);

  Value Evaluate(const Expr& expr, Scope* scope);
  Value EvaluateFilter(const Expr& expr, Scope* scope, const Value* block_input);
  Value EvaluateCall(const Expr& expr, Scope* scope);
  Value EvaluateBinary(const Expr& expr, Scope* scope);
  Value EvaluateConcat(const Expr& expr, Scope* scope);
  Value EvaluateCompare(const Expr& expr, Scope* scope);
  Value EvaluateSlice(const Expr& expr, Scope* scope);
  Args EvaluateArguments(const CallArguments& arguments, Scope* scope);
  Value LookUp(NameId name, Scope* scope) const;

  void CheckStack() const;
  Scope* NewScope(Scope* parent);
  void Release(Scope* scope);

  const Template& template_;
  const std::tm local_time_;
  std::vector<std::unique_ptr<Scope>> scopes_;
  std::vector<Scope*> free_scopes_;
  std::vector<Value> context_;  // by NameId
  std::vector<bool> in_context_;
  std::vector<Value> tracked_;
  TextBuilder* output_ = nullptr;
  const size_t work_max_;
  size_t work_ = 0;
  int line_ = 1;
  int macro_depth_ = 0;
  const char* stack_base_ = nullptr;
};

}  // namespace hearth::jinja
