#include "common/device/host/limits.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/base/time.h"
#include "common/kernels/kernels.h"

namespace hearth {
namespace {

constexpr int64_t kPiece = 256 << 10;

// Wide loads and nothing else; the compiler makes the best of each path out of it.
__attribute__((target_clones("avx512f", "avx2", "default"))) uint64_t FoldAll(const uint8_t* data, int64_t bytes) {
  uint64_t sum[32] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    __builtin_prefetch(data + i + 4096);
    uint64_t words[32];
    std::memcpy(words, data + i, sizeof(words));
    for (int k = 0; k < 32; ++k) sum[k] ^= words[k];
  }
  uint64_t all = 0;
  for (const uint64_t s : sum) all ^= s;
  return all;
}

__attribute__((target("avx512f,avx512bf16"))) void DotRounds(int64_t rounds, float* out) {
  __m512 sums[24];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f813f81), b = a;
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, a, b);
  }
  for (__m512& sum : sums) {
    float lanes[16];
    _mm512_storeu_ps(lanes, sum);
    *out += lanes[0];
  }
}

}  // namespace

double SecondsToRead(ThreadPool& pool, std::span<const MemoryRun> runs) {
  std::vector<MemoryRun> pieces;
  for (const MemoryRun& run : runs) {
    for (int64_t at = 0; at < run.bytes; at += kPiece) pieces.push_back({run.data + at, std::min(kPiece, run.bytes - at)});
  }
  std::atomic<uint64_t> sink{0};
  const int64_t begin = MonotonicNowNs();
  pool.ParallelFor(true, static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
    sink.fetch_xor(FoldAll(pieces[static_cast<size_t>(i)].data, pieces[static_cast<size_t>(i)].bytes), std::memory_order_relaxed);
  });
  return static_cast<double>(MonotonicNowNs() - begin) * 1e-9;
}

double DotPeak(ThreadPool& pool) {
  if (SupportedIsas().back() != Isa::kAvx512Bf16) return 0;
  constexpr int64_t kRounds = 400'000;
  std::vector<float> out(static_cast<size_t>(pool.num_threads()) * 16);
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const int64_t begin = MonotonicNowNs();
    pool.ParallelFor(true, 8 * pool.num_threads(), [&](int64_t, int worker) { DotRounds(kRounds, &out[static_cast<size_t>(worker) * 16]); });
    const double seconds = static_cast<double>(MonotonicNowNs() - begin) * 1e-9;
    best = std::max(best, 8.0 * pool.num_threads() * static_cast<double>(kRounds) * 24 * 64 / seconds * 1e-9);
  }
  return best;
}

}  // namespace hearth
