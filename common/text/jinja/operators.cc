#include "common/text/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "common/text/jinja/error.h"
#include "common/text/jinja/python_format.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

constexpr size_t kMaxItems = size_t{4} << 20;  // of a list that a template builds

std::string_view Symbol(char op) {
  switch (op) {
    case '+': return "+";
    case '-': return "-";
    case '*': return "*";
    case '/': return "/";
    case '%': return "%";
    case 'f': return "//";
    default: return "** or pow()";
  }
}

[[noreturn]] void Unsupported(char op, const Value& left, const Value& right) {
  Fail("unsupported operand type(s) for ", Symbol(op), ": '", left.type_name(), "' and '", right.type_name(), "'");
}

[[noreturn]] void TooLarge() { Fail("an integer of the template grows too large"); }

Int FloorDivide(Int a, Int b) {
  const Int quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

Value Power(const Value& left, const Value& right) {
  if (!left.is_integral() || !right.is_integral() || right.integer() < 0) {
    if (left.number() == 0 && right.number() < 0) Fail("0.0 cannot be raised to a negative power");
    const double result = std::pow(left.number(), right.number());
    if (std::isinf(result) && std::isfinite(left.number()) && std::isfinite(right.number())) Fail("the result of ** is too large");
    if (std::isnan(result) && !std::isnan(left.number()) && !std::isnan(right.number())) Fail("the result of ** is a complex number");
    return Value::OfFloat(result);
  }
  Int result = 1, base = left.integer();
  for (Int exponent = right.integer(); exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) TooLarge();
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) TooLarge();
  }
  return Value::OfInt(result);
}

Value NumberArithmetic(char op, const Value& left, const Value& right) {
  if (op == 'p') return Power(left, right);
  if (left.is_integral() && right.is_integral() && op != '/') {
    const Int a = left.integer(), b = right.integer();
    Int result = 0;
    switch (op) {
      case '+':
        if (__builtin_add_overflow(a, b, &result)) TooLarge();
        break;
      case '-':
        if (__builtin_sub_overflow(a, b, &result)) TooLarge();
        break;
      case '*':
        if (__builtin_mul_overflow(a, b, &result)) TooLarge();
        break;
      default:
        if (b == 0) Fail("integer division or modulo by zero");
        if (b == -1) {
          if (op == 'f' && __builtin_sub_overflow(Int{0}, a, &result)) TooLarge();
          break;
        }
        result = op == 'f' ? FloorDivide(a, b) : a - FloorDivide(a, b) * b;
    }
    return Value::OfInt(result);
  }
  const double a = left.number(), b = right.number();
  switch (op) {
    case '+': return Value::OfFloat(a + b);
    case '-': return Value::OfFloat(a - b);
    case '*': return Value::OfFloat(a * b);
    default: break;
  }
  if (b == 0) Fail(op == '/' && left.is_integral() && right.is_integral() ? "division by zero" : "float division by zero");
  if (op == '/') return Value::OfFloat(a / b);
  // As Python computes them: the remainder takes the divisor's sign, the quotient is rounded down from it.
  double remainder = std::fmod(a, b);
  double quotient = (a - remainder) / b;
  if (remainder != 0 && (b < 0) != (remainder < 0)) {
    remainder += b;
    quotient -= 1;
  }
  if (op == '%') return Value::OfFloat(remainder == 0 ? std::copysign(0.0, b) : remainder);
  if (quotient == 0) return Value::OfFloat(std::copysign(0.0, a / b));
  const double floored = std::floor(quotient);
  return Value::OfFloat(quotient - floored > 0.5 ? floored + 1 : floored);
}

