// Where to listen, as written in node.toml: host:port, [v6]:port, or a host alone.
// Room: common/base. Threads: any; pure. Names are resolved by those who listen.
#pragma once

#include <cstdint>
#include <string>

#include "common/base/status.h"

namespace hearth {

inline constexpr uint16_t kHttpPort = 8080;
inline constexpr uint16_t kGrpcPort = 8081;

struct ListenHost {
  std::string host;   // without brackets; "localhost" means both families
  uint16_t port = 0;  // 0: any free one
};

// InvalidArgument when it can't be read; a text without a port gets `default_port`.
absl::StatusOr<ListenHost> ParseListen(const std::string& text, uint16_t default_port);

}  // namespace hearth
