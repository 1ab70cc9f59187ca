// The addresses of this machine that a host to listen on (common/base/listen_host.h) stands for; "localhost" means both families.
// Room: services/router. Threads: any. Resolves names, so it may take a moment; used at start only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/listen_host.h"
#include "common/base/status.h"

namespace hearth::router {

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
