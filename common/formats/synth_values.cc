#include "common/formats/synth_values.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "common/base/check.h"
#include "common/base/hash.h"

namespace hearth {
namespace {

constexpr size_t kNormals = 1 << 16;  // an index is 16 random bits

void Store(DType dtype, float value, unsigned char* out) {
  switch (dtype) {
    case DType::kF32: std::memcpy(out, &value, 4); return;
    case DType::kBF16: {
      const bf16 rounded = ToBf16(value);
      std::memcpy(out, &rounded.bits, 2);
      return;
    }
    case DType::kF16: {
      const uint16_t bits = FloatToF16(value);
      std::memcpy(out, &bits, 2);
      return;
    }
    case DType::kF8E4M3: *out = FloatToF8E4M3(value); return;
    default: break;
  }
  HEARTH_CHECK(false && "not a dtype that is made up number by number");
}

}  // namespace

SynthRandom::SynthRandom(uint64_t seed, std::string_view name) : state_(Xxh3_64(name.data(), name.size()) ^ (seed * 0x9e3779b97f4a7c15u)) {}

uint64_t SynthRandom::Next() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

SynthValues::SynthValues(uint64_t seed) : seed_(seed), normals_(kNormals) {
  SynthRandom random(seed, "normals");
  for (size_t i = 0; i < kNormals / 2; ++i) {
    // Box and Muller's polar pair needs a radius above 0: the +1 keeps the logarithm finite.
    const double u = static_cast<double>((random.Next() >> 11) + 1) * 0x1p-53;
    const double v = static_cast<double>(random.Next() >> 11) * 0x1p-53;
    const double normal = std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
    normals_[i] = static_cast<float>(normal);
    normals_[i + kNormals / 2] = -normals_[i];
  }
}

std::vector<unsigned char> SynthValues::Int4Pool() const {
  std::vector<unsigned char> pool((1024 * 1024 + 12345) * sizeof(uint32_t));
  SynthRandom random(seed_, "int4");
  const auto nibble = [&](uint64_t index) {
    const double code = std::round(kInt4CodeSpread * normals_[index & 0xffff]);
    return static_cast<unsigned>(std::clamp(code, -8.0, 7.0) + 8.0);
  };
  for (unsigned char& byte : pool) {
    const uint64_t bits = random.Next();
    byte = static_cast<unsigned char>(nibble(bits) | nibble(bits >> 16) << 4);
  }
  return pool;
}

const std::vector<unsigned char>& SynthValues::Pool(const SynthSpec& spec) {
  if (spec.int4_words) {
    if (int4_pool_.empty()) int4_pool_ = Int4Pool();
    return int4_pool_;
  }
  std::vector<unsigned char>& pool = pools_[Key{{spec.dtype, spec.log_normal}, {spec.mean, spec.spread}}];
  if (!pool.empty()) return pool;
  const size_t element = DTypeBytes(spec.dtype, 1);
  std::vector<unsigned char> table(kNormals * element);
  for (size_t i = 0; i < kNormals; ++i) {
    const double x = normals_[i];
    const double value = spec.log_normal ? spec.mean * std::exp(spec.spread * x) : spec.mean + spec.spread * x;
    Store(spec.dtype, static_cast<float>(value), table.data() + i * element);
  }
  const uint64_t elements = PoolElements(spec.dtype);
  pool.resize(elements * element);
  SynthRandom random(seed_, "pool");
  uint64_t bits = 0;
  for (uint64_t i = 0; i < elements; ++i) {
    if (i % 4 == 0) bits = random.Next();
    std::memcpy(pool.data() + i * element, table.data() + (bits & 0xffff) * element, element);
    bits >>= 16;
  }
  return pool;
}

}  // namespace hearth
