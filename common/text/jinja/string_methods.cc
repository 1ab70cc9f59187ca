// Python's str methods. Those that only cut or glue keep the trust of every byte; those that rewrite characters (upper,
// title...) give text that is untrusted as soon as one byte of theirs was.
#include <algorithm>
#include <unordered_map>

#include "common/text/jinja/error.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/methods.h"
#include "common/text/jinja/python_format.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

Value Rewritten(const Value& self, std::string text) { return Value::OfString(std::move(text), self.text().trusted()); }

Value TextList(std::vector<Text> parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  for (Text& part : parts) items.push_back(Value::OfText(std::move(part)));
  return Value::OfList(std::move(items));
}

bool IsAbsent(const Value* value) { return value == nullptr || value->is_none(); }

Value StripMethod(const Value& self, const Args& args, std::string_view name, bool left, bool right) {
  const Bound bound(args, name, {"chars"});
  const bool by_whitespace = IsAbsent(bound[0]);
  const std::string_view characters = by_whitespace ? std::string_view() : RequireText(*bound[0], name).view();
  return Value::OfText(Strip(self.text(), characters, by_whitespace, left, right));
}

Value SplitMethod(const Value& self, const Args& args, std::string_view name, bool from_right) {
  const Bound bound(args, name, {"sep", "maxsplit"});
  const std::string_view separator = IsAbsent(bound[0]) ? std::string_view() : RequireText(*bound[0], name).view();
  if (!IsAbsent(bound[0]) && separator.empty()) Fail("empty separator");
  const Int limit = bound.Integer(1, -1);
  return TextList(from_right ? SplitFromRight(self.text(), separator, limit) : Split(self.text(), separator, limit));
}

// The part of `self` between the optional start and end arguments, in bytes.
std::pair<size_t, size_t> Range(std::string_view text, const Bound& bound, size_t first) {
  size_t begin = 0, end = text.size();
  if (IsAbsent(bound[first]) && IsAbsent(bound[first + 1])) return {begin, end};
  const Int length = static_cast<Int>(CountCharacters(text));
  const auto offset = [&](size_t i, Int otherwise) {
    Int at = IsAbsent(bound[i]) ? otherwise : bound.Integer(i, otherwise);
    if (at < 0) at = std::max<Int>(at + length, 0);
    return at > length ? text.size() + 1 : ByteOffset(text, static_cast<size_t>(at));
  };
  return {offset(first, 0), std::min(offset(first + 1, length), text.size())};
}

Value AffixMethod(const Value& self, const Args& args, std::string_view name, bool front) {
  const Bound bound(args, name, {"prefix", "start", "end"}, 1);
  const auto [begin, end] = Range(self.view(), bound, 1);
  const auto matches = [&, begin = begin, end = end](const Value& affix) {
    const std::string_view text = RequireText(affix, name).view();
    if (begin > end || end - begin < text.size()) return false;
    return self.view().substr(front ? begin : end - text.size(), text.size()) == text;
  };
  if (bound[0]->is_sequence() && bound[0]->sequence()->flavor == Sequence::Flavor::kTuple) {
    const std::vector<Value>& items = bound[0]->sequence()->items;
    return Value::OfBool(std::any_of(items.begin(), items.end(), matches));
  }
  if (!bound[0]->is_string()) {
    if (bound[0]->is_undefined()) Fail(bound[0]->undefined_hint());
    Fail(name, " first arg must be str or a tuple of str, not ", bound[0]->type_name());
  }
  return Value::OfBool(matches(*bound[0]));
}

Value FindText(const Value& self, const Args& args, std::string_view name, bool last, bool must) {
  const Bound bound(args, name, {"sub", "start", "end"}, 1);
  const std::string_view text = self.view();
  const std::string_view what = RequireText(*bound[0], name).view();
  const auto [begin, end] = Range(text, bound, 1);
  size_t at = std::string_view::npos;
  if (begin <= end) {
    const std::string_view part = text.substr(begin, end - begin);
    at = last ? part.rfind(what) : part.find(what);
  }
  if (at == std::string_view::npos) {
    if (must) Fail("substring not found");
    return Value::OfInt(-1);
  }
  return Value::OfInt(static_cast<Int>(CountCharacters(text.substr(0, begin + at))));
}

