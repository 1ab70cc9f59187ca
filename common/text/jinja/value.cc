#include "common/text/jinja/value.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/text/jinja/error.h"

namespace hearth::jinja {
namespace {

constexpr size_t kSmallDict = 8;  // searching this many keys is faster than hashing one

std::shared_ptr<Sequence> MakeSequence(std::vector<Value> items, Sequence::Flavor flavor, std::string_view type_name) {
  auto sequence = std::make_shared<Sequence>();
  for (const Value& item : items) sequence->nesting = std::max(sequence->nesting, item.nesting() + 1);
  CheckNesting(sequence->nesting);
  sequence->items = std::move(items);
  sequence->flavor = flavor;
  sequence->type_name = type_name;
  return sequence;
}

int CompareNumbers(const Value& left, const Value& right) {
  if (left.is_integral() && right.is_integral()) {
    return left.integer() < right.integer() ? -1 : left.integer() > right.integer() ? 1 : 0;
  }
  return left.number() < right.number() ? -1 : left.number() > right.number() ? 1 : 0;
}

}  // namespace

void CheckNesting(int nesting) {
  if (nesting > kMaxNesting) Fail("values are nested more than ", kMaxNesting, " deep");
}

std::optional<Value> Object::Attribute(std::string_view) { return std::nullopt; }
bool Object::SetAttribute(std::string_view, const Value&) { return false; }
Value Object::Call(Interpreter&, Args&) { Fail("'", type_name(), "' object is not callable"); }

Value Value::OfUndefined(std::string hint) { return Value(Data(std::make_shared<const UndefinedInfo>(UndefinedInfo{std::move(hint)}))); }

Value Value::OfList(std::vector<Value> items) { return OfSequence(MakeSequence(std::move(items), Sequence::Flavor::kList, "list")); }

Value Value::OfTuple(std::vector<Value> items) { return OfSequence(MakeSequence(std::move(items), Sequence::Flavor::kTuple, "tuple")); }

Value Value::OfGenerator(std::vector<Value> items, std::string_view type_name) {
  return OfSequence(MakeSequence(std::move(items), Sequence::Flavor::kGenerator, type_name));
}

Value Value::OfView(std::vector<Value> items, std::string_view type_name) {
  return OfSequence(MakeSequence(std::move(items), Sequence::Flavor::kView, type_name));
}

bool Value::Truthy() const {
  switch (kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return false;
    case Kind::kBool: return boolean();
    case Kind::kInt: return integer() != 0;
    case Kind::kFloat: return number() != 0;
    case Kind::kString: return !text().empty();
    case Kind::kSequence: return sequence()->flavor == Sequence::Flavor::kGenerator || !sequence()->items.empty();
    case Kind::kDict: return !dict()->entries.empty();
    case Kind::kObject: return true;
  }
  return false;
}

std::string_view Value::type_name() const {
  switch (kind()) {
    case Kind::kUndefined: return "Undefined";
    case Kind::kNone: return "NoneType";
    case Kind::kBool: return "bool";
    case Kind::kInt: return "int";
    case Kind::kFloat: return "float";
    case Kind::kString: return text().markup() ? "Markup" : "str";
    case Kind::kSequence: return sequence()->type_name;
    case Kind::kDict: return "dict";
    case Kind::kObject: return object()->type_name();
  }
  return "object";
}

const std::string& Value::undefined_hint() const {
  static const std::string* const kUnnamed = new std::string("a value is undefined");
  const Undefined& info = std::get<Undefined>(data_);
  return info == nullptr ? *kUnnamed : info->hint;
}

int Value::nesting() const {
  if (is_sequence()) return sequence()->nesting;
  return is_dict() ? dict()->nesting : 0;
}

namespace {

// Comparing walks both values. Lists that contain themselves, or share parts many times over, must not make that walk
// endless.
struct EqualWalk {
  int depth = 0;
  int64_t nodes = 0;

  bool Same(const Value& left, const Value& right) {
    CheckNesting(depth);
    if (++nodes > 20'000'000) Fail("comparing two values takes too long");
    if (left.is_number() && right.is_number()) {
      if (left.kind() == Kind::kFloat && std::isnan(left.number())) return false;
      if (right.kind() == Kind::kFloat && std::isnan(right.number())) return false;
      return CompareNumbers(left, right) == 0;
    }
    if (left.kind() != right.kind()) return false;
    ++depth;
    const bool same = SameContent(left, right);
    --depth;
    return same;
  }

 private:
  bool SameContent(const Value& left, const Value& right) {
    switch (left.kind()) {
      case Kind::kUndefined:
      case Kind::kNone: return true;
      case Kind::kString: return left.view() == right.view();
      case Kind::kSequence: {
        const Sequence& a = *left.sequence();
        const Sequence& b = *right.sequence();
        if (&a == &b) return true;
        if (!a.indexable() || a.flavor != b.flavor) return false;
        return std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(),
                          [this](const Value& x, const Value& y) { return Same(x, y); });
      }
      case Kind::kDict: {
        if (left.dict() == right.dict()) return true;
        if (left.dict()->entries.size() != right.dict()->entries.size()) return false;
        for (const auto& [key, value] : left.dict()->entries) {
          const Value* other = right.dict()->Find(key);
          if (other == nullptr || !Same(value, *other)) return false;
        }
        return true;
      }
      case Kind::kObject: return left.object() == right.object();
      default: return false;
    }
  }
};

}  // namespace

