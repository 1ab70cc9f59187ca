// The scan of every loaded byte for values that would poison an answer. Chunks are folded into one flag by loops that
// the compiler vectorises (a branch an element would cost ten times the memory's time); only a chunk that holds
// something bad is searched.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/formats/file_io.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

constexpr uint64_t kChunk = 4096;  // elements

// Tensors start at any byte of a file, so elements may lie unaligned.
template <typename T>
T Load(const unsigned char* data, uint64_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

struct F8Weight {
  using Bits = uint8_t;
  static bool IsBad(Bits b) { return (b & 0x7f) == 0x7f; }
};
struct Bf16Weight {
  using Bits = uint16_t;
  static bool IsBad(Bits b) { return (b & 0x7f80) == 0x7f80; }
};
struct F16Weight {
  using Bits = uint16_t;
  static bool IsBad(Bits b) { return (b & 0x7c00) == 0x7c00; }
};
struct F32Weight {
  using Bits = uint32_t;
  static bool IsBad(Bits b) { return (b & 0x7f800000u) == 0x7f800000u; }
};
// A scale is positive, and its largest weight (448 in E4M3) finite: from the smallest denormal's bits to those of the largest float / 448.
constexpr uint32_t kScaleBitsMax = std::bit_cast<uint32_t>(std::numeric_limits<float>::max() / 448.0f);
struct F32Scale {
  using Bits = uint32_t;
  static bool IsBad(Bits b) { return b - 1u >= kScaleBitsMax; }
};
struct Bf16Scale {
  using Bits = uint16_t;
  static bool IsBad(Bits b) { return static_cast<uint16_t>(b - 1u) >= kScaleBitsMax >> 16; }
};

// A block of a block format: its scales must be finite, its integers can't be wrong.
template <DType kDType>
bool IsBadBlock(const unsigned char* block) {
  const auto infinite = [block](int at) { return F16Weight::IsBad(Load<uint16_t>(block + at, 0)); };
  if constexpr (kDType == DType::kQ8_0) return infinite(0);
  if constexpr (kDType == DType::kQ6_K) return infinite(208);
  if constexpr (kDType == DType::kQ4_K || kDType == DType::kQ5_K) return infinite(0) || infinite(2);
  if constexpr (kDType == DType::kQ3_K) return infinite(108);
}

template <DType kDType>
absl::Status CheckBlocks(const std::string& name, const void* data, uint64_t count) {
  const DTypeBlock block = BlockOf(kDType);
  const auto* bytes = static_cast<const unsigned char*>(data);
  const uint64_t blocks = count / static_cast<uint64_t>(block.elements);
  for (uint64_t i = 0; i < blocks; ++i) {
    if (!IsBadBlock<kDType>(bytes + i * static_cast<uint64_t>(block.bytes))) continue;
    return absl::DataLossError(absl::StrCat("tensor ", Quoted(name), ": the ", std::string(DTypeName(kDType)), " block at element ",
                                            i * static_cast<uint64_t>(block.elements), " of ", count,
                                            " has a scale that is NaN or infinite: damaged file?"));
  }
  return absl::OkStatus();
}

// The first bad index, or `count`.
template <typename Kind>
uint64_t FindBad(const unsigned char* data, uint64_t count) {
  using Bits = typename Kind::Bits;
  for (uint64_t begin = 0; begin < count; begin += kChunk) {
    const uint64_t end = std::min(count, begin + kChunk);
    Bits any = 0;
    for (uint64_t i = begin; i < end; ++i) any |= Kind::IsBad(Load<Bits>(data, i)) ? Bits{1} : Bits{0};
    if (any == 0) continue;
    for (uint64_t i = begin; i < end; ++i) {
      if (Kind::IsBad(Load<Bits>(data, i))) return i;
    }
  }
  return count;
}

template <typename Kind>
absl::Status Check(const std::string& name, DType dtype, const void* data, uint64_t count, bool is_scale) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  const uint64_t bad = FindBad<Kind>(bytes, count);
  if (bad == count) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat("tensor %s: element %d of %d is %s (%s bits 0x%0*x): damaged file?", Quoted(name), bad, count,
                                             is_scale ? "not a positive scale of finite weights" : "NaN or infinite", std::string(DTypeName(dtype)),
                                             static_cast<int>(2 * sizeof(typename Kind::Bits)),
                                             static_cast<uint64_t>(Load<typename Kind::Bits>(bytes, bad))));
}

}  // namespace

absl::Status CheckValues(const std::string& name, DType dtype, const void* data, uint64_t count, bool is_scale) {
  if (is_scale && dtype == DType::kF32) return Check<F32Scale>(name, dtype, data, count, true);
  if (is_scale && dtype == DType::kBF16) return Check<Bf16Scale>(name, dtype, data, count, true);
  if (!is_scale) {
    switch (dtype) {
      case DType::kF8E4M3: return Check<F8Weight>(name, dtype, data, count, false);
      case DType::kBF16: return Check<Bf16Weight>(name, dtype, data, count, false);
      case DType::kF16: return Check<F16Weight>(name, dtype, data, count, false);
      case DType::kF32: return Check<F32Weight>(name, dtype, data, count, false);
      case DType::kQ8_0: return CheckBlocks<DType::kQ8_0>(name, data, count);
      case DType::kQ6_K: return CheckBlocks<DType::kQ6_K>(name, data, count);
      case DType::kQ4_K: return CheckBlocks<DType::kQ4_K>(name, data, count);
      case DType::kQ5_K: return CheckBlocks<DType::kQ5_K>(name, data, count);
      case DType::kQ3_K: return CheckBlocks<DType::kQ3_K>(name, data, count);
      default: break;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(name), ": values of type ", std::string(DTypeName(dtype)),
                                                 is_scale ? " can't be scales; supported: F32, BF16" : " can't be checked"));
}

}  // namespace hearth
