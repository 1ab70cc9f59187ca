// Block formats times BF16 activations by VDPBF16PS: the policies of linear.h for the avx512bf16 path. Every quantized integer is a BF16 number
// that look-ups find: of bytes in two tables of halves, of nibbles and six-bit codes in one table of words. A step is 64 columns. A part's sum
// starts from zero in lanes of its own, and is scaled as it is added to the total. Included by avx512bf16.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/bf16_dots.h"
#include "common/kernels/x86/block_units.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

// Integers up to 256 in magnitude are BF16 numbers.
constexpr uint16_t IntegerAsBf16(int value) {
  if (value == 0) return 0;
  int mantissa = value < 0 ? -value : value;
  int exponent = 127 + 7;
  for (; mantissa < 128; mantissa *= 2) --exponent;
  for (; mantissa >= 256; mantissa /= 2) ++exponent;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | exponent << 7 | (mantissa & 0x7f));
}

// Halves of 0..127.
struct ByteTables {
  alignas(64) uint8_t upper[128] = {};
  alignas(64) uint8_t lower[128] = {};
  constexpr ByteTables() {
    for (int i = 0; i < 128; ++i) {
      upper[i] = static_cast<uint8_t>(IntegerAsBf16(i) >> 8);
      lower[i] = static_cast<uint8_t>(IntegerAsBf16(i) & 0xff);
    }
  }
};
constexpr ByteTables kByteTables;

// 64 signed bytes as BF16, in two bytes each.
HEARTH_INLINE Bf16Bytes LookUpI8(__m512i q) {
  const __m512i upper_low = _mm512_load_si512(kByteTables.upper), upper_high = _mm512_load_si512(kByteTables.upper + 64);
  const __m512i lower_low = _mm512_load_si512(kByteTables.lower), lower_high = _mm512_load_si512(kByteTables.lower + 64);
  // The look-up ignores bit 7 of the index, which |-128| alone has: found as 0, made 128 (0x4300).
  const __m512i size = _mm512_abs_epi8(q);
  const __m512i found = _mm512_permutex2var_epi8(upper_low, size, upper_high);
  const __m512i magnitude = _mm512_mask_blend_epi8(_mm512_movepi8_mask(size), found, _mm512_set1_epi8(0x43));
  const __m512i lower = _mm512_permutex2var_epi8(lower_low, size, lower_high);
  // magnitude | (q & 0x80)
  return {_mm512_ternarylogic_epi32(magnitude, q, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8), lower};
}

// Entry i is (i & (kCodes - 1)) + kOffset; the look-up reads six bits of a two-register table and five of a one-register one.
template <int kEntries, int kCodes, int kOffset>
struct WordTable {
  alignas(64) uint16_t word[kEntries] = {};
  constexpr WordTable() {
    for (int i = 0; i < kEntries; ++i) word[i] = IntegerAsBf16((i & (kCodes - 1)) + kOffset);
  }
};
constexpr WordTable<32, 16, 0> kNibbles;
constexpr WordTable<32, 16, -8> kSignedNibbles;
constexpr WordTable<64, 64, -32> kSixBits;

// Places of the even ones of 64 words.
struct EvenWords {
  alignas(64) uint16_t word[32] = {};
  constexpr EvenWords() {
    for (int i = 0; i < 32; ++i) word[i] = static_cast<uint16_t>(2 * i);
  }
};
constexpr EvenWords kEvenWords;

// The sums of 32 numbers each, from x on.
HEARTH_INLINE __m128 SumsOfFour(const bf16* x) {
  const auto sum = [x](int i) __attribute__((always_inline)) {
    return _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)_mm512_set1_epi16(0x3f80), (__m512bh)Vec512::LoadBytes(x + 32 * i));
  };
  return Vec512::ReduceFour(sum(0), sum(1), sum(2), sum(3));
}

struct PairOfVectors {
  __m512bh a, b;
};

template <DType kDType>
struct BlockInBf16Base : BlockSizes<kDType> {
  using Acc = __m512;
  using W = PairOfVectors;
  static constexpr int kStep = 64;
  static constexpr int kSpan = BlockSizes<kDType>::kBlock < kStep ? kStep : BlockSizes<kDType>::kBlock;
};

// Blocks of 32 columns: two to a step, the first in lanes 0-7 and the second in 8-15, each with its scale there. The last of an odd number
// stands alone (the functions in One), zeros in the other's place.
template <DType kDType>
struct TwoBlocksInBf16 : BlockInBf16Base<kDType> {
  using X = PairOfVectors;
  using Scales = __m512;
  static HEARTH_INLINE void Add(__m512& total, const PairOfVectors& w, const Scales& scales, int, const X& x) {
    total = _mm512_fmadd_ps(_mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), w.a, x.a), w.b, x.b), scales, total);
  }
};

