#include "common/text/jinja/python_format.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

// One conversion: [flags][width][.precision]type.
struct Spec {
  bool left = false, zero = false, plus = false, space = false, alternate = false;
  size_t width = 0;
  int precision = -1;
  char type = 's';
};

constexpr size_t kMaxWidth = 1 << 20;

// `depth` guards against lists that contain themselves; the size of `out` against parts that are shared many times
// over.
void AppendRepr(const Value& value, std::string& out, int depth);

void AppendItems(const std::vector<Value>& items, std::string& out, int depth) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    AppendRepr(items[i], out, depth + 1);
  }
}

void AppendSequence(const Sequence& sequence, std::string& out, int depth) {
  switch (sequence.flavor) {
    case Sequence::Flavor::kList:
      out += '[';
      AppendItems(sequence.items, out, depth);
      out += ']';
      return;
    case Sequence::Flavor::kTuple:
      out += '(';
      AppendItems(sequence.items, out, depth);
      out += sequence.items.size() == 1 ? ",)" : ")";
      return;
    case Sequence::Flavor::kView:
      out += sequence.type_name;
      out += "([";
      AppendItems(sequence.items, out, depth);
      out += "])";
      return;
    case Sequence::Flavor::kRange: {
      const std::vector<Value>& items = sequence.items;
      const Int start = items.empty() ? 0 : items.front().integer();
      const Int step = items.size() < 2 ? 1 : items[1].integer() - start;
      out += Cat("range(", IntToString(start), ", ", IntToString(items.empty() ? 0 : items.back().integer() + step));
      out += step == 1 ? ")" : Cat(", ", IntToString(step), ")");
      return;
    }
    case Sequence::Flavor::kGenerator: out += Cat("<", sequence.type_name, " object>"); return;
  }
}

void AppendRepr(const Value& value, std::string& out, int depth) {
  CheckNesting(depth);
  switch (value.kind()) {
    case Kind::kUndefined: out += "Undefined"; return;
    case Kind::kNone: out += "None"; return;
    case Kind::kBool: out += value.boolean() ? "True" : "False"; return;
    case Kind::kInt: out += IntToString(value.integer()); return;
    case Kind::kFloat: out += FloatRepr(value.number()); return;
    case Kind::kString: out += ReprString(value.view()); return;
    case Kind::kSequence: AppendSequence(*value.sequence(), out, depth); break;
    case Kind::kDict: {
      out += '{';
      bool first = true;
      for (const auto& [key, item] : value.dict()->entries) {
        if (!first) out += ", ";
        first = false;
        AppendRepr(key, out, depth + 1);
        out += ": ";
        AppendRepr(item, out, depth + 1);
      }
      out += '}';
      break;
    }
    case Kind::kObject: out += value.object()->Repr(); return;
  }
  if (out.size() > kMaxTextBytes) Fail("the template builds a string of more than ", kMaxTextBytes >> 20, " MiB");
}

std::string Pad(std::string body, const Spec& spec, bool numeric) {
  const size_t length = CountCharacters(body);
  if (length >= spec.width) return body;
  const size_t missing = spec.width - length;
  if (spec.left) return Cat(body, std::string(missing, ' '));
  if (spec.zero && numeric) {
    const size_t sign = !body.empty() && (body[0] == '-' || body[0] == '+' || body[0] == ' ') ? 1 : 0;
    return body.insert(sign, missing, '0');
  }
  return Cat(std::string(missing, ' '), body);
}

std::string_view Sign(bool negative, const Spec& spec) { return negative ? "-" : spec.plus ? "+" : spec.space ? " " : ""; }

// Digits of the magnitude of `value`.
std::string InBase(Int value, unsigned base, bool upper) {
  __extension__ typedef unsigned __int128 Magnitude;
  const std::string_view symbols = upper ? "0123456789ABCDEF" : "0123456789abcdef";
  Magnitude rest = value < 0 ? Magnitude{0} - static_cast<Magnitude>(value) : static_cast<Magnitude>(value);
  std::string digits;
  do {
    const auto digit = static_cast<size_t>(rest % base);
    digits += symbols[digit];
    rest /= base;
  } while (rest > 0);
  std::reverse(digits.begin(), digits.end());
  return digits;
}

