// Logging: spdlog to standard error, one line an event, with a storm limit (repeats are counted, not printed).
// Room: common/base. Levels: info for what an operator wants to see once, warn for what he should look at, debug for the rest.
#pragma once

#include <spdlog/spdlog.h>

#include <optional>
#include <string>
#include <string_view>

#include "common/base/status.h"

namespace hearth {

// Call once at start. `level`: trace, debug, info, warn, error. A line reads "12:00:00.123 decode I message";
// under systemd the time is left to the journal and the level travels as "<4>".
absl::Status InitLogging(std::string_view process_name, std::string_view level);

// True at most `per_minute` times a minute for one `key`; what it held back is reported with the next line that passes.
// Use: if (const auto permit = LogAllowed("store-away", 10)) spdlog::warn("store away{}", permit->Note());
struct LogPermit {
  int suppressed;
  std::string Note(std::string_view what = "equal lines") const;  // " (3 equal lines not shown)", or nothing
};
std::optional<LogPermit> LogAllowed(std::string_view key, int per_minute);

}  // namespace hearth
