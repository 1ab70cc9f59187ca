// Filters over sequences and dicts: join, map, select, sort, first, items... What Python makes lazily is made at once
// here; the result still is a generator: it can be walked once, and has no length and no JSON form.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/filters.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/operators.h"
#include "common/text/jinja/python_format.h"
#include "common/text/jinja/tests.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

// "a.b.0" -> the attribute of the attribute of `value`; a missing one gives `otherwise` when that is not null.
Value Path(Interpreter& interpreter, Value value, const Value& attribute, const Value* otherwise) {
  const auto step = [&](const Value& key) {
    value = interpreter.Item(value, key);
    if (value.is_undefined() && otherwise != nullptr) value = *otherwise;
  };
  if (!attribute.is_string()) {
    step(attribute);
    return value;
  }
  for (const Text& part : Split(attribute.text(), ".", -1)) {
    const std::string_view name = part.view();
    const bool number = !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string_view::npos;
    step(number ? Value::OfInt(std::stoi(std::string(name))) : Value::OfText(part));
  }
  return value;
}

// What sort, unique and their kind compare: the attribute if one is named, in lower case unless case counts.
Value Key(Interpreter& interpreter, const Value& item, const Value* attribute, bool case_sensitive) {
  Value key = attribute == nullptr || attribute->is_none() ? item : Path(interpreter, item, *attribute, nullptr);
  if (case_sensitive || !key.is_string()) return key;
  interpreter.ChargeBytes(key.text().size());
  return Value::OfString(ToLower(key.view()), key.text().trusted());
}

struct Keyed {
  std::vector<Value> keys;
  Value item;
};

std::vector<Value> Sorted(Interpreter& interpreter, std::vector<Keyed> entries, bool reverse) {
  size_t bits = 1;
  while (bits < 32 && (entries.size() >> bits) != 0) ++bits;
  interpreter.Charge(entries.size() * bits);
  const auto less = [](const Keyed& a, const Keyed& b) {
    for (size_t i = 0; i < a.keys.size(); ++i) {
      if (!Equal(a.keys[i], b.keys[i])) return Compare(a.keys[i], b.keys[i], "<") < 0;
    }
    return false;
  };
  std::stable_sort(entries.begin(), entries.end(), [&](const Keyed& a, const Keyed& b) { return reverse ? less(b, a) : less(a, b); });
  std::vector<Value> out;
  out.reserve(entries.size());
  for (Keyed& entry : entries) out.push_back(std::move(entry.item));
  return out;
}

Value Length(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "length", {});
  switch (input.kind()) {
    case Kind::kUndefined: return Value::OfInt(0);
    case Kind::kString: return Value::OfInt(static_cast<Int>(CountCharacters(input.view())));
    case Kind::kDict: return Value::OfInt(static_cast<Int>(input.dict()->entries.size()));
    case Kind::kSequence:
      if (input.sequence()->flavor != Sequence::Flavor::kGenerator) return Value::OfInt(static_cast<Int>(input.sequence()->items.size()));
      break;
    default: break;
  }
  Fail("object of type '", input.type_name(), "' has no len()");
}

Value First(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "first", {});
  if (input.is_string()) return Index(input, Value::OfInt(0)).value_or(Value::OfUndefined("No first item, sequence was empty."));
  const bool generator = input.is_sequence() && input.sequence()->flavor == Sequence::Flavor::kGenerator;
  if (generator) {
    Sequence& sequence = *input.sequence();
    if (sequence.next < sequence.items.size()) return sequence.items[sequence.next++];
    return Value::OfUndefined("No first item, sequence was empty.");
  }
  const std::vector<Value> items = interpreter.Iterate(input);
  return items.empty() ? Value::OfUndefined("No first item, sequence was empty.") : items.front();
}

Value Last(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "last", {});
  if (input.is_string()) return Index(input, Value::OfInt(-1)).value_or(Value::OfUndefined("No last item, sequence was empty."));
  if (input.is_sequence() && input.sequence()->flavor == Sequence::Flavor::kGenerator) {
    Fail("'", input.type_name(), "' object is not reversible");
  }
  const std::vector<Value> items = interpreter.Iterate(input);
  return items.empty() ? Value::OfUndefined("No last item, sequence was empty.") : items.back();
}

