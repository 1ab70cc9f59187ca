#include "common/base/hash.h"

#include <sys/random.h>
#include <xxhash.h>

#include "absl/strings/str_format.h"
#include "common/base/check.h"

namespace hearth {

std::string Hash128::ToHex() const { return absl::StrFormat("%016x%016x", high, low); }

std::optional<Hash128> Hash128FromHex(std::string_view hex) {
  if (hex.size() != 32) return std::nullopt;
  Hash128 out;
  for (size_t i = 0; i < 32; ++i) {
    const char c = hex[i];
    uint64_t digit;
    if (c >= '0' && c <= '9') {
      digit = static_cast<uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint64_t>(c - 'a' + 10);
    } else {
      return std::nullopt;
    }
    uint64_t& half = i < 16 ? out.high : out.low;
    half = half << 4 | digit;
  }
  return out;
}

uint64_t Xxh3_64(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

Hash128 Xxh3_128(const void* data, size_t bytes) {
  const XXH128_hash_t h = XXH3_128bits(data, bytes);
  return {h.low64, h.high64};
}

Hash128 RandomHash128() {
  Hash128 out;
  HEARTH_CHECK(getrandom(&out, sizeof(out), 0) == static_cast<ssize_t>(sizeof(out)));
  return out;
}

struct Hasher128::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

Hasher128::Hasher128() : state_(std::make_unique<State>()) { XXH3_128bits_reset(state_->xxh); }
Hasher128::~Hasher128() = default;
void Hasher128::Update(const void* data, size_t bytes) { XXH3_128bits_update(state_->xxh, data, bytes); }
Hash128 Hasher128::Digest() const {
  const XXH128_hash_t h = XXH3_128bits_digest(state_->xxh);
  return {h.low64, h.high64};
}

}  // namespace hearth
