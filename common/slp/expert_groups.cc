#include "common/slp/expert_groups.h"

namespace hearth {

void GroupByExpert(const int32_t* ids, const float* weights, int64_t rows, int64_t top_k, int64_t num_experts, ExpertGroups& groups) {
  const int64_t pairs = rows * top_k;
  groups.begin.assign(static_cast<size_t>(num_experts) + 1, 0);
  groups.rows.resize(static_cast<size_t>(pairs));
  groups.weights.resize(static_cast<size_t>(pairs));
  for (int64_t i = 0; i < pairs; ++i) ++groups.begin[static_cast<size_t>(ids[i]) + 1];
  for (size_t e = 0; e < static_cast<size_t>(num_experts); ++e) groups.begin[e + 1] += groups.begin[e];
  std::vector<int64_t> next(groups.begin.begin(), groups.begin.end() - 1);
  for (int64_t i = 0; i < pairs; ++i) {
    const size_t to = static_cast<size_t>(next[static_cast<size_t>(ids[i])]++);
    groups.rows[to] = static_cast<int32_t>(i / top_k);
    groups.weights[to] = weights[i];
  }
}

}  // namespace hearth
