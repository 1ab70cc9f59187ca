#include "common/base/listen_host.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cctype>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace hearth {
namespace {

bool IsIpv6(const std::string& host) {
  in6_addr ignored;
  return inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &ignored) == 1;
}

bool IsNameOrIpv4(const std::string& host) {
  in_addr ignored;
  if (host.find_first_not_of("0123456789.") == std::string::npos) return host.empty() || inet_pton(AF_INET, host.c_str(), &ignored) == 1;
  return std::all_of(host.begin(), host.end(),
                     [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_'; });
}

}  // namespace

absl::StatusOr<ListenHost> ParseListen(const std::string& text, uint16_t default_port) {
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is no address to listen on: ", why, " (host:port, 1.2.3.4:port, [v6]:port or localhost:port)"));
  };
  if (text.find("://") != std::string::npos) return bad("it is no URL, leave out what stands before '://'");
  if (text.find_first_of(" \t\r\n") != std::string::npos) return bad("it has blanks");
  ListenHost listen;
  listen.port = default_port;
  std::string port;
  if (!text.empty() && text[0] == '[') {
    const size_t close = text.find(']');
    if (close == std::string::npos) return bad("a ']' is missing");
    listen.host = text.substr(1, close - 1);
    if (!IsIpv6(listen.host)) return bad("between the brackets stands no IPv6 address");
    if (close + 1 < text.size()) {
      if (text[close + 1] != ':') return bad("':' and a port must follow ']'");
      port = text.substr(close + 2);
      if (port.empty()) return bad("the port is missing");
    }
  } else if (std::count(text.begin(), text.end(), ':') > 1) {
    listen.host = text;
    if (!IsIpv6(listen.host)) return bad("it is no IPv6 address");
  } else {
    const size_t colon = text.find(':');
    listen.host = text.substr(0, colon);
    if (!IsNameOrIpv4(listen.host)) return bad("the host is neither a name nor an IPv4 address");
    if (colon != std::string::npos) {
      port = text.substr(colon + 1);
      if (port.empty()) return bad("the port is missing");
    }
  }
  if (listen.host.empty()) return bad("the host is missing");
  if (!port.empty()) {
    uint32_t number = 0;
    if (port.find_first_not_of("0123456789") != std::string::npos || !absl::SimpleAtoi(port, &number) || number > 65535)
      return bad("the port must be a number from 0 to 65535");
    listen.port = static_cast<uint16_t>(number);
  }
  return listen;
}

}  // namespace hearth
