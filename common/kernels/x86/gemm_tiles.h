// The prefill form's product in 16 x 16 tiles of sums (AMX): a form of gemm.h that multiplies a tile of weights by itself, over a thin tile unit U.
// AmxUnit (amx.cc) is the processor's; the twin in tile_gemm_test.cc is plain C++, so that the same index arithmetic runs on any CPU.
// Included by those two only; see isa_local.h.
//
// Tokens are rows of the first operand, read where they lie; a tile of weights, pairs of columns above each other, is the second as it is.
// TDPBF16PS (Intel SDM volume 2): sums[token][row] += (x0 w0 + x2 w2 + ...) + (x1 w1 + x3 w3 + ...) over 32 columns, each of the two chains one FMA
// after another from zero, columns ascending; all rounded to nearest even; subnormal inputs count as zero and subnormal results become zero,
// whatever MXCSR says. No E4M3 value is subnormal in BF16 (bf16_dots.h).
//
// Order of sums of a (row, token): a 128-column block is four such steps, columns ascending, into sums that begin at zero; then they are stored, and
// total = sums * scale + total in F32, blocks ascending. Not with the scale folded into the weights, which would round them. Nor do totals
// stay in tiles, even without scales: a tile of weights is converted once and must meet all tokens before the next one takes its place.
//
// A unit U: vector type V; Tile and Fill<P> as gemm.h asks; kPairsStride, bytes between two pairs of columns in Tile::pairs[pair][vector][row];
//   Configure(config) and Release() of the calling thread's tile registers; Zero<T>(); Load<T>(from, stride) and Store<T>(to, stride), stride in
//   bytes; Dot<C, A, B>(): TDPBF16PS
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/gemm.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

constexpr int kTileRows = 16;     // of a tile register, of 64 bytes each
constexpr int kTileColumns = 32;  // BF16 numbers in one of them

// What LDTILECFG reads: palette 1 is eight registers of up to 16 rows of up to 64 bytes (Intel SDM volume 1, "Programming with Intel AMX").
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Sums in registers 0 to 3, tokens in 4 and 5, weights in 6 and 7.
HEARTH_INLINE TileConfig ConfigFor(int64_t tokens) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = i < 6 ? static_cast<uint8_t>(tokens) : kTileRows;
  }
  return config;
}

template <class U>
struct TileForm {
  using V = typename U::V;
  using Tile = typename U::Tile;
  static constexpr int kVectors = 4;
  static constexpr int kTokensRead = kTileRows;
  static constexpr int kSumRows = 2 * kTileRows;  // a pair of token groups by a pair of vectors: as many sums as four registers hold

  template <class P>
  static HEARTH_INLINE void Fill(Tile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t begin, int64_t cols) {
    U::template Fill<P>(tile, v, data, stride, rows, begin, cols);
  }

  // sums[token][row] of one or two groups of tokens and vectors of rows.
  template <int kGroups, int kWide, class Ahead>
  static __attribute__((noinline)) void Sums(const GemmStep<TileForm>& step, int64_t v, const bf16* const (&x)[2], float (&sums)[kSumRows][kSumRows],
                                             Ahead& ahead) {
    U::template Zero<0>();
    if constexpr (kWide > 1) U::template Zero<1>();
    if constexpr (kGroups > 1) U::template Zero<2>();
    if constexpr (kGroups > 1 && kWide > 1) U::template Zero<3>();
    const int64_t ldx_bytes = step.ldx * static_cast<int64_t>(sizeof(bf16));
    for (int c = 0; c < kScaleBlock; c += kTileColumns) {
      for (int pairs = 0; pairs < kTileColumns / 2; pairs += kAheadPairs) ahead.Step();
      const uint32_t(*pairs)[kTileRows] = &step.tile->pairs[c / 2][v];
      U::template Load<4>(x[0] + c, ldx_bytes);
      U::template Load<6>(pairs, U::kPairsStride);
      U::template Dot<0, 4, 6>();
      if constexpr (kWide > 1) {
        U::template Load<7>(pairs + 1, U::kPairsStride);
        U::template Dot<1, 4, 7>();
      }
      if constexpr (kGroups > 1) {
        U::template Load<5>(x[1] + c, ldx_bytes);
        U::template Dot<2, 5, 6>();
        if constexpr (kWide > 1) U::template Dot<3, 5, 7>();
      }
    }
    U::template Store<0>(&sums[0][0], sizeof(sums[0]));
    if constexpr (kWide > 1) U::template Store<1>(&sums[0][kTileRows], sizeof(sums[0]));
    if constexpr (kGroups > 1) U::template Store<2>(&sums[kTileRows][0], sizeof(sums[0]));
    if constexpr (kGroups > 1 && kWide > 1) U::template Store<3>(&sums[kTileRows][kTileRows], sizeof(sums[0]));
  }

  template <class Ahead>
  static void Multiply(const GemmStep<TileForm>& step, int64_t vectors, const bf16* x, int64_t count, float (*totals)[kGemmRows<TileForm>],
                       Ahead& ahead) {
    static constexpr decltype(&Sums<1, 1, Ahead>) kKernels[2][2] = {{Sums<1, 1, Ahead>, Sums<1, 2, Ahead>}, {Sums<2, 1, Ahead>, Sums<2, 2, Ahead>}};
    alignas(64) float sums[kSumRows][kSumRows];
    // Registers keep the number of rows they were configured for, and reconfiguring them costs more than a step: the last group begins earlier and
    // computes some tokens twice, whose sums are left alone. A call of fewer tokens is configured for them.
    const int64_t last = count > kTileRows ? count - kTileRows : 0;
    int64_t part = 0;
    const auto start = [&](int64_t token) { return token < last ? token : last; };
    for (int64_t t = 0; t < count; t += kSumRows) {
      const int64_t left = count - t < kSumRows ? count - t : kSumRows;
      const int groups = left > kTileRows ? 2 : 1;
      const bf16* const from[2] = {x + start(t) * step.ldx, x + start(t + kTileRows) * step.ldx};
      for (int64_t v = 0; v < vectors; v += 2) {
        const int wide = vectors - v > 1 ? 2 : 1;
        ahead.BeginPart(part++);
        kKernels[groups - 1][wide - 1](step, v, from, sums, ahead);
        for (int64_t i = 0; i < left; ++i) {
          const int64_t group = i / kTileRows;
          const float* row = sums[group * kTileRows + t + i - start(t + group * kTileRows)];
          for (int j = 0; j < wide; ++j) {
            float* total = totals[t + i] + (v + j) * V::kLanes;
            V::Store(total, V::Fma(V::Load(row + j * V::kLanes), step.scales[v + j], step.first ? V::Zero() : V::Load(total)));
          }
        }
      }
    }
  }
};

// The calling thread's registers are configured for the call and released at its end: a thread that has tile state costs 8 KiB at each switch.
template <class U, class P>
void GemmInTiles(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  for (int64_t m = 0; m < m_count; m += kGemmTokens) {
    const int64_t count = m_count - m < kGemmTokens ? m_count - m : kGemmTokens;
    U::Configure(ConfigFor(count < kTileRows ? count : kTileRows));
    GemmOf<TileForm<U>, P>(w, x + m * ldx, ldx, count, y + m * ldy, ldy, row_begin, row_end);
    U::Release();
  }
}

}  // namespace
}  // namespace hearth
