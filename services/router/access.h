// Who may ask: API keys and browser origins.
// Room: services/router. Threads: any; const after load.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth::router {

class ApiKeys {
 public:
  // One key a line; blank lines and lines that begin with # are skipped. An empty path: no key is asked for. A file without a key is an
  // error: it would open the door that it was meant to close.
  static absl::StatusOr<ApiKeys> Load(const std::string& path);

  bool required() const { return !keys_.empty(); }
  // `authorization`: the header as sent, "Bearer <key>". Returns the key's index (0 when none is asked for); Unauthenticated otherwise,
  // with nothing of the key in the message. Compares with all keys, in a time that does not depend on where they differ.
  absl::StatusOr<int32_t> Check(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

class CorsOrigins {
 public:
  // An entry without a port allows every port; "*" allows all.
  explicit CorsOrigins(std::vector<std::string> allowed) : allowed_(std::move(allowed)) {}
  bool Allows(std::string_view origin) const;

 private:
  std::vector<std::string> allowed_;
};

}  // namespace hearth::router
