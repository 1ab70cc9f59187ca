// Python's list, tuple and dict methods. A container that grows is tracked, since it may come to hold itself.
#include <algorithm>
#include <unordered_map>

#include "common/text/jinja/error.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/python_format.h"

namespace hearth::jinja {
namespace {

using Table = std::unordered_map<std::string_view, MethodFunction>;

void Grow(Interpreter& interpreter, const Value& self, const Value& item) {
  Sequence& list = *self.sequence();
  CheckNesting(item.nesting() + 1);
  list.nesting = std::max(list.nesting, item.nesting() + 1);
  if (list.items.size() >= (size_t{4} << 20)) Fail("the template builds a list of more than ", size_t{4} << 20, " items");
  interpreter.Charge(1);
  interpreter.Track(self);
}

Value Append(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "append", {"object"}, 1);
  Grow(interpreter, self, *bound[0]);
  self.sequence()->items.push_back(*bound[0]);
  return Value::OfNone();
}

Value Extend(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "extend", {"iterable"}, 1);
  for (Value& item : interpreter.Iterate(*bound[0])) {
    Grow(interpreter, self, item);
    self.sequence()->items.push_back(std::move(item));
  }
  return Value::OfNone();
}

Value Insert(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "insert", {"index", "object"}, 2);
  Grow(interpreter, self, *bound[1]);
  std::vector<Value>& items = self.sequence()->items;
  interpreter.Charge(items.size());
  const Int size = static_cast<Int>(items.size());
  Int at = bound.Integer(0, 0);
  at = std::clamp<Int>(at < 0 ? at + size : at, 0, size);
  items.insert(items.begin() + static_cast<std::ptrdiff_t>(at), *bound[1]);
  return Value::OfNone();
}

Value Pop(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "pop", {"index"});
  std::vector<Value>& items = self.sequence()->items;
  interpreter.Charge(items.size());
  if (items.empty()) Fail("pop from empty list");
  Int at = bound.Integer(0, -1);
  if (at < 0) at += static_cast<Int>(items.size());
  if (at < 0 || at >= static_cast<Int>(items.size())) Fail("pop index out of range");
  const auto position = items.begin() + static_cast<std::ptrdiff_t>(at);
  Value item = std::move(*position);
  items.erase(position);
  return item;
}

Value Remove(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "remove", {"value"}, 1);
  std::vector<Value>& items = self.sequence()->items;
  interpreter.Charge(items.size());
  const auto at = std::find_if(items.begin(), items.end(), [&](const Value& item) { return Equal(item, *bound[0]); });
  if (at == items.end()) Fail("list.remove(x): x not in list");
  items.erase(at);
  return Value::OfNone();
}

Value Position(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "index", {"value"}, 1);
  const std::vector<Value>& items = self.sequence()->items;
  interpreter.Charge(items.size());
  const auto at = std::find_if(items.begin(), items.end(), [&](const Value& item) { return Equal(item, *bound[0]); });
  if (at == items.end()) Fail(Repr(*bound[0]), " is not in ", self.type_name());
  return Value::OfInt(at - items.begin());
}

Value Count(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "count", {"value"}, 1);
  const std::vector<Value>& items = self.sequence()->items;
  interpreter.Charge(items.size());
  return Value::OfInt(std::count_if(items.begin(), items.end(), [&](const Value& item) { return Equal(item, *bound[0]); }));
}

Value Reverse(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "reverse", {});
  interpreter.Charge(self.sequence()->items.size());
  std::vector<Value>& items = self.sequence()->items;
  items = std::vector<Value>(items.rbegin(), items.rend());
  return Value::OfNone();
}

Value SortInPlace(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "sort", {"reverse"});
  Args passed;
  passed.named = {{"reverse", Value::OfBool(bound.Flag(0, false))}, {"case_sensitive", Value::OfBool(true)}};
  const Value sorted = interpreter.ApplyFilter("sort", self, passed);
  self.sequence()->items = sorted.sequence()->items;
  return Value::OfNone();
}

Value ClearList(Interpreter&, const Value& self, Args& args) {
  const Bound bound(args, "clear", {});
  self.sequence()->items.clear();
  return Value::OfNone();
}

Value CopyList(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "copy", {});
  return Value::OfList(interpreter.Iterate(self));
}

std::vector<Value> Pairs(const Dict& dict) {
  std::vector<Value> pairs;
  pairs.reserve(dict.entries.size());
  for (const auto& [key, value] : dict.entries) pairs.push_back(Value::OfTuple({key, value}));
  return pairs;
}

Value Items(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "items", {});
  interpreter.Charge(self.dict()->entries.size());
  return Value::OfView(Pairs(*self.dict()), "dict_items");
}