Value JoinFilter(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "join", {"d", "attribute"});
  const Text separator = bound[0] == nullptr ? Text() : ToText(*bound[0]);
  std::vector<Text> parts;
  size_t bytes = 0;
  for (const Value& item : interpreter.Iterate(input)) {
    const bool plain = bound[1] == nullptr || bound[1]->is_none();
    parts.push_back(ToText(plain ? item : Path(interpreter, item, *bound[1], nullptr)));
    bytes += parts.back().size() + separator.size();
  }
  interpreter.ChargeBytes(bytes);
  return Value::OfText(Join(separator, parts));
}

Value ListFilter(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "list", {});
  return Value::OfList(interpreter.Iterate(input));
}

Value Items(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "items", {});
  std::vector<Value> pairs;
  if (!input.is_undefined()) {
    if (!input.is_dict()) Fail("Can only get item pairs from a mapping.");
    interpreter.Charge(input.dict()->entries.size());
    for (const auto& [key, value] : input.dict()->entries) pairs.push_back(Value::OfTuple({key, value}));
  }
  return Value::OfGenerator(std::move(pairs));
}

Value Default(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "default", {"default_value", "boolean"});
  const bool replace = input.is_undefined() || (bound.Flag(1, false) && !input.Truthy());
  if (!replace) return input;
  return bound[0] == nullptr ? Value::OfText(Text()) : *bound[0];
}

Value DictSort(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "dictsort", {"case_sensitive", "by", "reverse"});
  if (input.is_undefined()) Fail(input.undefined_hint());
  if (!input.is_dict()) Fail("'", input.type_name(), " object' has no attribute 'items'");
  const std::string_view by = bound[1] == nullptr ? "key" : RequireText(*bound[1], "dictsort").view();
  if (by != "key" && by != "value") Fail("You can only sort by either \"key\" or \"value\"");
  std::vector<Keyed> entries;
  for (const auto& [key, value] : input.dict()->entries) {
    entries.push_back({{Key(interpreter, by == "key" ? key : value, nullptr, bound.Flag(0, false))}, Value::OfTuple({key, value})});
  }
  return Value::OfList(Sorted(interpreter, std::move(entries), bound.Flag(2, false)));
}

Value Sort(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "sort", {"reverse", "case_sensitive", "attribute"});
  std::vector<Text> attributes;
  if (bound[2] != nullptr && bound[2]->is_string()) attributes = Split(bound[2]->text(), ",", -1);
  std::vector<Keyed> entries;
  for (Value& item : interpreter.Iterate(input)) {
    Keyed entry;
    if (attributes.empty()) {
      entry.keys.push_back(Key(interpreter, item, bound[2], bound.Flag(1, false)));
    }
    for (const Text& attribute : attributes) {
      const Value name = Value::OfText(attribute);
      entry.keys.push_back(Key(interpreter, item, &name, bound.Flag(1, false)));
    }
    entry.item = std::move(item);
    entries.push_back(std::move(entry));
  }
  return Value::OfList(Sorted(interpreter, std::move(entries), bound.Flag(0, false)));
}

Value Unique(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "unique", {"case_sensitive", "attribute"});
  Dict seen;
  std::vector<Value> out;
  for (Value& item : interpreter.Iterate(input)) {
    const Value key = Key(interpreter, item, bound[1], bound.Flag(0, false));
    if (seen.Find(key) != nullptr) continue;
    seen.Set(key, Value::OfNone());
    out.push_back(std::move(item));
  }
  return Value::OfGenerator(std::move(out));
}

Value Extreme(Interpreter& interpreter, const Value& input, const Args& args, std::string_view name, int sign) {
  const Bound bound(args, name, {"case_sensitive", "attribute"});
  std::optional<Value> best, best_key;
  for (Value& item : interpreter.Iterate(input)) {
    Value key = Key(interpreter, item, bound[1], bound.Flag(0, false));
    if (best.has_value() && Compare(key, *best_key, sign < 0 ? "<" : ">") * sign <= 0) continue;
    best = std::move(item);
    best_key = std::move(key);
  }
  return best.has_value() ? *best : Value::OfUndefined("No aggregated item, sequence was empty.");
}