Value Justify(const Value& self, const Args& args, std::string_view name, bool left, bool right) {
  const Bound bound(args, name, {"width", "fillchar"}, 1);
  const Text fill = bound[1] == nullptr ? Text(" ", true) : RequireText(*bound[1], name);
  if (CountCharacters(fill.view()) != 1) Fail("The fill character must be exactly one character long");
  const Int width = bound.Integer(0, 0);
  if (width > static_cast<Int>(kMaxTextBytes)) Fail(name, "() to a width of more than ", kMaxTextBytes);
  const Int missing = width - static_cast<Int>(CountCharacters(self.view()));
  if (missing <= 0) return self;
  // Where both sides are filled, Python gives the odd character to the left if the width is odd.
  const Int before = left && right ? missing / 2 + (missing & width & 1) : left ? missing : 0;
  TextBuilder out;
  for (Int i = 0; i < before; ++i) out.Append(fill);
  out.Append(self.text());
  for (Int i = before; i < missing; ++i) out.Append(fill);
  return Value::OfText(out.Take());
}

Value Partition(const Value& self, const Args& args, std::string_view name, bool last) {
  const Bound bound(args, name, {"sep"}, 1);
  const Text& text = self.text();
  const Text& separator = RequireText(*bound[0], name);
  if (separator.empty()) Fail("empty separator");
  const size_t at = last ? text.view().rfind(separator.view()) : text.view().find(separator.view());
  std::vector<Value> parts(3, Value::OfText(Text()));
  if (at == std::string_view::npos) {
    parts[last ? 2 : 0] = self;
  } else {
    parts[0] = Value::OfText(text.Slice(0, at));
    parts[1] = Value::OfText(separator);
    parts[2] = Value::OfText(text.Slice(at + separator.size(), text.size()));
  }
  return Value::OfTuple(std::move(parts));
}

// True when there is a character and all of them satisfy `is`.
template <typename Predicate>
Value All(const Value& self, Predicate is) {
  const std::string_view text = self.view();
  for (size_t pos = 0; pos < text.size();) {
    if (!is(NextCodePoint(text, pos))) return Value::OfBool(false);
  }
  return Value::OfBool(!text.empty());
}

// isupper and islower: some letter has a case, and none has the other one.
Value AllCased(const Value& self, bool (*wanted)(char32_t), bool (*other)(char32_t)) {
  const std::string_view text = self.view();
  bool found = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t code = NextCodePoint(text, pos);
    if (other(code)) return Value::OfBool(false);
    found = found || wanted(code);
  }
  return Value::OfBool(found);
}

Value IsTitle(const Value& self) {
  const std::string_view text = self.view();
  bool found = false, inside = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t code = NextCodePoint(text, pos);
    if (IsUpper(code) ? inside : IsLower(code) && !inside) return Value::OfBool(false);
    inside = IsUpper(code) || IsLower(code);
    found = found || inside;
  }
  return Value::OfBool(found);
}

Value JoinMethod(Interpreter& interpreter, const Value& self, const Args& args) {
  const Bound bound(args, "join", {"iterable"}, 1);
  std::vector<Text> parts;
  size_t bytes = 0;
  for (const Value& item : interpreter.Iterate(*bound[0])) {
    if (item.is_undefined()) Fail(item.undefined_hint());
    if (!item.is_string()) Fail("sequence item ", parts.size(), ": expected str instance, ", item.type_name(), " found");
    parts.push_back(item.text());
    bytes += item.text().size() + self.text().size();
  }
  interpreter.ChargeBytes(bytes);
  return Value::OfText(Join(self.text(), parts));
}

Value ExpandTabs(const Value& self, const Args& args) {
  const Bound bound(args, "expandtabs", {"tabsize"});
  const Int size = std::clamp<Int>(bound.Integer(0, 8), 0, 1024);
  std::string out;
  Int column = 0;
  for (const char c : self.view()) {
    if (c == '\t') {
      const Int blanks = size == 0 ? 0 : size - column % size;
      out.append(static_cast<size_t>(blanks), ' ');
      column += blanks;
      if (out.size() > kMaxTextBytes) Fail("the template builds a string of more than ", kMaxTextBytes >> 20, " MiB");
    } else {
      out += c;
      if ((static_cast<unsigned char>(c) & 0xC0) != 0x80) ++column;
      if (c == '\n' || c == '\r') column = 0;
    }
  }
  return Rewritten(self, std::move(out));
}

