#include "services/router/http/listen_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hearth::router {
namespace {

// Whether a socket can be bound to this address on any port: false where the family is switched off.
bool FamilyWorks(bool v6) {
  const int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  bool ok = false;
  if (v6) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_loopback;
    ok = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  } else {
    ok = true;
  }
  close(fd);
  return ok;
}

}  // namespace

absl::StatusOr<std::vector<NumericAddress>> ResolveListen(const ListenHost& listen) {
  std::vector<NumericAddress> out;
  if (listen.host == "localhost") {
    // Not left to /etc/hosts, which on many machines knows one family only.
    if (FamilyWorks(false)) out.push_back({"127.0.0.1", false});
    if (FamilyWorks(true)) out.push_back({"::1", true});
    if (out.empty()) return absl::UnavailableError("localhost: this machine has neither IPv4 nor IPv6");
    return out;
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(listen.host.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::UnavailableError(absl::StrCat("'", listen.host, "' can't be resolved: ", gai_strerror(error)));
  }
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    char text[NI_MAXHOST];
    if (getnameinfo(entry->ai_addr, entry->ai_addrlen, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    const NumericAddress address{text, entry->ai_family == AF_INET6};
    if (std::none_of(out.begin(), out.end(), [&](const auto& other) { return other.ip == address.ip; })) out.push_back(address);
  }
  freeaddrinfo(found);
  if (out.size() > 1) {
    const bool no_v6 = !FamilyWorks(true);
    out.erase(std::remove_if(out.begin(), out.end(), [&](const auto& address) { return address.v6 && no_v6; }), out.end());
  }
  if (out.empty()) return absl::UnavailableError(absl::StrCat("'", listen.host, "' has no address on this machine"));
  return out;
}

absl::Status CheckBindable(const NumericAddress& address, uint16_t port) {
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (address.v6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    inet_pton(AF_INET6, address.ip.c_str(), &v6->sin6_addr);
    length = sizeof(*v6);
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    inet_pton(AF_INET, address.ip.c_str(), &v4->sin_addr);
    length = sizeof(*v4);
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return ListenError(address, port, errno);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.v6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  const int error = bind(fd, reinterpret_cast<const sockaddr*>(&storage), length) != 0 || listen(fd, 1) != 0 ? errno : 0;
  close(fd);
  return error == 0 ? absl::OkStatus() : ListenError(address, port, error);
}

absl::Status ListenError(const NumericAddress& address, uint16_t port, int error) {
  const char* remedy = error == EADDRINUSE ? "another process listens there: stop it or choose another port"
                       : error == EACCES   ? "ports below 1024 need the right to bind them"
                                           : "is the address one of this machine's?";
  return absl::UnavailableError(absl::StrCat(FormatAddress(address, port), ": ", strerror(error), "; ", remedy));
}

std::string FormatAddress(const NumericAddress& address, uint16_t port) {
  return address.v6 ? absl::StrCat("[", address.ip, "]:", port) : absl::StrCat(address.ip, ":", port);
}

}  // namespace hearth::router
