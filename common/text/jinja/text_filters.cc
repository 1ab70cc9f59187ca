// Filters that make or take text and numbers: trim, replace, tojson, indent, int, round...
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "common/text/jinja/error.h"
#include "common/text/jinja/filters.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/json_io.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/operators.h"
#include "common/text/jinja/python_format.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

// str(value) | method(args)
Value ByMethod(Interpreter& interpreter, std::string_view method, const Value& input, Args& args) {
  return FindStringMethod(method)(interpreter, Value::OfText(ToText(input)), args);
}

Value Upper(Interpreter& interpreter, const Value& input, Args& args) { return ByMethod(interpreter, "upper", input, args); }
Value Lower(Interpreter& interpreter, const Value& input, Args& args) { return ByMethod(interpreter, "lower", input, args); }
Value Capitalized(Interpreter& interpreter, const Value& input, Args& args) { return ByMethod(interpreter, "capitalize", input, args); }
Value Trim(Interpreter& interpreter, const Value& input, Args& args) { return ByMethod(interpreter, "strip", input, args); }

// Jinja2's own title: a capital after every space, hyphen or opening bracket, so that "it's" stays "It's".
Value Title(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "title", {});
  const Text text = ToText(input);
  std::string out, word;
  const auto flush = [&] {
    out += Capitalize(word);
    word.clear();
  };
  const std::string_view view = text.view();
  for (size_t pos = 0; pos < view.size();) {
    const size_t start = pos;
    const char32_t code = NextCodePoint(view, pos);
    const bool breaks = code == '-' || code == '(' || code == '{' || code == '[' || code == '<' || IsSpace(code);
    if (breaks) {
      flush();
      out += view.substr(start, pos - start);
    } else {
      word += view.substr(start, pos - start);
    }
  }
  flush();
  return Value::OfString(std::move(out), text.trusted());
}

Value ReplaceFilter(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "replace", {"old", "new", "count"}, 2);
  const Int count = bound[2] == nullptr || bound[2]->is_none() ? -1 : bound.Integer(2, -1);
  return Value::OfText(Replace(ToText(input), ToText(*bound[0]).view(), ToText(*bound[1]), count));
}

Value StringFilter(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "string", {});
  return Value::OfText(ToText(input));
}

Value Safe(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "safe", {});
  Text text = ToText(input);
  text.set_markup(true);
  return Value::OfText(std::move(text));
}

Value Escape(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "escape", {});
  if (input.is_string() && input.text().markup()) return input;
  // Adding it to an empty safe text escapes it.
  Text empty;
  empty.set_markup(true);
  return Arithmetic('+', Value::OfText(std::move(empty)), Value::OfText(ToText(input)));
}

Value ForceEscape(Interpreter& interpreter, const Value& input, Args& args) {
  Text text = ToText(input);
  text.set_markup(false);
  return Escape(interpreter, Value::OfText(std::move(text)), args);
}

Value Format(Interpreter&, const Value& input, Args& args) {
  if (!args.named.empty()) {
    if (!args.positional.empty()) Fail("can't handle positional and keyword arguments at the same time");
    auto dict = std::make_shared<Dict>();
    for (const auto& [name, value] : args.named) dict->Set(Value::OfString(name, true), value);
    return Value::OfText(PercentFormat(ToText(input), Value::OfDict(std::move(dict))));
  }
  return Value::OfText(PercentFormat(ToText(input), Value::OfTuple(args.positional)));
}

// Transformers' tojson: json.dumps with characters as they are.
Value ToJsonFilter(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = bound.Flag(0, false);
  style.sort_keys = bound.Flag(3, false);
  if (const Value* indent = bound[1]; indent != nullptr && !indent->is_none()) {
    style.pretty = true;
    style.item_separator.pop_back();  // json.dumps ends its lines without a blank
    if (indent->is_string()) {
      style.indent = std::string(indent->view());
    } else {
      const Int width = bound.Integer(1, 0);
      if (width > 1024) Fail("tojson(): an indent of more than 1024 blanks");
      style.indent.assign(width < 0 ? 0 : static_cast<size_t>(width), ' ');
    }
  }
  if (const Value* separators = bound[2]; separators != nullptr && !separators->is_none()) {
    const std::vector<Value> parts = interpreter.Iterate(*separators);
    if (parts.size() != 2) Fail("tojson(): separators must be a pair (item, key)");
    style.item_separator = std::string(RequireText(parts[0], "tojson()").view());
    style.key_separator = std::string(RequireText(parts[1], "tojson()").view());
  }
  return Value::OfText(ToJson(input, style));
}