Value ZeroFill(const Value& self, const Args& args) {
  const Bound bound(args, "zfill", {"width"}, 1);
  const Int missing = bound.Integer(0, 0) - static_cast<Int>(CountCharacters(self.view()));
  if (missing <= 0) return self;
  if (missing > static_cast<Int>(kMaxTextBytes)) Fail("zfill() to a width of more than ", kMaxTextBytes);
  std::string text(self.view());
  text.insert(!text.empty() && (text[0] == '-' || text[0] == '+') ? 1 : 0, static_cast<size_t>(missing), '0');
  return Rewritten(self, std::move(text));
}

Value CountText(const Value& self, const Args& args) {
  const Bound bound(args, "count", {"sub", "start", "end"}, 1);
  const std::string_view what = RequireText(*bound[0], "count").view();
  const auto [begin, end] = Range(self.view(), bound, 1);
  if (begin > end) return Value::OfInt(0);
  const std::string_view part = self.view().substr(begin, end - begin);
  if (what.empty()) return Value::OfInt(static_cast<Int>(CountCharacters(part)) + 1);
  Int count = 0;
  for (size_t at = part.find(what); at != std::string_view::npos; at = part.find(what, at + what.size())) ++count;
  return Value::OfInt(count);
}

Value ReplaceMethod(const Value& self, const Args& args) {
  const Bound bound(args, "replace", {"old", "new", "count"}, 2);
  return Value::OfText(Replace(self.text(), RequireText(*bound[0], "replace").view(), RequireText(*bound[1], "replace"), bound.Integer(2, -1)));
}

Value RemoveAffix(const Value& self, const Args& args, std::string_view name, bool front) {
  const Bound bound(args, name, {"affix"}, 1);
  const std::string_view affix = RequireText(*bound[0], name).view();
  const Text& text = self.text();
  const bool has = front ? text.view().starts_with(affix) : text.view().ends_with(affix);
  if (!has) return self;
  return Value::OfText(front ? text.Slice(affix.size(), text.size()) : text.Slice(0, text.size() - affix.size()));
}

// The functions of the table: the interpreter charges for the text once, here.
#define METHOD(expression)                                               \
  [](Interpreter& interpreter, const Value& self, Args& args) -> Value { \
    interpreter.ChargeBytes(self.text().size());                         \
    static_cast<void>(args);                                             \
    return expression;                                                   \
  }

