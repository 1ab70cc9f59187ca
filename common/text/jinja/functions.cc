#include "common/text/jinja/functions.h"

#include <locale.h>

#include "common/text/jinja/error.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/loop.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/python_format.h"

namespace hearth::jinja {
namespace {

constexpr Int kMaxRange = 100'000;  // as Jinja2's sandbox has it

// namespace(a=1): the one thing whose attributes `set` can change.
class Namespace : public Object {
 public:
  std::string_view type_name() const override { return "Namespace"; }
  std::string Repr() const override { return "<Namespace>"; }
  std::optional<Value> Attribute(std::string_view name) override {
    const Value* found = values_.Find(name);
    return found == nullptr ? std::nullopt : std::optional<Value>(*found);
  }
  bool SetAttribute(std::string_view name, const Value& value) override {
    values_.Set(Value::OfString(std::string(name), true), value);
    return true;
  }
  void Clear() override { values_.Clear(); }

 private:
  Dict values_;
};

// cycler('a', 'b'): next(), current, reset().
class Cycler : public Object {
 public:
  explicit Cycler(std::vector<Value> items) : items_(std::move(items)) {}
  std::string_view type_name() const override { return "Cycler"; }
  std::string Repr() const override { return "<Cycler>"; }
  std::optional<Value> Attribute(std::string_view name) override {
    if (name == "current") return items_[at_];
    if (name == "next")
      return Method("next", [](Cycler& cycler) { return cycler.items_[std::exchange(cycler.at_, (cycler.at_ + 1) % cycler.items_.size())]; });
    if (name == "reset") return Method("reset", [](Cycler& cycler) { return cycler.at_ = 0, Value::OfNone(); });
    return std::nullopt;
  }

 private:
  Value Method(std::string name, Value (*body)(Cycler&)) {
    return Value::OfObject(
        std::make_shared<FunctionObject>(std::move(name), [keep = shared_from_this(), this, body](Interpreter&, Args&) { return body(*this); }));
  }

  const std::vector<Value> items_;
  size_t at_ = 0;
};

// joiner(', '): nothing at the first call, the separator ever after.
class Joiner : public Object {
 public:
  explicit Joiner(Text separator) : separator_(std::move(separator)) {}
  std::string_view type_name() const override { return "Joiner"; }
  std::string Repr() const override { return "<Joiner>"; }
  bool callable() const override { return true; }
  Value Call(Interpreter&, Args&) override { return Value::OfText(std::exchange(used_, true) ? separator_ : Text()); }

 private:
  const Text separator_;
  bool used_ = false;
};

std::shared_ptr<Dict> DictOf(Interpreter& interpreter, std::string_view function, const Args& args) {
  auto dict = std::make_shared<Dict>();
  if (args.positional.size() > 1) Fail(function, " expected at most 1 argument, got ", args.positional.size());
  if (!args.positional.empty()) {
    const Value& from = args.positional[0];
    if (from.is_dict()) {
      for (const auto& [key, value] : from.dict()->entries) dict->Set(key, value);
    } else {
      for (const Value& pair : interpreter.Iterate(from)) {
        const std::vector<Value> items = interpreter.Iterate(pair);
        if (items.size() != 2) Fail("dictionary update sequence element has length ", items.size(), "; 2 is required");
        dict->Set(items[0], items[1]);
      }
    }
  }
  for (const auto& [name, value] : args.named) dict->Set(Value::OfString(name, true), value);
  return dict;
}

Value Range(Interpreter& interpreter, Args& args) {
  const Bound bound(args, "range", {"start", "stop", "step"}, 1);
  const bool one = bound[1] == nullptr;
  const Int start = one ? 0 : bound.Integer(0, 0);
  const Int stop = bound.Integer(one ? 0 : 1, 0);
  const Int step = bound.Integer(2, 1);
  if (step == 0) Fail("range() arg 3 must not be zero");
  std::vector<Value> items;
  for (Int i = start; step > 0 ? i < stop : i > stop; i += step) {
    if (static_cast<Int>(items.size()) >= kMaxRange) Fail("range() of more than ", static_cast<int64_t>(kMaxRange), " numbers");
    items.push_back(Value::OfInt(i));
  }
  interpreter.Charge(items.size());
  Value range = Value::OfList(std::move(items));
  range.sequence()->flavor = Sequence::Flavor::kRange;
  range.sequence()->type_name = "range";
  return range;
}

Value MakeNamespace(Interpreter& interpreter, Args& args) {
  const std::shared_ptr<Dict> values = DictOf(interpreter, "namespace", args);
  const auto made = std::make_shared<Namespace>();
  for (const auto& [name, value] : values->entries) made->SetAttribute(ToText(name).view(), value);
  Value out = Value::OfObject(made);
  interpreter.Track(out);
  return out;
}

Value RaiseException(Interpreter&, Args& args) {
  const Bound bound(args, "raise_exception", {"message"}, 1);
  throw Error{std::string(ToText(*bound[0]).view()), 0, 0, /*raised_by_template=*/true};
}

Value StrftimeNow(Interpreter& interpreter, Args& args) {
  const Bound bound(args, "strftime_now", {"format"}, 1);
  const Text& format = RequireText(*bound[0], "strftime_now()");
  return Value::OfString(FormatTime(format.view(), interpreter.local_time()), format.trusted());
}

Value MakeCycler(Interpreter&, Args& args) {
  if (args.positional.empty()) Fail("at least one item has to be provided");
  return Value::OfObject(std::make_shared<Cycler>(std::move(args.positional)));
}

Value MakeJoiner(Interpreter&, Args& args) {
  const Bound bound(args, "joiner", {"sep"});
  return Value::OfObject(std::make_shared<Joiner>(bound[0] == nullptr ? Text(", ", true) : ToText(*bound[0])));
}

Value MakeDict(Interpreter& interpreter, Args& args) { return Value::OfDict(DictOf(interpreter, "dict", args)); }

}  // namespace

std::string FormatTime(std::string_view format, const std::tm& time) {
  // datetime.now() knows neither zone nor offset: Python writes nothing for them. %f are microseconds, which a prompt
  // has no use for.
  std::string safe;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] == '%' && i + 1 < format.size()) {
      const char c = format[++i];
      if (c == 'z' || c == 'Z') continue;
      if (c == 'f') {
        safe += "000000";
        continue;
      }
      safe += '%';
      safe += c;
    } else if (format[i] == '%') {
      safe += "%%";
    } else if (format[i] != '\0') {
      safe += format[i];
    }
  }
  if (safe.empty()) return {};
  if (safe.size() > 4096) Fail("the format of strftime_now is longer than 4096 bytes");
  static const locale_t locale = newlocale(LC_ALL_MASK, "C", nullptr);
  // One more character tells an empty result from a buffer that is too small.
  safe += '.';
  std::string out(safe.size() * 64 + 64, '\0');
  out.resize(strftime_l(out.data(), out.size(), safe.c_str(), &time, locale));
  if (!out.empty()) out.pop_back();
  return out;
}