bool Equal(const Value& left, const Value& right) { return EqualWalk().Same(left, right); }

int Compare(const Value& left, const Value& right, std::string_view op) {
  if (left.is_undefined()) Fail(left.undefined_hint());
  if (right.is_undefined()) Fail(right.undefined_hint());
  if (left.is_number() && right.is_number()) return CompareNumbers(left, right);
  // The order of UTF-8 bytes is the order of code points.
  if (left.is_string() && right.is_string()) return left.view().compare(right.view());
  if (left.is_sequence() && right.is_sequence() && left.sequence()->flavor == right.sequence()->flavor &&
      left.sequence()->flavor <= Sequence::Flavor::kTuple) {
    const std::vector<Value>& a = left.sequence()->items;
    const std::vector<Value>& b = right.sequence()->items;
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
      if (!Equal(a[i], b[i])) return Compare(a[i], b[i], op);
    }
    return a.size() < b.size() ? -1 : a.size() > b.size() ? 1 : 0;
  }
  Fail("'", op, "' not supported between instances of '", left.type_name(), "' and '", right.type_name(), "'");
}

size_t Hash(const Value& value) {
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInt: return std::hash<uint64_t>()(static_cast<uint64_t>(value.integer()));
    case Kind::kFloat: {
      const double number = value.number();
      if (number == std::floor(number) && std::abs(number) < 9e18) {
        return std::hash<uint64_t>()(static_cast<uint64_t>(static_cast<int64_t>(number)));
      }
      return std::hash<double>()(number);
    }
    case Kind::kString: return std::hash<std::string_view>()(value.view());
    case Kind::kObject: return std::hash<const void*>()(value.object().get());
    case Kind::kSequence: {
      const Sequence& sequence = *value.sequence();
      if (sequence.flavor == Sequence::Flavor::kList) Fail("unhashable type: 'list'");
      if (!sequence.indexable()) return std::hash<const void*>()(&sequence);
      size_t hash = 0x345678;
      for (const Value& item : sequence.items) hash = hash * 1000003 ^ Hash(item);
      return hash;
    }
    case Kind::kDict: Fail("unhashable type: 'dict'");
    default: return 1;
  }
}

std::optional<size_t> Dict::Position(size_t hash, const Value& key) {
  if (!indexed_) {
    index_.clear();
    for (size_t i = 0; i < entries.size(); ++i) index_.emplace(Hash(entries[i].first), static_cast<uint32_t>(i));
    indexed_ = true;
  }
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    if (Equal(entries[it->second].first, key)) return it->second;
  }
  return std::nullopt;
}

Value* Dict::Find(const Value& key) {
  const size_t hash = Hash(key);
  if (entries.size() <= kSmallDict) {
    for (auto& [name, value] : entries) {
      if (Equal(name, key)) return &value;
    }
    return nullptr;
  }
  const std::optional<size_t> at = Position(hash, key);
  return at.has_value() ? &entries[*at].second : nullptr;
}

Value* Dict::Find(std::string_view key) {
  if (entries.size() <= kSmallDict) {
    for (auto& [name, value] : entries) {
      if (name.is_string() && name.view() == key) return &value;
    }
    return nullptr;
  }
  return Find(Value::OfString(std::string(key), true));
}

void Dict::Set(const Value& key, Value value) {
  const int depth = std::max(key.nesting(), value.nesting()) + 1;
  CheckNesting(depth);
  nesting = std::max(nesting, depth);
  if (Value* found = Find(key); found != nullptr) {
    *found = std::move(value);
    return;
  }
  if (indexed_) index_.emplace(Hash(key), static_cast<uint32_t>(entries.size()));
  entries.emplace_back(key, std::move(value));
}

bool Dict::Erase(const Value& key) {
  const Value* found = Find(key);
  if (found == nullptr) return false;
  const auto at = std::find_if(entries.begin(), entries.end(), [found](const auto& entry) { return &entry.second == found; });
  entries.erase(at);
  indexed_ = false;
  return true;
}

void Dict::Clear() {
  entries.clear();
  index_.clear();
  indexed_ = false;
}

Bound::Bound(const Args& args, std::string_view function, std::initializer_list<std::string_view> parameters, size_t required)
    : function_(function), values_(parameters.size(), nullptr) {
  if (args.positional.size() > parameters.size()) {
    Fail(function, "() takes at most ", parameters.size(), " argument(s) (", args.positional.size(), " given)");
  }
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    const auto* at = std::find(parameters.begin(), parameters.end(), name);
    if (at == parameters.end()) Fail(function, "() got an unexpected keyword argument '", name, "'");
    const Value*& slot = values_[at - parameters.begin()];
    if (slot != nullptr) Fail(function, "() got multiple values for argument '", name, "'");
    slot = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values_[i] == nullptr) Fail(function, "() missing required argument '", *(parameters.begin() + i), "'");
  }
}

Int Bound::Integer(size_t index, Int otherwise) const {
  const Value* value = values_[index];
  if (value == nullptr) return otherwise;
  if (value->is_undefined()) Fail(value->undefined_hint());
  if (!value->is_integral()) {
    Fail(function_, "(): '", value->type_name(), "' object cannot be interpreted as an integer");
  }
  return value->integer();
}

}  // namespace hearth::jinja