std::string EscapeHtml(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&#34;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

Value Repeat(const Value& value, const Value& times) {
  const Int count = std::max<Int>(times.integer(), 0);
  if (value.is_string()) {
    const Text& text = value.text();
    if (!text.empty() && count > static_cast<Int>(kMaxTextBytes / text.size())) {
      Fail("the template builds a string of more than ", kMaxTextBytes >> 20, " MiB");
    }
    TextBuilder out;
    if (!text.empty()) {
      for (Int i = 0; i < count; ++i) out.Append(text);
    }
    return Value::OfText(out.Take());
  }
  const std::vector<Value>& items = value.sequence()->items;
  std::vector<Value> out;
  if (!items.empty()) {
    if (count > static_cast<Int>(kMaxItems / items.size())) Fail("the template builds a list of more than ", kMaxItems, " items");
    for (Int i = 0; i < count; ++i) out.insert(out.end(), items.begin(), items.end());
  }
  return value.sequence()->flavor == Sequence::Flavor::kTuple ? Value::OfTuple(std::move(out)) : Value::OfList(std::move(out));
}

bool IsListOrTuple(const Value& value) { return value.is_sequence() && value.sequence()->flavor <= Sequence::Flavor::kTuple; }

Value Add(const Value& left, const Value& right) {
  if (left.is_string() && right.is_string()) {
    if (left.text().markup() == right.text().markup()) {
      Text out = Text::Concat(left.text(), right.text());
      out.set_markup(left.text().markup());
      return Value::OfText(std::move(out));
    }
    // What `safe` marked turns its neighbour into HTML, as markupsafe's + does.
    const auto escaped = [](const Text& text) { return text.markup() ? text : Text(EscapeHtml(text.view()), text.trusted()); };
    Text out = Text::Concat(escaped(left.text()), escaped(right.text()));
    out.set_markup(true);
    return Value::OfText(std::move(out));
  }
  if (left.is_string()) Fail("can only concatenate str (not \"", right.type_name(), "\") to str");
  if (IsListOrTuple(left)) {
    if (!right.is_sequence() || right.sequence()->flavor != left.sequence()->flavor) {
      Fail("can only concatenate ", left.type_name(), " (not \"", right.type_name(), "\") to ", left.type_name());
    }
    std::vector<Value> items = left.sequence()->items;
    if (items.size() + right.sequence()->items.size() > kMaxItems) Fail("the template builds a list of more than ", kMaxItems, " items");
    items.insert(items.end(), right.sequence()->items.begin(), right.sequence()->items.end());
    return left.sequence()->flavor == Sequence::Flavor::kTuple ? Value::OfTuple(std::move(items)) : Value::OfList(std::move(items));
  }
  Unsupported('+', left, right);
}

// An index or slice bound; none and absent are nullopt.
std::optional<Int> SliceBound(const Value* value) {
  if (value == nullptr || value->is_none()) return std::nullopt;
  if (value->is_undefined()) Fail(value->undefined_hint());
  if (!value->is_integral()) Fail("slice indices must be integers or None or have an __index__ method");
  return value->integer();
}

}  // namespace

Value Arithmetic(char op, const Value& left, const Value& right) {
  if (left.is_number() && right.is_number()) return NumberArithmetic(op, left, right);
  if (left.is_undefined()) Fail(left.undefined_hint());
  if (op == '%' && left.is_string()) return Value::OfText(PercentFormat(left.text(), right));
  if (right.is_undefined()) Fail(right.undefined_hint());
  if (op == '+') return Add(left, right);
  if (op == '*') {
    if ((left.is_string() || IsListOrTuple(left)) && right.is_integral()) return Repeat(left, right);
    if ((right.is_string() || IsListOrTuple(right)) && left.is_integral()) return Repeat(right, left);
    if (left.is_string() || IsListOrTuple(left)) Fail("can't multiply sequence by non-int of type '", right.type_name(), "'");
  }
  Unsupported(op, left, right);
}

Value Negate(const Value& value) {
  if (value.is_integral()) return NumberArithmetic('-', Value::OfInt(0), value);
  if (value.is_number()) return Value::OfFloat(-value.number());
  if (value.is_undefined()) Fail(value.undefined_hint());
  Fail("bad operand type for unary -: '", value.type_name(), "'");
}

Value Plus(const Value& value) {
  if (value.is_integral()) return Value::OfInt(value.integer());
  if (value.is_number()) return value;
  if (value.is_undefined()) Fail(value.undefined_hint());
  Fail("bad operand type for unary +: '", value.type_name(), "'");
}

bool Contains(const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kUndefined: return false;
    case Kind::kString:
      if (item.is_undefined()) Fail(item.undefined_hint());
      if (!item.is_string()) Fail("'in <string>' requires string as left operand, not ", item.type_name());
      return container.view().find(item.view()) != std::string_view::npos;
    case Kind::kSequence: {
      Sequence& sequence = *container.sequence();
      for (size_t i = sequence.next; i < sequence.items.size(); ++i) {
        if (sequence.flavor == Sequence::Flavor::kGenerator) sequence.next = i + 1;
        if (Equal(sequence.items[i], item)) return true;
      }
      return false;
    }
    case Kind::kDict: return container.dict()->Find(item) != nullptr;
    default: Fail("argument of type '", container.type_name(), "' is not iterable");
  }
}

