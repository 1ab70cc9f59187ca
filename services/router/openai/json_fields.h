// Reading a JSON request: bytes to a value with a bound on depth, and typed fields with errors that name the field.
// Room: services/router. Null is the same as absent for every optional field; fields that nobody asks for are noted, not refused.
// Threads: any.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth::router {

using Json = nlohmann::ordered_json;

// An object. Errors say where: "byte 17: ...".
absl::StatusOr<Json> ParseJsonObject(std::string_view body);
// Whether `value` is this very string.
bool IsText(const Json& value, std::string_view text);
// "an array", "the string \"abc\"": for messages.
std::string Describe(const Json& value);

class Fields {
 public:
  // `object` must outlive this. `prefix`: "stream_options." for nested ones.
  explicit Fields(const Json& object, std::string prefix = "") : object_(object), prefix_(std::move(prefix)) {}

  // Null when the field is absent or null.
  const Json* Get(std::string_view name);
  std::string Name(std::string_view name) const { return prefix_ + std::string(name); }

  absl::Status Bool(std::string_view name, bool* value);
  absl::Status String(std::string_view name, std::optional<std::string>* value);
  absl::Status Integer(std::string_view name, int64_t min, int64_t max, std::optional<int64_t>* value);
  absl::Status Number(std::string_view name, double min, double max, std::optional<double>* value);

  // Names that were in the object and never asked for.
  std::vector<std::string> Unread() const;

 private:
  const Json& object_;
  const std::string prefix_;
  std::set<std::string, std::less<>> read_;
};

// A list of token ids, each in [0, vocab_size).
absl::StatusOr<std::vector<int32_t>> ReadTokenIds(const Json& array, std::string_view name, int32_t vocab_size);

}  // namespace hearth::router