Value Indent(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "indent", {"width", "first", "blank"});
  const Text& text = RequireText(input, "indent");
  Text indention("    ", true);
  if (bound[0] != nullptr && bound[0]->is_string()) {
    indention = bound[0]->text();
  } else if (bound[0] != nullptr) {
    const Int width = bound.Integer(0, 4);
    if (width > 4096) Fail("indent() by more than 4096 blanks");
    indention = Text(std::string(width < 0 ? 0 : static_cast<size_t>(width), ' '), true);
  }
  const bool first = bound.Flag(1, false), blank = bound.Flag(2, false);
  // Jinja2 appends a newline before it splits into lines: a text that ends in one keeps it.
  const std::vector<Text> lines = SplitLines(Text::Concat(text, Text("\n", true)), false);
  TextBuilder out;
  if (first) out.Append(indention);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.Append("\n", true);
    if (i > 0 && (blank || !lines[i].empty())) out.Append(indention);
    out.Append(lines[i]);
  }
  return Value::OfText(out.Take());
}

Value Center(Interpreter& interpreter, const Value& input, Args& args) {
  const Bound bound(args, "center", {"width"});
  Args width;
  width.positional.push_back(bound[0] == nullptr ? Value::OfInt(80) : *bound[0]);
  return ByMethod(interpreter, "center", input, width);
}

Value Truncate(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "truncate", {"length", "killwords", "end", "leeway"});
  const Text& text = RequireText(input, "truncate");
  const Text end = bound[2] == nullptr ? Text("...", true) : RequireText(*bound[2], "truncate");
  const Int length = bound.Integer(0, 255);
  const Int leeway = bound[3] == nullptr || bound[3]->is_none() ? 5 : bound.Integer(3, 5);
  const Int end_length = static_cast<Int>(CountCharacters(end.view()));
  if (length < end_length) Fail("truncate: expected length >= ", static_cast<int64_t>(end_length));
  if (leeway < 0) Fail("truncate: expected leeway >= 0");
  if (static_cast<Int>(CountCharacters(text.view())) <= length + leeway) return input;
  const Text cut = text.Slice(0, ByteOffset(text.view(), static_cast<size_t>(length - end_length)));
  if (bound.Flag(1, false)) return Value::OfText(Text::Concat(cut, end));
  return Value::OfText(Text::Concat(SplitFromRight(cut, " ", 1).front(), end));
}

Value WordCount(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "wordcount", {});
  const Text text = ToText(input);
  const std::string_view view = text.view();
  Int words = 0;
  bool inside = false;
  for (size_t pos = 0; pos < view.size();) {
    const bool letter = IsWordCharacter(NextCodePoint(view, pos));
    words += letter && !inside ? 1 : 0;
    inside = letter;
  }
  return Value::OfInt(words);
}

Value UrlEncode(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "urlencode", {});
  const Text text = ToText(input);
  std::string out;
  for (const char c : text.view()) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = byte < 0x80 && (IsAlpha(byte) || IsDigit(byte) || std::string_view("_.-~/").find(c) != std::string_view::npos);
    if (plain) {
      out += c;
    } else {
      constexpr char kHex[] = "0123456789ABCDEF";
      const char escaped[] = {'%', kHex[byte >> 4], kHex[byte & 15]};
      out.append(escaped, 3);
    }
  }
  return Value::OfString(std::move(out), text.trusted());
}

// --- numbers ---

std::string_view Stripped(const Text& text, Text& holder) {
  holder = Strip(text, {}, true, true, true);
  return holder.view();
}

std::optional<Int> ReadInt(const Text& text, int base) {
  Text holder;
  std::string digits;
  std::string_view view = Stripped(text, holder);
  const bool negative = view.starts_with('-');
  if (negative || view.starts_with('+')) view.remove_prefix(1);
  const std::string_view prefix = base == 16 ? "xX" : base == 8 ? "oO" : base == 2 ? "bB" : "";
  if (view.size() > 2 && view[0] == '0' && prefix.find(view[1]) != std::string_view::npos && !prefix.empty()) view.remove_prefix(2);
  Int value = 0;
  for (size_t i = 0; i < view.size(); ++i) {
    const char c = view[i];
    if (c == '_' && i > 0 && i + 1 < view.size() && view[i - 1] != '_') continue;
    const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'z' ? (c | 32) - 'a' + 10 : 99;
    if (digit >= base) return std::nullopt;
    if (__builtin_mul_overflow(value, Int{base}, &value) || __builtin_add_overflow(value, Int{digit}, &value)) {
      Fail("an integer of the template grows too large");
    }
  }
  if (view.empty()) return std::nullopt;
  return negative ? -value : value;
}

std::optional<double> ReadFloat(const Text& text) {
  Text holder;
  std::string_view view = Stripped(text, holder);
  if (view.starts_with('+') && !view.starts_with("+-")) view.remove_prefix(1);
  double value = 0;
  const auto result = std::from_chars(view.data(), view.data() + view.size(), value);
  if (view.empty() || result.ptr != view.data() + view.size()) return std::nullopt;
  if (result.ec == std::errc::result_out_of_range) return view.starts_with('-') ? -HUGE_VAL : HUGE_VAL;
  return result.ec == std::errc() ? std::optional<double>(value) : std::nullopt;
}