std::optional<Value> GlobalFunction(std::string_view name) {
  struct Entry {
    std::string_view name;
    Value (*function)(Interpreter&, Args&);
  };
  static constexpr Entry kFunctions[] = {{"range", Range},      {"namespace", MakeNamespace},  {"raise_exception", RaiseException},
                                         {"dict", MakeDict},    {"strftime_now", StrftimeNow}, {"cycler", MakeCycler},
                                         {"joiner", MakeJoiner}};
  for (const Entry& entry : kFunctions) {
    if (entry.name == name) return Value::OfObject(std::make_shared<FunctionObject>(std::string(name), entry.function));
  }
  return std::nullopt;
}

Value BindMethod(const Value& self, std::string_view name) {
  const MethodFunction method = FindMethod(self, name);
  return Value::OfObject(std::make_shared<FunctionObject>(
      std::string(name), [self, method](Interpreter& interpreter, Args& args) { return method(interpreter, self, args); }));
}

// --- loop ---

std::string Loop::Repr() const { return Cat("<LoopContext ", index_ + 1, "/", items_.size(), ">"); }

std::optional<Value> Loop::Attribute(std::string_view name) {
  const auto number = [](size_t value) { return Value::OfInt(static_cast<Int>(value)); };
  if (name == "index") return number(index_ + 1);
  if (name == "index0") return number(index_);
  if (name == "revindex") return number(items_.size() - index_);
  if (name == "revindex0") return number(items_.size() - index_ - 1);
  if (name == "first") return Value::OfBool(index_ == 0);
  if (name == "last") return Value::OfBool(index_ + 1 == items_.size());
  if (name == "length") return number(items_.size());
  if (name == "depth") return number(static_cast<size_t>(depth_) + 1);
  if (name == "depth0") return number(static_cast<size_t>(depth_));
  if (name == "previtem") return index_ > 0 ? items_[index_ - 1] : Value::OfUndefined("there is no previous item");
  if (name == "nextitem") return index_ + 1 < items_.size() ? items_[index_ + 1] : Value::OfUndefined("there is no next item");
  if (name == "cycle") {
    return Value::OfObject(
        std::make_shared<FunctionObject>("cycle", [keep = shared_from_this(), this](Interpreter&, Args& args) { return Cycle(args); }));
  }
  if (name == "changed") {
    return Value::OfObject(
        std::make_shared<FunctionObject>("changed", [keep = shared_from_this(), this](Interpreter&, Args& args) { return Changed(args); }));
  }
  return std::nullopt;
}

Value Loop::Cycle(const Args& args) const {
  if (args.positional.empty()) Fail("no items for cycling given");
  return args.positional[index_ % args.positional.size()];
}

Value Loop::Changed(const Args& args) {
  const bool same = changed_called_ && Equal(Value::OfTuple(args.positional), Value::OfTuple(last_changed_));
  changed_called_ = true;
  last_changed_ = args.positional;
  return Value::OfBool(!same);
}

Value Loop::Call(Interpreter& interpreter, Args& args) {
  const Bound bound(args, "loop", {"iterable"}, 1);
  return Value::OfText(interpreter.CallLoop(statement_, outer_, *bound[0], depth_ + 1));
}

}  // namespace hearth::jinja
