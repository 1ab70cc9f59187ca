#include "services/router/http/http_message.h"

#include <boost/beast/http/status.hpp>

namespace hearth::router {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::string NormalPath(std::string_view target) {
  // Absolute form, as proxies send it.
  if (const size_t scheme = target.find("://"); scheme != std::string_view::npos && target.find('/') == scheme + 1) {
    const size_t path = target.find('/', scheme + 3);
    target = path == std::string_view::npos ? "/" : target.substr(path);
  }
  target = target.substr(0, target.find_first_of("?#"));
  std::string path;
  for (size_t i = 0; i < target.size(); ++i) {
    char c = target[i];
    if (c == '/' && !path.empty() && path.back() == '/') continue;
    if (c == '%' && i + 2 < target.size() && HexDigit(target[i + 1]) >= 0 && HexDigit(target[i + 2]) >= 0) {
      c = static_cast<char>(HexDigit(target[i + 1]) * 16 + HexDigit(target[i + 2]));
      i += 2;
    }
    path += c;
  }
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string HttpDate(absl::Time time) { return absl::FormatTime("%a, %d %b %E4Y %H:%M:%S GMT", time, absl::UTCTimeZone()); }

std::string_view ReasonPhrase(int status) {
  const auto reason = boost::beast::http::obsolete_reason(static_cast<boost::beast::http::status>(status));
  return {reason.data(), reason.size()};
}

std::string_view Trim(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

}  // namespace hearth::router
