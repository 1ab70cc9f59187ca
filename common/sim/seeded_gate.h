// Which experts tokens choose where no gate computes: drawn from a seed.
// Room: common/sim. May touch: common/base. Threads: one; the same calls give the same choices.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace hearth {

class SeededGate {
 public:
  // Expert of popularity rank r = 1, 2, ... is drawn with probability proportional to 1 / r^skew (Zipf's law); ranks are dealt over the ids.
  SeededGate(uint64_t seed, double skew) : random_(seed), skew_(skew) {}

  // top_k different experts for each of m tokens: ids [m, top_k] ascending, weights [m, top_k] all 1 / top_k.
  void Choose(int64_t num_experts, int64_t top_k, int64_t m, int32_t* ids, float* weights);

 private:
  int32_t Draw(int64_t num_experts);

  std::mt19937_64 random_;
  const double skew_;
  std::vector<double> sums_;  // of the probabilities by rank, for as many experts as were asked last
};

}  // namespace hearth
