#include "common/formats/config_keys.h"

#include "absl/strings/str_cat.h"

namespace hearth {

std::string Shown(const nlohmann::json& value) {
  constexpr size_t kShownBytes = 120;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return text;
}

const nlohmann::json* ConfigKeys::Find(std::string_view key) const {
  const auto found = object_.find(std::string(key));
  return found == object_.end() ? nullptr : &*found;
}

absl::Status ConfigKeys::Refuse(std::string_view key, std::string_view need) const {
  const nlohmann::json* value = Find(key);
  const std::string found = value == nullptr ? "is missing" : absl::StrCat("is ", Shown(*value));
  return absl::InvalidArgumentError(absl::StrCat(path_, Sv(key), " ", found, "; ", Sv(need)));
}

void ConfigKeys::NoteFallback(std::string_view key, std::string_view value) const {
  Note(absl::StrCat(path_, Sv(key), " is missing: ", Sv(value), " taken, as Transformers does"));
}

absl::StatusOr<int64_t> ConfigKeys::Int(std::string_view key, Range range) const {
  const nlohmann::json* value = Find(key);
  const std::string need = absl::StrCat("need a whole number from ", range.min, " to ", range.max);
  if (value == nullptr || !value->is_number_integer()) return Refuse(key, need);
  // The library keeps what is above 2^63 as unsigned; get<int64_t>() would wrap it.
  if (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(range.max)) return Refuse(key, need);
  const int64_t number = value->get<int64_t>();
  if (number < range.min || number > range.max) return Refuse(key, need);
  return number;
}

absl::StatusOr<int64_t> ConfigKeys::IntOr(std::string_view key, int64_t fallback, Range range) const {
  if (Has(key)) return Int(key, range);
  NoteFallback(key, absl::StrCat(fallback));
  return fallback;
}

absl::StatusOr<int64_t> ConfigKeys::IntOrNull(std::string_view key, int64_t fallback, int64_t if_null, Range range) const {
  if (Has(key) && !HasValue(key)) return if_null;
  return IntOr(key, fallback, range);
}

absl::StatusOr<double> ConfigKeys::Double(std::string_view key, double min, double max) const {
  const nlohmann::json* value = Find(key);
  const std::string need = absl::StrCat("need a number from ", min, " to ", max);
  if (value == nullptr || !value->is_number()) return Refuse(key, need);
  const double number = value->get<double>();
  if (!(number >= min && number <= max)) return Refuse(key, need);
  return number;
}

absl::StatusOr<double> ConfigKeys::DoubleOr(std::string_view key, double fallback, double min, double max, bool note) const {
  if (Has(key)) return Double(key, min, max);
  if (note) NoteFallback(key, absl::StrCat(fallback));
  return fallback;
}

absl::StatusOr<bool> ConfigKeys::BoolOr(std::string_view key, bool fallback, bool note) const {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) {
    if (note) NoteFallback(key, fallback ? "true" : "false");
    return fallback;
  }
  if (!value->is_boolean()) return Refuse(key, "need true or false");
  return value->get<bool>();
}

absl::StatusOr<std::string> ConfigKeys::StringOr(std::string_view key, std::string_view fallback, bool note) const {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) {
    if (note) NoteFallback(key, absl::StrCat("\"", Sv(fallback), "\""));
    return std::string(fallback);
  }
  if (!value->is_string()) return Refuse(key, "need a string");
  return value->get<std::string>();
}

}  // namespace hearth