const std::unordered_map<std::string_view, MethodFunction>& Table() {
  static const auto* const kTable = new std::unordered_map<std::string_view, MethodFunction>{
      {"strip", METHOD(StripMethod(self, args, "strip", true, true))},
      {"lstrip", METHOD(StripMethod(self, args, "lstrip", true, false))},
      {"rstrip", METHOD(StripMethod(self, args, "rstrip", false, true))},
      {"split", METHOD(SplitMethod(self, args, "split", false))},
      {"rsplit", METHOD(SplitMethod(self, args, "rsplit", true))},
      {"splitlines", METHOD(TextList(SplitLines(self.text(), Bound(args, "splitlines", {"keepends"}).Flag(0, false))))},
      {"startswith", METHOD(AffixMethod(self, args, "startswith", true))},
      {"endswith", METHOD(AffixMethod(self, args, "endswith", false))},
      {"removeprefix", METHOD(RemoveAffix(self, args, "removeprefix", true))},
      {"removesuffix", METHOD(RemoveAffix(self, args, "removesuffix", false))},
      {"find", METHOD(FindText(self, args, "find", false, false))},
      {"rfind", METHOD(FindText(self, args, "rfind", true, false))},
      {"index", METHOD(FindText(self, args, "index", false, true))},
      {"rindex", METHOD(FindText(self, args, "rindex", true, true))},
      {"count", METHOD(CountText(self, args))},
      {"replace", METHOD(ReplaceMethod(self, args))},
      {"join", METHOD(JoinMethod(interpreter, self, args))},
      {"partition", METHOD(Partition(self, args, "partition", false))},
      {"rpartition", METHOD(Partition(self, args, "rpartition", true))},
      {"upper", METHOD(Rewritten(self, ToUpper(self.view())))},
      {"lower", METHOD(Rewritten(self, ToLower(self.view())))},
      {"casefold", METHOD(Rewritten(self, ToLower(self.view())))},
      {"title", METHOD(Rewritten(self, ToTitle(self.view())))},
      {"capitalize", METHOD(Rewritten(self, Capitalize(self.view())))},
      {"swapcase", METHOD(Rewritten(self, SwapCase(self.view())))},
      {"center", METHOD(Justify(self, args, "center", true, true))},
      {"ljust", METHOD(Justify(self, args, "ljust", false, true))},
      {"rjust", METHOD(Justify(self, args, "rjust", true, false))},
      {"zfill", METHOD(ZeroFill(self, args))},
      {"expandtabs", METHOD(ExpandTabs(self, args))},
      {"format", METHOD(Value::OfText(BraceFormat(self.text(), args)))},
      {"isspace", METHOD(All(self, IsSpace))},
      {"isalpha", METHOD(All(self, IsAlpha))},
      {"isdigit", METHOD(All(self, IsDigit))},
      {"isdecimal", METHOD(All(self, IsDigit))},
      {"isnumeric", METHOD(All(self, [](char32_t c) { return IsWordCharacter(c) && !IsAlpha(c) && c != '_'; }))},
      {"isalnum", METHOD(All(self, [](char32_t c) { return IsWordCharacter(c) && c != '_'; }))},
      {"isascii", METHOD(Value::OfBool(std::all_of(self.view().begin(), self.view().end(), [](char c) { return c >= 0; })))},
      {"isprintable", METHOD(Value::OfBool(self.text().empty() || All(self, IsPrintable).boolean()))},
      {"isidentifier", METHOD(Value::OfBool(All(self, IsWordCharacter).boolean() && (self.view()[0] < '0' || self.view()[0] > '9')))},
      {"isupper", METHOD(AllCased(self, IsUpper, IsLower))},
      {"islower", METHOD(AllCased(self, IsLower, IsUpper))},
      {"istitle", METHOD(IsTitle(self))},
  };
  return *kTable;
}

#undef METHOD

// Pieces of `text` between its runs of whitespace; at most `limit` cuts (< 0: all), made from the left.
std::vector<Text> SplitAtSpace(const Text& text, Int limit) {
  const std::string_view view = text.view();
  std::vector<Text> out;
  size_t pos = 0;
  while (true) {
    size_t next = pos;
    while (pos < view.size() && (next = pos, IsSpace(NextCodePoint(view, next)))) pos = next;
    if (pos >= view.size()) return out;
    if (limit >= 0 && static_cast<Int>(out.size()) >= limit) {
      out.push_back(text.Slice(pos, view.size()));
      return out;
    }
    const size_t start = pos;
    while (pos < view.size() && (next = pos, !IsSpace(NextCodePoint(view, next)))) pos = next;
    out.push_back(text.Slice(start, pos));
  }
}

