// The prefill form's product for block formats on the avx512bf16 path (see gemm.h): tiles hold the integers as BF16 numbers, and the scales of each row
// and part of a block beside them.
//
// Order of sums of a (row, token): pairs of columns ascending within a part, in one lane (two at a time with VDPBF16PS); the part's sum times its scale
// is added to the total, then, for Q4_K and Q5_K, the part's minimum times its sum of activations is taken off; parts ascending. It depends on nothing else.
// Included by avx512bf16.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/block_bf16_dots.h"
#include "common/kernels/x86/block_units.h"
#include "common/kernels/x86/gemm.h"
#include "common/kernels/x86/gemm_bf16.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

// Halves of the integers -32..31, found by their lower six bits.
struct SixBitTables {
  alignas(64) uint8_t upper[64] = {};
  alignas(64) uint8_t lower[64] = {};
  constexpr SixBitTables() {
    for (int i = 0; i < 64; ++i) {
      upper[i] = static_cast<uint8_t>(IntegerAsBf16(i < 32 ? i : i - 64) >> 8);
      lower[i] = static_cast<uint8_t>(IntegerAsBf16(i < 32 ? i : i - 64) & 0xff);
    }
  }
};
constexpr SixBitTables kSixBitTables;

// How the integers become pairs in a tile: as signed bytes they are moved like FP8 codes (gemm_bf16.h), and then looked up.
template <DType kDType>
struct BlockPairs : BlockUnits<kDType> {
  using U = BlockUnits<kDType>;

  // 64 columns of a row, of which `cols` are there, from unit `u` of its block on.
  static HEARTH_INLINE __m512i Load(const uint8_t* block, int u, int64_t cols) {
    const __m512i first = _mm512_zextsi256_si512(U::Unit(block, u));
    if (cols <= 32) return first;
    return _mm512_inserti64x4(first, U::kBlock > 32 ? U::Unit(block, u + 1) : U::Unit(block + U::kBlockBytes, 0), 1);
  }
  static HEARTH_INLINE void TransposeRows(__m512i r0, __m512i r1, __m512i r2, __m512i r3, __m512i* out) {
    F8Pairs::TransposeRows(r0, r1, r2, r3, out);
  }
  static HEARTH_INLINE void Store(__m512i columns, int j, uint32_t* out) {
    const Bf16Bytes bytes = LookUp(columns);
    _mm512_store_si512(out + 2 * j * kDotRows, _mm512_unpacklo_epi8(bytes.lower, bytes.upper));
    _mm512_store_si512(out + (2 * j + 1) * kDotRows, _mm512_unpackhi_epi8(bytes.lower, bytes.upper));
  }

 private:
  static HEARTH_INLINE Bf16Bytes LookUp(__m512i q) {
    if constexpr (kDType == DType::kQ8_0) return LookUpI8(q);
    return {_mm512_permutexvar_epi8(q, _mm512_load_si512(kSixBitTables.upper)), _mm512_permutexvar_epi8(q, _mm512_load_si512(kSixBitTables.lower))};
  }
};

template <DType kDType>
struct BlockForm {
  using V = Vec512;
  using U = BlockUnits<kDType>;
  static constexpr int kVectors = DotForm::kVectors;
  static constexpr int kAtOnce = DotForm::kAtOnce;
  static constexpr int kParts = kScaleBlock / U::kPart;

  // Scales are those of all blocks that the tile's columns lie in: a block that fills two tiles gives them to the first. Then minima, negated.
  struct Tile : DotForm::Tile {
    static constexpr int kScales = U::kBlock > kScaleBlock ? U::kBlock / U::kPart : kParts;
    alignas(64) float scales[kScales * (U::kHasMin ? 2 : 1)][kVectors][V::kLanes];
    int first_part;  // where in `scales` the tile's columns begin
    // Of each token's activations in each part, with minima only.
    float sums[U::kHasMin ? kGemmTokens : 1][kParts];
  };

