#include "services/router/access.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/match.h"
#include "services/router/http/http_message.h"

namespace hearth::router {
namespace {

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

// Keys are compared by their hashes, so that not even the length shows in the time.
Digest Sha256(std::string_view text) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

}  // namespace

absl::StatusOr<ApiKeys> ApiKeys::Load(const std::string& path) {
  ApiKeys keys;
  if (path.empty()) return keys;
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read (", strerror(errno), "); router.api_key_file names it"));
  for (std::string line; std::getline(in, line);) {
    const std::string_view key = Trim(line);
    if (!key.empty() && key[0] != '#') keys.keys_.emplace_back(key);
  }
  if (keys.keys_.empty())
    return absl::InvalidArgumentError(absl::StrCat(path, ": holds no key; write one a line, or leave router.api_key_file empty"));
  return keys;
}

absl::StatusOr<int32_t> ApiKeys::Check(std::string_view authorization) const {
  if (keys_.empty()) return 0;
  const std::string_view header = Trim(authorization);
  if (header.empty()) return absl::UnauthenticatedError("an API key is needed: send it as \"Authorization: Bearer <key>\"");
  const size_t blank = header.find_first_of(" \t");
  if (!absl::EqualsIgnoreCase(Sv(header.substr(0, blank)), "bearer")) {
    return absl::UnauthenticatedError("the Authorization header must be \"Bearer <key>\"");
  }
  const std::string_view key = blank == std::string_view::npos ? std::string_view() : Trim(header.substr(blank));
  const Digest digest = Sha256(key);
  int32_t found = -1;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (CRYPTO_memcmp(Sha256(keys_[i]).data(), digest.data(), digest.size()) == 0) found = static_cast<int32_t>(i);
  }
  if (key.empty() || found < 0) return absl::UnauthenticatedError("the API key is not one of this node's");
  return found;
}

bool CorsOrigins::Allows(std::string_view origin) const {
  if (origin.empty()) return false;
  for (const std::string& entry : allowed_) {
    if (entry == "*" || entry == origin) return true;
    // Any port of an entry that names none.
    if (origin.size() > entry.size() + 1 && origin.substr(0, entry.size()) == entry && origin[entry.size()] == ':' &&
        origin.find_first_not_of("0123456789", entry.size() + 1) == std::string_view::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace hearth::router
