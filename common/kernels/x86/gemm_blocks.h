// The prefill form's product for block formats on the avx512bf16 path: as gemm_bf16.h, rows in lanes and tokens broadcast, but a scale holds for 32
// columns (Q6_K: 16) and belongs to one row. A tile of weights becomes BF16 integers once and meets all tokens of the panel.
//
// Order of sums of a (row, token): pairs of columns ascending within a part, in one lane; the part's sum times its scale is added to the total, then,
// for Q4_K, the part's minimum times its sum of activations is taken off; parts ascending. It depends on nothing else. Between chunks of columns the
// total waits in y. Included by avx512bf16.cc only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/block_units.h"
#include "common/kernels/x86/gemm_bf16.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

constexpr int kBlockGemmUnits = 4;         // of 32 columns in a tile
constexpr int64_t kBlockGemmTokens = 128;  // a panel: its activations in a chunk of columns fill 1 MiB at most
constexpr int64_t kBlockGemmChunk = 4096;  // columns
static_assert(32 * kBlockGemmUnits == kScaleBlock);

// A tile, and each of its rows' scales and minima.
template <DType kDType>
struct BlockGemmTile {
  using U = BlockUnits<kDType>;
  static constexpr int kParts = 32 / U::kPart;  // of a unit
  GemmTile numbers;
  alignas(64) float scale[kParts * kBlockGemmUnits][kGemmVectors][kGemmLanes];
  alignas(64) float min[U::kHasMin ? kParts * kBlockGemmUnits : 1][kGemmVectors][kGemmLanes];
};

// Vector `v` of the tile: up to 16 rows, `units` units of columns from column c on. Rows that are missing count as zero. Fetches the
// tile behind it, which is filled while nothing else happens.
template <DType kDType>
__attribute__((noinline)) void FillBlockTile(BlockGemmTile<kDType>& tile, int v, const uint8_t* data, int64_t stride, int64_t rows, int64_t c,
                                             int units) {
  using Tile = BlockGemmTile<kDType>;
  using U = BlockUnits<kDType>;
  constexpr int kPartsOfBlock = U::kBlock / U::kPart;
  constexpr int kAheadLines = (static_cast<int>(kScaleBlock) * U::kBlockBytes / U::kBlock + 63) / 64;
  const int live = rows < kGemmLanes ? static_cast<int>(rows) : kGemmLanes;
  for (int r = 0; r < kGemmLanes; ++r) {
    if (r < live) {
      const uint8_t* ahead = data + r * stride + (c + kScaleBlock) * U::kBlockBytes / U::kBlock;
      for (int line = 0; line < kAheadLines; ++line) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 * line), _MM_HINT_T0);
    }
    float scale[kPartsOfBlock] = {};
    float min[kPartsOfBlock] = {};
    for (int unit = 0; unit < units; ++unit) {
      const int64_t column = c + 32 * unit;
      const int64_t block = column / U::kBlock;
      if (r < live && (unit == 0 || column % U::kBlock == 0)) U::Scales(data + r * stride + block * U::kBlockBytes, scale, min);
      for (int part = 0; part < Tile::kParts; ++part) {
        const int of_block = static_cast<int>(column % U::kBlock) / U::kPart + part;
        tile.scale[unit * Tile::kParts + part][v][r] = scale[of_block];
        if constexpr (U::kHasMin) tile.min[unit * Tile::kParts + part][v][r] = min[of_block];
      }
    }
  }
  for (int unit = 0; unit < units; ++unit) {
    const int64_t column = c + 32 * unit;
    const uint8_t* p = data + column / U::kBlock * U::kBlockBytes;
    const int u = static_cast<int>(column % U::kBlock) / 32;
    const auto load = [&](int r) __attribute__((always_inline)) {
      if (r >= live) return _mm512_setzero_si512();
      __m512 numbers[2];
      Vec512::WidenI8(U::Unit(p + r * stride, u), numbers);
      return (__m512i)_mm512_cvtne2ps_pbh(numbers[1], numbers[0]);
    };
    __m512i groups[4][4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) Bf16Pairs::TransposeRows(load(4 * q), load(4 * q + 1), load(4 * q + 2), load(4 * q + 3), groups[q]);
    uint32_t* out = &tile.numbers.pairs[16 * unit][v][0];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i columns[4];
      TransposeLanes(groups[0][j], groups[1][j], groups[2][j], groups[3][j], columns);
#pragma GCC unroll 4
      for (int l = 0; l < 4; ++l) Bf16Pairs::Store(columns[l], 4 * l + j, out);
    }
  }
}

