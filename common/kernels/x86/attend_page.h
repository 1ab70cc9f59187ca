// A page of expanded attention for many queries, the prefill form: both of its products in the tiles of gemm.h. Scores have positions in lanes and
// queries broadcast, so that a query's softmax runs along lanes; the values' sums have columns in lanes and pairs of weights broadcast.
//
// Orders of sums. A score: the key's columns ascending, in one lane (two at a time with VDPBF16PS). The softmax's sum: a page's vectors ascending, then
// the lanes. A (query, column): positions ascending (two at a time with VDPBF16PS); with two terms a page's high weights times high values, then high
// times low, then low times high. A position that a query doesn't see has weight zero or isn't visited, which comes to the same: nothing depends on
// the call's other queries or on how far the page is filled.
// Included by the files of this folder only; see isa_local.h.
//
// A page form P: G, the form of gemm.h whose tiles and Step are used; Keys, its policy for BF16 weights; and
//   FillValues(tile, v, pair, values, ld, begin, end, cols): the tile's vector `v` from `cols` columns of the positions [begin, end) of 64, in pairs
//   `pair` and on; other positions are zero and not read
#pragma once

#include <utility>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/gemm.h"
#include "common/kernels/x86/gemm_f32.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/vector_exp.h"

namespace hearth {
namespace {

constexpr int kPagePairs = kAttendPositions / 2;
constexpr int64_t kPageQueries = 24;  // that meet the keys' tiles before the values' tiles take their place in L1

template <class Path>
struct F32Page {
  using G = F32Form<Path>;
  using V = typename G::V;
  using Keys = Bf16Floats<V>;
  static void FillValues(typename G::Tile& tile, int64_t v, int64_t pair, const bf16* values, int64_t ld, int64_t begin, int64_t end, int64_t cols) {
    for (int64_t j = 0; j < kAttendPositions; ++j) {
      V::Store(tile.columns[2 * pair + j][v], j >= begin && j < end ? V::LoadBf16N(values + j * ld, cols) : V::Zero());
    }
  }
};

// scores[t][position] of T queries and N vectors of positions.
template <class G, int N, int T>
__attribute__((noinline)) void ScorePositions(const typename G::Tile* tiles, int64_t pairs, const bf16* q, int64_t ldq, float* scores) {
  using V = typename G::V;
  typename V::F acc[N][T];
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) {
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) acc[v][t] = V::Zero();
  }
  for (; pairs > 0; pairs -= kGemmPairs, ++tiles, q += kScaleBlock) {
    const int count = pairs < kGemmPairs ? static_cast<int>(pairs) : kGemmPairs;
    for (int p = 0; p < count; ++p) G::template Step<N, T>(acc, *tiles, p, q + 2 * p, ldq);
  }
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) V::Store(scores + t * kAttendPositions + v * V::kLanes, acc[v][t]);
  }
}

// Weights of some queries as the second product takes them.
struct PageWeights {
  const bf16* terms;  // [queries, num_terms, 64]
  int num_terms;
  int pairs;             // of positions: behind them none of these queries sees one
  const float* factors;  // [queries]: what the sums so far are multiplied by
};

// acc[t][column] of T queries and N vectors of columns.
template <class G, int N, int T>
__attribute__((noinline)) void AddPageValues(const typename G::Tile& tile, const PageWeights& weights, float* acc, int64_t ldacc) {
  using V = typename G::V;
  typename V::F sum[N][T];
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
    const typename V::F factor = V::Set(weights.factors[t]);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) sum[v][t] = V::Mul(V::Load(acc + t * ldacc + v * V::kLanes), factor);
  }
  const int64_t ld = weights.num_terms * kAttendPositions;
  const auto add = [&](int first_pair, const bf16* term) __attribute__((always_inline)) {
    for (int p = 0; p < weights.pairs; ++p) G::template Step<N, T>(sum, tile, first_pair + p, term + 2 * p, ld);
  };
  add(0, weights.terms);
  if (weights.num_terms > 1) {
    add(kPagePairs, weights.terms);
    add(0, weights.terms + kAttendPositions);
  }
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) V::Store(acc + t * ldacc + v * V::kLanes, sum[v][t]);
  }
}

// Both products by number of vectors and queries; I runs over all pairs of these.
template <class G>
using VectorsAndQueries = std::make_integer_sequence<int, G::kVectors * G::kAtOnce>;
template <class G, int... I>
HEARTH_INLINE auto ScoreKernel(std::integer_sequence<int, I...>, int64_t vectors, int64_t queries) {
  static constexpr decltype(&ScorePositions<G, 1, 1>) kKernels[] = {ScorePositions<G, I / G::kAtOnce + 1, I % G::kAtOnce + 1>...};
  return kKernels[(vectors - 1) * G::kAtOnce + queries - 1];
}
template <class G, int... I>
HEARTH_INLINE auto ValueKernel(std::integer_sequence<int, I...>, int64_t vectors, int64_t queries) {
  static constexpr decltype(&AddPageValues<G, 1, 1>) kKernels[] = {AddPageValues<G, I / G::kAtOnce + 1, I % G::kAtOnce + 1>...};
  return kKernels[(vectors - 1) * G::kAtOnce + queries - 1];
}

