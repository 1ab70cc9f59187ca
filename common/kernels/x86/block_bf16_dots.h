// Block formats times BF16 activations by VDPBF16PS: the policies of linear.h for the avx512bf16 path. Every quantized integer is a BF16 number
// that look-ups find: of bytes in two tables of halves, of nibbles and six-bit codes in one table of words. Integers stay in the lanes that the format
// has them in, so that widening costs little, and activations are put in that order once for all rows. A part's sum starts from zero in lanes of its
// own, and is scaled as it is added to the total. Included by avx512bf16.cc only; see isa_local.h.
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
constexpr WordTable<32, 32, 0> kFiveBits;
constexpr WordTable<32, 8, -4> kThreeBits;

// The even ones of 64 words, and the odd ones.
struct EvenWords {
  alignas(64) uint16_t word[32] = {};
  constexpr EvenWords() {
    for (int i = 0; i < 32; ++i) word[i] = static_cast<uint16_t>(2 * i);
  }
};
constexpr EvenWords kEvenWords;
HEARTH_INLINE __m512i Even(__m512i low, __m512i high) { return _mm512_permutex2var_epi16(low, _mm512_load_si512(kEvenWords.word), high); }
HEARTH_INLINE __m512i Odd(__m512i low, __m512i high) {
  return _mm512_permutex2var_epi16(low, _mm512_add_epi16(_mm512_load_si512(kEvenWords.word), _mm512_set1_epi16(1)), high);
}

// The sums of 32 numbers each, from x on.
HEARTH_INLINE __m128 SumsOfFour(const bf16* x) {
  const auto sum = [x](int i) __attribute__((always_inline)) {
    return _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)_mm512_set1_epi16(0x3f80), (__m512bh)Vec512::LoadBytes(x + 32 * i));
  };
  return Vec512::ReduceFour(sum(0), sum(1), sum(2), sum(3));
}

// Four lanes each of numbers a, b, c, d of a vector, for a permutation.
HEARTH_INLINE __m512i Quarters(int a, int b, int c, int d) { return _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d); }

HEARTH_INLINE __m512bh ArrangedAt(const bf16* x, int vector) { return (__m512bh)Vec512::LoadBytes(x + 32 * vector); }
HEARTH_INLINE void Arrange(__m512i value, bf16* x, int vector) { _mm512_storeu_si512(x + 32 * vector, value); }

// kSpan: columns between two looks at scales, kStep: between two weights W; kSpanX: BF16 numbers that a span's activations take up when arranged.
template <DType kDType, int kColumns>
struct BlockInBf16Base : BlockSizes<kDType> {
  using Acc = __m512;
  static constexpr bool kSumsTerms = false;
  static constexpr int kSpan = BlockSizes<kDType>::kBlock < kColumns ? kColumns : BlockSizes<kDType>::kBlock;
  static constexpr int kStep = kColumns;
  static constexpr int kSpanX = kSpan;
};

template <DType kDType>
struct BlockInBf16;

// Two blocks to a step, the first in lanes 0-7 and the second in 8-15, each with its scale there.
template <>
struct BlockInBf16<DType::kQ8_0> : BlockInBf16Base<DType::kQ8_0, 64> {
  struct W {
    __m512bh a, b;
  };
  using Scales = __m512;

  // Interleaving bytes within 128-bit lanes moves columns as it does FP8 codes.
  static HEARTH_INLINE void ArrangeX(const bf16* x, bf16* out) {
    const F8InBf16::X arranged = F8InBf16::LoadX(x);
    Arrange((__m512i)arranged.v[0], out, 0);
    Arrange((__m512i)arranged.v[1], out, 1);
  }
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    const __m128i first = _mm_set1_epi16(static_cast<int16_t>(Bits16(p)));
    const __m128i second = _mm_set1_epi16(static_cast<int16_t>(Bits16(p + kBlockBytes)));
    out = _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
  }
  static HEARTH_INLINE W Load(const uint8_t* p, const Scales&, int) {
    const Bf16Bytes bytes = LookUpI8(_mm512_inserti64x4(_mm512_castsi256_si512(Load32(p + 2)), Load32(p + kBlockBytes + 2), 1));
    return {(__m512bh)_mm512_unpacklo_epi8(bytes.lower, bytes.upper), (__m512bh)_mm512_unpackhi_epi8(bytes.lower, bytes.upper)};
  }
  static HEARTH_INLINE void Add(__m512& total, const W& w, const Scales& scales, int, const bf16* x) {
    const __m512 sum = _mm512_dpbf16_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), w.a, ArrangedAt(x, 0)), w.b, ArrangedAt(x, 1));
    total = _mm512_fmadd_ps(sum, scales, total);
  }
  static HEARTH_INLINE void Finish(__m512&, const Scales&, const bf16*) {}
};