// totals[t][row] += the tile times T tokens.   x: the tile's first column of token 0; sums: of token 0's activations in the tile's parts
template <DType kDType, int V, int T>
__attribute__((noinline)) void MultiplyBlockTile(const BlockGemmTile<kDType>& tile, int units, const bf16* x, int64_t ldx, const float* sums,
                                                 int64_t ldsums, float (*totals)[kGemmRows]) {
  using Tile = BlockGemmTile<kDType>;
  constexpr int kPairs = 16 / Tile::kParts;
  for (int part = 0; part < units * Tile::kParts; ++part) {
    __m512 acc[V][T];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) acc[v][t] = _mm512_setzero_ps();
    }
    for (int p = part * kPairs; p < (part + 1) * kPairs; ++p) {
      __m512bh w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) w[v] = (__m512bh)_mm512_load_si512(tile.numbers.pairs[p][v]);
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        int32_t pair;
        std::memcpy(&pair, x + t * ldx + 2 * p, sizeof(pair));
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[v][t] = _mm512_dpbf16_ps(acc[v][t], w[v], both);
      }
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        float* to = totals[t] + v * kGemmLanes;
        __m512 total = _mm512_fmadd_ps(acc[v][t], _mm512_load_ps(tile.scale[part][v]), _mm512_load_ps(to));
        if constexpr (Tile::U::kHasMin) total = _mm512_fmadd_ps(_mm512_set1_ps(sums[t * ldsums + part]), _mm512_load_ps(tile.min[part][v]), total);
        _mm512_store_ps(to, total);
      }
    }
  }
}

template <DType kDType, int V, int... T>
HEARTH_INLINE void MultiplyBlockPart(std::integer_sequence<int, T...>, const BlockGemmTile<kDType>& tile, int units, const bf16* x, int64_t ldx,
                                     const float* sums, int64_t ldsums, int64_t count, float (*totals)[kGemmRows]) {
  static constexpr void (*kKernels[])(const BlockGemmTile<kDType>&, int, const bf16*, int64_t, const float*, int64_t,
                                      float(*)[kGemmRows]) = {MultiplyBlockTile<kDType, V, T + 1>...};
  kKernels[count - 1](tile, units, x, ldx, sums, ldsums, totals);
}

// In even parts: a rest of one or two tokens would wait for its own sums.
template <DType kDType, int V>
void MultiplyBlockTokens(const BlockGemmTile<kDType>& tile, int units, const bf16* x, int64_t ldx, const float* sums, int64_t ldsums, int64_t m_count,
                         float (*totals)[kGemmRows]) {
  const int64_t parts = (m_count + kGemmAtOnce - 1) / kGemmAtOnce;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * m_count / parts;
    const int64_t count = (part + 1) * m_count / parts - begin;
    MultiplyBlockPart<kDType, V>(std::make_integer_sequence<int, kGemmAtOnce>(), tile, units, x + begin * ldx, ldx, sums + begin * ldsums, ldsums,
                                 count, totals + begin);
  }
}

// What a call works in, on its stack.
template <DType kDType>
struct BlockGemmWork {
  static constexpr int64_t kSums = BlockUnits<kDType>::kHasMin ? kBlockGemmChunk / 32 : 1;
  BlockGemmTile<kDType> tile;
  alignas(64) float totals[kBlockGemmTokens][kGemmRows];
  float sums[kBlockGemmTokens][kSums];  // of a token's activations in each part of the chunk
};

