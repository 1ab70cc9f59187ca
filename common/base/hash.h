// XXH3 sums (128 bits where identity matters, 64 where damage is to be seen) and random 128-bit ids.
// Room: common/base.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace hearth {

struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
  bool IsZero() const { return low == 0 && high == 0; }
  std::string ToHex() const;  // 32 lower-case digits, high half first
  template <typename H>
  friend H AbslHashValue(H h, const Hash128& v) {
    return H::combine(std::move(h), v.low, v.high);
  }
};
static_assert(sizeof(Hash128) == 16);

std::optional<Hash128> Hash128FromHex(std::string_view hex);
uint64_t Xxh3_64(const void* data, size_t bytes);
Hash128 Xxh3_128(const void* data, size_t bytes);
Hash128 RandomHash128();  // from the kernel's generator: names a generation, a request, a lease

// XXH3-128 over pieces, in order.
class Hasher128 {
 public:
  Hasher128();
  ~Hasher128();
  Hasher128(const Hasher128&) = delete;
  Hasher128& operator=(const Hasher128&) = delete;
  void Update(const void* data, size_t bytes);
  void Update(std::string_view text) { Update(text.data(), text.size()); }
  template <typename T>
  void UpdateValue(const T& value) {
    Update(&value, sizeof(value));
  }
  Hash128 Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hearth
