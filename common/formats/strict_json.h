// JSON as RFC 8259 has it and nothing looser: no BOM, comments, NaN, Infinity, duplicate keys or bottomless nesting.
// Every error names line, column and key, because people mend these files by hand.
// Room: common/formats. May touch:
// common/base. Threads: any. Two ways in: a tree for small files, events for headers of many megabytes, which must not
// cost ten times their size.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

inline constexpr size_t kJsonDepthMax = 64;

// Receives a document's events in order. Values return true to go on; Fail() stops with a message to which the place is
// added.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool parse_error(size_t position, const std::string& last_token, const nlohmann::detail::exception& error) final;
  bool binary(binary_t& value) final { return Fail("binary value"); }

 protected:
  bool Fail(std::string message);
  // The key under which the parser stands, for messages; set by the handler.
  std::string place_;

 private:
  friend absl::Status ParseJsonEvents(std::string_view what, std::string_view text, JsonEvents& events);
  std::string failure_;
  size_t syntax_position_ = 0;
  bool syntax_error_ = false;
  std::string syntax_text_;
};

// `what` names the file in errors.
absl::Status ParseJsonEvents(std::string_view what, std::string_view text, JsonEvents& events);
absl::StatusOr<nlohmann::json> ParseStrictJson(std::string_view what, std::string_view text);

}  // namespace hearth
