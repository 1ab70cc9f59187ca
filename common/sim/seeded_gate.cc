#include "common/sim/seeded_gate.h"

#include <algorithm>
#include <cmath>

namespace hearth {
namespace {

// Deals ranks over ids so that popular experts don't sit side by side: a prime that divides no usual number of experts.
constexpr int64_t kStride = 97;

}  // namespace

int32_t SeededGate::Draw(int64_t num_experts) {
  // Without the standard's distributions: their results differ between libraries.
  if (skew_ <= 0) return static_cast<int32_t>(random_() % static_cast<uint64_t>(num_experts));
  if (static_cast<int64_t>(sums_.size()) != num_experts) {
    sums_.clear();
    double sum = 0;
    for (int64_t rank = 1; rank <= num_experts; ++rank) sums_.push_back(sum += std::pow(static_cast<double>(rank), -skew_));
  }
  const double at = static_cast<double>(random_() >> 11) * 0x1p-53 * sums_.back();
  const int64_t rank = std::upper_bound(sums_.begin(), sums_.end(), at) - sums_.begin();
  return static_cast<int32_t>(std::min(rank, num_experts - 1) * kStride % num_experts);
}

void SeededGate::Choose(int64_t num_experts, int64_t top_k, int64_t m, int32_t* ids, float* weights) {
  for (int64_t token = 0; token < m; ++token) {
    int32_t* chosen = ids + token * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      do {
        chosen[k] = Draw(num_experts);
      } while (std::find(chosen, chosen + k, chosen[k]) != chosen + k);
    }
    std::sort(chosen, chosen + top_k);
  }
  std::fill(weights, weights + m * top_k, 1.0f / static_cast<float>(top_k));
}

}  // namespace hearth
