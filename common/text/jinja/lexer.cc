#include "common/text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

// \r\n and \r become \n, and one newline at the very end is dropped (keep_trailing_newline is off in Transformers).
std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool IsAsciiDigit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(NormalizeNewlines(source)), text_(source_) {}

  std::vector<Token> Run() {
    while (pos_ < text_.size()) ReadData();
    Push(TokenType::kEnd, pos_);
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void Fail(size_t at, std::string message) {
    Locate(at);
    throw Error{std::move(message), line_, column_};
  }

  // Positions are asked for in rising order, so lines and columns are counted once over the whole source.
  void Locate(size_t at) {
    if (at < located_) located_ = 0, line_ = 1, column_ = 1;
    while (located_ < at) {
      if (text_[located_] == '\n') {
        ++line_;
        column_ = 1;
        ++located_;
      } else {
        NextCodePoint(text_, located_);
        ++column_;
      }
    }
  }

  Token& Push(TokenType type, size_t at, std::string text = {}) {
    Locate(at);
    Token& token = tokens_.emplace_back();
    token.type = type;
    token.text = std::move(text);
    token.line = line_;
    token.column = column_;
    return token;
  }

  size_t SkipSpace(size_t at) const {
    while (at < text_.size()) {
      size_t next = at;
      if (!IsSpace(NextCodePoint(text_, next))) break;
      at = next;
    }
    return at;
  }

  bool At(size_t pos, std::string_view what) const { return text_.substr(std::min(pos, text_.size()), what.size()) == what; }

  // The text up to the next tag, then the tag. Whether the text began at the start of a line matters to lstrip_blocks.
  void ReadData() {
    size_t tag = pos_;
    while (true) {
      tag = text_.find('{', tag);
      if (tag == std::string_view::npos || tag + 1 >= text_.size()) {
        PushData(pos_, text_.size());
        pos_ = text_.size();
        return;
      }
      const char kind = text_[tag + 1];
      if (kind == '{' || kind == '%' || kind == '#') break;
      ++tag;
    }
    const char kind = text_[tag + 1];
    const char sign = tag + 2 < text_.size() && (text_[tag + 2] == '-' || text_[tag + 2] == '+') ? text_[tag + 2] : 0;
    PushData(pos_, Stripped(pos_, tag, sign, kind != '{'));
    pos_ = tag + 2 + (sign != 0 ? 1 : 0);
    if (kind == '#') {
      SkipComment(tag);
    } else if (kind == '{') {
      Push(TokenType::kVariableBegin, tag);
      ReadExpression(tag, '}');
    } else if (!ReadRaw(tag)) {
      Push(TokenType::kBlockBegin, tag);
      ReadExpression(tag, '%');
    }
  }

  void PushData(size_t begin, size_t end) {
    if (begin < end) Push(TokenType::kData, begin, std::string(text_.substr(begin, end - begin)));
  }

  // End of the data [begin, tag) after the tag's whitespace control.
  size_t Stripped(size_t begin, size_t tag, char sign, bool lstrip) const {
    if (sign == '-') {
      size_t end = tag;
      while (end > begin) {
        const size_t previous = PreviousCharacter(text_, end);
        size_t next = previous;
        if (!IsSpace(NextCodePoint(text_, next))) break;
        end = previous;
      }
      return std::max(end, begin);
    }
    if (sign == '+' || !lstrip) return tag;
    const size_t newline = text_.substr(begin, tag - begin).rfind('\n');
    const bool line_in_data = newline != std::string_view::npos;
    const size_t line_start = line_in_data ? begin + newline + 1 : begin;
    if (!line_in_data && !line_starting_) return tag;
    return SkipSpace(line_start) >= tag ? line_start : tag;
  }

  // Behind a tag's end. trim: a block or comment, whose newline goes.
  void EndTag(size_t end, char sign, bool trim) {
    pos_ = end;
    if (sign == '-') {
      pos_ = SkipSpace(pos_);
    } else if (sign != '+' && trim && pos_ < text_.size() && text_[pos_] == '\n') {
      ++pos_;
    }
    line_starting_ = text_[pos_ - 1] == '\n';
  }

  void SkipComment(size_t tag) {
    const size_t close = text_.find("#}", pos_);
    if (close == std::string_view::npos) Fail(tag, "this comment is never closed: '#}' is missing");
    const char sign = close > pos_ && (text_[close - 1] == '-' || text_[close - 1] == '+') ? text_[close - 1] : 0;
    EndTag(close + 2, sign, true);
  }

  // {% raw %} ... {% endraw %}; pos_ stands behind "{%" and its sign.
  bool ReadRaw(size_t tag) {
    size_t at = SkipSpace(pos_);
    if (!At(at, "raw")) return false;
    at = SkipSpace(at + 3);
    const bool strip = At(at, "-%}");
    if (!strip && !At(at, "%}")) return false;
    size_t begin = at + (strip ? 3 : 2);
    if (strip) begin = SkipSpace(begin);
    line_starting_ = text_[begin - 1] == '\n';
    for (size_t open = text_.find("{%", begin); open != std::string_view::npos; open = text_.find("{%", open + 2)) {
      size_t name = open + 2;
      const char sign = name < text_.size() && (text_[name] == '-' || text_[name] == '+') ? text_[name++] : 0;
      name = SkipSpace(name);
      if (!At(name, "endraw")) continue;
      size_t close = SkipSpace(name + 6);
      const char end_sign = close < text_.size() && (text_[close] == '-' || text_[close] == '+') ? text_[close++] : 0;
      if (!At(close, "%}")) continue;
      PushData(begin, Stripped(begin, open, sign, true));
      EndTag(close + 2, end_sign, true);
      return true;
    }
    Fail(tag, "this raw block is never closed: 'endraw' is missing");
  }

  void ReadExpression(size_t tag, char end) {
    std::string open;  // brackets that wait for their partner
    while (true) {
      pos_ = SkipSpace(pos_);
      if (pos_ >= text_.size()) Fail(tag, end == '%' ? "this tag is never closed: '%}' is missing" : "this tag is never closed: '}}' is missing");
      if (open.empty()) {
        const char sign = text_[pos_] == '-' || (text_[pos_] == '+' && end == '%') ? text_[pos_] : 0;
        const size_t close = pos_ + (sign != 0 ? 1 : 0);
        if (At(close, end == '%' ? "%}" : "}}")) {
          Push(end == '%' ? TokenType::kBlockEnd : TokenType::kVariableEnd, pos_);
          EndTag(close + 2, sign, end == '%');
          return;
        }
      }
      ReadToken(open);
    }
  }

  void ReadToken(std::string& open) {
    const char c = text_[pos_];
    if (IsAsciiDigit(c)) return ReadNumber();
    if (c == '"' || c == '\'') return ReadString();
    size_t end = pos_;
    char32_t code = NextCodePoint(text_, end);
    if (code == '_' || IsAlpha(code)) {
      size_t next = end;
      while (end < text_.size()) {
        next = end;
        code = NextCodePoint(text_, next);
        if (!IsWordCharacter(code)) break;
        end = next;
      }
      Push(TokenType::kName, pos_, std::string(text_.substr(pos_, end - pos_)));
      pos_ = end;
      return;
    }
    ReadOperator(open);
  }

  void ReadOperator(std::string& open) {
    static constexpr std::string_view kTwo[] = {"**", "//", "==", "!=", ">=", "<="};
    static constexpr std::string_view kOne = "+-/*%~[](){}><=.:|,;";
    std::string_view op;
    for (std::string_view two : kTwo) {
      if (At(pos_, two)) op = two;
    }
    if (op.empty() && kOne.find(text_[pos_]) != std::string_view::npos) op = text_.substr(pos_, 1);
    if (op.empty()) {
      size_t end = pos_;
      NextCodePoint(text_, end);
      Fail(pos_, Cat("unexpected character '", text_.substr(pos_, end - pos_), "'"));
    }
    if (op == "(" || op == "[" || op == "{") {
      open += op == "(" ? ')' : op == "[" ? ']' : '}';
    } else if (op == ")" || op == "]" || op == "}") {
      if (open.empty()) Fail(pos_, Cat("unexpected '", op, "'"));
      if (open.back() != op[0]) Fail(pos_, Cat("unexpected '", op, "', expected '", std::string(1, open.back()), "'"));
      open.pop_back();
    }
    Push(TokenType::kOperator, pos_, std::string(op));
    pos_ += op.size();
  }

  // Digits that may be grouped by single underscores; returns the end, or `at` when there are none.
  size_t Digits(size_t at) const {
    size_t end = at;
    while (end < text_.size() &&
           (IsAsciiDigit(text_[end]) || (text_[end] == '_' && end > at && end + 1 < text_.size() && IsAsciiDigit(text_[end + 1]))))
      ++end;
    return end;
  }

  void ReadNumber() {
    const size_t begin = pos_;
    const char base_letter = begin + 1 < text_.size() ? static_cast<char>(text_[begin + 1] | 32) : ' ';
    if (text_[begin] == '0' && (base_letter == 'x' || base_letter == 'o' || base_letter == 'b')) {
      const int base = base_letter == 'x' ? 16 : base_letter == 'o' ? 8 : 2;
      std::string digits;
      size_t end = begin + 2;
      while (end < text_.size() && (std::isxdigit(static_cast<unsigned char>(text_[end])) != 0 || text_[end] == '_')) {
        if (text_[end] != '_') digits += text_[end];
        ++end;
      }
      uint64_t value = 0;
      const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
      if (digits.empty() || result.ec != std::errc() || result.ptr != digits.data() + digits.size()) {
        Fail(begin, "this number can't be read");
      }
      Push(TokenType::kInteger, begin).integer = value;
      pos_ = end;
      return;
    }
    size_t end = Digits(begin);
    bool is_float = false;
    // `messages.0.role` is two subscripts, not the number 0.0.
    const bool after_dot = begin > 0 && text_[begin - 1] == '.';
    if (!after_dot) {
      if (end + 1 < text_.size() && text_[end] == '.' && IsAsciiDigit(text_[end + 1])) {
        end = Digits(end + 1);
        is_float = true;
      }
      if (end < text_.size() && (text_[end] | 32) == 'e') {
        size_t exponent = end + 1;
        if (exponent < text_.size() && (text_[exponent] == '+' || text_[exponent] == '-')) ++exponent;
        if (const size_t stop = Digits(exponent); stop > exponent) {
          end = stop;
          is_float = true;
        }
      }
    }
    std::string digits(text_.substr(begin, end - begin));
    std::erase(digits, '_');
    Token& token = Push(is_float ? TokenType::kFloat : TokenType::kInteger, begin);
    if (is_float) {
      std::from_chars(digits.data(), digits.data() + digits.size(), token.number);
    } else {
      if (digits.size() > 1 && digits[0] == '0' && digits.find_first_not_of('0') != std::string::npos) {
        Fail(begin, "a number may not begin with 0");
      }
      if (digits.size() > 36) Fail(begin, "this number is too large");
      for (char digit : digits) token.integer = token.integer * 10 + (digit - '0');
    }
    pos_ = end;
  }

  void ReadString() {
    const size_t begin = pos_;
    const char quote = text_[pos_++];
    std::string out;
    while (true) {
      if (pos_ >= text_.size()) Fail(begin, "this string is never closed");
      const char c = text_[pos_];
      if (c == quote) break;
      if (c != '\\') {
        out += c;
        ++pos_;
        continue;
      }
      if (pos_ + 1 >= text_.size()) Fail(begin, "this string is never closed");
      ReadEscape(out);
    }
    ++pos_;
    Push(TokenType::kString, begin, std::move(out));
  }

  // Python's escapes. An unknown one stays as it is written, backslash included.
  void ReadEscape(std::string& out) {
    const size_t begin = pos_;
    const char c = text_[pos_ + 1];
    pos_ += 2;
    switch (c) {
      case '\n': return;
      case '\\': out += '\\'; return;
      case '\'': out += '\''; return;
      case '"': out += '"'; return;
      case 'a': out += '\a'; return;
      case 'b': out += '\b'; return;
      case 'f': out += '\f'; return;
      case 'n': out += '\n'; return;
      case 'r': out += '\r'; return;
      case 't': out += '\t'; return;
      case 'v': out += '\v'; return;
      case 'x': return AppendUtf8(Hex(begin, 2), out);
      case 'U': return AppendUtf8(Hex(begin, 8), out);
      case 'u': {
        char32_t code = Hex(begin, 4);
        if (code >= 0xD800 && code < 0xDC00 && At(pos_, "\\u")) {
          pos_ += 2;
          const char32_t low = Hex(begin, 4);
          if (low < 0xDC00 || low > 0xDFFF) Fail(begin, "half of a surrogate pair is no character");
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
        if (code >= 0xD800 && code <= 0xDFFF) Fail(begin, "half of a surrogate pair is no character");
        return AppendUtf8(code, out);
      }
      default: break;
    }
    if (c >= '0' && c <= '7') {
      char32_t code = static_cast<char32_t>(c - '0');
      for (int i = 0; i < 2 && pos_ < text_.size() && text_[pos_] >= '0' && text_[pos_] <= '7'; ++i) {
        code = code * 8 + static_cast<char32_t>(text_[pos_++] - '0');
      }
      return AppendUtf8(code, out);
    }
    if (c == 'N') Fail(begin, "\\N{...} escapes are not supported: write the character itself or \\uXXXX");
    out += '\\';
    pos_ = begin + 1;  // the character behind the backslash may be a multi-byte one: it is read as ordinary text
    out += text_[pos_++];
  }

  char32_t Hex(size_t begin, size_t digits) {
    uint32_t code = 0;
    const std::string_view hex = text_.substr(std::min(pos_, text_.size()), digits);
    const auto result = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
    if (hex.size() != digits || result.ptr != hex.data() + digits || code > 0x10FFFF) Fail(begin, "this escape can't be read");
    pos_ += digits;
    return code;
  }

  std::string source_;
  std::string_view text_;
  size_t pos_ = 0;
  bool line_starting_ = true;
  size_t located_ = 0;
  int line_ = 1, column_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> Tokenize(std::string_view source) { return Lexer(source).Run(); }

}  // namespace hearth::jinja
