// Typed, bounded access to one object of a config.json, with errors that name the key, what was found and what would
// do.
// Room: common/formats, internal. Threads: one.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

class ConfigKeys {
 public:
  // `path` precedes keys in messages: "config.json: rope_scaling.".
  ConfigKeys(const nlohmann::json& object, std::string path, std::vector<std::string>* notes)
      : object_(object), path_(std::move(path)), notes_(notes) {}

  struct Range {
    int64_t min;
    int64_t max;
  };

  bool Has(std::string_view key) const { return Find(key) != nullptr; }  // there, even if null
  bool HasValue(std::string_view key) const { return Find(key) != nullptr && !Find(key)->is_null(); }
  const nlohmann::json* Find(std::string_view key) const;

  absl::StatusOr<int64_t> Int(std::string_view key, Range range) const;  // required
  // Absent: `fallback`, with a note. Null is an error.
  absl::StatusOr<int64_t> IntOr(std::string_view key, int64_t fallback, Range range) const;
  // Null means `if_null`, as several published configs write it.
  absl::StatusOr<int64_t> IntOrNull(std::string_view key, int64_t fallback, int64_t if_null, Range range) const;
  absl::StatusOr<double> Double(std::string_view key, double min, double max) const;
  absl::StatusOr<double> DoubleOr(std::string_view key, double fallback, double min, double max, bool note = true) const;
  absl::StatusOr<bool> BoolOr(std::string_view key, bool fallback, bool note = false) const;
  absl::StatusOr<std::string> StringOr(std::string_view key, std::string_view fallback, bool note = false) const;

  // "config.json: key `hidden_size` is "abc"; need ...".
  absl::Status Refuse(std::string_view key, std::string_view need) const;
  void Note(std::string text) const { notes_->push_back(std::move(text)); }
  const std::string& path() const { return path_; }

 private:
  void NoteFallback(std::string_view key, std::string_view value) const;

  const nlohmann::json& object_;
  std::string path_;
  std::vector<std::string>* notes_;
};

// A JSON value for a message, cut when long.
std::string Shown(const nlohmann::json& value);

}  // namespace hearth
