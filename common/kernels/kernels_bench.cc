// FP8 `linear` in GB/s of weights, beside a plain read of the same bytes, out of L2 and out of DRAM; attention and the
// transposed product beside it. One thread. Run as:  bench/kernels_bench --benchmark_filter=linear
#include <benchmark/benchmark.h>
#include <immintrin.h>

#include <cstring>
#include <memory>
#include <string>

#include "common/kernels/kernels.h"
#include "common/kernels/kernels_cases.h"

namespace hearth {
namespace {

constexpr int64_t kCols = 7168;  // DeepSeek-V3's gate_proj: [2048, 7168]
constexpr int64_t kRows = 2048;
constexpr int64_t kDramCopies = 20;  // 294 MB: more than any cache a core reaches
constexpr int64_t kL2Rows = 64;      // 459 KB

void SetRate(benchmark::State& state, int64_t bytes) {
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(bytes) * 1e-9 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

// One matrix after the other, so that each comes from memory.
const std::vector<std::unique_ptr<MatrixCase>>& DramMatrices() {
  static const auto* matrices = [] {
    auto* list = new std::vector<std::unique_ptr<MatrixCase>>;
    std::mt19937 rng(1);
    for (int64_t i = 0; i < kDramCopies; ++i) {
      list->push_back(std::make_unique<MatrixCase>(rng, DType::kF8E4M3, kRows, kCols, kCols, 0));
    }
    return list;
  }();
  return *matrices;
}

std::vector<bf16> Activations(int64_t n) {
  std::mt19937 rng(2);
  std::vector<bf16> x(static_cast<size_t>(n));
  FillGaussian(rng, x);
  return x;
}

uint64_t ReadAll(const void* data, int64_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint64_t sum[8] = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    uint64_t words[8];
    std::memcpy(words, p + i, sizeof(words));
    for (int k = 0; k < 8; ++k) sum[k] ^= words[k];
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

void PlainRead(benchmark::State& state, bool dram) {
  const auto& matrices = DramMatrices();
  const int64_t rows = dram ? kRows : kL2Rows;
  size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(ReadAll(matrices[next]->view().data, rows * kCols));
    if (dram) next = (next + 1) % matrices.size();
  }
  SetRate(state, rows * kCols);
}

// product(w, x, m, y, rows): rows [0, rows) of y, for x [m, kCols].
template <class Product>
void ProductF8(benchmark::State& state, const Product& product, bool dram) {
  const auto& matrices = DramMatrices();
  const int64_t m = state.range(0);
  const int64_t rows = dram ? kRows : kL2Rows;
  const std::vector<bf16> x = Activations(m * kCols);
  std::vector<float> y(static_cast<size_t>(m * kRows));
  size_t next = 0;
  for (auto _ : state) {
    product(matrices[next]->view(), x.data(), m, y.data(), rows);
    benchmark::ClobberMemory();
    if (dram) next = (next + 1) % matrices.size();
  }
  SetRate(state, rows * kCols);
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * static_cast<double>(m * rows * kCols) * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

// What a core's VDPBF16PS units reach on registers alone: the limit of every product here.
__attribute__((target("avx512f,avx512bf16"))) void DotPeak(benchmark::State& state) {
  if (Kernels(SupportedIsas().back()).name != std::string("avx512bf16")) return state.SkipWithError("this CPU has no VDPBF16PS");
  constexpr int kSums = 24;
  __m512 sums[kSums];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = a;
  constexpr int64_t kRounds = 10'000;
  for (auto _ : state) {
    for (int64_t round = 0; round < kRounds; ++round) {
      asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
      for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, a, b);
    }
  }
  for (__m512& sum : sums) benchmark::DoNotOptimize(sum);
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * 32 * kSums * kRounds * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void LinearTransposedF8(benchmark::State& state, Isa isa) {
  std::mt19937 rng(1);
  const MatrixCase w(rng, DType::kF8E4M3, 128, 512, 512, 0);  // one head of kv_b_proj
  const std::vector<float> x(128, 0.7f);
  std::vector<float> y(512);
  for (auto _ : state) {
    Kernels(isa).linear_transposed(w.view(), x.data(), y.data(), 0, 512);
    benchmark::ClobberMemory();
  }
  SetRate(state, 128 * 512);
}

void MlaAbsorbed(benchmark::State& state, Isa isa) {
  constexpr int64_t kHeads = 128;
  constexpr int64_t kRank = 512;
  constexpr int64_t kRope = 64;
  const std::vector<bf16> q = Activations(kHeads * (kRank + kRope));
  const std::vector<bf16> kv = Activations(64 * (kRank + kRope));
  std::vector<SoftmaxState> softmax(kHeads);
  std::vector<float> acc(kHeads * kRank);
  std::vector<float> scratch(kHeads * 64);
  for (auto _ : state) {
    Kernels(isa).mla_absorbed(q.data(), q.data() + kHeads * kRank, kv.data(), 64, kHeads, kRank, kRope, 0.04f, softmax.data(), acc.data(),
                              scratch.data());
    benchmark::ClobberMemory();
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * kHeads * 64 * (2 * kRank + kRope) * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

// What attention does with one page: widen its rows, attend with some queries.  GB/s: of the page's bytes. `pages`: so many that they lie in DRAM.
struct PageShape {
  const char* name;
  int64_t queries, key_dim, value_dim;
  bool shared;  // one row is key and value (latent attention)
};
constexpr PageShape kPageShapes[] = {
    {"gqa_8_queries", 8, 128, 128, false}, {"gqa_128_queries", 128, 128, 128, false}, {"mla_32_heads", 32, 576, 512, true}};

void AttendPage(benchmark::State& state, Isa isa, const PageShape& shape, int terms, bool dram) {
  const KernelTable& k = Kernels(isa);
  constexpr int64_t kPositions = 64;
  const bool f8 = terms == 0;
  const int64_t vectors = shape.shared ? 1 : 2;
  const int64_t page_bytes = vectors * kPositions * (f8 ? shape.key_dim : 2 * terms * shape.key_dim);
  const int64_t pages = dram ? (int64_t{512} << 20) / page_bytes : 1;
  GuardedBytes cached(static_cast<size_t>(pages * page_bytes));
  std::mt19937 rng(3);
  FillGaussian(rng, {reinterpret_cast<bf16*>(cached.data()), static_cast<size_t>(page_bytes / 2)});
  if (f8) {
    for (int64_t i = 0; i < page_bytes; ++i) cached.data()[i] &= 0xbf;  // no NaN code
  }
  for (int64_t page = 1; page < pages; ++page) std::copy_n(cached.data(), page_bytes, cached.data() + page * page_bytes);
  std::vector<float> q(static_cast<size_t>(shape.queries * shape.key_dim)), widened(static_cast<size_t>(vectors * kPositions * shape.key_dim));
  FillGaussian(rng, q);
  const std::vector<float> scales(kPositions, 1.0f / 64);
  std::vector<SoftmaxState> softmax(static_cast<size_t>(shape.queries));
  std::vector<float> acc(static_cast<size_t>(shape.queries * shape.value_dim)), scratch(static_cast<size_t>(shape.queries * kPositions));
  int64_t next = 0;
  for (auto _ : state) {
    for (int64_t part = 0; part < vectors; ++part) {
      const uint8_t* from = cached.data() + next * page_bytes + part * page_bytes / vectors;
      float* to = widened.data() + part * kPositions * shape.key_dim;
      if (f8) {
        k.widen_f8(from, shape.key_dim, scales.data(), kPositions, shape.key_dim, to, shape.key_dim);
      } else {
        k.widen_bf16(reinterpret_cast<const bf16*>(from), terms * shape.key_dim, terms > 1 ? shape.key_dim : 0, kPositions, shape.key_dim, to,
                     shape.key_dim);
      }
    }
    k.attend(q.data(), shape.queries, widened.data(), shape.key_dim, widened.data() + (vectors - 1) * kPositions * shape.key_dim, shape.key_dim,
             kPositions, shape.key_dim, shape.value_dim, 0.05f, softmax.data(), acc.data(), scratch.data(), {});
    benchmark::ClobberMemory();
    next = (next + 1) % pages;
  }
  SetRate(state, page_bytes);
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(shape.queries * kPositions * (shape.key_dim + shape.value_dim) * state.iterations()), benchmark::Counter::kIsRate);
}

void RegisterAll() {
  for (bool dram : {false, true}) {
    const std::string place = dram ? "dram" : "l2";
    benchmark::RegisterBenchmark(("read/" + place).c_str(), PlainRead, dram)->Unit(benchmark::kMicrosecond);
    for (Isa isa : SupportedIsas()) {
      for (const int terms : {1, 2}) {
        const std::string name = "linear_f8/" + place + "/" + std::string(IsaName(isa)) + (terms > 1 ? "/two_terms" : "");
        const auto run = [isa, terms, dram](benchmark::State& state) {
          // A token of two terms is two rows of x.
          const auto product = [isa, terms](const WeightView& w, const bf16* x, int64_t m, float* y, int64_t rows) {
            Kernels(isa).linear(w, x, kCols, m / terms, terms, y, kRows, 0, rows);
          };
          ProductF8(state, product, dram);
        };
        auto* bench = benchmark::RegisterBenchmark(name.c_str(), run)->Unit(benchmark::kMicrosecond);
        if (isa == Isa::kScalar) {
          bench->Arg(terms);
          continue;
        }
        for (const int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 12}) bench->Arg(m * terms);
        if (!dram) bench->Arg(64);
      }
    }
  }
  benchmark::RegisterBenchmark("peak/vdpbf16ps", DotPeak);
  for (Isa isa : SupportedIsas(Numerics::kFast)) {
    if (isa == Isa::kScalar) continue;
    for (bool dram : {false, true}) {
      const std::string name = std::string(dram ? "gemm_f8/dram/" : "gemm_f8/l2/") + std::string(IsaName(isa));
      const auto run = [isa, dram](benchmark::State& state) {
        const auto product = [isa](const WeightView& w, const bf16* x, int64_t m, float* y, int64_t rows) {
          Kernels(isa).gemm(w, x, kCols, m, y, kRows, 0, rows);
        };
        ProductF8(state, product, dram);
      };
      auto* bench = benchmark::RegisterBenchmark(name.c_str(), run)->Unit(benchmark::kMicrosecond);
      for (const int64_t m : {1, 4, 16, 32, 60, 64, 120, 128, 252, 504, 512}) bench->Arg(m);
    }
  }
  for (Isa isa : SupportedIsas()) {
    const std::string name(IsaName(isa));
    benchmark::RegisterBenchmark(("linear_transposed_f8/l2/" + name).c_str(), LinearTransposedF8, isa)->Unit(benchmark::kMicrosecond);
    benchmark::RegisterBenchmark(("mla_absorbed/128_heads_64_positions/" + name).c_str(), MlaAbsorbed, isa)->Unit(benchmark::kMicrosecond);
    for (const PageShape& shape : kPageShapes) {
      for (const int terms : {1, 2, 0}) {
        for (const bool dram : {false, true}) {
          const std::string bench = "attend/" + std::string(shape.name) + "/" +
                                    (terms == 0   ? "fp8"
                                     : terms == 1 ? "bf16"
                                                  : "bf16x2") +
                                    "/" + (dram ? "dram/" : "l2/") + name;
          benchmark::RegisterBenchmark(bench.c_str(), AttendPage, isa, shape, terms, dram)->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  hearth::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
