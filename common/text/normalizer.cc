// See normalizer.h. One struct per type, chosen by name in ParseStep.
#include "common/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/text/json_access.h"
#include "common/text/regex.h"
#include "common/text/unicode_class.h"
#include "common/text/unicode_form.h"
#include "common/text/utf8.h"

namespace hearth {

struct Normalizer::Step {
  virtual ~Step() = default;
  virtual absl::StatusOr<std::string> Apply(std::string_view text) const = 0;
};

namespace {

using Step = Normalizer::Step;
constexpr int kSequenceDepthMax = 16;

struct FormStep : Step {
  explicit FormStep(UnicodeForm f) : form(f) {}
  absl::StatusOr<std::string> Apply(std::string_view text) const override { return ToUnicodeForm(text, form); }
  UnicodeForm form;
};

struct LowercaseStep : Step {
  absl::StatusOr<std::string> Apply(std::string_view text) const override {
    std::string out;
    out.reserve(text.size());
    for (size_t position = 0; position < text.size();) {
      const char32_t c = DecodeUtf8(text, &position);
      if (c == 0x130) {  // the only character whose lower case is two
        out += "i\xCC\x87";
      } else {
        AppendUtf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))), &out);
      }
    }
    return out;
  }
};

struct ReplaceStep : Step {
  ReplaceStep(Regex p, std::string c) : pattern(std::move(p)), content(std::move(c)) {}
  absl::StatusOr<std::string> Apply(std::string_view text) const override {
    std::vector<ByteRange> matches;
    RETURN_IF_ERROR(pattern.FindAll(text, &matches));
    std::string out;
    size_t copied = 0;
    for (const ByteRange& match : matches) {
      out += text.substr(copied, match.begin - copied);
      out += content;
      copied = match.end;
    }
    out += text.substr(copied);
    return out;
  }
  Regex pattern;
  std::string content;
};

struct PrependStep : Step {
  explicit PrependStep(std::string p) : prefix(std::move(p)) {}
  absl::StatusOr<std::string> Apply(std::string_view text) const override { return text.empty() ? std::string() : prefix + std::string(text); }
  std::string prefix;
};

struct StripStep : Step {
  StripStep(bool l, bool r) : left(l), right(r) {}
  absl::StatusOr<std::string> Apply(std::string_view text) const override {
    size_t begin = text.size();
    size_t end = 0;
    for (size_t position = 0; position < text.size();) {
      const size_t start = position;
      if (IsWhiteSpace(DecodeUtf8(text, &position))) continue;
      begin = std::min(begin, start);
      end = position;
    }
    if (!left) begin = 0;
    if (!right) end = text.size();
    return begin < end ? std::string(text.substr(begin, end - begin)) : std::string();
  }
  bool left;
  bool right;
};

absl::Status ParseStep(const nlohmann::json& spec, const std::string& where, int depth, std::vector<std::unique_ptr<Step>>* steps) {
  if (depth > kSequenceDepthMax) return absl::InvalidArgumentError(absl::StrCat(where, ": sequences nest too deeply"));
  ASSIGN_OR_RETURN(const std::string type, JsonString(spec, "type", where));
  if (type == "Sequence") {
    const nlohmann::json& parts = JsonMember(spec, "normalizers");
    if (!parts.is_array()) return JsonTypeError(absl::StrCat(where, ".normalizers"), "an array", parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      RETURN_IF_ERROR(ParseStep(parts[i], absl::StrCat(where, ".normalizers[", i, "]"), depth + 1, steps));
    }
  } else if (type == "NFC") {
    steps->push_back(std::make_unique<FormStep>(UnicodeForm::kNfc));
  } else if (type == "NFD") {
    steps->push_back(std::make_unique<FormStep>(UnicodeForm::kNfd));
  } else if (type == "NFKC") {
    steps->push_back(std::make_unique<FormStep>(UnicodeForm::kNfkc));
  } else if (type == "NFKD") {
    steps->push_back(std::make_unique<FormStep>(UnicodeForm::kNfkd));
  } else if (type == "Lowercase") {
    steps->push_back(std::make_unique<LowercaseStep>());
  } else if (type == "Prepend") {
    ASSIGN_OR_RETURN(std::string prefix, JsonString(spec, "prepend", where));
    steps->push_back(std::make_unique<PrependStep>(std::move(prefix)));
  } else if (type == "Replace") {
    const nlohmann::json& pattern = JsonMember(spec, "pattern");
    ASSIGN_OR_RETURN(std::string content, JsonString(spec, "content", where));
    ASSIGN_OR_RETURN(Regex regex, ParsePattern(pattern, absl::StrCat(where, ".pattern")));
    steps->push_back(std::make_unique<ReplaceStep>(std::move(regex), std::move(content)));
  } else if (type == "Strip") {
    ASSIGN_OR_RETURN(const bool left, JsonBool(spec, "strip_left", true, where));
    ASSIGN_OR_RETURN(const bool right, JsonBool(spec, "strip_right", true, where));
    steps->push_back(std::make_unique<StripStep>(left, right));
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ".type: \"", type, "\" is not supported; supported are NFC, NFD, NFKC, NFKD, Lowercase, Replace, Prepend, Strip and Sequence"));
  }
  return absl::OkStatus();
}

}  // namespace

Normalizer::Normalizer() = default;
Normalizer::Normalizer(Normalizer&&) noexcept = default;
Normalizer& Normalizer::operator=(Normalizer&&) noexcept = default;
Normalizer::~Normalizer() = default;

absl::StatusOr<Normalizer> Normalizer::Parse(const nlohmann::json& spec) {
  Normalizer normalizer;
  if (spec.is_null()) return normalizer;
  RETURN_IF_ERROR(ParseStep(spec, "normalizer", 0, &normalizer.steps_));
  return normalizer;
}

absl::StatusOr<std::string> Normalizer::Apply(std::string_view text) const {
  std::string current(text);
  for (const auto& step : steps_) {
    ASSIGN_OR_RETURN(current, step->Apply(current));
  }
  return current;
}

}  // namespace hearth
