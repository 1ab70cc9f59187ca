#include "common/text/jinja/utf8.h"

#include <utf8proc.h>

namespace hearth::jinja {
namespace {

bool IsContinuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

utf8proc_category_t Category(char32_t code) { return utf8proc_category(static_cast<utf8proc_int32_t>(code)); }

// The few characters whose upper case is more than one character; utf8proc maps one to one.
std::string_view LongUpper(char32_t code) {
  switch (code) {
    case 0x00DF: return "SS";
    case 0x0149: return "\xCA\xBCN";
    case 0x01F0: return "J\xCC\x8C";
    case 0x0587: return "\xD4\xB5\xD5\x92";
    case 0xFB00: return "FF";
    case 0xFB01: return "FI";
    case 0xFB02: return "FL";
    case 0xFB03: return "FFI";
    case 0xFB04: return "FFL";
    case 0xFB05:
    case 0xFB06: return "ST";
    default: return {};
  }
}

bool IsRaw(char32_t code) { return code >= 0xDC80 && code <= 0xDCFF; }

void AppendUpper(char32_t code, std::string& out) {
  if (std::string_view special = LongUpper(code); !special.empty()) {
    out += special;
  } else if (code < 0x80) {
    out += static_cast<char>(code >= 'a' && code <= 'z' ? code - 32 : code);
  } else if (IsRaw(code)) {
    AppendUtf8(code, out);
  } else {
    AppendUtf8(static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(code))), out);
  }
}

void AppendLower(char32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code >= 'A' && code <= 'Z' ? code + 32 : code);
  } else if (code == 0x0130) {
    out += "i\xCC\x87";
  } else if (IsRaw(code)) {
    AppendUtf8(code, out);
  } else {
    AppendUtf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))), out);
  }
}

void AppendTitle(char32_t code, std::string& out) {
  if (code < 0x80 || IsRaw(code)) {
    AppendUpper(code, out);
  } else if (std::string_view special = LongUpper(code); !special.empty()) {
    // Only the first of the letters is a capital: "Ss", "Ffi".
    out += special.substr(0, 1);
    out += ToLower(special.substr(1));
  } else {
    AppendUtf8(static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(code))), out);
  }
}

bool IsCased(char32_t code) {
  const utf8proc_category_t category = Category(code);
  return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL || category == UTF8PROC_CATEGORY_LT;
}

}  // namespace

char32_t NextCodePoint(std::string_view text, size_t& pos) {
  const auto byte = static_cast<unsigned char>(text[pos]);
  if (byte < 0x80) {
    ++pos;
    return byte;
  }
  const int length = byte >= 0xF0 && byte <= 0xF4 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC2 ? 2 : 0;
  if (length != 0 && byte <= 0xF4 && pos + length <= text.size()) {
    char32_t code = byte & (0xFF >> (length + 1));
    bool valid = true;
    for (int i = 1; i < length; ++i) {
      const auto next = static_cast<unsigned char>(text[pos + i]);
      valid = valid && IsContinuation(next);
      code = (code << 6) | (next & 0x3F);
    }
    constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (valid && code >= kSmallest[length] && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF)) {
      pos += length;
      return code;
    }
  }
  ++pos;
  return 0xDC00 + byte;
}

size_t PreviousCharacter(std::string_view text, size_t pos) {
  size_t start = pos - 1;
  for (int i = 0; i < 3 && start > 0 && IsContinuation(static_cast<unsigned char>(text[start])); ++i) --start;
  size_t end = start;
  NextCodePoint(text, end);
  return end == pos ? start : pos - 1;
}

void AppendUtf8(char32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (IsRaw(code)) {
    out += static_cast<char>(code - 0xDC00);
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

size_t CountCharacters(std::string_view text) {
  size_t count = 0;
  for (size_t pos = 0; pos < text.size(); ++count) NextCodePoint(text, pos);
  return count;
}

size_t ByteOffset(std::string_view text, size_t index) {
  size_t pos = 0;
  while (index > 0 && pos < text.size()) {
    NextCodePoint(text, pos);
    --index;
  }
  return pos;
}

bool IsSpace(char32_t code) {
  if (code < 0x80) return (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x20);
  return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
         code == 0x205F || code == 0x3000;
}

bool IsPrintable(char32_t code) {
  if (code < 0x7F) return code >= 0x20;
  if (IsRaw(code)) return false;
  switch (Category(code)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return false;
    default: return true;
  }
}

bool IsAlpha(char32_t code) {
  const utf8proc_category_t category = Category(code);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool IsDigit(char32_t code) { return Category(code) == UTF8PROC_CATEGORY_ND; }
bool IsUpper(char32_t code) { return Category(code) == UTF8PROC_CATEGORY_LU; }
bool IsLower(char32_t code) { return Category(code) == UTF8PROC_CATEGORY_LL; }

bool IsWordCharacter(char32_t code) {
  if (code == '_' || IsAlpha(code)) return true;
  const utf8proc_category_t category = Category(code);
  return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL || category == UTF8PROC_CATEGORY_NO;
}

std::string ToUpper(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) AppendUpper(NextCodePoint(text, pos), out);
  return out;
}

std::string ToLower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool after_letter = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t code = NextCodePoint(text, pos);
    if (code == 0x03A3) {
      // Greek capital sigma has another lower case at the end of a word.
      size_t ahead = pos;
      const bool letter_follows = ahead < text.size() && IsAlpha(NextCodePoint(text, ahead));
      AppendUtf8(after_letter && !letter_follows ? 0x03C2 : 0x03C3, out);
    } else {
      AppendLower(code, out);
    }
    after_letter = code < 0x80 ? ((code | 32) >= 'a' && (code | 32) <= 'z') : IsAlpha(code);
  }
  return out;
}

std::string Capitalize(std::string_view text) {
  if (text.empty()) return {};
  std::string out;
  size_t pos = 0;
  AppendTitle(NextCodePoint(text, pos), out);
  return out + ToLower(text.substr(pos));
}

std::string ToTitle(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool inside = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t code = NextCodePoint(text, pos);
    if (inside) {
      AppendLower(code, out);
    } else {
      AppendTitle(code, out);
    }
    inside = IsCased(code);
  }
  return out;
}

std::string SwapCase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const char32_t code = NextCodePoint(text, pos);
    if (IsUpper(code)) {
      AppendLower(code, out);
    } else {
      AppendUpper(code, out);
    }
  }
  return out;
}

}  // namespace hearth::jinja