template <DType kDType>
struct BlockInBf16;

template <>
struct BlockInBf16<DType::kQ8_0> : TwoBlocksInBf16<DType::kQ8_0> {
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    const __m128i first = _mm_set1_epi16(static_cast<int16_t>(Bits16(p)));
    const __m128i second = _mm_set1_epi16(static_cast<int16_t>(Bits16(p + kBlockBytes)));
    out = _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
  }
  static HEARTH_INLINE void LoadScalesOne(const uint8_t* p, Scales& out) {
    out = _mm512_cvtph_ps(_mm256_zextsi128_si256(_mm_set1_epi16(static_cast<int16_t>(Bits16(p)))));
  }
  static HEARTH_INLINE W Load(const uint8_t* p, int) {
    return Widen(_mm512_inserti64x4(_mm512_castsi256_si512(Load32(p + 2)), Load32(p + kBlockBytes + 2), 1));
  }
  static HEARTH_INLINE W LoadOne(const uint8_t* p) { return Widen(_mm512_zextsi256_si512(Load32(p + 2))); }
  // The bytes' columns lie as those of F8InBf16.
  static HEARTH_INLINE X LoadX(const bf16* p) { return Same(F8InBf16::LoadX(p)); }
  static HEARTH_INLINE X LoadXOne(const bf16* p) { return Same(F8InBf16::LoadXN(p, kBlock)); }

 private:
  static HEARTH_INLINE X Same(const F8InBf16::X& x) { return {x.a, x.b}; }
  static HEARTH_INLINE W Widen(__m512i q) {
    const Bf16Bytes bytes = LookUpI8(q);
    return {(__m512bh)_mm512_unpacklo_epi8(bytes.lower, bytes.upper), (__m512bh)_mm512_unpackhi_epi8(bytes.lower, bytes.upper)};
  }
};

template <>
struct BlockInBf16<DType::kI4G32> : TwoBlocksInBf16<DType::kI4G32> {
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    out = Scale(_mm512_inserti64x4(_mm512_castsi256_si512(Twice(p)), Twice(p + kBlockBytes), 1));
  }
  static HEARTH_INLINE void LoadScalesOne(const uint8_t* p, Scales& out) { out = Scale(_mm512_zextsi256_si512(Twice(p))); }
  static HEARTH_INLINE W Load(const uint8_t* p, int) {
    return Widen(_mm256_inserti128_si256(_mm256_castsi128_si256(Load16(p + 2)), Load16(p + kBlockBytes + 2), 1));
  }
  static HEARTH_INLINE W LoadOne(const uint8_t* p) { return Widen(_mm256_zextsi128_si256(Load16(p + 2))); }
  // The even columns of 64, and the odd ones: as the nibbles lie.
  static HEARTH_INLINE X LoadX(const bf16* p) { return Arrange(Vec512::LoadBytes(p), Vec512::LoadBytes(p + 32)); }
  static HEARTH_INLINE X LoadXOne(const bf16* p) { return Arrange(Vec512::LoadBytes(p), _mm512_setzero_si512()); }

 private:
  static HEARTH_INLINE __m128i Load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static HEARTH_INLINE __m256i Twice(const uint8_t* p) { return _mm256_set1_epi16(static_cast<int16_t>(Bits16(p))); }
  // BF16 is the upper half of F32.
  static HEARTH_INLINE __m512 Scale(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static HEARTH_INLINE W Widen(__m256i bytes) {
    const __m512i words = _mm512_cvtepu8_epi16(bytes);
    const __m512i table = _mm512_load_si512(kSignedNibbles.word);
    return {(__m512bh)_mm512_permutexvar_epi16(words, table), (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table)};
  }
  static HEARTH_INLINE X Arrange(__m512i low, __m512i high) {
    const __m512i index = _mm512_load_si512(kEvenWords.word);
    const __m512i odd = _mm512_add_epi16(index, _mm512_set1_epi16(1));
    return {(__m512bh)_mm512_permutex2var_epi16(low, index, high), (__m512bh)_mm512_permutex2var_epi16(low, odd, high)};
  }
};