Value Keys(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "keys", {});
  return Value::OfView(interpreter.Iterate(self), "dict_keys");
}

Value Values(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "values", {});
  interpreter.Charge(self.dict()->entries.size());
  std::vector<Value> values;
  for (const auto& entry : self.dict()->entries) values.push_back(entry.second);
  return Value::OfView(std::move(values), "dict_values");
}

Value Get(Interpreter&, const Value& self, Args& args) {
  const Bound bound(args, "get", {"key", "default"}, 1);
  const Value* found = self.dict()->Find(*bound[0]);
  return found != nullptr ? *found : bound[1] != nullptr ? *bound[1] : Value::OfNone();
}

Value SetDefault(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "setdefault", {"key", "default"}, 1);
  if (const Value* found = self.dict()->Find(*bound[0]); found != nullptr) return *found;
  const Value value = bound[1] != nullptr ? *bound[1] : Value::OfNone();
  self.dict()->Set(*bound[0], value);
  interpreter.Track(self);
  return value;
}

Value Update(Interpreter& interpreter, const Value& self, Args& args) {
  interpreter.Track(self);
  if (args.positional.size() > 1) Fail("update expected at most 1 argument, got ", args.positional.size());
  if (!args.positional.empty()) {
    const Value& from = args.positional[0];
    interpreter.Charge(from.is_dict() ? from.dict()->entries.size() : 1);
    for (const Value& pair : from.is_dict() ? Pairs(*from.dict()) : interpreter.Iterate(from)) {
      const std::vector<Value> items = interpreter.Iterate(pair);
      if (items.size() != 2) Fail("dictionary update sequence element has length ", items.size(), "; 2 is required");
      self.dict()->Set(items[0], items[1]);
    }
  }
  for (const auto& [name, value] : args.named) self.dict()->Set(Value::OfString(name, true), value);
  return Value::OfNone();
}

Value PopKey(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "pop", {"key", "default"}, 1);
  interpreter.Charge(self.dict()->entries.size());
  const Value* found = self.dict()->Find(*bound[0]);
  if (found == nullptr) {
    if (bound[1] == nullptr) Fail("KeyError: ", Repr(*bound[0]));
    return *bound[1];
  }
  Value value = *found;
  self.dict()->Erase(*bound[0]);
  return value;
}

Value PopItem(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "popitem", {});
  if (self.dict()->entries.empty()) Fail("popitem(): dictionary is empty");
  const auto [key, value] = self.dict()->entries.back();
  interpreter.Charge(self.dict()->entries.size());
  self.dict()->Erase(key);
  return Value::OfTuple({key, value});
}

Value ClearDict(Interpreter&, const Value& self, Args& args) {
  const Bound bound(args, "clear", {});
  self.dict()->Clear();
  return Value::OfNone();
}

Value CopyDict(Interpreter& interpreter, const Value& self, Args& args) {
  const Bound bound(args, "copy", {});
  interpreter.Charge(self.dict()->entries.size());
  auto copy = std::make_shared<Dict>();
  for (const auto& [key, value] : self.dict()->entries) copy->Set(key, value);
  return Value::OfDict(std::move(copy));
}

MethodFunction Lookup(const Table& table, std::string_view name) {
  const auto at = table.find(name);
  return at == table.end() ? nullptr : at->second;
}

}  // namespace

MethodFunction FindSequenceMethod(const Value& self, std::string_view name) {
  static const auto* const kReading = new Table{{"index", Position}, {"count", Count}};
  static const auto* const kChanging =
      new Table{{"append", Append},   {"extend", Extend}, {"insert", Insert},   {"pop", Pop},         {"remove", Remove},
                {"clear", ClearList}, {"copy", CopyList}, {"reverse", Reverse}, {"sort", SortInPlace}};
  if (!self.sequence()->indexable()) return nullptr;
  const MethodFunction reading = Lookup(*kReading, name);
  return reading == nullptr && self.sequence()->flavor == Sequence::Flavor::kList ? Lookup(*kChanging, name) : reading;
}

MethodFunction FindDictMethod(std::string_view name) {
  static const auto* const kTable =
      new Table{{"items", Items},   {"keys", Keys},  {"values", Values},   {"get", Get},         {"setdefault", SetDefault},
                {"update", Update}, {"pop", PopKey}, {"popitem", PopItem}, {"clear", ClearDict}, {"copy", CopyDict}};
  return Lookup(*kTable, name);
}

MethodFunction FindMethod(const Value& self, std::string_view name) {
  switch (self.kind()) {
    case Kind::kString: return FindStringMethod(name);
    case Kind::kSequence: return FindSequenceMethod(self, name);
    case Kind::kDict: return FindDictMethod(name);
    default: return nullptr;
  }
}

}  // namespace hearth::jinja
