#include "common/base/logging.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <stdlib.h>

#include <mutex>

#include "absl/container/flat_hash_map.h"
#include "common/base/time.h"

namespace hearth {

absl::Status InitLogging(std::string_view process_name, std::string_view level) {
  const auto parsed = spdlog::level::from_str(std::string(level));
  if (parsed == spdlog::level::off && level != "off") {
    return absl::InvalidArgumentError(absl::StrCat("log level '", Sv(level), "' is unknown: use trace, debug, info, warn, error or off"));
  }
  auto logger = std::make_shared<spdlog::logger>(std::string(process_name), std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  // JOURNAL_STREAM is set where standard error goes to the journal (systemd.exec(5)).
  logger->set_pattern(getenv("JOURNAL_STREAM") ? "%n %L %v" : "%H:%M:%S.%e %n %^%L%$ %v");
  logger->set_level(parsed);
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  // A full or read-only disk behind standard error must not stop a service.
  spdlog::set_error_handler([](const std::string&) {});
  return absl::OkStatus();
}

std::optional<LogPermit> LogAllowed(std::string_view key, int per_minute) {
  struct Window {
    int64_t start_ns = 0;
    int passed = 0;
    int suppressed = 0;
  };
  static std::mutex mutex;
  static auto& windows = *new absl::flat_hash_map<std::string, Window>();
  std::lock_guard lock(mutex);
  Window& w = windows[Sv(key)];
  const int64_t now = MonotonicNowNs();
  if (w.passed == 0 || now - w.start_ns > 60'000'000'000) {
    w.start_ns = now;
    w.passed = 0;
  }
  if (w.passed >= per_minute) {
    ++w.suppressed;
    return std::nullopt;
  }
  ++w.passed;
  return LogPermit{std::exchange(w.suppressed, 0)};
}

std::string LogPermit::Note(std::string_view what) const { return suppressed == 0 ? "" : fmt::format(" ({} {} not shown)", suppressed, what); }

}  // namespace hearth