// Where four blocks' scales and nibbles lie.
struct I4Places {
  alignas(64) uint8_t scale[64] = {};
  alignas(64) uint8_t nibbles[64] = {};  // bit 6: of a second vector, which begins 8 bytes behind the first
  constexpr I4Places() {
    for (int i = 0; i < 64; ++i) {
      const int block = 18 * (i / 16), at = block + 2 + i % 16;
      scale[i] = static_cast<uint8_t>(block + i % 2);
      nibbles[i] = static_cast<uint8_t>(at < 64 ? at : 64 + at - 8);
    }
  }
};
constexpr I4Places kI4Places;

// Four blocks to a step, each in four lanes: word j of a block's eight holds columns 4 j to 4 j + 3, and vector k of the four takes the k-th of them.
template <>
struct BlockInBf16<DType::kI4G32> : BlockInBf16Base<DType::kI4G32, 128> {
  struct W {
    __m512bh q[4];
  };
  using Scales = __m512;

  static HEARTH_INLINE void ArrangeX(const bf16* x, bf16* out) {
    const __m512i a = Vec512::LoadBytes(x), b = Vec512::LoadBytes(x + 32), c = Vec512::LoadBytes(x + 64), d = Vec512::LoadBytes(x + 96);
    const __m512i even_low = Even(a, b), even_high = Even(c, d), odd_low = Odd(a, b), odd_high = Odd(c, d);
    Arrange(Even(even_low, even_high), out, 0);
    Arrange(Even(odd_low, odd_high), out, 1);
    Arrange(Odd(even_low, even_high), out, 2);
    Arrange(Odd(odd_low, odd_high), out, 3);
  }
  // BF16 is the upper half of F32: bytes 2 and 3 of each of a block's four lanes.
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    out = (__m512)_mm512_maskz_permutexvar_epi8(0xccccccccccccccccull, _mm512_load_si512(kI4Places.scale), Vec512::LoadBytes(p));
  }
  static HEARTH_INLINE W Load(const uint8_t* p, const Scales&, int) {
    // Four blocks are 72 bytes.
    const __m512i words = _mm512_permutex2var_epi8(Vec512::LoadBytes(p), _mm512_load_si512(kI4Places.nibbles), Vec512::LoadBytes(p + 8));
    const __m512i table = _mm512_load_si512(kSignedNibbles.word);
    W w;
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) w.q[k] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * k), table);
    return w;
  }
  static HEARTH_INLINE void Add(__m512& total, const W& w, const Scales& scales, int, const bf16* x) {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sum = _mm512_dpbf16_ps(sum, w.q[k], ArrangedAt(x, k));
    total = _mm512_fmadd_ps(sum, scales, total);
  }
  static HEARTH_INLINE void Finish(__m512&, const Scales&, const bf16*) {}
};

// First bits of the eight scales and eight minima. Bytes 4-11 hold four of each in their lower six bits, and in the upper two those of the four that
// follow, bytes 12-15 those four's lower halves (BlockUnits). `upper`: in bytes 4-11, a half's bits as fifth and sixth; `lower`: in bytes 8-15.
struct Q4Fields {
  alignas(16) uint8_t upper[16] = {};
  alignas(16) uint8_t lower[16] = {};
  alignas(16) uint8_t of_upper[16] = {};  // the bits that `upper` has
  constexpr Q4Fields() {
    for (int i = 0; i < 16; ++i) {
      const int byte = i % 4;
      const bool min = i >= 8, in_halves = i % 8 >= 4;
      upper[i] = static_cast<uint8_t>((min ? 32 : 0) + 8 * byte + (in_halves ? 2 : 0));
      lower[i] = static_cast<uint8_t>(32 + 8 * byte + (min ? 4 : 0));
      of_upper[i] = in_halves ? 0x30 : 0x3f;
    }
  }
};
constexpr Q4Fields kQ4Fields;

