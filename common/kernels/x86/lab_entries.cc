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
  static constexpr bool kScaled = true;
  static constexpr float kFactor = 1.0f;
  static constexpr int kElementBytes = 1;
  static constexpr int kStep = 64;

  struct W {
    __m512bh even, odd;
  };
  using X = W;

  static HEARTH_INLINE W Load(const uint8_t* p) { return Widen(_mm512_loadu_si512(p)); }
  static HEARTH_INLINE W LoadN(const uint8_t* p, int64_t n) { return Widen(Vec512::LoadBytesN(p, n)); }
  static HEARTH_INLINE X LoadX(const bf16* p) { return Split(Vec512::LoadBytes(p), Vec512::LoadBytes(p + 32)); }
  static HEARTH_INLINE X LoadXN(const bf16* p, int64_t n) { return Split(Vec512::LoadBytesN(p, 2 * n), Vec512::LoadBytesN(p + 32, 2 * n - 64)); }
  static HEARTH_INLINE void Dot(Acc& acc, const W& w, const X& x) {
    acc = _mm512_dpbf16_ps(acc, w.even, x.even);
    acc = _mm512_dpbf16_ps(acc, w.odd, x.odd);
  }

 private:
  static HEARTH_INLINE W Widen(__m512i codes) {
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0, 0)) return LookUp(codes);
    const __m512i bits = _mm512_set1_epi16(static_cast<int16_t>(0x87f0)), bias = _mm512_set1_epi16(120 << 7);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 4), odd = _mm512_srai_epi16(codes, 4);
    return {(__m512bh)_mm512_add_epi16(_mm512_and_si512(even, bits), bias), (__m512bh)_mm512_add_epi16(_mm512_and_si512(odd, bits), bias)};
  }
  static __attribute__((noinline, cold)) W LookUp(__m512i codes) {
    const Bf16Bytes bytes = LookUpF8(codes);
    const __m512i low_byte = _mm512_set1_epi16(0x00ff);
    return {(__m512bh)_mm512_or_si512(_mm512_slli_epi16(bytes.upper, 8), _mm512_and_si512(bytes.lower, low_byte)),
            (__m512bh)_mm512_or_si512(_mm512_andnot_si512(low_byte, bytes.upper), _mm512_srli_epi16(bytes.lower, 8))};
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
    return {(__m512bh)_mm512_permutex2var_epi16(low, even, high),
            (__m512bh)_mm512_permutex2var_epi16(low, _mm512_add_epi16(even, _mm512_set1_epi16(1)), high)};
  }
};

// R rows at a time by policy D; kAhead: the next group of rows is fetched meanwhile.
template <class D, int R, bool kAhead>
void LabRows(const WeightView& w, const bf16* x, float* y, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + R <= end; row += R) {
    LinearRows<Vec512, D, R, 1>(w, row, x, w.cols, 1, y, w.rows, kAhead && row + 2 * R <= end ? R * w.row_stride : 0);
  }
  for (; row < end; ++row) LinearRows<Vec512, D, 1, 1>(w, row, x, w.cols, 1, y, w.rows, 0);
}

}  // namespace

constinit const LabEntry kLabEntries[kNumLabEntries] = {
    {"two tables, 4 rows", LabRows<F8InBf16, 4, true>},
    {"two tables, 8 rows", LabRows<F8InBf16, 8, true>},
    {"two tables, 8 rows, no software prefetch", LabRows<F8InBf16, 8, false>},
    {"shift, rare branch, 4 rows", LabRows<F8ByShift, 4, true>},
    {"shift, rare branch, 8 rows", LabRows<F8ByShift, 8, true>},
};

}  // namespace hearth