Value Min(Interpreter& interpreter, const Value& input, Args& args) { return Extreme(interpreter, input, args, "min", -1); }
Value Max(Interpreter& interpreter, const Value& input, Args& args) { return Extreme(interpreter, input, args, "max", 1); }

Value Sum(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "sum", {"attribute", "start"});
  Value total = bound[1] == nullptr ? Value::OfInt(0) : *bound[1];
  const bool plain = bound[0] == nullptr || bound[0]->is_none();
  for (const Value& item : interpreter.Iterate(input)) {
    total = Arithmetic('+', total, plain ? item : Path(interpreter, item, *bound[0], nullptr));
    if (total.is_sequence()) interpreter.Charge(total.sequence()->items.size());
  }
  return total;
}

Value Reverse(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "reverse", {});
  if (input.is_string()) {
    const Value step = Value::OfInt(-1);
    return Slice(input, nullptr, nullptr, &step);
  }
  std::vector<Value> items = interpreter.Iterate(input);
  std::reverse(items.begin(), items.end());
  return Value::OfGenerator(std::move(items), "list_reverseiterator");
}

Value Batch(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "batch", {"linecount", "fill_with"}, 1);
  const Int size = bound.Integer(0, 1);
  if (size < 1 || size > 100'000) Fail("batch(): linecount must be 1 to 100000");
  std::vector<Value> rows, row;
  for (Value& item : interpreter.Iterate(input)) {
    if (static_cast<Int>(row.size()) == size) rows.push_back(Value::OfList(std::exchange(row, {})));
    row.push_back(std::move(item));
  }
  if (!row.empty()) {
    while (bound[1] != nullptr && !bound[1]->is_none() && static_cast<Int>(row.size()) < size) row.push_back(*bound[1]);
    rows.push_back(Value::OfList(std::move(row)));
  }
  return Value::OfGenerator(std::move(rows));
}

Value SliceFilter(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "slice", {"slices", "fill_with"}, 1);
  const Int slices = bound.Integer(0, 1);
  if (slices < 1 || slices > 100'000) Fail("slice(): slices must be 1 to 100000");
  const std::vector<Value> items = interpreter.Iterate(input);
  const size_t count = static_cast<size_t>(slices);
  const size_t each = items.size() / count, with_extra = items.size() % count;
  std::vector<Value> rows;
  size_t at = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t size = each + (i < with_extra ? 1 : 0);
    std::vector<Value> row(items.begin() + static_cast<std::ptrdiff_t>(at), items.begin() + static_cast<std::ptrdiff_t>(at + size));
    if (bound[1] != nullptr && !bound[1]->is_none() && i >= with_extra) row.push_back(*bound[1]);
    at += size;
    rows.push_back(Value::OfList(std::move(row)));
  }
  return Value::OfGenerator(std::move(rows));
}

Value AttributeFilter(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "attr", {"name"}, 1);
  const std::string_view name = RequireText(*bound[0], "attr").view();
  // Only attributes, never items: `d|attr('key')` of a dict is undefined.
  if (input.is_dict() && FindMethod(input, name) == nullptr) {
    return Value::OfUndefined(Cat("'dict object' has no attribute ", ReprString(name)));
  }
  return interpreter.Attribute(input, name);
}

// The groups are sorted by their key; in templates they are used as pairs.
Value GroupBy(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "groupby", {"attribute", "default", "case_sensitive"}, 1);
  const bool case_sensitive = bound.Flag(2, false);
  const auto raw_key = [&](const Value& item) { return Path(interpreter, item, *bound[0], bound[1]); };
  std::vector<Keyed> entries;
  for (Value& item : interpreter.Iterate(input)) {
    const Value key = Key(interpreter, raw_key(item), nullptr, case_sensitive);
    entries.push_back({{key}, std::move(item)});
  }
  std::vector<Value> groups, members;
  std::optional<Value> group_key, first_key;
  const auto flush = [&] {
    if (group_key.has_value()) groups.push_back(Value::OfTuple({*first_key, Value::OfList(std::exchange(members, {}))}));
  };
  for (const Value& item : Sorted(interpreter, std::move(entries), false)) {
    const Value key = Key(interpreter, raw_key(item), nullptr, case_sensitive);
    if (!group_key.has_value() || !Equal(*group_key, key)) {
      flush();
      group_key = key;
      first_key = raw_key(item);
    }
    members.push_back(item);
  }
  flush();
  return Value::OfList(std::move(groups));
}