  template <class P>
  static __attribute__((noinline)) void Fill(Tile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t begin, int64_t cols) {
    const int64_t live = rows < V::kLanes ? rows : V::kLanes;
    const uint8_t* block = data + ColumnBytes<P>(begin);
    const int in_block = static_cast<int>(begin % U::kBlock);
    tile.first_part = in_block / U::kPart;
    if (in_block == 0) FillScales(tile, v, block, stride, live, cols);
    for (int c = 0; c < kScaleBlock; c += 64) {
      const uint8_t* p = block + (U::kBlock > kScaleBlock ? 0 : c / U::kBlock * U::kBlockBytes);
      const int unit = U::kBlock > kScaleBlock ? (in_block + c) / 32 : 0;
      __m512i groups[4][4];
      DotForm::Transpose<P>([&](int r) { return r < live && c < cols ? P::Load(p + r * stride, unit, cols - c) : _mm512_setzero_si512(); }, groups);
      DotForm::StorePairs<P>(tile, v, c, groups);
    }
  }

  static HEARTH_INLINE void Prepare(Tile& tile, const bf16* x, int64_t ldx, int64_t count) {
    if constexpr (U::kHasMin) {
      for (int64_t t = 0; t < count; ++t, x += ldx) _mm_storeu_ps(tile.sums[t], SumsOfFour(x));
    }
  }

  template <int N, int T>
  static HEARTH_INLINE void Step(V::F (&acc)[N][T], const Tile& tile, int p, const bf16* x, int64_t ldx) {
    DotForm::Step<N, T>(acc, tile, p, x, ldx);
  }

  static HEARTH_INLINE V::F AddPart(V::F total, V::F sum, const Tile& tile, int part, int v, int64_t token) {
    const int place = tile.first_part + part;
    total = V::Fma(sum, V::Load(tile.scales[place][v]), total);
    if constexpr (U::kHasMin) total = V::Fma(V::Set(tile.sums[token][part]), V::Load(tile.scales[Tile::kScales + place][v]), total);
    return total;
  }

 private:
  static HEARTH_INLINE void FillScales(Tile& tile, int64_t v, const uint8_t* block, int64_t stride, int64_t live, int64_t cols) {
    if constexpr (U::kBlock > kScaleBlock) {
      V::F square[V::kLanes];
      for (int r = 0; r < V::kLanes; ++r) {
        alignas(64) float row[V::kLanes] = {};
        if (r < live) U::Scales(block + r * stride, row, row + Tile::kScales);
        square[r] = V::Load(row);
      }
      V::Transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < V::kLanes; ++i) V::Store(tile.scales[i][v], square[i]);
    } else {
      for (int part = 0; part < kParts; ++part) {
        for (int r = 0; r < V::kLanes; ++r) {
          float scale = 0.0f;
          if (r < live && part * U::kPart < cols) U::Scales(block + part * U::kBlockBytes + r * stride, &scale, nullptr);
          tile.scales[part][v][r] = scale;
        }
      }
    }
  }
};

template <class Path>
void GemmWithBlocks(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  const auto blocks = [&]<DType kDType>() { GemmOf<BlockForm<kDType>, BlockPairs<kDType>>(w, x, ldx, m_count, y, ldy, row_begin, row_end); };
  switch (w.dtype) {
    case DType::kQ8_0: return blocks.template operator()<DType::kQ8_0>();
    case DType::kQ6_K: return blocks.template operator()<DType::kQ6_K>();
    case DType::kQ4_K: return blocks.template operator()<DType::kQ4_K>();
    case DType::kI4G32: return blocks.template operator()<DType::kI4G32>();
    case DType::kQ5_K: return blocks.template operator()<DType::kQ5_K>();
    case DType::kQ3_K: return blocks.template operator()<DType::kQ3_K>();
    default: return Gemm<Path>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  }
}

}  // namespace
}  // namespace hearth
