#include "common/formats/strict_json.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/formats/file_io.h"

namespace hearth {
namespace {

using nlohmann::json;

std::string LineAndColumn(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const size_t line = 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
  const size_t newline = before.rfind('\n');
  const size_t column = 1 + (newline == std::string_view::npos ? before.size() : before.size() - newline - 1);
  return absl::StrCat("line ", line, ", column ", column);
}

// The library quotes what it read, which may be anything.
std::string Printable(std::string text) {
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

// What people really put where JSON wants a value, in words of its own; empty when it is none of these.
std::string KnownMistake(std::string_view rest) {
  for (std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
    if (rest.starts_with(word)) {
      return absl::StrCat(Sv(word), " is not a JSON number (Python's json module writes it unless allow_nan is off); write a finite number");
    }
  }
  if (rest.starts_with("//") || rest.starts_with("/*") || rest.starts_with("#")) return "comments are not JSON; remove them";
  return "";
}

// Builds a tree. A key given twice has no one meaning, so it is refused rather than resolved.
class TreeBuilder : public JsonEvents {
 public:
  bool null() override { return Put(nullptr) != nullptr; }
  bool boolean(bool value) override { return Put(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Put(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Put(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override { return Put(value) != nullptr; }
  bool string(string_t& value) override { return Put(std::move(value)) != nullptr; }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    keys_.back() = name;
    SetPlace();
    if (open_.back()->contains(name)) return Fail("the key is given twice");
    return true;
  }
  json Take() { return std::move(root_); }

 private:
  json* Put(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back();
    if (parent.is_object()) return &(parent[keys_.back()] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }
  bool Open(json value) {
    if (open_.size() >= kJsonDepthMax) return Fail(absl::StrCat("nested deeper than ", kJsonDepthMax));
    open_.push_back(Put(std::move(value)));
    keys_.emplace_back();
    return true;
  }
  bool Close() {
    open_.pop_back();
    keys_.pop_back();
    SetPlace();
    return true;
  }
  void SetPlace() {
    place_.clear();
    for (const std::string& key : keys_) {
      if (!key.empty()) absl::StrAppend(&place_, place_.empty() ? "" : ".", key);
    }
  }

  json root_;
  std::vector<json*> open_;  // a child is only added to the innermost, so pointers to the outer ones stay good
  std::vector<std::string> keys_;
};

}  // namespace

bool JsonEvents::Fail(std::string message) {
  failure_ = std::move(message);
  return false;
}

bool JsonEvents::parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception& error) {
  syntax_error_ = true;
  syntax_position_ = position;
  syntax_text_ = error.what();
  return false;
}

absl::Status ParseJsonEvents(std::string_view what, std::string_view text, JsonEvents& events) {
  const auto error = [&](std::string_view message) { return absl::InvalidArgumentError(absl::StrCat(Sv(what), ": ", Sv(message))); };
  if (text.starts_with("\xef\xbb\xbf")) return error("starts with a byte order mark; save it as UTF-8 without BOM");
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) return error("is empty");
  // The library takes it for the end of the text.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return error(absl::StrCat("not valid JSON: ", LineAndColumn(text, zero), ": a zero byte"));
  }
  bool good = false;
  try {
    good = json::sax_parse(text.begin(), text.end(), &events, json::input_format_t::json, /*strict=*/true,
                           /*ignore_comments=*/false);
  } catch (const std::exception& e) {  // out of memory and the like: the library reports syntax through parse_error
    return absl::ResourceExhaustedError(absl::StrCat(Sv(what), ": ", e.what()));
  }
  if (good) return absl::OkStatus();
  const std::string at_key = events.place_.empty() ? "" : absl::StrCat(" at key ", Quoted(events.place_));
  if (!events.syntax_error_) return error(absl::StrCat("refused", at_key, ": ", events.failure_));

  // The library counts the bytes it has read: the last of them is the one it stumbled over.
  size_t start = std::min(events.syntax_position_, text.size());
  if (start > 0) --start;
  if (start > 0 && text[start - 1] == '-') --start;
  std::string reason = KnownMistake(text.substr(start));
  if (reason.empty()) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: text": the place is told in our own way.
    const size_t colon = events.syntax_text_.find(": ");
    reason = colon == std::string::npos ? events.syntax_text_ : events.syntax_text_.substr(colon + 2);
  }
  return error(absl::StrCat("not valid JSON: ", LineAndColumn(text, start), at_key, ": ", Printable(reason)));
}

absl::StatusOr<json> ParseStrictJson(std::string_view what, std::string_view text) {
  TreeBuilder builder;
  RETURN_IF_ERROR(ParseJsonEvents(what, text, builder));
  return builder.Take();
}

}  // namespace hearth