std::vector<Text> SplitAtSpaceFromRight(const Text& text, Int limit) {
  const std::string_view view = text.view();
  std::vector<Text> out;
  size_t end = view.size();
  const auto space_before = [view](size_t at) {
    size_t pos = PreviousCharacter(view, at);
    return IsSpace(NextCodePoint(view, pos));
  };
  while (true) {
    while (end > 0 && space_before(end)) end = PreviousCharacter(view, end);
    if (end == 0) break;
    if (limit >= 0 && static_cast<Int>(out.size()) >= limit) {
      out.push_back(text.Slice(0, end));
      break;
    }
    size_t start = end;
    while (start > 0 && !space_before(start)) start = PreviousCharacter(view, start);
    out.push_back(text.Slice(start, end));
    end = start;
  }
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace

MethodFunction FindStringMethod(std::string_view name) {
  const auto at = Table().find(name);
  return at == Table().end() ? nullptr : at->second;
}

const Text& RequireText(const Value& value, std::string_view what) {
  if (value.is_undefined()) Fail(value.undefined_hint());
  if (!value.is_string()) Fail(what, ": expected a string, got '", value.type_name(), "'");
  return value.text();
}

Text Strip(const Text& text, std::string_view characters, bool by_whitespace, bool left, bool right) {
  const std::string_view view = text.view();
  const auto strips = [&](size_t from, size_t to) {
    size_t pos = from;
    const char32_t code = NextCodePoint(view, pos);
    return by_whitespace ? IsSpace(code) : characters.find(view.substr(from, to - from)) != std::string_view::npos;
  };
  size_t begin = 0, end = view.size();
  while (left && begin < end) {
    size_t next = begin;
    NextCodePoint(view, next);
    if (!strips(begin, next)) break;
    begin = next;
  }
  while (right && end > begin) {
    const size_t previous = PreviousCharacter(view, end);
    if (!strips(previous, end)) break;
    end = previous;
  }
  Text out = text.Slice(begin, end);
  return out;
}

Text Replace(const Text& text, std::string_view from, const Text& to, Int limit) {
  const std::string_view view = text.view();
  TextBuilder out;
  size_t done = 0;
  Int count = 0;
  if (from.empty()) {
    // Python puts the new text before every character and at the end.
    size_t pos = 0;
    for (; limit < 0 || count < limit; ++count) {
      out.Append(to);
      if (pos >= view.size()) return out.Take();
      const size_t start = pos;
      NextCodePoint(view, pos);
      out.Append(text.Slice(start, pos));
    }
    out.Append(text.Slice(pos, view.size()));
    return out.Take();
  }
  for (size_t at = view.find(from); at != std::string_view::npos && (limit < 0 || count < limit); at = view.find(from, done)) {
    out.Append(text.Slice(done, at));
    out.Append(to);
    done = at + from.size();
    ++count;
  }
  if (count == 0) return text;
  out.Append(text.Slice(done, view.size()));
  return out.Take();
}

Text Join(const Text& separator, const std::vector<Text>& parts) {
  TextBuilder out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out.Append(separator);
    out.Append(parts[i]);
  }
  return out.Take();
}

std::vector<Text> SplitLines(const Text& text, bool keep_ends) {
  const std::string_view view = text.view();
  std::vector<Text> out;
  size_t start = 0;
  for (size_t pos = 0; pos < view.size();) {
    const size_t at = pos;
    const char32_t code = NextCodePoint(view, pos);
    const bool ends = (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 || code == 0x2028 || code == 0x2029;
    if (!ends) continue;
    if (code == '\r' && pos < view.size() && view[pos] == '\n') ++pos;
    out.push_back(text.Slice(start, keep_ends ? pos : at));
    start = pos;
  }
  if (start < view.size()) out.push_back(text.Slice(start, view.size()));
  return out;
}

std::vector<Text> Split(const Text& text, std::string_view separator, Int limit) {
  if (separator.empty()) return SplitAtSpace(text, limit);
  const std::string_view view = text.view();
  std::vector<Text> out;
  size_t start = 0;
  for (size_t at = view.find(separator); at != std::string_view::npos && (limit < 0 || static_cast<Int>(out.size()) < limit);
       at = view.find(separator, start)) {
    out.push_back(text.Slice(start, at));
    start = at + separator.size();
  }
  out.push_back(text.Slice(start, view.size()));
  return out;
}

std::vector<Text> SplitFromRight(const Text& text, std::string_view separator, Int limit) {
  if (separator.empty()) return SplitAtSpaceFromRight(text, limit);
  const std::string_view view = text.view();
  std::vector<Text> out;
  size_t end = view.size();
  while (end >= separator.size() && (limit < 0 || static_cast<Int>(out.size()) < limit)) {
    const size_t at = view.substr(0, end).rfind(separator);
    if (at == std::string_view::npos) break;
    out.push_back(text.Slice(at + separator.size(), end));
    end = at;
  }
  out.push_back(text.Slice(0, end));
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace hearth::jinja