// For each step of 128 columns and byte of the two vectors' halves, where eight bits begin among the 64 around it that bring the bit of its lower run of 32
// columns to place kTo. A byte has a bit for each of the block's runs: those of a step's lower half of 64 columns stand kApart runs below the upper's.
template <int kTo, int kApart>
struct RunBits {
  alignas(64) uint8_t begin[2][64] = {};
  constexpr RunBits() {
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < 64; ++i) begin[step][i] = static_cast<uint8_t>((8 * (i % 8) + 4 * step + (i < 32 ? 0 : kApart) + 64 - kTo) % 64);
    }
  }
  // `bits`: 32 bytes. Byte k of both halves is byte k of these.
  HEARTH_INLINE __m512i Moved(const uint8_t* bits, int step) const {
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(begin[step]), _mm512_broadcast_i64x4(Load32(bits)));
  }
};
constexpr RunBits<4, 2> kFifthBits;
constexpr RunBits<2, 1> kThirdBits;

// 64 bytes to a step of four parts: the first 32 bytes hold parts 0 and 1 in their low and high nibbles, the others parts 2 and 3. As words they hold two
// columns of two parts each, the lower lanes of parts 0 and 1 and the upper ones of 2 and 3. Q5_K has its fifth bits apart.
template <DType kDType>
struct BlockWithMinima : BlockInBf16Base<kDType, 128> {
  using BlockInBf16Base<kDType, 128>::kSpan;
  using BlockInBf16Base<kDType, 128>::kStep;
  static constexpr int kSpanX = kSpan + 32;  // sixteen floats behind them: eight zeros, then the sums over the parts
  struct W {
    __m512bh q[4];
    __m512 low_scale, high_scale;
  };
  using Scales = __m512;  // of the eight parts, then their minima, negated

