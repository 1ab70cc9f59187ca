// See regex_dialect.h. One pass from left to right; classes nest, so they are read by a bounded recursion.
#include "common/text/regex_dialect.h"

#include <algorithm>
#include <cctype>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace hearth {
namespace {

constexpr int kClassDepthMax = 32;
// Oniguruma counts the superscripts and fractions of Latin-1 as word characters, and no others.
constexpr char kWordItems[] = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";
constexpr char kAlnumItems[] = "\\p{Alphabetic}\\p{Nd}";
constexpr char kHexItems[] = "0-9A-Fa-f";

// A set of characters as the union of PCRE2 class items and of whole sub-patterns that can't be written as items.
struct CharacterSet {
  std::string items;
  std::vector<std::string> alternatives;

  void AddItems(std::string_view more) {
    // A '-' that ended one part must not become a range with the next.
    if (!items.empty() && items.back() == '-' && (items.size() < 2 || items[items.size() - 2] != '\\')) {
      items.back() = '\\';
      items.push_back('-');
    }
    items += more;
  }
  std::string Pattern() const {
    if (alternatives.empty()) return absl::StrCat("[", items, "]");
    std::vector<std::string> parts = alternatives;
    if (!items.empty()) parts.push_back(absl::StrCat("[", items, "]"));
    return parts.size() == 1 ? parts[0] : absl::StrCat("(?:", absl::StrJoin(parts, "|"), ")");
  }
};

// The PCRE2 name of a property. A bare script name means script *extensions* in PCRE2 and the script itself in
// Oniguruma.
std::string PropertyName(std::string_view name) {
  static const auto* const kNames = new absl::flat_hash_map<std::string, std::string>{{"any", "Any"},
                                                                                      {"letter", "L"},
                                                                                      {"lowercaseletter", "Ll"},
                                                                                      {"uppercaseletter", "Lu"},
                                                                                      {"titlecaseletter", "Lt"},
                                                                                      {"casedletter", "L&"},
                                                                                      {"modifierletter", "Lm"},
                                                                                      {"otherletter", "Lo"},
                                                                                      {"mark", "M"},
                                                                                      {"combiningmark", "M"},
                                                                                      {"nonspacingmark", "Mn"},
                                                                                      {"spacingmark", "Mc"},
                                                                                      {"enclosingmark", "Me"},
                                                                                      {"number", "N"},
                                                                                      {"decimalnumber", "Nd"},
                                                                                      {"digit", "Nd"},
                                                                                      {"letternumber", "Nl"},
                                                                                      {"othernumber", "No"},
                                                                                      {"punctuation", "P"},
                                                                                      {"connectorpunctuation", "Pc"},
                                                                                      {"dashpunctuation", "Pd"},
                                                                                      {"openpunctuation", "Ps"},
                                                                                      {"closepunctuation", "Pe"},
                                                                                      {"initialpunctuation", "Pi"},
                                                                                      {"finalpunctuation", "Pf"},
                                                                                      {"otherpunctuation", "Po"},
                                                                                      {"symbol", "S"},
                                                                                      {"mathsymbol", "Sm"},
                                                                                      {"currencysymbol", "Sc"},
                                                                                      {"modifiersymbol", "Sk"},
                                                                                      {"othersymbol", "So"},
                                                                                      {"separator", "Z"},
                                                                                      {"spaceseparator", "Zs"},
                                                                                      {"lineseparator", "Zl"},
                                                                                      {"paragraphseparator", "Zp"},
                                                                                      {"other", "C"},
                                                                                      {"control", "Cc"},
                                                                                      {"format", "Cf"},
                                                                                      {"surrogate", "Cs"},
                                                                                      {"privateuse", "Co"},
                                                                                      {"unassigned", "Cn"},
                                                                                      {"space", "White_Space"},
                                                                                      {"whitespace", "White_Space"},
                                                                                      {"alpha", "Alphabetic"},
                                                                                      {"alphabetic", "Alphabetic"},
                                                                                      {"punct", "P"},
                                                                                      {"upper", "Uppercase"},
                                                                                      {"uppercase", "Uppercase"},
                                                                                      {"lower", "Lowercase"},
                                                                                      {"lowercase", "Lowercase"},
                                                                                      {"ideographic", "Ideographic"},
                                                                                      {"emoji", "Emoji"},
                                                                                      {"emojipresentation", "Emoji_Presentation"},
                                                                                      {"emojimodifier", "Emoji_Modifier"},
                                                                                      {"extendedpictographic", "Extended_Pictographic"},
                                                                                      {"variationselector", "Variation_Selector"},
                                                                                      {"math", "Math"},
                                                                                      {"hexdigit", "Hex_Digit"},
                                                                                      {"diacritic", "Diacritic"},
                                                                                      {"dash", "Dash"},
                                                                                      {"lc", "L&"},
                                                                                      {"l&", "L&"}};
  std::string plain;
  for (const char c : name) {
    if (c != ' ' && c != '_' && c != '-') plain.push_back(absl::ascii_tolower(c));
  }
  if (const auto it = kNames->find(plain); it != kNames->end()) return it->second;
  if (plain.size() <= 2) {  // a general category
    if (!plain.empty()) plain[0] = absl::ascii_toupper(plain[0]);
    return plain;
  }
  return absl::StrCat("sc:", Sv(name));
}

// Names that are the union of several PCRE2 items; empty for all others.
std::string SeveralItems(std::string_view name) {
  const std::string plain = absl::AsciiStrToLower(Sv(name));
  if (plain == "alnum") return kAlnumItems;
  if (plain == "word") return kWordItems;
  return "";
}

// The items of a POSIX bracket such as [:alpha:]. Those left out are the same in both dialects.
std::string PosixItems(std::string_view name) {
  if (name == "alpha") return "\\p{Alphabetic}";
  if (name == "digit") return "\\p{Nd}";
  if (name == "space") return "\\p{White_Space}";
  if (name == "upper") return "\\p{Uppercase}";
  if (name == "lower") return "\\p{Lowercase}";
  if (name == "punct") return "\\p{P}\\p{S}";
  if (name == "alnum") return kAlnumItems;
  if (name == "word") return "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
  if (name == "xdigit") return kHexItems;
  return absl::StrCat("[:", Sv(name), ":]");
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  absl::StatusOr<std::string> Run() {
    std::string out;
    while (position_ < pattern_.size()) {
      const char c = pattern_[position_];
      if (c == '\\') {
        const std::string_view escape = pattern_.substr(position_, 2);
        if (escape == "\\b" || escape == "\\B") {
          out += WordBoundary(escape == "\\b");
          position_ += 2;
          continue;
        }
        CharacterSet set;
        std::string other;
        ReadEscape(&set, &other);
        out += other.empty() ? set.Pattern() : other;
      } else if (c == '[') {
        ASSIGN_OR_RETURN(const CharacterSet set, ReadClass(0));
        out += set.Pattern();
      } else if (c == '(') {
        CopyGroupStart(&out);
      } else if (c == '{' && position_ + 2 < pattern_.size() && pattern_[position_ + 1] == ',' && absl::ascii_isdigit(pattern_[position_ + 2])) {
        out += "{0,";
        position_ += 2;
      } else {
        out.push_back(c);
        ++position_;
      }
    }
    return out;
  }

 private:
  static std::string WordBoundary(bool wanted) {
    const std::string word = absl::StrCat("[", kWordItems, "]");
    if (wanted) return absl::StrCat("(?:(?<=", word, ")(?!", word, ")|(?<!", word, ")(?=", word, "))");
    return absl::StrCat("(?:(?<=", word, ")(?=", word, ")|(?<!", word, ")(?!", word, "))");
  }

  // Ruby's (?m) lets the dot match a newline, which PCRE2 calls (?s).
  void CopyGroupStart(std::string* out) {
    size_t end = position_ + 1;
    if (end < pattern_.size() && pattern_[end] == '?') {
      ++end;
      while (end < pattern_.size() && (pattern_[end] == 'i' || pattern_[end] == 'm' || pattern_[end] == 'x' || pattern_[end] == '-')) ++end;
      if (end < pattern_.size() && (pattern_[end] == ':' || pattern_[end] == ')')) {
        std::string flags(pattern_.substr(position_, end - position_));
        std::replace(flags.begin(), flags.end(), 'm', 's');
        *out += flags;
        position_ = end;
        return;
      }
    }
    out->push_back(pattern_[position_++]);
  }

  // Reads one escape. A set of characters goes to `set`; anything else (an assertion, a literal) to `other`.
  void ReadEscape(CharacterSet* set, std::string* other) {
    const char c = position_ + 1 < pattern_.size() ? pattern_[position_ + 1] : '\0';
    position_ += 2;
    switch (c) {
      case 's': return set->AddItems("\\p{White_Space}");
      case 'S': return set->AddItems("\\P{White_Space}");
      case 'd': return set->AddItems("\\p{Nd}");
      case 'D': return set->AddItems("\\P{Nd}");
      case 'w': return set->AddItems(kWordItems);
      case 'W': set->alternatives.push_back(absl::StrCat("[^", kWordItems, "]")); return;
      case 'h': return set->AddItems(kHexItems);
      case 'H': set->alternatives.push_back(absl::StrCat("[^", kHexItems, "]")); return;
      case 'p':
      case 'P': {
        if (position_ >= pattern_.size() || pattern_[position_] != '{') break;
        const size_t close = pattern_.find('}', position_);
        if (close == std::string_view::npos) break;
        std::string_view name = pattern_.substr(position_ + 1, close - position_ - 1);
        bool negated = c == 'P';
        if (!name.empty() && name[0] == '^') {
          negated = !negated;
          name.remove_prefix(1);
        }
        position_ = close + 1;
        if (const std::string several = SeveralItems(name); !several.empty()) {
          if (!negated) return set->AddItems(several);
          set->alternatives.push_back(absl::StrCat("[^", several, "]"));
          return;
        }
        return set->AddItems(absl::StrCat(negated ? "\\P{" : "\\p{", PropertyName(name), "}"));
      }
      case 'v': *other = "\\x0b"; return;
      case 'u':
        if (position_ + 4 <= pattern_.size()) {
          *other = absl::StrCat("\\x{", Sv(pattern_.substr(position_, 4)), "}");
          position_ += 4;
          return;
        }
        break;
      default: break;
    }
    position_ = std::min(position_, pattern_.size());
    *other = c == '\0' ? "\\" : absl::StrCat("\\", std::string(1, c));
  }

  // Reads from '[' to its ']'.
  absl::StatusOr<CharacterSet> ReadClass(int depth) {
    if (depth > kClassDepthMax) return absl::InvalidArgumentError("character classes nest too deeply");
    ++position_;
    bool negated = false;
    if (position_ < pattern_.size() && pattern_[position_] == '^') {
      negated = true;
      ++position_;
    }
    std::vector<CharacterSet> operands(1);
    bool first = true;
    while (true) {
      if (position_ >= pattern_.size()) return absl::InvalidArgumentError("a character class has no closing ']'");
      const char c = pattern_[position_];
      CharacterSet& set = operands.back();
      if (c == ']' && !first) {
        ++position_;
        break;
      }
      first = false;
      if (c == '\\') {
        std::string other;
        ReadEscape(&set, &other);
        set.items += other;
      } else if (pattern_.substr(position_, 2) == "&&") {
        operands.emplace_back();
        position_ += 2;
      } else if (const size_t close = pattern_.find(":]", position_); pattern_.substr(position_, 2) == "[:" && close != std::string_view::npos) {
        set.AddItems(PosixItems(pattern_.substr(position_ + 2, close - position_ - 2)));
        position_ = close + 2;
      } else if (c == '[') {
        ASSIGN_OR_RETURN(const CharacterSet nested, ReadClass(depth + 1));
        set.AddItems(nested.items);
        set.alternatives.insert(set.alternatives.end(), nested.alternatives.begin(), nested.alternatives.end());
      } else {
        if (c == ']') set.items += "\\";
        set.items.push_back(c);
        ++position_;
      }
    }
    if (operands.size() == 1 && !negated) return operands[0];
    CharacterSet result;
    if (operands.size() == 1 && operands[0].alternatives.empty()) {
      result.alternatives.push_back(absl::StrCat("[^", operands[0].items, "]"));
      return result;
    }
    // An intersection looks ahead for every operand but the one that takes the character.
    std::string all;
    for (size_t i = 1; i < operands.size(); ++i) absl::StrAppend(&all, "(?=", operands[i].Pattern(), ")");
    absl::StrAppend(&all, operands[0].Pattern());
    result.alternatives.push_back(negated ? absl::StrCat("(?:(?!", all, ")(?s:.))") : absl::StrCat("(?:", all, ")"));
    return result;
  }

  std::string_view pattern_;
  size_t position_ = 0;
};

}  // namespace

absl::StatusOr<std::string> PcreFromOniguruma(std::string_view pattern) { return Translator(pattern).Run(); }

}  // namespace hearth
