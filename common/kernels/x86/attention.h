// Attention of some heads over one run of positions: scores by the row-dot skeleton (positions are its rows, heads its
// tokens), one step of the running softmax, then the weighted sum of values in F32.
// Each (head, position) score and each (head, column) sum has an order of its own, whatever the tiles are.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include "common/kernels/kernels.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"
#include "common/kernels/x86/vector_exp.h"

namespace hearth {
namespace {

constexpr int64_t kRunMax = 64;  // positions of a run; scores of a head are this far apart
constexpr float kMinusInfinity = -__builtin_inff();

// Queries and keys come in two pieces each, without and with position.
struct KeyPiece {
  const bf16* q;
  int64_t ldq;
  const bf16* k;
  int64_t ldk;
  int64_t n;
};

// acc[r][t] += k[r] . q[t] over n columns.   k: rows k_stride bytes apart; q: ldq elements apart
template <class D, int R, int T>
HEARTH_INLINE void ScoreDots(typename D::Acc (&acc)[R][T], const uint8_t* k, int64_t k_stride, const bf16* q, int64_t ldq, int64_t n) {
  const auto add = [&](const typename D::X(&qs)[T], const auto& load) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename D::W ks = load(k + r * k_stride);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < D::kVectors; ++v) D::Dot(acc[r][t], ks.v[v], qs[t].v[v]);
      }
    }
  };
  typename D::X qs[T];
  for (; n >= D::kStep; n -= D::kStep, k += D::kStep * D::kElementBytes, q += D::kStep) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) qs[t] = D::LoadX(q + t * ldq);
    add(
        qs, [](const uint8_t* p) __attribute__((always_inline)) { return D::Load(p); });
  }
  if (n == 0) return;
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) qs[t] = D::LoadXN(q + t * ldq, n);
  add(
      qs, [n](const uint8_t* p) __attribute__((always_inline)) { return D::LoadN(p, n); });
}

template <class V, class D, int R, int T>
__attribute__((noinline)) void ScoreTile(const KeyPiece (&pieces)[2], int64_t head, int64_t position, float scale, float* scores) {
  typename D::Acc acc[R][T];
  ZeroTile<V, D, R, T>(acc);
#pragma GCC unroll 2
  for (const KeyPiece& piece : pieces) {
    const auto* keys = reinterpret_cast<const uint8_t*>(piece.k + position * piece.ldk);
    ScoreDots<D, R, T>(acc, keys, piece.ldk * 2, piece.q + head * piece.ldq, piece.ldq, piece.n);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) scores[(head + t) * kRunMax + position + r] = scale * V::ReduceAdd(acc[r][t]);
  }
}

template <class V, class D, int T>
HEARTH_INLINE void ScoreHeads(const KeyPiece (&pieces)[2], int64_t head, int64_t count, float scale, float* scores) {
  constexpr int kPositions = 4;
  int64_t j = 0;
  for (; j + kPositions <= count; j += kPositions) ScoreTile<V, D, kPositions, T>(pieces, head, j, scale, scores);
  for (; j < count; ++j) ScoreTile<V, D, 1, T>(pieces, head, j, scale, scores);
}

template <class Path>
void Scores(const KeyPiece (&pieces)[2], int64_t heads, int64_t count, float scale, float* scores) {
  int64_t h = 0;
  for (; h + Path::kScoreHeads <= heads; h += Path::kScoreHeads) {
    ScoreHeads<typename Path::V, typename Path::Bf16, Path::kScoreHeads>(pieces, h, count, scale, scores);
  }
  for (; h < heads; ++h) ScoreHeads<typename Path::V, typename Path::Bf16, 1>(pieces, h, count, scale, scores);
}

// Turns a head's scores into exp(score - max), moves its state on and rescales acc [n] if the max rose.
template <class V>
void AdvanceSoftmax(float* scores, int64_t count, SoftmaxState* state, float* acc, int64_t n) {
  float max = state->max;
  for (int64_t j = 0; j < count; ++j) max = scores[j] > max ? scores[j] : max;
  if (max == kMinusInfinity) {  // nothing visible so far
    for (int64_t j = 0; j < count; ++j) scores[j] = 0.0f;
    return;
  }
  if (max > state->max) {
    const float factor = ExpOne<V>(state->max - max);
    for (int64_t i = 0; i < n; i += V::kLanes) V::StoreN(acc + i, V::Mul(V::LoadN(acc + i, n - i), V::Set(factor)), n - i);
    state->sum *= factor;
    state->max = max;
  }
  for (int64_t j = 0; j < count; j += V::kLanes) {
    V::StoreN(scores + j, Exp<V>(V::Sub(V::LoadN(scores + j, count - j), V::Set(max))), count - j);
  }
  for (int64_t j = 0; j < count; ++j) state->sum += scores[j];
}

