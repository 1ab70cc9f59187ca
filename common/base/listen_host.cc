#include "common/base/listen_host.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace hearth {

absl::StatusOr<ListenHost> ParseListen(const std::string& text, uint16_t default_port) {
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is no address to listen on: ", why, " (host:port, 1.2.3.4:port, [v6]:port or localhost:port)"));
  };
  ListenHost listen;
  listen.port = default_port;
  std::string port;
  if (!text.empty() && text[0] == '[') {
    const size_t close = text.find(']');
    if (close == std::string::npos) return bad("a ']' is missing");
    listen.host = text.substr(1, close - 1);
    if (close + 1 < text.size()) {
      if (text[close + 1] != ':') return bad("':' and a port must follow ']'");
      port = text.substr(close + 2);
      if (port.empty()) return bad("the port is missing");
    }
  } else if (std::count(text.begin(), text.end(), ':') > 1) {
    listen.host = text;
    in6_addr ignored;
    if (inet_pton(AF_INET6, text.substr(0, text.find('%')).c_str(), &ignored) != 1) return bad("it is no IPv6 address");
  } else {
    const size_t colon = text.find(':');
    listen.host = text.substr(0, colon);
    if (colon != std::string::npos) {
      port = text.substr(colon + 1);
      if (port.empty()) return bad("the port is missing");
    }
  }
  if (listen.host.empty()) return bad("the host is missing");
  if (!port.empty()) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(port, &number) || number > 65535) return bad("the port must be a number from 0 to 65535");
    listen.port = static_cast<uint16_t>(number);
  }
  return listen;
}

}  // namespace hearth