  static HEARTH_INLINE void ArrangeX(const bf16* x, bf16* out) {
#pragma GCC unroll 2
    for (int step = 0; step < 2; ++step) {
      const bf16* p = x + kStep * step;
      const __m512i a = Vec512::LoadBytes(p), b = Vec512::LoadBytes(p + 32), c = Vec512::LoadBytes(p + 64), d = Vec512::LoadBytes(p + 96);
      Arrange(Even(a, c), out, 4 * step);
      Arrange(Even(b, d), out, 4 * step + 1);
      Arrange(Odd(a, c), out, 4 * step + 2);
      Arrange(Odd(b, d), out, 4 * step + 3);
    }
    const __m256 sums = _mm256_insertf128_ps(_mm256_castps128_ps256(SumsOfFour(x)), SumsOfFour(x + kStep), 1);
    Arrange((__m512i)_mm512_insertf32x8(_mm512_setzero_ps(), sums, 1), out, 8);
  }
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    const auto field = [](const uint8_t* places) __attribute__((always_inline)) { return _mm_load_si128(reinterpret_cast<const __m128i*>(places)); };
    const __m128i upper = _mm_multishift_epi64_epi8(field(kQ4Fields.upper), LoadTwice(p + 4));
    const __m128i lower = _mm_multishift_epi64_epi8(field(kQ4Fields.lower), LoadTwice(p + 8));
    const __m128i joined = _mm_ternarylogic_epi32(field(kQ4Fields.of_upper), upper, lower, 0xca);  // of_upper ? upper : lower
    const __m128i numbers = _mm_and_si128(joined, _mm_set1_epi8(0x3f));
    const __m128i factors = _mm_set1_epi32(static_cast<int32_t>(Bits32(p) ^ 0x80000000u));  // d, -dmin
    const __m256i places = _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi16(1), 1);
    const __m512 factor = _mm512_cvtph_ps(_mm256_permutexvar_epi16(places, _mm256_castsi128_si256(factors)));
    out = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(numbers)), factor);
  }
  static HEARTH_INLINE W Load(const uint8_t* p, const Scales& scales, int step) {
    W w;
    if constexpr (kDType == DType::kQ5_K) {
      const __m512i words = Vec512::LoadBytes(p + 48 + 64 * step);
      const __m512i fifth = kFifthBits.Moved(p + 16, step);
      const __m512i table = _mm512_load_si512(kFiveBits.word);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        // The bit of the part in the high nibbles is the next one.
        const __m512i bit = _mm512_srli_epi16(fifth, k / 2 * 8 + k % 2);
        const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(16), bit, _mm512_srli_epi16(words, 4 * k), 0xca);  // 16 ? bit : words
        w.q[k] = (__m512bh)_mm512_permutexvar_epi16(code, table);
      }
    } else {
      const __m512i words = Vec512::LoadBytes(p + 16 + 64 * step);
      const __m512i table = _mm512_load_si512(kNibbles.word);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) w.q[k] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * k), table);
    }
    w.low_scale = _mm512_permutexvar_ps(Quarters(4 * step, 4 * step, 4 * step + 2, 4 * step + 2), scales);
    w.high_scale = _mm512_permutexvar_ps(Quarters(4 * step + 1, 4 * step + 1, 4 * step + 3, 4 * step + 3), scales);
    return w;
  }
  static HEARTH_INLINE void Add(__m512& total, const W& w, const Scales&, int step, const bf16* x) {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 low = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, w.q[0], ArrangedAt(x, 4 * step)), w.q[2], ArrangedAt(x, 4 * step + 2));
    const __m512 high = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, w.q[1], ArrangedAt(x, 4 * step + 1)), w.q[3], ArrangedAt(x, 4 * step + 3));
    total = _mm512_fmadd_ps(low, w.low_scale, total);
    total = _mm512_fmadd_ps(high, w.high_scale, total);
  }
  static HEARTH_INLINE void Finish(__m512& total, const Scales& scales, const bf16* x) {
    total = _mm512_fmadd_ps(scales, _mm512_castsi512_ps(Vec512::LoadBytes(x + kSpan)), total);
  }

 private:
  static HEARTH_INLINE __m128i LoadTwice(const uint8_t* p) {
    return _mm_set1_epi64x(static_cast<int64_t>(Bits32(p) | static_cast<uint64_t>(Bits32(p + 4)) << 32));
  }
};

template <>
struct BlockInBf16<DType::kQ4_K> : BlockWithMinima<DType::kQ4_K> {};
template <>
struct BlockInBf16<DType::kQ5_K> : BlockWithMinima<DType::kQ5_K> {};

// Parts of 16 columns in four lanes each, the even columns of 64 in one vector and the odd ones in the next. A step is one half of the block.
template <DType kDType>
struct BlockOfSixteens : BlockInBf16Base<kDType, 128> {
  using BlockInBf16Base<kDType, 128>::kSpan;
  struct W {
    __m512bh q[4];
    __m512 low_scale, high_scale;
  };
  using Scales = __m512;

  static HEARTH_INLINE void ArrangeX(const bf16* x, bf16* out) {
#pragma GCC unroll 4
    for (int i = 0; i < kSpan / 64; ++i) {
      const __m512i a = Vec512::LoadBytes(x + 64 * i), b = Vec512::LoadBytes(x + 64 * i + 32);
      Arrange(Even(a, b), out, 2 * i);
      Arrange(Odd(a, b), out, 2 * i + 1);
    }
  }
  static HEARTH_INLINE __m512 LowScale(const Scales& scales, int step) {
    return _mm512_permutexvar_ps(Quarters(8 * step, 8 * step + 1, 8 * step + 2, 8 * step + 3), scales);
  }
  static HEARTH_INLINE __m512 HighScale(const Scales& scales, int step) {
    return _mm512_permutexvar_ps(Quarters(8 * step + 4, 8 * step + 5, 8 * step + 6, 8 * step + 7), scales);
  }
  static HEARTH_INLINE void Add(__m512& total, const W& w, const Scales&, int step, const bf16* x) {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 low = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, w.q[0], ArrangedAt(x, 4 * step)), w.q[1], ArrangedAt(x, 4 * step + 1));
    const __m512 high = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, w.q[2], ArrangedAt(x, 4 * step + 2)), w.q[3], ArrangedAt(x, 4 * step + 3));
    total = _mm512_fmadd_ps(low, w.low_scale, total);
    total = _mm512_fmadd_ps(high, w.high_scale, total);
  }
  static HEARTH_INLINE void Finish(__m512&, const Scales&, const bf16*) {}
};