// Values as they lie in a page, or widened.
template <class V>
HEARTH_INLINE typename V::F LoadValue(const bf16* p) {
  return V::LoadBf16(p);
}
template <class V>
HEARTH_INLINE typename V::F LoadValue(const float* p) {
  return V::Load(p);
}
template <class V>
HEARTH_INLINE typename V::F LoadValueN(const bf16* p, int64_t n) {
  return V::LoadBf16N(p, n);
}
template <class V>
HEARTH_INLINE typename V::F LoadValueN(const float* p, int64_t n) {
  return V::LoadN(p, n);
}

// acc[h, c..] += sum_j p[h, j] v[j, c..] for H heads and C vectors of columns, j ascending; kTail: one vector of n
// columns.
template <class V, int H, int C, bool kTail, class T>
HEARTH_INLINE void AddValuesTile(const float* p, const T* v, int64_t ldv, int64_t count, float* acc, int64_t ldacc, int64_t n) {
  static_assert(!kTail || C == 1);
  typename V::F sum[H][C];
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const float* from = acc + h * ldacc + c * V::kLanes;
      if constexpr (kTail) {
        sum[h][c] = V::LoadN(from, n);
      } else {
        sum[h][c] = V::Load(from);
      }
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    typename V::F value[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const T* from = v + j * ldv + c * V::kLanes;
      if constexpr (kTail) {
        value[c] = LoadValueN<V>(from, n);
      } else {
        value[c] = LoadValue<V>(from);
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      const typename V::F weight = V::Set(p[h * kRunMax + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[h][c] = V::Fma(weight, value[c], sum[h][c]);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = acc + h * ldacc + c * V::kLanes;
      if constexpr (kTail) {
        V::StoreN(to, sum[h][c], n);
      } else {
        V::Store(to, sum[h][c]);
      }
    }
  }
}

template <class V, int H, int C, class T>
__attribute__((noinline)) void AddValuesRow(const float* p, const T* v, int64_t ldv, int64_t count, float* acc, int64_t ldacc, int64_t n) {
  int64_t c = 0;
  for (; c + C * V::kLanes <= n; c += C * V::kLanes) AddValuesTile<V, H, C, false>(p, v + c, ldv, count, acc + c, ldacc, 0);
  for (; c < n; c += V::kLanes) AddValuesTile<V, H, 1, true>(p, v + c, ldv, count, acc + c, ldacc, n - c);
}

template <class Path, class T>
void AddValues(const float* p, const T* v, int64_t ldv, int64_t count, int64_t heads, float* acc, int64_t n) {
  using V = typename Path::V;
  int64_t h = 0;
  for (; h + Path::kValueHeads <= heads; h += Path::kValueHeads) {
    AddValuesRow<V, Path::kValueHeads, Path::kValueVectors>(p + h * kRunMax, v, ldv, count, acc + h * n, n, n);
  }
  for (; h < heads; ++h) AddValuesRow<V, 1, Path::kValueVectors>(p + h * kRunMax, v, ldv, count, acc + h * n, n, n);
}

template <class Path>
void MlaAbsorbed(const bf16* q_latent, const bf16* q_rope, const bf16* kv, int64_t count, int64_t heads, int64_t rank, int64_t rope, float scale,
                 SoftmaxState* state, float* acc, float* scratch) {
  const int64_t ldkv = rank + rope;
  const KeyPiece pieces[2] = {{q_latent, rank, kv, ldkv, rank}, {q_rope, rope, kv + rank, ldkv, rope}};
  Scores<Path>(pieces, heads, count, scale, scratch);
  for (int64_t h = 0; h < heads; ++h) {
    AdvanceSoftmax<typename Path::V>(scratch + h * kRunMax, count, &state[h], acc + h * rank, rank);
  }
  AddValues<Path>(scratch, kv, ldkv, count, heads, acc, rank);
}

}  // namespace
}  // namespace hearth
