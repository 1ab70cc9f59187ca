// Addresses to listen on, as written in node.toml: host:port, [v6]:port, a name; "localhost" means both families.
// Room: services/router. Threads: any. Resolves names, so it may take a moment; used at start only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace hearth::router {

struct ListenHost {
  std::string host;   // without brackets
  uint16_t port = 0;  // 0: any free one
};

// InvalidArgument when it can't be read; a text without a port gets `default_port`.
absl::StatusOr<ListenHost> ParseListen(const std::string& text, uint16_t default_port);

// Numeric addresses of the host. A family that this machine lacks is left out where the name has another ("localhost" without IPv6).
struct NumericAddress {
  std::string ip;
  bool v6 = false;
};
absl::StatusOr<std::vector<NumericAddress>> ResolveListen(const ListenHost& listen);
// Whether a socket could listen there now; Unavailable says why not, and what to do. Port 0 always can.
absl::Status CheckBindable(const NumericAddress& address, uint16_t port);
// Unavailable: what `error` (an errno) of bind or listen means for an operator.
absl::Status ListenError(const NumericAddress& address, uint16_t port, int error);
// "127.0.0.1:80", "[::1]:80"
std::string FormatAddress(const NumericAddress& address, uint16_t port);

}  // namespace hearth::router
