#include "common/text/jinja/interpreter.h"

#include <algorithm>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/filters.h"
#include "common/text/jinja/functions.h"
#include "common/text/jinja/loop.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/operators.h"
#include "common/text/jinja/python_format.h"
#include "common/text/jinja/tests.h"

namespace hearth::jinja {
namespace {

constexpr std::ptrdiff_t kMaxStack = 1 << 20;  // of the 8 MiB that threads have
constexpr int kMaxMacroDepth = 200;

// Template code that can be called later: a macro, or the body of a call block.
class MacroObject : public Object {
 public:
  MacroObject(const MacroBody& body, Scope* scope) : body_(body), scope_(scope) {}
  std::string_view type_name() const override { return "Macro"; }
  std::string Repr() const override { return Cat("<Macro ", ReprString(body_.name), ">"); }
  std::optional<Value> Attribute(std::string_view name) override {
    return name == "name" ? std::optional<Value>(Value::OfString(body_.name, true)) : std::nullopt;
  }
  bool callable() const override { return true; }
  Value Call(Interpreter& interpreter, Args& args) override { return Value::OfText(interpreter.CallMacro(body_, scope_, args)); }

 private:
  const MacroBody& body_;
  Scope* scope_;
};

// "'dict object' has no attribute 'x'", as Jinja2 words it.
Value MissingAttribute(const Value& object, std::string_view name) {
  const std::string type = object.is_none() ? "None" : Cat(object.type_name(), " object");
  return Value::OfUndefined(Cat("'", type, "' has no attribute ", ReprString(name)));
}

}  // namespace

Value* Scope::Find(NameId name) {
  if (names_.size() > kSearchedMax) {
    const auto at = places_.find(name);
    return at == places_.end() ? nullptr : &names_[at->second].second;
  }
  for (auto& [id, value] : names_) {
    if (id == name) return &value;
  }
  return nullptr;
}

void Scope::Set(NameId name, Value value) {
  if (Value* held = Find(name); held != nullptr) {
    *held = std::move(value);
    return;
  }
  names_.emplace_back(name, std::move(value));
  if (names_.size() <= kSearchedMax) return;
  // From the first name on that makes searching slow, all of them are indexed.
  for (size_t i = places_.size(); i < names_.size(); ++i) places_.emplace(names_[i].first, i);
}

void Scope::Clear() {
  names_.clear();
  places_.clear();
}

void Scope::Capture() {
  for (Scope* scope = this; scope != nullptr && !scope->captured; scope = scope->parent) scope->captured = true;
}

Interpreter::Interpreter(const Template& parsed, const std::tm& local_time, size_t work_max)
    : template_(parsed), local_time_(local_time), context_(parsed.names.size()), in_context_(parsed.names.size(), false), work_max_(work_max) {}

Interpreter::~Interpreter() {
  scopes_.clear();
  // Lists that were appended to and namespaces may hold each other: emptied one by one, nothing keeps itself alive.
  for (const Value& value : tracked_) {
    if (value.is_sequence()) value.sequence()->items.clear();
    if (value.is_dict()) value.dict()->Clear();
    if (value.is_object()) value.object()->Clear();
  }
}

void Interpreter::SetVariable(std::string_view name, const Value& value) {
  const auto at = std::find(template_.names.begin(), template_.names.end(), name);
  if (at == template_.names.end()) return;  // the template never mentions it
  const size_t id = static_cast<size_t>(at - template_.names.begin());
  context_[id] = value;
  in_context_[id] = true;
}

Text Interpreter::Run() {
  stack_base_ = static_cast<const char*>(__builtin_frame_address(0));
  TextBuilder output;
  output_ = &output;
  Execute(template_.body, NewScope(nullptr));
  output_ = nullptr;
  return output.Take();
}

void Interpreter::Charge(size_t units) {
  work_ += units;
  if (work_ > work_max_) Fail("the template does too much work: it was stopped (an endless loop?)");
}

void Interpreter::Track(const Value& value) {
  bool* const known = value.is_sequence() ? &value.sequence()->tracked : value.is_dict() ? &value.dict()->tracked : nullptr;
  if (known != nullptr && std::exchange(*known, true)) return;
  tracked_.push_back(value);
}

void Interpreter::CheckStack() const {
  const std::ptrdiff_t used = stack_base_ - static_cast<const char*>(__builtin_frame_address(0));
  if (used > kMaxStack || used < -kMaxStack) Fail("the template recurses too deeply");
}

Scope* Interpreter::NewScope(Scope* parent) {
  Scope* scope = nullptr;
  if (free_scopes_.empty()) {
    scope = scopes_.emplace_back(std::make_unique<Scope>()).get();
  } else {
    scope = free_scopes_.back();
    free_scopes_.pop_back();
  }
  scope->parent = parent;
  return scope;
}

void Interpreter::Release(Scope* scope) {
  if (scope->captured) return;
  scope->Clear();
  free_scopes_.push_back(scope);
}

Value Interpreter::LookUp(NameId name, Scope* scope) const {
  for (; scope != nullptr; scope = scope->parent) {
    if (const Value* value = scope->Find(name); value != nullptr) return *value;
  }
  if (in_context_[name]) return context_[name];
  const std::string& text = template_.names[name];
  if (std::optional<Value> function = GlobalFunction(text); function.has_value()) return *std::move(function);
  return Value::OfUndefined(Cat(ReprString(text), " is undefined"));
}

// --- statements ---

Interpreter::Flow Interpreter::Execute(const Block& block, Scope* scope) {
  for (const auto& statement : block) {
    if (const Flow flow = ExecuteOne(*statement, scope); flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Text Interpreter::Capture(const Block& block, Scope* scope) {
  TextBuilder captured;
  TextBuilder* const outer = std::exchange(output_, &captured);
  Execute(block, scope);
  output_ = outer;
  return captured.Take();
}

Interpreter::Flow Interpreter::ExecuteOne(const Statement& statement, Scope* scope) {
  line_ = statement.line;
  Charge(1);
  switch (statement.kind) {
    case StatementKind::kData:
      ChargeBytes(statement.data.size());
      output_->Append(statement.data);
      break;
    case StatementKind::kOutput: {
      const Text text = ToText(Evaluate(*statement.exprs[0], scope));
      ChargeBytes(text.size());
      output_->Append(text);
      break;
    }
    case StatementKind::kIf: return ExecuteIf(statement, scope);
    case StatementKind::kFor: return RunLoop(statement, scope, Evaluate(*statement.exprs[0], scope), 0);
    case StatementKind::kSet:
    case StatementKind::kSetBlock: ExecuteSet(statement, scope); break;
    case StatementKind::kMacro:
      scope->Capture();
      scope->Set(statement.target.name, Value::OfObject(std::make_shared<MacroObject>(*statement.macro, scope)));
      break;
    case StatementKind::kCallBlock: ExecuteCallBlock(statement, scope); break;
    case StatementKind::kFilterBlock: {
      CheckStack();
      Scope* const inner = NewScope(scope);
      const Value input = Value::OfText(Capture(statement.blocks[0], inner));
      output_->Append(ToText(EvaluateFilter(*statement.exprs[0], inner, &input)));
      Release(inner);
      break;
    }
    case StatementKind::kWith: ExecuteWith(statement, scope); break;
    case StatementKind::kScope: {
      CheckStack();
      Scope* const inner = NewScope(scope);
      Execute(statement.blocks[0], inner);
      Release(inner);
      break;
    }
    case StatementKind::kBreak: return Flow::kBreak;
    case StatementKind::kContinue: return Flow::kContinue;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::ExecuteIf(const Statement& statement, Scope* scope) {
  CheckStack();
  for (size_t i = 0; i < statement.exprs.size(); ++i) {
    if (Evaluate(*statement.exprs[i], scope).Truthy()) return Execute(statement.blocks[i], scope);
  }
  return statement.blocks.size() > statement.exprs.size() ? Execute(statement.blocks.back(), scope) : Flow::kNormal;
}

void Interpreter::ExecuteSet(const Statement& statement, Scope* scope) {
  if (statement.kind == StatementKind::kSet) {
    Assign(statement.target, Evaluate(*statement.exprs[0], scope), scope);
    return;
  }
  CheckStack();
  Scope* const inner = NewScope(scope);
  Value value = Value::OfText(Capture(statement.blocks[0], inner));
  if (statement.exprs[0] != nullptr) value = EvaluateFilter(*statement.exprs[0], inner, &value);
  Release(inner);
  Assign(statement.target, value, scope);
}

void Interpreter::ExecuteCallBlock(const Statement& statement, Scope* scope) {
  const Expr& call = *statement.exprs[0];
  const Value callee = Evaluate(*call.children[0], scope);
  Args args = EvaluateArguments(call.arguments, scope);
  scope->Capture();
  args.named.emplace_back("caller", Value::OfObject(std::make_shared<MacroObject>(*statement.macro, scope)));
  output_->Append(ToText(Call(callee, args)));
}

void Interpreter::ExecuteWith(const Statement& statement, Scope* scope) {
  CheckStack();
  Scope* const inner = NewScope(scope);
  // All values are computed outside: `with a = 1, b = a` gives b the outer a.
  std::vector<Value> values;
  for (const ExprPtr& expr : statement.exprs) values.push_back(Evaluate(*expr, scope));
  for (size_t i = 0; i < values.size(); ++i) Assign(statement.targets[i], values[i], inner);
  Execute(statement.blocks[0], inner);
  Release(inner);
}

void Interpreter::Assign(const Target& target, const Value& value, Scope* scope) {
  if (target.is_tuple) {
    if (!value.is_string() && !value.is_sequence() && !value.is_dict() && !value.is_undefined()) {
      Fail("cannot unpack non-iterable ", value.type_name(), " object");
    }
    const std::vector<Value> items = Iterate(value);
    if (items.size() < target.parts.size()) {
      Fail("not enough values to unpack (expected ", target.parts.size(), ", got ", items.size(), ")");
    }
    if (items.size() > target.parts.size()) Fail("too many values to unpack (expected ", target.parts.size(), ")");
    for (size_t i = 0; i < items.size(); ++i) Assign(target.parts[i], items[i], scope);
    return;
  }
  if (target.attribute.empty()) {
    scope->Set(target.name, value);
    return;
  }
  const Value object = LookUp(target.name, scope);
  if (!object.is_object() || !object.object()->SetAttribute(target.attribute, value)) {
    Fail("cannot assign attribute on non-namespace object");
  }
}

Interpreter::Flow Interpreter::RunLoop(const Statement& statement, Scope* outer, const Value& iterable, int depth) {
  CheckStack();
  std::vector<Value> items = Iterate(iterable);
  Scope* scope = NewScope(outer);
  if (const Expr* test = statement.exprs[1].get(); test != nullptr) {
    std::vector<Value> kept;
    for (Value& item : items) {
      Assign(statement.target, item, scope);
      if (Evaluate(*test, scope).Truthy()) kept.push_back(std::move(item));
      scope->Clear();
    }
    items = std::move(kept);
  }
  if (statement.recursive) outer->Capture();  // loop(...) comes back to this frame
  const auto loop = std::make_shared<Loop>(statement, outer, std::move(items), depth);
  bool ran = false;
  for (size_t i = 0; i < loop->items().size(); ++i) {
    ran = true;
    Charge(1);
    if (scope->captured) {
      scope = NewScope(outer);
    } else {
      scope->Clear();
    }
    loop->MoveTo(i);
    scope->Set(kLoopName, Value::OfObject(loop));
    Assign(statement.target, loop->items()[i], scope);
    if (Execute(statement.blocks[0], scope) == Flow::kBreak) break;
  }
  Release(scope);
  if (ran || statement.blocks.size() == 1) return Flow::kNormal;
  Scope* const inner = NewScope(outer);
  const Flow flow = Execute(statement.blocks[1], inner);  // a `break` in the else part means the loop around this one
  Release(inner);
  return flow;
}

Text Interpreter::CallLoop(const Statement& loop, Scope* outer, const Value& iterable, int depth) {
  if (depth > kMaxMacroDepth) Fail("the template recurses too deeply");
  TextBuilder captured;
  TextBuilder* const previous = std::exchange(output_, &captured);
  RunLoop(loop, outer, iterable, depth);
  output_ = previous;
  return captured.Take();
}

Text Interpreter::CallMacro(const MacroBody& macro, Scope* defined_in, Args& args) {
  if (++macro_depth_ > kMaxMacroDepth) Fail("macros call each other more than ", kMaxMacroDepth, " deep");
  CheckStack();
  const std::vector<NameId>& names = macro.parameters.names;
  Scope* const scope = NewScope(defined_in);
  const auto take_named = [&args](std::string_view name) -> std::optional<Value> {
    const auto at = std::find_if(args.named.begin(), args.named.end(), [name](const auto& arg) { return arg.first == name; });
    if (at == args.named.end()) return std::nullopt;
    Value value = std::move(at->second);
    args.named.erase(at);
    return value;
  };
  bool caller_taken = false;
  const size_t first_default = names.size() - macro.parameters.defaults.size();
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = template_.names[names[i]];
    std::optional<Value> value;
    if (i < args.positional.size()) {
      value = args.positional[i];
    } else {
      value = take_named(name);
    }
    if (!value.has_value()) {
      value = i >= first_default ? Evaluate(*macro.parameters.defaults[i - first_default], scope)
                                 : Value::OfUndefined(Cat("parameter ", ReprString(name), " was not provided"));
    }
    caller_taken = caller_taken || names[i] == kCallerName;
    scope->Set(names[i], *std::move(value));
  }
  if (macro.uses_caller && !caller_taken) {
    scope->Set(kCallerName, take_named("caller").value_or(Value::OfUndefined("No caller defined")));
  }
  if (macro.uses_kwargs) {
    auto rest = std::make_shared<Dict>();
    for (const auto& [name, value] : args.named) rest->Set(Value::OfString(name, true), value);
    scope->Set(kKwargsName, Value::OfDict(std::move(rest)));
  } else if (!args.named.empty()) {
    Fail("macro ", ReprString(macro.name), " takes no keyword argument ", ReprString(args.named.front().first));
  }
  const size_t taken = std::min(names.size(), args.positional.size());
  if (macro.uses_varargs) {
    scope->Set(kVarargsName, Value::OfTuple({args.positional.begin() + static_cast<std::ptrdiff_t>(taken), args.positional.end()}));
  } else if (args.positional.size() > names.size()) {
    Fail("macro ", ReprString(macro.name), " takes not more than ", names.size(), " argument(s)");
  }
  Text out = Capture(macro.body, scope);
  Release(scope);
  --macro_depth_;
  ChargeBytes(out.size());
  return out;
}

// --- expressions ---

Value Interpreter::Evaluate(const Expr& expr, Scope* scope) {
  CheckStack();
  Charge(1);
  line_ = expr.line;
  const auto child = [&](size_t i) { return Evaluate(*expr.children[i], scope); };
  switch (expr.kind) {
    case ExprKind::kConstant: return expr.constant;
    case ExprKind::kName: return LookUp(expr.name, scope);
    case ExprKind::kList:
    case ExprKind::kTuple: {
      std::vector<Value> items;
      items.reserve(expr.children.size());
      for (size_t i = 0; i < expr.children.size(); ++i) items.push_back(child(i));
      return expr.kind == ExprKind::kList ? Value::OfList(std::move(items)) : Value::OfTuple(std::move(items));
    }
    case ExprKind::kDict: {
      auto dict = std::make_shared<Dict>();
      for (size_t i = 0; i < expr.children.size(); i += 2) {
        const Value key = child(i);
        dict->Set(key, child(i + 1));
      }
      return Value::OfDict(std::move(dict));
    }
    case ExprKind::kAttribute: return Attribute(child(0), expr.text);
    case ExprKind::kItem: {
      const Value object = child(0);
      return Item(object, child(1));
    }
    case ExprKind::kSlice: return EvaluateSlice(expr, scope);
    case ExprKind::kCall: return EvaluateCall(expr, scope);
    case ExprKind::kFilter: return EvaluateFilter(expr, scope, nullptr);
    case ExprKind::kTest: {
      const Value input = child(0);
      return Value::OfBool(ApplyTest(expr.text, input, EvaluateArguments(expr.arguments, scope)));
    }
    case ExprKind::kUnary: {
      const Value value = child(0);
      if (expr.ops == "!") return Value::OfBool(!value.Truthy());
      return expr.ops == "-" ? Negate(value) : Plus(value);
    }
    case ExprKind::kBinary: return EvaluateBinary(expr, scope);
    case ExprKind::kConcat: return EvaluateConcat(expr, scope);
    case ExprKind::kAnd: {
      Value left = child(0);
      return left.Truthy() ? child(1) : left;
    }
    case ExprKind::kOr: {
      Value left = child(0);
      return left.Truthy() ? left : child(1);
    }
    case ExprKind::kCompare: return EvaluateCompare(expr, scope);
    case ExprKind::kCondition:
      if (child(0).Truthy()) return child(1);
      if (expr.children[2] != nullptr) return child(2);
      return Value::OfUndefined(Cat("the inline if-expression on line ", expr.line, " evaluated to false and no else section was defined."));
  }
  return Value();
}

Args Interpreter::EvaluateArguments(const CallArguments& arguments, Scope* scope) {
  Args args;
  args.positional.reserve(arguments.positional.size());
  for (const ExprPtr& expr : arguments.positional) args.positional.push_back(Evaluate(*expr, scope));
  for (const auto& [name, expr] : arguments.named) args.named.emplace_back(name, Evaluate(*expr, scope));
  if (arguments.star != nullptr) {
    for (Value& item : Iterate(Evaluate(*arguments.star, scope))) args.positional.push_back(std::move(item));
  }
  if (arguments.double_star != nullptr) {
    const Value more = Evaluate(*arguments.double_star, scope);
    if (!more.is_dict()) Fail("argument after ** must be a mapping, not ", more.type_name());
    for (const auto& [name, value] : more.dict()->entries) {
      if (!name.is_string()) Fail("keywords must be strings");
      args.named.emplace_back(std::string(name.view()), value);
    }
  }
  return args;
}

Value Interpreter::EvaluateCall(const Expr& expr, Scope* scope) {
  const Expr& callee = *expr.children[0];
  if (callee.kind == ExprKind::kAttribute) {
    // object.method(...) without making a bound method first.
    const Value object = Evaluate(*callee.children[0], scope);
    if (const MethodFunction method = FindMethod(object, callee.text); method != nullptr) {
      Args args = EvaluateArguments(expr.arguments, scope);
      line_ = expr.line;
      return method(*this, object, args);
    }
    const Value function = Attribute(object, callee.text);
    Args args = EvaluateArguments(expr.arguments, scope);
    return Call(function, args);
  }
  const Value function = Evaluate(callee, scope);
  Args args = EvaluateArguments(expr.arguments, scope);
  line_ = expr.line;
  return Call(function, args);
}

Value Interpreter::EvaluateFilter(const Expr& expr, Scope* scope, const Value* block_input) {
  CheckStack();
  const Expr* inner = expr.children[0].get();
  Value input;
  if (inner == nullptr) {
    input = *block_input;
  } else {
    // In a filter block the chain's first filter takes the block.
    input = block_input != nullptr && inner->kind == ExprKind::kFilter ? EvaluateFilter(*inner, scope, block_input) : Evaluate(*inner, scope);
  }
  Args args = EvaluateArguments(expr.arguments, scope);
  line_ = expr.line;
  return ApplyFilter(expr.text, input, args);
}

Value Interpreter::EvaluateBinary(const Expr& expr, Scope* scope) {
  const Value left = Evaluate(*expr.children[0], scope);
  const Value right = Evaluate(*expr.children[1], scope);
  line_ = expr.line;
  const char op = expr.ops[0];
  if (op == '+' && left.is_string() && right.is_string() && !left.text().markup() && !right.text().markup()) {
    size_t copied = 0;
    Text out = Text::Concat(left.text(), right.text(), &copied);
    ChargeBytes(copied);
    return Value::OfText(std::move(out));
  }
  Value out = Arithmetic(op, left, right);
  if (out.is_string()) ChargeBytes(out.text().size());
  if (out.is_sequence()) Charge(out.sequence()->items.size());
  return out;
}

Value Interpreter::EvaluateConcat(const Expr& expr, Scope* scope) {
  Text out;
  for (const ExprPtr& part : expr.children) {
    size_t copied = 0;
    Text text = ToText(Evaluate(*part, scope));
    text.set_markup(false);
    out = Text::Concat(out, text, &copied);
    ChargeBytes(copied);
  }
  return Value::OfText(std::move(out));
}

Value Interpreter::EvaluateCompare(const Expr& expr, Scope* scope) {
  Value left = Evaluate(*expr.children[0], scope);
  for (size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = Evaluate(*expr.children[i + 1], scope);
    line_ = expr.line;
    bool holds = false;
    switch (expr.ops[i]) {
      case '=': holds = Equal(left, right); break;
      case '!': holds = !Equal(left, right); break;
      case '<': holds = Compare(left, right, "<") < 0; break;
      case '>': holds = Compare(left, right, ">") > 0; break;
      case 'l': holds = Compare(left, right, "<=") <= 0; break;
      case 'g': holds = Compare(left, right, ">=") >= 0; break;
      default:
        if (right.is_string()) ChargeBytes(right.text().size());
        if (right.is_sequence()) Charge(right.sequence()->items.size());
        holds = Contains(right, left) == (expr.ops[i] == 'i');
    }
    if (!holds) return Value::OfBool(false);
    left = std::move(right);
  }
  return Value::OfBool(true);
}

Value Interpreter::EvaluateSlice(const Expr& expr, Scope* scope) {
  const Value object = Evaluate(*expr.children[0], scope);
  std::optional<Value> bounds[3];
  for (size_t i = 0; i < 3; ++i) {
    if (expr.children[i + 1] != nullptr) bounds[i] = Evaluate(*expr.children[i + 1], scope);
  }
  if (object.is_string()) ChargeBytes(object.text().size());
  if (object.is_sequence()) Charge(object.sequence()->items.size());
  // Slicing what can't be sliced gives undefined, as every failed subscript does.
  if (!object.is_undefined() && !object.is_string() && !(object.is_sequence() && object.sequence()->indexable())) {
    return Value::OfUndefined(Cat("'", object.type_name(), " object' can't be sliced"));
  }
  const auto bound = [&bounds](size_t i) { return bounds[i].has_value() ? &*bounds[i] : nullptr; };
  return Slice(object, bound(0), bound(1), bound(2));
}

// --- what values offer ---

Value Interpreter::Attribute(const Value& object, std::string_view name) {
  if (object.is_undefined()) Fail(object.undefined_hint());
  if (object.is_object()) {
    std::optional<Value> found = object.object()->Attribute(name);
    return found.has_value() ? *std::move(found) : MissingAttribute(object, name);
  }
  if (FindMethod(object, name) != nullptr) return BindMethod(object, name);
  if (object.is_dict()) {
    if (const Value* found = object.dict()->Find(name); found != nullptr) return *found;
  }
  return MissingAttribute(object, name);
}

Value Interpreter::Item(const Value& object, const Value& key) {
  if (object.is_undefined()) Fail(object.undefined_hint());
  if (object.is_string()) ChargeBytes(object.text().size());
  if (std::optional<Value> found = Index(object, key); found.has_value()) return *std::move(found);
  if (key.is_string()) {
    if (object.is_object()) return Attribute(object, key.view());
    if (FindMethod(object, key.view()) != nullptr) return BindMethod(object, key.view());
    return MissingAttribute(object, key.view());
  }
  const std::string type = object.is_none() ? "None" : Cat(object.type_name(), " object");
  return Value::OfUndefined(Cat(type, " has no element ", key.is_number() ? Repr(key) : key.type_name()));
}

Value Interpreter::Call(const Value& callee, Args& args) {
  if (callee.is_undefined()) Fail(callee.undefined_hint());
  if (!callee.is_object() || !callee.object()->callable()) Fail("'", callee.type_name(), "' object is not callable");
  Charge(1);
  return callee.object()->Call(*this, args);
}

Value Interpreter::ApplyFilter(std::string_view name, const Value& input, Args& args) {
  const FilterFunction filter = FindFilter(name);
  if (filter == nullptr) Fail("No filter named '", name, "' found.");
  if (input.is_string()) ChargeBytes(input.text().size());
  if (input.is_sequence()) Charge(input.sequence()->items.size());
  Value out = filter(*this, input, args);
  if (out.is_string()) ChargeBytes(out.text().size());
  return out;
}

bool Interpreter::ApplyTest(std::string_view name, const Value& input, const Args& args) {
  const TestFunction test = FindTest(name);
  if (test == nullptr) Fail("No test named '", name, "' found.");
  Charge(1);
  return test(*this, input, args);
}

std::vector<Value> Interpreter::Iterate(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return {};
    case Kind::kString: Charge(value.text().size()); return Characters(value.text());
    case Kind::kSequence: {
      Sequence& sequence = *value.sequence();
      Charge(sequence.items.size() + 1);
      if (sequence.flavor != Sequence::Flavor::kGenerator) return sequence.items;
      std::vector<Value> rest(sequence.items.begin() + static_cast<std::ptrdiff_t>(sequence.next), sequence.items.end());
      sequence.next = sequence.items.size();
      return rest;
    }
    case Kind::kDict: {
      Charge(value.dict()->entries.size() + 1);
      std::vector<Value> keys;
      keys.reserve(value.dict()->entries.size());
      for (const auto& entry : value.dict()->entries) keys.push_back(entry.first);
      return keys;
    }
    default: Fail("'", value.type_name(), "' object is not iterable");
  }
}

}  // namespace hearth::jinja