std::string FormatNumber(const Value& value, const Spec& spec) {
  if (value.is_undefined()) Fail(value.undefined_hint());
  if (!value.is_number()) {
    Fail("%", std::string(1, spec.type), " format: a real number is required, not ", value.type_name());
  }
  switch (spec.type) {
    case 'd':
    case 'i':
    case 'u': {
      const Int number = value.is_integral() ? value.integer() : static_cast<Int>(value.number());
      return Cat(Sign(number < 0, spec), InBase(number, 10, false));
    }
    case 'x':
    case 'X':
    case 'o': {
      if (!value.is_integral()) Fail("%", std::string(1, spec.type), " format: an integer is required, not ", value.type_name());
      const Int number = value.integer();
      const std::string prefix = !spec.alternate ? "" : spec.type == 'o' ? "0o" : spec.type == 'x' ? "0x" : "0X";
      return Cat(Sign(number < 0, spec), prefix, InBase(number, spec.type == 'o' ? 8 : 16, spec.type == 'X'));
    }
    default: {
      const double number = value.number();
      const char format[] = {'%', '.', '*', spec.type, 0};
      char buffer[512];
      const int precision = std::min(spec.precision < 0 ? 6 : spec.precision, 100);
      std::snprintf(buffer, sizeof(buffer), format, precision, std::abs(number));
      return Cat(Sign(std::signbit(number) && !std::isnan(number), spec), buffer);
    }
  }
}

size_t ReadNumber(std::string_view text, size_t& pos) {
  size_t value = 0;
  while (pos < text.size() && text[pos] >= '0' && text[pos] <= '9') {
    value = value * 10 + static_cast<size_t>(text[pos++] - '0');
    if (value > kMaxWidth) Fail("format width or precision is too large");
  }
  return value;
}

void AppendConverted(const Value& value, const Spec& spec, TextBuilder& out) {
  if (spec.type == 's' && spec.width == 0 && spec.precision < 0) return out.Append(ToText(value));
  std::string body;
  bool numeric = false;
  if (spec.type == 's' || spec.type == 'r') {
    body = spec.type == 's' ? std::string(ToText(value).view()) : Repr(value);
    if (spec.precision >= 0) body.resize(ByteOffset(body, static_cast<size_t>(spec.precision)));
  } else if (spec.type == 'c') {
    if (value.is_string()) {
      body = std::string(value.view());
    } else {
      AppendUtf8(static_cast<char32_t>(std::clamp<Int>(value.is_integral() ? value.integer() : 0, 0, 0x10FFFF)), body);
    }
  } else {
    body = FormatNumber(value, spec);
    numeric = true;
  }
  out.Append(Pad(std::move(body), spec, numeric), IsTrusted(value));
}

}  // namespace

std::string IntToString(Int value) { return value < 0 ? Cat("-", InBase(value, 10, false)) : InBase(value, 10, false); }

std::string FloatRepr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const double size = std::abs(value);
  // Python's repr: the shortest digits that read back, with an exponent only outside [1e-4, 1e16).
  const bool exponent = size != 0 && (size < 1e-4 || size >= 1e16);
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value, exponent ? std::chars_format::scientific : std::chars_format::fixed);
  std::string out(buffer, result.ptr);
  if (!exponent && out.find('.') == std::string::npos) out += ".0";
  return out;
}

std::string ReprString(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    const char32_t code = NextCodePoint(text, pos);
    char buffer[16];
    if (code == static_cast<char32_t>(quote) || code == '\\') {
      out += '\\';
      out += static_cast<char>(code);
    } else if (code == '\n') {
      out += "\\n";
    } else if (code == '\r') {
      out += "\\r";
    } else if (code == '\t') {
      out += "\\t";
    } else if (IsPrintable(code)) {
      out += text.substr(start, pos - start);
    } else {
      std::snprintf(buffer, sizeof(buffer), code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", static_cast<unsigned>(code));
      out += buffer;
    }
  }
  out += quote;
  return out;
}

std::string Repr(const Value& value) {
  std::string out;
  AppendRepr(value, out, 0);
  return out;
}

Text ToText(const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return Text();
  std::string text = Repr(value);  // first: it refuses what would keep IsTrusted walking for ever
  return Text(std::move(text), IsTrusted(value));
}

bool IsTrusted(const Value& value) {
  switch (value.kind()) {
    case Kind::kString: return value.text().trusted();
    case Kind::kSequence: return std::all_of(value.sequence()->items.begin(), value.sequence()->items.end(), IsTrusted);
    case Kind::kDict:
      return std::all_of(value.dict()->entries.begin(), value.dict()->entries.end(),
                         [](const auto& entry) { return IsTrusted(entry.first) && IsTrusted(entry.second); });
    // An object may show a caller's strings (a namespace does): nothing in its text is a special token of the template.
    case Kind::kObject: return false;
    default: return true;
  }
}

