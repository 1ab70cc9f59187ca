// Compiled with the flags of the avx512bf16 path, for the bench alone; isa_local.h has the rules of this folder.
#include "common/kernels/x86/lab_entries.h"

#include <immintrin.h>

#include "common/kernels/x86/bf16_dots.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

// Shift instead of look up: BF16 has E4M3's mantissa in its upper bits and an exponent that is larger by 120, so a normal code is its own bits, moved.
// Zero and the subnormals, about one code in ten thousand of a Gaussian block, take the tables. Even and odd codes become a vector each.
struct F8ByShift {
  using Acc = Vec512::F;
  using Vector = __m512bh;
  static constexpr bool kScaled = true;
  static constexpr bool kSumsTerms = false;
  static constexpr float kFactor = 1.0f;
  static constexpr int kElementBytes = 1;
  static constexpr int kStep = 64;
  static constexpr int kVectors = 2;

  struct W {
    Vector v[kVectors];  // of the even columns, and of the odd ones
  };
  using X = W;

  static HEARTH_INLINE W Load(const uint8_t* p) { return Widen(_mm512_loadu_si512(p)); }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return Widen(Vec512::LoadBytesN(p, n)); }
  static HEARTH_INLINE X LoadX(const bf16* p) { return Split(Vec512::LoadBytes(p), Vec512::LoadBytes(p + 32)); }
  static HEARTH_INLINE void Dot(Acc& acc, Vector w, Vector x) { acc = _mm512_dpbf16_ps(acc, w, x); }

 private:
  static HEARTH_INLINE W Widen(__m512i codes) {
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0, 0)) return LookUp(codes);
    const __m512i bits = _mm512_set1_epi16(static_cast<int16_t>(0x87f0)), bias = _mm512_set1_epi16(120 << 7);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 4), odd = _mm512_srai_epi16(codes, 4);
    return {{(__m512bh)_mm512_add_epi16(_mm512_and_si512(even, bits), bias), (__m512bh)_mm512_add_epi16(_mm512_and_si512(odd, bits), bias)}};
  }
  static __attribute__((noinline, cold)) W LookUp(__m512i codes) {
    const Bf16Bytes bytes = LookUpF8(codes);
    const __m512i low_byte = _mm512_set1_epi16(0x00ff);
    return {{(__m512bh)_mm512_or_si512(_mm512_slli_epi16(bytes.upper, 8), _mm512_and_si512(bytes.lower, low_byte)),
             (__m512bh)_mm512_or_si512(_mm512_andnot_si512(low_byte, bytes.upper), _mm512_srli_epi16(bytes.lower, 8))}};
  }
  static HEARTH_INLINE X Split(__m512i low, __m512i high) {
    alignas(64) static constexpr auto kEven = [] {
      struct {
        uint16_t index[32];
      } even = {};
      for (int i = 0; i < 32; ++i) even.index[i] = static_cast<uint16_t>(2 * i);
      return even;
    }();
    const __m512i even = _mm512_load_si512(kEven.index);
    return {{(__m512bh)_mm512_permutex2var_epi16(low, even, high),
             (__m512bh)_mm512_permutex2var_epi16(low, _mm512_add_epi16(even, _mm512_set1_epi16(1)), high)}};
  }
};

// The product's look-up as a compiler makes it when left alone: each of the three uses of a line reads it anew.
struct F8ReadThrice : F8InBf16 {
  static HEARTH_INLINE W Load(const uint8_t* p) {
    const Bf16Bytes bytes = LookUpF8(_mm512_loadu_si512(p));
    return {{(__m512bh)_mm512_unpacklo_epi8(bytes.lower, bytes.upper), (__m512bh)_mm512_unpackhi_epi8(bytes.lower, bytes.upper)}};
  }
};

template <int kRowsOfOne, int kRowsOfTwo, int kRows, int kTokens>
struct LabPath {
  using V = Vec512;
  template <class D, int kPieces>
  static constexpr TileShapes kLinearTiles = {.one = {kRowsOfOne, 1}, .few = {kRowsOfTwo, 2}, .many = {kRows, kTokens}};
};

template <class D, int kRowsOfOne, int kRowsOfTwo, int kRows, int kTokens, bool kAhead = true>
void LabLinear(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, int terms, float* y, int64_t ldy, int64_t row_begin,
               int64_t row_end) {
  using Path = LabPath<kRowsOfOne, kRowsOfTwo, kRows, kTokens>;
  WeightView view = w;
  view.fetch_ahead = kAhead;
  if (terms == 1) return LinearOf<Path, D, 1>(view, x, ldx, m_count, y, ldy, row_begin, row_end);
  LinearOf<Path, D, 2>(view, x, ldx, m_count, y, ldy, row_begin, row_end);
}

}  // namespace

// Names: rows of a group for one token; for two; rows x tokens of a tile for more.
constinit const LabEntry kLabEntries[kNumLabEntries] = {
    {"1; 4; 4 x 4", LabLinear<F8InBf16, 1, 4, 4, 4>},
    {"2; 6; 4 x 3", LabLinear<F8InBf16, 2, 6, 4, 3>},
    {"8; 8; 3 x 6", LabLinear<F8InBf16, 8, 8, 3, 6>},
    {"4; 8; 2 x 6", LabLinear<F8InBf16, 4, 8, 2, 6>},
    {"4; 8; 4 x 6, not fetched ahead", LabLinear<F8InBf16, 4, 8, 4, 6, false>},
    {"4; 8; 4 x 6, each line read three times", LabLinear<F8ReadThrice, 4, 8, 4, 6>},
    {"4; 8; 4 x 6, shift with a rare branch", LabLinear<F8ByShift, 4, 8, 4, 6>},
    {"8; 8; 4 x 4, shift with a rare branch", LabLinear<F8ByShift, 8, 8, 4, 4>},
};

}  // namespace hearth
