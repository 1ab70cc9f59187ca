// The page form of attend_page.h in VDPBF16PS. Included by the files of this folder only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/gemm_bf16.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

struct DotPage {
  using G = DotForm;
  using V = Vec512;
  using Keys = Bf16Pairs;
  static void FillValues(G::Tile& tile, int64_t v, int64_t pair, const bf16* values, int64_t ld, int64_t begin, int64_t end, int64_t cols) {
    const __mmask16 mask = V::First16(cols);
    const auto words = [&](int64_t j) {
      return j >= begin && j < end ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values + j * ld)) : _mm512_setzero_si512();
    };
    for (int64_t p = 0; p < kAttendPositions / 2; ++p) {
      _mm512_store_si512(tile.pairs[pair + p][v], _mm512_or_si512(words(2 * p), _mm512_slli_epi32(words(2 * p + 1), 16)));
    }
  }
};

}  // namespace
}  // namespace hearth