Text PercentFormat(const Text& format, const Value& values) {
  const std::string_view text = format.view();
  const bool tuple = values.is_sequence() && values.sequence()->flavor == Sequence::Flavor::kTuple;
  size_t used = 0;
  bool named = false;
  const auto next = [&]() -> Value {
    if (tuple ? used >= values.sequence()->items.size() : used >= 1) Fail("not enough arguments for format string");
    return tuple ? values.sequence()->items[used++] : (++used, values);
  };
  TextBuilder out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t percent = std::min(text.find('%', pos), text.size());
    out.Append(format.Slice(pos, percent));
    if (percent == text.size()) break;
    pos = percent + 1;
    Spec spec;
    std::optional<Value> value;
    if (pos < text.size() && text[pos] == '(') {
      const size_t close = text.find(')', pos);
      if (close == std::string_view::npos) Fail("incomplete format key");
      if (!values.is_dict()) Fail("format requires a mapping");
      const Value* found = values.dict()->Find(text.substr(pos + 1, close - pos - 1));
      if (found == nullptr) Fail("KeyError: ", ReprString(text.substr(pos + 1, close - pos - 1)));
      value = *found;
      named = true;
      pos = close + 1;
    }
    for (bool flags = true; flags && pos < text.size();) {
      switch (text[pos]) {
        case '-': spec.left = true; break;
        case '0': spec.zero = true; break;
        case '+': spec.plus = true; break;
        case ' ': spec.space = true; break;
        case '#': spec.alternate = true; break;
        default: flags = false; continue;
      }
      ++pos;
    }
    spec.width = ReadNumber(text, pos);
    if (pos < text.size() && text[pos] == '.') {
      ++pos;
      spec.precision = static_cast<int>(ReadNumber(text, pos));
    }
    if (pos >= text.size()) Fail("incomplete format");
    spec.type = text[pos++];
    if (spec.type == '%') {
      out.Append("%", true);
      continue;
    }
    if (std::string_view("sradiuxXoeEfFgGc").find(spec.type) == std::string_view::npos) {
      Fail("unsupported format character '", std::string(1, spec.type), "'");
    }
    if (spec.type == 'a') spec.type = 'r';
    AppendConverted(value.has_value() ? *value : next(), spec, out);
  }
  if (!named && !values.is_dict() && used < (tuple ? values.sequence()->items.size() : 1)) {
    Fail("not all arguments converted during string formatting");
  }
  return out.Take();
}

Text BraceFormat(const Text& format, const Args& args) {
  const std::string_view text = format.view();
  size_t automatic = 0;
  TextBuilder out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t brace = std::min(text.find_first_of("{}", pos), text.size());
    out.Append(format.Slice(pos, brace));
    if (brace == text.size()) break;
    pos = brace + 1;
    if (pos < text.size() && text[pos] == text[brace]) {
      out.Append(format.Slice(pos, pos + 1));
      ++pos;
      continue;
    }
    if (text[brace] == '}') Fail("Single '}' encountered in format string");
    const size_t close = text.find('}', pos);
    if (close == std::string_view::npos) Fail("expected '}' before end of string");
    std::string_view field = text.substr(pos, close - pos);
    pos = close + 1;
    std::string_view rules;
    if (const size_t colon = field.find(':'); colon != std::string_view::npos) {
      rules = field.substr(colon + 1);
      field = field.substr(0, colon);
    }
    Spec spec;
    if (field.size() >= 2 && field[field.size() - 2] == '!') {
      spec.type = field.back();
      field.remove_suffix(2);
    }
    const Value* value = nullptr;
    if (field.find_first_not_of("0123456789") == std::string_view::npos) {
      size_t at = 0;
      const size_t index = field.empty() ? automatic++ : ReadNumber(field, at);
      if (index >= args.positional.size()) Fail("Replacement index ", index, " out of range for positional args tuple");
      value = &args.positional[index];
    } else {
      for (const auto& [name, item] : args.named) {
        if (name == field) value = &item;
      }
      if (value == nullptr) Fail("KeyError: ", ReprString(field));
    }
    if (value->is_number() && spec.type == 's') spec.type = 0;
    size_t at = 0;
    bool right = value->is_number();
    if (at < rules.size() && (rules[at] == '<' || rules[at] == '>')) right = rules[at++] == '>';
    if (at < rules.size() && rules[at] == '+') {
      spec.plus = true;
      ++at;
    }
    if (at < rules.size() && rules[at] == '0') {
      spec.zero = true;
      ++at;
    }
    spec.width = ReadNumber(rules, at);
    if (at < rules.size() && rules[at] == '.') {
      ++at;
      spec.precision = static_cast<int>(ReadNumber(rules, at));
    }
    if (at < rules.size()) spec.type = rules[at++];
    if (at < rules.size() || std::string_view("sdxXoeEfFgGcr\0", 14).find(spec.type) == std::string_view::npos) {
      Fail("unsupported format specification ", ReprString(rules));
    }
    spec.left = !right;
    if (spec.type == 0) {
      spec.type = value->kind() == Kind::kFloat && spec.precision >= 0 ? 'g' : value->is_integral() && !value->is_bool() ? 'd' : 's';
    }
    AppendConverted(*value, spec, out);
  }
  return out.Take();
}

}  // namespace hearth::jinja
