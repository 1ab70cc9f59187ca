// JSON in and out: the rendering context becomes values (with their trust), and values become what json.dumps writes.
// Room: common/text/jinja. Pure functions.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

// Throws Error when nested deeper than kMaxNesting.
Value FromJson(const nlohmann::ordered_json& json, bool trusted);

struct JsonStyle {
  bool ensure_ascii = false;  // Transformers' tojson writes characters as they are
  bool sort_keys = false;
  bool pretty = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
// Throws Error with Python's sentence for what json.dumps refuses. The whole text is untrusted if any string in it is.
Text ToJson(const Value& value, const JsonStyle& style);

}  // namespace hearth::jinja