// The 32 bytes of a step hold columns 0-31 in their low nibbles and 32-63 in the high ones.
template <>
struct BlockInBf16<DType::kQ4_K> : BlockInBf16Base<DType::kQ4_K> {
  struct Scales {
    float scale[8];
    float min[8];
  };
  struct X {
    __m512bh a, b;
    __m512 a_sum, b_sum;
  };
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) { BlockUnits<DType::kQ4_K>::Scales(p, out.scale, out.min); }
  static HEARTH_INLINE W Load(const uint8_t* p, int step) {
    const __m512i words = _mm512_cvtepu8_epi16(Load32(p + 16 + 32 * step));
    const __m512i table = _mm512_load_si512(kNibbles.word);
    return {(__m512bh)_mm512_permutexvar_epi16(words, table), (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table)};
  }
  static HEARTH_INLINE X LoadX(const bf16* p) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const __m512bh a = (__m512bh)Vec512::LoadBytes(p), b = (__m512bh)Vec512::LoadBytes(p + 32);
    return {a, b, _mm512_dpbf16_ps(_mm512_setzero_ps(), ones, a), _mm512_dpbf16_ps(_mm512_setzero_ps(), ones, b)};
  }
  static HEARTH_INLINE void Add(__m512& total, const W& w, const Scales& scales, int step, const X& x) {
    const __m512 zero = _mm512_setzero_ps();
    total = _mm512_fmadd_ps(_mm512_dpbf16_ps(zero, w.a, x.a), _mm512_set1_ps(scales.scale[2 * step]), total);
    total = _mm512_fmadd_ps(_mm512_dpbf16_ps(zero, w.b, x.b), _mm512_set1_ps(scales.scale[2 * step + 1]), total);
    total = _mm512_fmadd_ps(x.a_sum, _mm512_set1_ps(scales.min[2 * step]), total);
    total = _mm512_fmadd_ps(x.b_sum, _mm512_set1_ps(scales.min[2 * step + 1]), total);
  }
};

// A step is two runs of 32 columns; a run's two parts lie in lanes 0-7 and 8-15.
template <>
struct BlockInBf16<DType::kQ6_K> : BlockInBf16Base<DType::kQ6_K> {
  using X = PairOfVectors;
  struct Scales {
    alignas(64) float scale[16];
  };
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) { BlockUnits<DType::kQ6_K>::Scales(p, out.scale, nullptr); }
  // Look-ups take the lower nibble and, above it, two bits of `upper` where they have been shifted to; what stands higher is ignored.
  static HEARTH_INLINE W Load(const uint8_t* p, int step) {
    const int half = step / 2;
    __m512i low_a = _mm512_cvtepu8_epi16(Load32(p + 64 * half)), low_b = _mm512_cvtepu8_epi16(Load32(p + 64 * half + 32));
    __m512i upper_a = _mm512_cvtepu8_epi16(Load32(p + 128 + 32 * half)), upper_b;
    if (step % 2 == 0) {
      upper_b = _mm512_slli_epi16(upper_a, 2);
      upper_a = _mm512_slli_epi16(upper_a, 4);
    } else {
      low_a = _mm512_srli_epi16(low_a, 4);
      low_b = _mm512_srli_epi16(low_b, 4);
      upper_b = _mm512_srli_epi16(upper_a, 2);
    }
    return {Find(low_a, upper_a), Find(low_b, upper_b)};
  }
  static HEARTH_INLINE X LoadX(const bf16* p) { return {(__m512bh)Vec512::LoadBytes(p), (__m512bh)Vec512::LoadBytes(p + 32)}; }
  static HEARTH_INLINE void Add(__m512& total, const W& w, const Scales& scales, int step, const X& x) {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 all = _mm512_load_ps(scales.scale);
    const __m512i first = _mm512_inserti64x4(_mm512_set1_epi32(4 * step), _mm256_set1_epi32(4 * step + 1), 1);
    const __m512i second = _mm512_inserti64x4(_mm512_set1_epi32(4 * step + 2), _mm256_set1_epi32(4 * step + 3), 1);
    total = _mm512_fmadd_ps(_mm512_dpbf16_ps(zero, w.a, x.a), _mm512_permutexvar_ps(first, all), total);
    total = _mm512_fmadd_ps(_mm512_dpbf16_ps(zero, w.b, x.b), _mm512_permutexvar_ps(second, all), total);
  }

 private:
  static HEARTH_INLINE __m512bh Find(__m512i low, __m512i upper) {
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, upper, 0xca);  // 15 ? low : upper
    return (__m512bh)_mm512_permutex2var_epi16(_mm512_load_si512(kSixBits.word), code, _mm512_load_si512(kSixBits.word + 32));
  }
};

}  // namespace
}  // namespace hearth
