// Typed reading of JSON members; what is absent or of another type becomes an error that names its path.
// Room: common/text. May touch: common/base. Threads: any; pure functions. nlohmann's exceptions never leave here.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace hearth {

// The member, or null (a JSON null) when it is absent.
inline const nlohmann::json& JsonMember(const nlohmann::json& object, const char* key) {
  static const nlohmann::json kNull;
  if (!object.is_object()) return kNull;
  const auto it = object.find(key);
  return it == object.end() ? kNull : *it;
}

inline absl::Status JsonTypeError(const std::string& where, const std::string& wanted, const nlohmann::json& found) {
  std::string text = found.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return absl::InvalidArgumentError(absl::StrCat(where, ": expected ", wanted, ", found ", text));
}

inline absl::StatusOr<std::string> JsonString(const nlohmann::json& object, const char* key, const std::string& where) {
  const nlohmann::json& member = JsonMember(object, key);
  if (!member.is_string()) return JsonTypeError(absl::StrCat(where, ".", key), "a string", member);
  return member.get_ref<const std::string&>();
}

// Absent and null mean `fallback`.
inline absl::StatusOr<bool> JsonBool(const nlohmann::json& object, const char* key, bool fallback, const std::string& where) {
  const nlohmann::json& member = JsonMember(object, key);
  if (member.is_null()) return fallback;
  if (!member.is_boolean()) return JsonTypeError(absl::StrCat(where, ".", key), "true or false", member);
  return member.get<bool>();
}

// Token ids: 0 <= id < 2^24, a bound that keeps tables indexed by id within memory for any file.
inline absl::StatusOr<int32_t> JsonTokenId(const nlohmann::json& value, const std::string& where) {
  constexpr uint64_t kTokenIdMax = (1u << 24) - 1;
  if (!value.is_number_unsigned() || value.get<uint64_t>() > kTokenIdMax) {
    return JsonTypeError(where, "a token id from 0 to 16777215", value);
  }
  return static_cast<int32_t>(value.get<uint64_t>());
}

// A whole file of those beside a tokenizer, and one as JSON. Errors: NotFound, or InvalidArgument with the parser's own position.
absl::StatusOr<std::string> ReadTokenizerFile(const std::string& path);
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path);
// `where`: what errors call the text.
absl::StatusOr<nlohmann::json> ParseJson(const std::string& text, const std::string& where);

}  // namespace hearth
