// Values of the template language, behaving as the Python objects that Jinja2 would hold: none, bool, int, float, str,
// list, tuple, dict, generators and views, undefined, and objects with attributes (namespace, loop, macros, methods).
// Room: common/text/jinja. Threads: a value belongs to one rendering; constants of a parsed template are shared
// read-only. Containers know how deep they nest and refuse to grow past kMaxNesting, so no walk over a value can
// exhaust the stack.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "common/text/jinja/text.h"

namespace hearth::jinja {

// Wide enough for every JSON integer, signed or unsigned; arithmetic beyond it is an error.
__extension__ typedef __int128 Int;

inline constexpr int kMaxNesting = 256;

class Interpreter;
class Value;
struct Args;

struct None {};

// `hint` is the sentence of the error when the value is used: "'x' is undefined".
struct UndefinedInfo {
  std::string hint;
};
using Undefined = std::shared_ptr<const UndefinedInfo>;

struct Sequence;
struct Dict;

// Things that are neither numbers, strings nor containers.
class Object : public std::enable_shared_from_this<Object> {
 public:
  virtual ~Object() = default;
  virtual std::string_view type_name() const = 0;
  virtual std::string Repr() const = 0;
  virtual std::optional<Value> Attribute(std::string_view name);
  virtual bool SetAttribute(std::string_view name,
                            const Value& value);  // false: attributes of this object can't be set
  virtual bool callable() const { return false; }
  virtual Value Call(Interpreter& interpreter, Args& args);
  virtual void Clear() {}  // drops references, to break cycles at the end of a rendering
};

enum class Kind : uint8_t { kUndefined, kNone, kBool, kInt, kFloat, kString, kSequence, kDict, kObject };

class Value {
 public:
  Value() : data_(Undefined()) {}
  static Value OfUndefined(std::string hint);
  static Value OfNone() { return Value(Data(None{})); }
  static Value OfBool(bool value) { return Value(Data(value)); }
  static Value OfInt(Int value) { return Value(Data(value)); }
  static Value OfFloat(double value) { return Value(Data(value)); }
  static Value OfText(Text value) { return Value(Data(std::move(value))); }
  static Value OfString(std::string value, bool trusted) { return OfText(Text(std::move(value), trusted)); }
  static Value OfList(std::vector<Value> items);
  static Value OfTuple(std::vector<Value> items);
  // `type_name` must outlive the value ("generator", "dict_items").
  static Value OfGenerator(std::vector<Value> items, std::string_view type_name = "generator");
  static Value OfView(std::vector<Value> items, std::string_view type_name);
  static Value OfSequence(std::shared_ptr<Sequence> value) { return Value(Data(std::move(value))); }
  static Value OfDict(std::shared_ptr<Dict> value) { return Value(Data(std::move(value))); }
  static Value OfObject(std::shared_ptr<Object> value) { return Value(Data(std::move(value))); }

  Kind kind() const { return static_cast<Kind>(data_.index()); }
  bool is_undefined() const { return kind() == Kind::kUndefined; }
  bool is_none() const { return kind() == Kind::kNone; }
  bool is_bool() const { return kind() == Kind::kBool; }
  bool is_string() const { return kind() == Kind::kString; }
  bool is_dict() const { return kind() == Kind::kDict; }
  bool is_sequence() const { return kind() == Kind::kSequence; }
  bool is_object() const { return kind() == Kind::kObject; }
  // bool counts as a number, as in Python.
  bool is_integral() const { return kind() == Kind::kInt || kind() == Kind::kBool; }
  bool is_number() const { return is_integral() || kind() == Kind::kFloat; }

  bool boolean() const { return std::get<bool>(data_); }
  Int integer() const { return is_bool() ? Int{boolean()} : std::get<Int>(data_); }
  double number() const { return kind() == Kind::kFloat ? std::get<double>(data_) : static_cast<double>(integer()); }
  const Text& text() const { return std::get<Text>(data_); }
  std::string_view view() const { return text().view(); }
  const std::shared_ptr<Sequence>& sequence() const { return std::get<std::shared_ptr<Sequence>>(data_); }
  const std::shared_ptr<Dict>& dict() const { return std::get<std::shared_ptr<Dict>>(data_); }
  const std::shared_ptr<Object>& object() const { return std::get<std::shared_ptr<Object>>(data_); }

  bool Truthy() const;
  // "str", "int", "NoneType": as Python names the type in its errors.
  std::string_view type_name() const;
  // "'x' is undefined", for an undefined value that is used.
  const std::string& undefined_hint() const;
  int nesting() const;  // 0 for what contains nothing

 private:
  using Data = std::variant<Undefined, None, bool, Int, double, Text, std::shared_ptr<Sequence>, std::shared_ptr<Dict>, std::shared_ptr<Object>>;
  explicit Value(Data data) : data_(std::move(data)) {}
  Data data_;
};

struct Sequence {
  enum class Flavor : uint8_t { kList, kTuple, kRange, kView, kGenerator };
  std::vector<Value> items;
  Flavor flavor = Flavor::kList;
  std::string_view type_name = "list";
  size_t next = 0;  // generators only: what is already taken
  int nesting = 1;
  bool tracked = false;  // see Interpreter::Track
  bool indexable() const { return flavor <= Flavor::kRange; }
};

// Insertion-ordered, keys by Python's equality (1 == 1.0 == True). Small dicts are searched, larger ones indexed.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int nesting = 1;
  bool tracked = false;  // see Interpreter::Track

  // Throws Error for an unhashable key. The pointer is valid until the dict changes.
  Value* Find(const Value& key);
  Value* Find(std::string_view key);
  void Set(const Value& key, Value value);
  bool Erase(const Value& key);
  void Clear();

 private:
  std::optional<size_t> Position(size_t hash, const Value& key);
  std::unordered_multimap<size_t, uint32_t> index_;
  bool indexed_ = false;
};

// What a call passes, before it is matched to a signature.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// Matches arguments to parameter names as Python does; `function` is named in errors.
class Bound {
 public:
  Bound(const Args& args, std::string_view function, std::initializer_list<std::string_view> parameters, size_t required = 0);
  const Value* operator[](size_t index) const { return values_[index]; }
  bool Flag(size_t index, bool otherwise) const { return values_[index] == nullptr ? otherwise : values_[index]->Truthy(); }
  Int Integer(size_t index, Int otherwise) const;

 private:
  std::string function_;
  std::vector<const Value*> values_;
};

bool Equal(const Value& left, const Value& right);
// <0, 0, >0; throws Error when Python refuses to order the two (`op` is named: "<").
int Compare(const Value& left, const Value& right, std::string_view op);
size_t Hash(const Value& value);
// Throws Error for what `value` may not hold.
void CheckNesting(int nesting);

}  // namespace hearth::jinja
