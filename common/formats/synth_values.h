// Random weights at the speed of the disk: pools of ready-made values from which pieces are cut at odd offsets.
//
// Room: common/formats, internal. Threads: one. Deterministic: a tensor's bytes depend on its name, shape and the seed
// alone, not on shards or order.
//
// Drawing 20 GB of normal numbers one by one would take minutes of a core; a pool of a few megabytes is drawn once for
// each spread, and every megabyte of a tensor starts at another place in it, so that no two matrices, and no two parts
// of one, are alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "common/formats/tensor_plan.h"

namespace hearth {

// A small counter generator (splitmix64's finaliser over a Weyl sequence).
class SynthRandom {
 public:
  SynthRandom(uint64_t seed, std::string_view name);
  uint64_t Next();
  uint64_t Below(uint32_t bound) { return ((Next() >> 32) * bound) >> 32; }

 private:
  uint64_t state_;
};

// What a tensor is to hold.
struct SynthSpec {
  DType dtype = DType::kBF16;
  double mean = 0.0;
  double spread = 1.0;      // standard deviation; of the logarithm when `log_normal`
  bool log_normal = false;  // mean * exp(spread * normal): scales
  bool int4_words = false;  // words of eight nibbles, each a number from -8 to 7 of kInt4CodeSpread, plus 8; dtype is one of as many bytes
  static SynthSpec Int4Words() { return {.dtype = DType::kF32, .int4_words = true}; }
};

// Standard deviation of the FP8 codes' values in every FP8 weight; the block scales bring them to size. 7 of it reach
// the largest code.
inline constexpr double kF8CodeSpread = 64.0;
// The same of INT4 numbers: nearly 3 of it reach the largest.
inline constexpr double kInt4CodeSpread = 2.5;

class SynthValues {
 public:
  explicit SynthValues(uint64_t seed);
  // Calls `write(data, bytes)` with consecutive pieces until `count` elements are through.
  template <typename Write>
  absl::Status Stream(std::string_view name, const SynthSpec& spec, uint64_t count, Write write) {
    const std::vector<unsigned char>& pool = Pool(spec);
    SynthRandom random(seed_, name);
    const uint64_t element = DTypeBytes(spec.dtype, 1);
    const uint64_t pool_elements = pool.size() / element;
    for (uint64_t done = 0; done < count;) {
      const uint64_t take = std::min<uint64_t>(count - done, pool_elements / 4);
      const uint64_t start = random.Below(static_cast<uint32_t>(pool_elements - take + 1));
      RETURN_IF_ERROR(write(pool.data() + start * element, take * element));
      done += take;
    }
    return absl::OkStatus();
  }

 private:
  // FP8 fills most of a model, from one pool; the others have a pool for each spread, and are few.
  static uint64_t PoolElements(DType dtype) {
    const uint64_t mebi = 1024 * 1024;
    return (dtype == DType::kF8E4M3 ? 4 * mebi : dtype == DType::kF32 ? mebi / 16 : mebi) + 12345;
  }
  using Key = std::pair<std::pair<DType, bool>, std::pair<double, double>>;

  const std::vector<unsigned char>& Pool(const SynthSpec& spec);
  std::vector<unsigned char> Int4Pool() const;

  uint64_t seed_;
  std::vector<float> normals_;  // a table of standard normal numbers, symmetric, so that their mean is exactly 0
  std::map<Key, std::vector<unsigned char>> pools_;
  std::vector<unsigned char> int4_pool_;
};

}  // namespace hearth