std::optional<Value> Index(const Value& object, const Value& key) {
  if (object.is_dict()) {
    if (key.is_dict() || (key.is_sequence() && key.sequence()->flavor == Sequence::Flavor::kList)) return std::nullopt;
    const Value* found = object.dict()->Find(key);
    return found == nullptr ? std::nullopt : std::optional<Value>(*found);
  }
  if (!key.is_integral()) return std::nullopt;
  Int index = key.integer();
  if (object.is_sequence()) {
    if (!object.sequence()->indexable()) return std::nullopt;
    const std::vector<Value>& items = object.sequence()->items;
    const Int size = static_cast<Int>(items.size());
    if (index < 0) index += size;
    if (index < 0 || index >= size) return std::nullopt;
    return items[static_cast<size_t>(index)];
  }
  if (!object.is_string()) return std::nullopt;
  const Value start = Value::OfInt(index);
  const Value stop = Value::OfInt(index + 1);
  Value character = Slice(object, &start, index == -1 ? nullptr : &stop, nullptr);
  return character.text().empty() ? std::nullopt : std::optional<Value>(std::move(character));
}

Value Slice(const Value& object, const Value* start, const Value* stop, const Value* step) {
  if (object.is_undefined()) Fail(object.undefined_hint());
  if (!object.is_string() && !(object.is_sequence() && object.sequence()->indexable())) {
    Fail("'", object.type_name(), "' object is not subscriptable");
  }
  const Int stride = SliceBound(step).value_or(1);
  if (stride == 0) Fail("slice step cannot be zero");
  std::optional<Int> first = SliceBound(start), last = SliceBound(stop);
  if (object.is_string() && stride == 1) {
    // The usual cases walk only to the place of the cut, from the end that is nearer.
    const std::string_view view = object.view();
    const auto offset = [view](Int index) -> size_t {
      if (index >= 0) return ByteOffset(view, static_cast<size_t>(std::min<Int>(index, static_cast<Int>(view.size()))));
      size_t at = view.size();
      for (; index < 0 && at > 0; ++index) at = PreviousCharacter(view, at);
      return at;
    };
    const size_t begin = first.has_value() ? offset(*first) : 0;
    return Value::OfText(object.text().Slice(begin, last.has_value() ? offset(*last) : view.size()));
  }
  const std::vector<Value> characters = object.is_string() ? Characters(object.text()) : std::vector<Value>();
  const std::vector<Value>& items = object.is_string() ? characters : object.sequence()->items;
  const Int size = static_cast<Int>(items.size());
  const auto clamp = [size, stride](std::optional<Int> bound, Int otherwise) {
    if (!bound.has_value()) return otherwise;
    const Int at = *bound < 0 ? *bound + size : *bound;
    return stride > 0 ? std::clamp<Int>(at, 0, size) : std::clamp<Int>(at, -1, size - 1);
  };
  const Int begin = clamp(first, stride > 0 ? 0 : size - 1);
  const Int end = clamp(last, stride > 0 ? size : -1);
  std::vector<Value> out;
  for (Int i = begin; stride > 0 ? i < end : i > end; i += stride) out.push_back(items[static_cast<size_t>(i)]);
  if (object.is_string()) {
    TextBuilder builder;
    for (const Value& character : out) builder.Append(character.text());
    return Value::OfText(builder.Take());
  }
  if (object.sequence()->flavor == Sequence::Flavor::kTuple) return Value::OfTuple(std::move(out));
  if (object.sequence()->flavor == Sequence::Flavor::kList) return Value::OfList(std::move(out));
  Value range = Value::OfList(std::move(out));
  range.sequence()->flavor = Sequence::Flavor::kRange;
  range.sequence()->type_name = "range";
  return range;
}

std::vector<Value> Characters(const Text& text) {
  const std::string_view view = text.view();
  std::vector<Value> out;
  if (view.size() > 4 * kMaxItems) Fail("a string of ", view.size(), " bytes is too long to be walked character by character");
  for (size_t pos = 0; pos < view.size();) {
    const size_t start = pos;
    NextCodePoint(view, pos);
    out.push_back(Value::OfText(text.Slice(start, pos)));
  }
  return out;
}

}  // namespace hearth::jinja