// Rows [row, row + rows), at most 32, over columns [c0, c0 + cols): y's totals so far (none if c0 is 0) plus theirs.
template <DType kDType>
void BlockGemmRowsOf(const WeightView& w, int64_t row, int64_t rows, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t c0,
                     int64_t cols, BlockGemmWork<kDType>& work) {
  using U = BlockUnits<kDType>;
  using Work = BlockGemmWork<kDType>;
  const int64_t stride = w.row_stride / U::kBlock * U::kBlockBytes;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + row * stride;
  for (int64_t m = 0; m < m_count; ++m) {
    for (int64_t r = 0; r < kGemmRows; ++r) work.totals[m][r] = c0 > 0 && r < rows ? y[m * ldy + row + r] : 0.0f;
  }
  static constexpr decltype(&MultiplyBlockTokens<kDType, 1>) kMultiply[] = {MultiplyBlockTokens<kDType, 1>, MultiplyBlockTokens<kDType, 2>,
                                                                            MultiplyBlockTokens<kDType, 3>, MultiplyBlockTokens<kDType, 4>};
  static_assert(sizeof(kMultiply) / sizeof(kMultiply[0]) == kGemmVectors);
  const int vectors = static_cast<int>((rows + kGemmLanes - 1) / kGemmLanes);
  for (int64_t c = c0; c < c0 + cols; c += 32 * kBlockGemmUnits) {
    const int64_t left = (c0 + cols - c) / 32;
    const int units = left < kBlockGemmUnits ? static_cast<int>(left) : kBlockGemmUnits;
    for (int v = 0; v < vectors; ++v) {
      FillBlockTile<kDType>(work.tile, v, data + v * kGemmLanes * stride, stride, rows - v * kGemmLanes, c, units);
    }
    kMultiply[vectors - 1](work.tile, units, x + c, ldx, work.sums[0] + (U::kHasMin ? (c - c0) / 32 : 0), Work::kSums, m_count, work.totals);
  }
  for (int64_t m = 0; m < m_count; ++m) std::memcpy(y + m * ldy + row, work.totals[m], static_cast<size_t>(rows) * sizeof(float));
}

template <DType kDType>
void BlockGemm(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  BlockGemmWork<kDType> work;
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t m0 = 0; m0 < m_count; m0 += kBlockGemmTokens) {
    const int64_t count = m_count - m0 < kBlockGemmTokens ? m_count - m0 : kBlockGemmTokens;
    const bf16* xm = x + m0 * ldx;
    for (int64_t c0 = 0; c0 < w.cols; c0 += kBlockGemmChunk) {
      const int64_t cols = w.cols - c0 < kBlockGemmChunk ? w.cols - c0 : kBlockGemmChunk;
      if constexpr (BlockUnits<kDType>::kHasMin) {
        for (int64_t m = 0; m < count; ++m) {
          for (int64_t part = 0; part < cols / 32; ++part) {
            const __m512bh values = (__m512bh)Vec512::LoadBytes(xm + m * ldx + c0 + 32 * part);
            work.sums[m][part] = Vec512::ReduceAdd(_mm512_dpbf16_ps(_mm512_setzero_ps(), ones, values));
          }
        }
      }
      for (int64_t row = row_begin; row < row_end; row += kGemmRows) {
        const int64_t rows = row_end - row < kGemmRows ? row_end - row : kGemmRows;
        BlockGemmRowsOf<kDType>(w, row, rows, xm, ldx, count, y + m0 * ldy, ldy, c0, cols, work);
      }
    }
  }
}

template <class Path>
void GemmOrBlockGemm(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  switch (w.dtype) {
    case DType::kQ8_0: return BlockGemm<DType::kQ8_0>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kQ6_K: return BlockGemm<DType::kQ6_K>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kQ4_K: return BlockGemm<DType::kQ4_K>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kI4G32: return BlockGemm<DType::kI4G32>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    default: return Gemm<Path>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  }
}

}  // namespace
}  // namespace hearth