// Takes the first positional argument off `args`.
std::string TakeName(Args& args, std::string_view filter) {
  if (args.positional.empty()) Fail(filter, " requires a filter argument");
  const std::string name(RequireText(args.positional.front(), filter).view());
  args.positional.erase(args.positional.begin());
  return name;
}

Value Map(Interpreter& interpreter, const Value& input, Args& args) {
  std::vector<Value> out;
  const std::vector<Value> items = interpreter.Iterate(input);
  if (args.positional.empty() && !args.named.empty()) {
    const Bound bound(args, "map", {"attribute", "default"}, 1);
    for (const Value& item : items) out.push_back(Path(interpreter, item, *bound[0], bound[1]));
    return Value::OfGenerator(std::move(out));
  }
  const std::string name = TakeName(args, "map");
  for (const Value& item : items) {
    Args copy = args;
    out.push_back(interpreter.ApplyFilter(name, item, copy));
  }
  return Value::OfGenerator(std::move(out));
}

Value SelectOrReject(Interpreter& interpreter, const Value& input, Args& args, bool keep, bool by_attribute) {
  Value attribute;
  if (by_attribute) {
    if (args.positional.empty()) Fail("Missing parameter for attribute name");
    attribute = args.positional.front();
    args.positional.erase(args.positional.begin());
  }
  const std::string test = args.positional.empty() ? std::string() : TakeName(args, "select");
  std::vector<Value> out;
  for (Value& item : interpreter.Iterate(input)) {
    const Value subject = by_attribute ? Path(interpreter, item, attribute, nullptr) : item;
    const bool holds = test.empty() ? subject.Truthy() : interpreter.ApplyTest(test, subject, args);
    if (holds == keep) out.push_back(std::move(item));
  }
  return Value::OfGenerator(std::move(out));
}

Value Select(Interpreter& i, const Value& input, Args& args) { return SelectOrReject(i, input, args, true, false); }
Value Reject(Interpreter& i, const Value& input, Args& args) { return SelectOrReject(i, input, args, false, false); }
Value SelectAttr(Interpreter& i, const Value& input, Args& args) { return SelectOrReject(i, input, args, true, true); }
Value RejectAttr(Interpreter& i, const Value& input, Args& args) { return SelectOrReject(i, input, args, false, true); }

}  // namespace

FilterFunction FindSequenceFilter(std::string_view name) {
  static const auto* const kTable = new std::unordered_map<std::string_view, FilterFunction>{{"length", Length},
                                                                                             {"count", Length},
                                                                                             {"first", First},
                                                                                             {"last", Last},
                                                                                             {"join", JoinFilter},
                                                                                             {"list", ListFilter},
                                                                                             {"items", Items},
                                                                                             {"default", Default},
                                                                                             {"d", Default},
                                                                                             {"dictsort", DictSort},
                                                                                             {"sort", Sort},
                                                                                             {"unique", Unique},
                                                                                             {"min", Min},
                                                                                             {"max", Max},
                                                                                             {"sum", Sum},
                                                                                             {"reverse", Reverse},
                                                                                             {"batch", Batch},
                                                                                             {"slice", SliceFilter},
                                                                                             {"attr", AttributeFilter},
                                                                                             {"groupby", GroupBy},
                                                                                             {"map", Map},
                                                                                             {"select", Select},
                                                                                             {"reject", Reject},
                                                                                             {"selectattr", SelectAttr},
                                                                                             {"rejectattr", RejectAttr}};
  const auto at = kTable->find(name);
  return at == kTable->end() ? nullptr : at->second;
}

FilterFunction FindFilter(std::string_view name) {
  const FilterFunction text = FindTextFilter(name);
  return text != nullptr ? text : FindSequenceFilter(name);
}

}  // namespace hearth::jinja