std::optional<Int> Truncated(double number) {
  if (!std::isfinite(number) || std::abs(number) > 1e38) return std::nullopt;
  return static_cast<Int>(number);
}

Value IntFilter(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "int", {"default", "base"});
  const Value otherwise = bound[0] == nullptr ? Value::OfInt(0) : *bound[0];
  if (input.is_undefined()) Fail(input.undefined_hint());
  if (input.is_integral()) return Value::OfInt(input.integer());
  std::optional<Int> value;
  if (input.is_string()) {
    const Int base = bound.Integer(1, 10);
    if (base < 2 || base > 36) Fail("int() base must be >= 2 and <= 36");
    value = ReadInt(input.text(), static_cast<int>(base));
    if (!value.has_value()) {
      if (const std::optional<double> number = ReadFloat(input.text()); number.has_value()) value = Truncated(*number);
    }
  } else if (input.is_number()) {
    value = Truncated(input.number());
  }
  return value.has_value() ? Value::OfInt(*value) : otherwise;
}

Value FloatFilter(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "float", {"default"});
  const Value otherwise = bound[0] == nullptr ? Value::OfFloat(0) : *bound[0];
  if (input.is_undefined()) Fail(input.undefined_hint());
  if (input.is_number()) return Value::OfFloat(input.number());
  if (!input.is_string()) return otherwise;
  const std::optional<double> value = ReadFloat(input.text());
  return value.has_value() ? Value::OfFloat(*value) : otherwise;
}

Value Abs(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "abs", {});
  if (input.is_undefined()) Fail(input.undefined_hint());
  if (!input.is_number()) Fail("bad operand type for abs(): '", input.type_name(), "'");
  if (input.is_integral()) return input.integer() < 0 ? Negate(input) : Value::OfInt(input.integer());
  return Value::OfFloat(std::abs(input.number()));
}

Value Round(Interpreter&, const Value& input, Args& args) {
  const Bound bound(args, "round", {"precision", "method"});
  if (input.is_undefined()) Fail(input.undefined_hint());
  if (!input.is_number()) Fail("type ", input.type_name(), " doesn't define __round__ method");
  const Int precision = bound.Integer(0, 0);
  const std::string_view method = bound[1] == nullptr ? "common" : RequireText(*bound[1], "round").view();
  if (method != "common" && method != "ceil" && method != "floor") Fail("method must be common, ceil or floor");
  if (precision > 300 || precision < -300) return input;
  const int digits = static_cast<int>(precision);
  if (method != "common") {
    const double scale = std::pow(10.0, digits);
    const double scaled = input.number() * scale;
    return Value::OfFloat((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
  }
  if (input.is_integral() && digits >= 0) return Value::OfInt(input.integer());
  const double number = input.number();
  if (!std::isfinite(number)) return input;
  double rounded = 0;
  if (digits >= 0) {
    // The decimal expansion is exact, so a half is a half only if it is one in binary: then the even digit wins, as in
    // Python.
    char buffer[700];
    const auto result = std::to_chars(buffer, buffer + sizeof(buffer), number, std::chars_format::fixed, digits);
    std::from_chars(buffer, result.ptr, rounded);
  } else {
    const double scale = std::pow(10.0, -digits);
    rounded = std::nearbyint(number / scale) * scale;
  }
  return input.is_integral() ? Value::OfInt(static_cast<Int>(rounded)) : Value::OfFloat(rounded);
}

}  // namespace

FilterFunction FindTextFilter(std::string_view name) {
  static const auto* const kTable = new std::unordered_map<std::string_view, FilterFunction>{{"upper", Upper},
                                                                                             {"lower", Lower},
                                                                                             {"capitalize", Capitalized},
                                                                                             {"title", Title},
                                                                                             {"trim", Trim},
                                                                                             {"replace", ReplaceFilter},
                                                                                             {"string", StringFilter},
                                                                                             {"safe", Safe},
                                                                                             {"e", Escape},
                                                                                             {"escape", Escape},
                                                                                             {"forceescape", ForceEscape},
                                                                                             {"format", Format},
                                                                                             {"tojson", ToJsonFilter},
                                                                                             {"indent", Indent},
                                                                                             {"center", Center},
                                                                                             {"truncate", Truncate},
                                                                                             {"wordcount", WordCount},
                                                                                             {"urlencode", UrlEncode},
                                                                                             {"int", IntFilter},
                                                                                             {"float", FloatFilter},
                                                                                             {"abs", Abs},
                                                                                             {"round", Round}};
  const auto at = kTable->find(name);
  return at == kTable->end() ? nullptr : at->second;
}

}  // namespace hearth::jinja