// Byte k of the step's 32 holds, two bits each, columns k, 32 + k, 64 + k and 96 + k; the third bits stand apart.
template <>
struct BlockInBf16<DType::kQ3_K> : BlockOfSixteens<DType::kQ3_K> {
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    const __m512i numbers = _mm512_cvtepi8_epi32(BlockUnits<DType::kQ3_K>::ScaleBytes(p));
    out = _mm512_mul_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(HalfAt(p + 108)));
  }
  static HEARTH_INLINE W Load(const uint8_t* p, const Scales& scales, int step) {
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    const __m512i pairs = _mm512_srlv_epi16(_mm512_broadcast_i64x4(Load32(p + 32 + 32 * step)), shifts);
    const __m512i third = kThirdBits.Moved(p, step);
    const __m512i low = Join(pairs, third), high = Join(_mm512_srli_epi16(pairs, 4), _mm512_srli_epi16(third, 2));
    return {
        {Find(low), Find(_mm512_srli_epi16(low, 8)), Find(high), Find(_mm512_srli_epi16(high, 8))}, LowScale(scales, step), HighScale(scales, step)};
  }

 private:
  static HEARTH_INLINE __m512i Join(__m512i pairs, __m512i third) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(4), third, pairs, 0xca);  // 4 ? third : pairs
  }
  static HEARTH_INLINE __m512bh Find(__m512i code) { return (__m512bh)_mm512_permutexvar_epi16(code, _mm512_load_si512(kThreeBits.word)); }
};

// 64 bytes with columns 0-63 of the step in their low nibbles and 64-127 in the high ones, and 32 bytes with the upper bits of each run of 32 columns. As
// words they hold even columns in their lower bytes and odd ones in the upper.
template <>
struct BlockInBf16<DType::kQ6_K> : BlockOfSixteens<DType::kQ6_K> {
  static HEARTH_INLINE void LoadScales(const uint8_t* p, Scales& out) {
    const __m512i numbers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 192)));
    out = _mm512_mul_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(HalfAt(p + 208)));
  }
  // Look-ups take the lower nibble and, above it, two bits of `upper` where they have been shifted to; what stands higher is ignored.
  static HEARTH_INLINE W Load(const uint8_t* p, const Scales& scales, int step) {
    const __m512i lower = Vec512::LoadBytes(p + 64 * step);
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    const __m512i upper = _mm512_srlv_epi16(_mm512_broadcast_i64x4(Load32(p + 128 + 32 * step)), shifts);
    const __m512i low = Join(lower, _mm512_slli_epi16(upper, 4));
    const __m512i high = Join(_mm512_srli_epi16(lower, 4), upper);
    return {
        {Find(low), Find(_mm512_srli_epi16(low, 8)), Find(high), Find(_mm512_srli_epi16(high, 8))}, LowScale(scales, step), HighScale(scales, step)};
  }

 private:
  static HEARTH_INLINE __m512i Join(__m512i lower, __m512i upper) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), lower, upper, 0xca);  // 15 ? lower : upper
  }
  static HEARTH_INLINE __m512bh Find(__m512i code) {
    return (__m512bh)_mm512_permutex2var_epi16(_mm512_load_si512(kSixBits.word), code, _mm512_load_si512(kSixBits.word + 32));
  }
};

}  // namespace
}  // namespace hearth
