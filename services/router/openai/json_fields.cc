#include "services/router/openai/json_fields.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "services/router/api_error.h"

namespace hearth::router {
namespace {

constexpr int kDepthMax = 128;

// Everything behind this recurses over the value (printing, templates), so its depth is bounded before it is built.
absl::Status CheckDepth(std::string_view body) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kDepthMax)
        return absl::InvalidArgumentError(absl::StrFormat("the JSON is nested deeper than %d levels at byte %d", kDepthMax, i));
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return absl::OkStatus();
}

absl::Status WrongType(std::string_view name, std::string_view wanted, const Json& found) {
  return WithCode(FieldError(name, absl::StrCat("'", Sv(name), "' must be ", Sv(wanted), ", not ", Describe(found))), "invalid_type");
}

absl::Status OutOfRange(std::string_view name, std::string_view what) {
  return WithCode(FieldError(name, absl::StrCat("'", Sv(name), "' ", Sv(what))), "invalid_value");
}

}  // namespace

bool IsText(const Json& value, std::string_view text) { return value.is_string() && value.get_ref<const std::string&>() == text; }

std::string Describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::object: return "an object";
    case Json::value_t::array: return "an array";
    case Json::value_t::string: {
      const auto& text = value.get_ref<const std::string&>();
      return text.size() > 40 ? "a string" : "the string " + value.dump(-1, ' ', true);
    }
    case Json::value_t::boolean: return value.get<bool>() ? "true" : "false";
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
    case Json::value_t::number_float: return "the number " + value.dump();
    default: return "a value of another type";
  }
}

absl::StatusOr<Json> ParseJsonObject(std::string_view body) {
  if (body.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return WithCode(absl::InvalidArgumentError("the body is empty: send a JSON object"), "invalid_json");
  }
  // The library takes it for the end of the text.
  if (const size_t zero = body.find('\0'); zero != std::string_view::npos) {
    return WithCode(absl::InvalidArgumentError(absl::StrFormat("the body is not valid JSON at byte %d: a zero byte", zero + 1)), "invalid_json");
  }
  if (absl::Status depth = CheckDepth(body); !depth.ok()) return WithCode(depth, "invalid_json");
  Json value;
  try {
    value = Json::parse(body);
  } catch (const Json::parse_error& error) {
    // The library's own message quotes input, which may be anything; its position is what helps.
    std::string what = error.what();
    const bool surrogate = what.find("surrogate") != std::string::npos;
    const bool utf8 = what.find("UTF-8") != std::string::npos;
    return WithCode(
        absl::InvalidArgumentError(absl::StrFormat("the body is not valid %s at byte %d%s", utf8 ? "UTF-8" : "JSON", error.byte,
                                                   surrogate ? ": a \\uD800 to \\uDFFF escape counts only as half of a pair, high before low" : "")),
        "invalid_json");
  } catch (const Json::exception&) {
    return WithCode(absl::InvalidArgumentError("the body is not valid JSON: a number in it is too large"), "invalid_json");
  }
  if (!value.is_object()) {
    return WithCode(absl::InvalidArgumentError(absl::StrCat("the body must be a JSON object, not ", Describe(value))), "invalid_json");
  }
  return value;
}

const Json* Fields::Get(std::string_view name) {
  read_.emplace(name);
  const auto at = object_.find(std::string(name));
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

absl::Status Fields::Bool(std::string_view name, bool* value) {
  const Json* found = Get(name);
  if (found == nullptr) return absl::OkStatus();
  if (!found->is_boolean()) return WrongType(Name(name), "true or false", *found);
  *value = found->get<bool>();
  return absl::OkStatus();
}

absl::Status Fields::String(std::string_view name, std::optional<std::string>* value) {
  const Json* found = Get(name);
  if (found == nullptr) return absl::OkStatus();
  if (!found->is_string()) return WrongType(Name(name), "a string", *found);
  *value = found->get<std::string>();
  return absl::OkStatus();
}

absl::Status Fields::Integer(std::string_view name, int64_t min, int64_t max, std::optional<int64_t>* value) {
  const Json* found = Get(name);
  if (found == nullptr) return absl::OkStatus();
  if (!found->is_number_integer()) return WrongType(Name(name), "a whole number", *found);
  const bool huge = found->is_number_unsigned() && found->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const int64_t number = huge ? INT64_MAX : found->get<int64_t>();
  if (huge || number < min || number > max) {
    if (max == INT64_MAX || max == INT32_MAX) return OutOfRange(Name(name), absl::StrFormat("must be at least %d, not %s", min, found->dump()));
    return OutOfRange(Name(name), absl::StrFormat("must be from %d to %d, not %s", min, max, found->dump()));
  }
  *value = number;
  return absl::OkStatus();
}

absl::Status Fields::Number(std::string_view name, double min, double max, std::optional<double>* value) {
  const Json* found = Get(name);
  if (found == nullptr) return absl::OkStatus();
  if (!found->is_number()) return WrongType(Name(name), "a number", *found);
  const double number = found->get<double>();
  if (!(number >= min && number <= max)) return OutOfRange(Name(name), absl::StrFormat("must be from %g to %g, not %s", min, max, found->dump()));
  *value = number;
  return absl::OkStatus();
}

std::vector<std::string> Fields::Unread() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.items()) {
    if (!read_.count(name)) names.push_back(name);
  }
  return names;
}

absl::StatusOr<std::vector<int32_t>> ReadTokenIds(const Json& array, std::string_view name, int32_t vocab_size) {
  if (!array.is_array()) return WrongType(name, "a list of token ids", array);
  std::vector<int32_t> ids;
  ids.reserve(array.size());
  for (const Json& item : array) {
    if (!item.is_number_integer()) return WrongType(name, "a list of token ids", item);
    const bool huge = item.is_number_unsigned() && item.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
    if (huge || item.get<int64_t>() < 0 || item.get<int64_t>() >= vocab_size) {
      return OutOfRange(name,
                        absl::StrFormat("holds the token id %s at place %d: this model's ids are 0 to %d", item.dump(), ids.size(), vocab_size - 1));
    }
    ids.push_back(item.get<int32_t>());
  }
  return ids;
}

}  // namespace hearth::router