// One query's step of the softmax over `vectors` of scores, of which it sees positions [begin, end). Returns what its sums so far are multiplied by.
template <class V>
HEARTH_INLINE float AdvancePage(float* scores, int64_t vectors, int64_t begin, int64_t end, float scale, int terms, SoftmaxState* state,
                                bf16* weights) {
  for (int64_t j = 0; j < begin; ++j) scores[j] = -__builtin_inff();
  for (int64_t j = end < 0 ? 0 : end; j < vectors * V::kLanes; ++j) scores[j] = -__builtin_inff();
  typename V::F most = V::Set(-__builtin_inff());
  for (int64_t c = 0; c < vectors; ++c) most = V::Max(most, V::Load(scores + c * V::kLanes));
  const float max = scale * V::ReduceMax(most);
  float factor = 1.0f;
  if (max > state->max) {
    factor = ExpOne<V>(state->max - max);
    state->max = max;
  }
  const typename V::F base = V::Set(state->max == -__builtin_inff() ? 0.0f : state->max);  // nothing visible so far: weights of zero
  typename V::F sum = V::Zero();
  for (int64_t c = 0; c < vectors; ++c) {
    const typename V::F weight = Exp<V>(V::Sub(V::Mul(V::Load(scores + c * V::kLanes), V::Set(scale)), base));
    sum = V::Add(sum, weight);
    bf16* high = weights + c * V::kLanes;
    V::StoreBf16(high, weight);
    if (terms > 1) V::StoreBf16(high + kAttendPositions, V::Sub(weight, V::LoadBf16(high)));
  }
  state->sum = state->sum * factor + V::ReduceAdd(sum);
  return factor;
}

template <class Path>
void AttendPage(const ExpandedPage& page, const bf16* q, int64_t queries, int64_t seen, SoftmaxState* state, float* acc, int64_t ldacc,
                float* scratch) {
  using P = typename Path::template Page<Path>;
  using G = typename P::G;
  using V = typename G::V;
  using Tile = typename G::Tile;
  constexpr int kGroups = kAttendPositions / kGemmRows<G>;  // of positions, a tile's rows each
  constexpr auto kKernels = VectorsAndQueries<G>();
  const auto vectors_of = [](int64_t n) { return (n + V::kLanes - 1) / V::kLanes; };
  const auto in_group = [](int64_t vectors, int64_t group) {
    const int64_t left = vectors - group * G::kVectors;
    return left < G::kVectors ? left : static_cast<int64_t>(G::kVectors);
  };
  const int64_t key_tiles = (page.key_dim + kScaleBlock - 1) / kScaleBlock;
  const int64_t value_vectors = vectors_of(page.value_dim);
  const int64_t value_groups = (value_vectors + G::kVectors - 1) / G::kVectors;
  Tile* keys = reinterpret_cast<Tile*>(scratch);  // [group of positions][128 columns]
  Tile* values = keys + kGroups * key_tiles;      // [group of columns]

  for (int64_t group = 0; group < kGroups; ++group) {
    for (int64_t v = 0; v < G::kVectors; ++v) {
      const int64_t first = (group * G::kVectors + v) * V::kLanes;
      for (int64_t c = 0; c < key_tiles; ++c) {
        G::template Fill<typename P::Keys>(keys[group * key_tiles + c], v, reinterpret_cast<const uint8_t*>(page.keys + first * page.ld),
                                           page.ld * static_cast<int64_t>(sizeof(bf16)), page.count - first, c * kScaleBlock,
                                           page.key_dim - c * kScaleBlock);
      }
    }
  }
  for (int64_t v = 0; v < value_vectors; ++v) {
    const int64_t column = v * V::kLanes;
    for (int term = 0; term < page.terms; ++term) {
      P::FillValues(values[v / G::kVectors], v % G::kVectors, term * kPagePairs, page.values + term * page.value_dim + column, page.ld, page.skip,
                    page.count, page.value_dim - column);
    }
  }

  alignas(64) float scores[kPageQueries * kAttendPositions];
  alignas(64) bf16 weights[kPageQueries * kTermsMax * kAttendPositions];
  float factors[kPageQueries];
  const int64_t ldw = page.terms * kAttendPositions;
  for (int64_t from = 0; from < queries; from += kPageQueries) {
    const int64_t batch = queries - from < kPageQueries ? queries - from : kPageQueries;
    const int64_t parts = (batch + G::kAtOnce - 1) / G::kAtOnce;
    const auto begin_of = [&](int64_t part) { return part * batch / parts; };
    // What a query of the batch sees, and the part's last one most of all.
    const auto seen_by = [&](int64_t query) {
      const int64_t end = seen + from + query;
      return end < page.count ? end : page.count;
    };
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = begin_of(part), count = begin_of(part + 1) - begin;
      const int64_t vectors = vectors_of(seen_by(begin + count - 1));
      for (int64_t group = 0; group * G::kVectors < vectors; ++group) {
        ScoreKernel<G>(kKernels, in_group(vectors, group), count)(keys + group * key_tiles, page.key_dim / 2, q + (from + begin) * page.key_dim,
                                                                  page.key_dim, scores + begin * kAttendPositions + group * kGemmRows<G>);
      }
      for (int64_t i = begin; i < begin + count; ++i) {
        factors[i] = AdvancePage<V>(scores + i * kAttendPositions, vectors, page.skip, seen_by(i), page.scale, page.terms, state + from + i,
                                    weights + i * ldw);
      }
    }
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = begin_of(part), count = begin_of(part + 1) - begin;
      const PageWeights of_part = {.terms = weights + begin * ldw,
                                   .num_terms = page.terms,
                                   .pairs = static_cast<int>((seen_by(begin + count - 1) + 1) / 2),
                                   .factors = factors + begin};
      for (int64_t group = 0; group < value_groups; ++group) {
        ValueKernel<G>(kKernels, in_group(value_vectors, group), count)(values[group], of_part, acc + (from + begin) * ldacc + group * kGemmRows<G>,
                                                                        ldacc);
      }
    }
  }
}

}  // namespace
}  // namespace hearth
