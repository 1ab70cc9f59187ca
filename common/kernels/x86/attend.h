// Attention in F32 over one run of positions (GQA, absorbed MLA with two BF16 terms), and what makes F32 of a page's rows where those are no plain BF16.
// A tile of scores is some queries times four positions, whose lanes are added up four at once. A tile that reaches beyond the run takes its last
// position again, so that every score is a sum of the same shape. Included by the files of this folder only; see isa_local.h.
#pragma once

#include <immintrin.h>

#include "common/kernels/kernels.h"
#include "common/kernels/x86/attention.h"
#include "common/kernels/x86/isa_local.h"

namespace hearth {
namespace {

constexpr int kTilePositions = 4;

template <class V>
void WidenBf16(const bf16* src, int64_t ld, int64_t low, int64_t rows, int64_t n, float* dst, int64_t ld_dst) {
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* from = src + r * ld;
    float* to = dst + r * ld_dst;
    int64_t i = 0;
    if (low > 0) {
      for (; i + V::kLanes <= n; i += V::kLanes) V::Store(to + i, V::Add(V::LoadBf16(from + i), V::LoadBf16(from + low + i)));
      if (i < n) V::StoreN(to + i, V::Add(V::LoadBf16N(from + i, n - i), V::LoadBf16N(from + low + i, n - i)), n - i);
    } else {
      for (; i + V::kLanes <= n; i += V::kLanes) V::Store(to + i, V::LoadBf16(from + i));
      if (i < n) V::StoreN(to + i, V::LoadBf16N(from + i, n - i), n - i);
    }
  }
}

template <class V>
void WidenF8(const uint8_t* codes, int64_t ld, const float* scales, int64_t rows, int64_t n, float* dst, int64_t ld_dst) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = codes + r * ld;
    float* to = dst + r * ld_dst;
    const typename V::F scale = V::Set(scales[r] * 256.0f);  // LoadF8 gives 2^-8 of a code's value
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) V::Store(to + i, V::Mul(V::LoadF8(from + i), scale));
    if (i < n) V::StoreN(to + i, V::Mul(V::LoadF8N(from + i, n - i), scale), n - i);
  }
}

// scores[t * 64 + 0..3] of T queries, [T, n], and the four positions that `keys` names.
template <class V, int T, class K>
__attribute__((noinline)) void AttendTile(const float* q, const K* const (&keys)[kTilePositions], int64_t n, float scale, float* scores) {
  typename V::F acc[T][kTilePositions];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int r = 0; r < kTilePositions; ++r) acc[t][r] = V::Zero();
  }
  int64_t c = 0;
  for (; c + V::kLanes <= n; c += V::kLanes) {
    typename V::F key[kTilePositions];
#pragma GCC unroll 8
    for (int r = 0; r < kTilePositions; ++r) key[r] = LoadValue<V>(keys[r] + c);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const typename V::F query = V::Load(q + t * n + c);
#pragma GCC unroll 8
      for (int r = 0; r < kTilePositions; ++r) acc[t][r] = V::Fma(query, key[r], acc[t][r]);
    }
  }
  if (c < n) {
    typename V::F key[kTilePositions];
#pragma GCC unroll 8
    for (int r = 0; r < kTilePositions; ++r) key[r] = LoadValueN<V>(keys[r] + c, n - c);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const typename V::F query = V::LoadN(q + t * n + c, n - c);
#pragma GCC unroll 8
      for (int r = 0; r < kTilePositions; ++r) acc[t][r] = V::Fma(query, key[r], acc[t][r]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    const __m128 sums = V::ReduceFour(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
    _mm_storeu_ps(scores + t * kRunMax, _mm_mul_ps(sums, _mm_set1_ps(scale)));
  }
}

// The bytes of a tile's positions in a run that is read next.
HEARTH_INLINE void FetchPositions(const void* run, int64_t bytes_per_position, int64_t position) {
  if (run == nullptr) return;
  const char* from = static_cast<const char*>(run) + position * bytes_per_position;
  for (int64_t at = 0; at < kTilePositions * bytes_per_position; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
}

// Scores of all queries. What lies behind a query's `count` scores is overwritten, up to the next multiple of four.
template <class Path, class K>
void AttendScores(const float* q, int64_t queries, const K* k, int64_t ldk, int64_t count, int64_t n, float scale, float* scores,
                  const NextRuns& next) {
  using V = typename Path::V;
  // Positions outermost: four keys stay in L1 while all queries meet them.
  for (int64_t j = 0; j < count; j += kTilePositions) {
    const K* keys[kTilePositions];
    for (int64_t r = 0; r < kTilePositions; ++r) keys[r] = k + (j + r < count ? j + r : count - 1) * ldk;
    FetchPositions(next.first, next.bytes_per_position, j);
    FetchPositions(next.second, next.bytes_per_position, j);
    int64_t h = 0;
    for (; h + Path::kQueries <= queries; h += Path::kQueries) AttendTile<V, Path::kQueries>(q + h * n, keys, n, scale, scores + h * kRunMax + j);
    for (; h < queries; ++h) AttendTile<V, 1>(q + h * n, keys, n, scale, scores + h * kRunMax + j);
  }
}

template <class Path, class K>
void Attend(const float* q, int64_t queries, const K* k, int64_t ldk, const K* v, int64_t ldv, int64_t count, int64_t key_dim, int64_t value_dim,
            float scale, SoftmaxState* state, float* acc, float* scratch, const NextRuns& next) {
  AttendScores<Path>(q, queries, k, ldk, count, key_dim, scale, scratch, next);
  for (int64_t h = 0; h < queries; ++h) {
    AdvanceSoftmax<typename Path::V>(scratch + h * kRunMax, count, &state[h], acc + h * value_dim, value_dim);
  }
  AddValues<Path>(scratch, v, ldv, count, queries, acc, value_dim);
}

}  // namespace
}  // namespace hearth
