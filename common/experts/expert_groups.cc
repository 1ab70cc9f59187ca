#include "common/experts/expert_groups.h"

#include <algorithm>

namespace hearth {

void GroupByExpert(const int32_t* ids, int64_t rows, int64_t top_k, int64_t num_experts, ExpertGroups& groups) {
  const int64_t pairs = rows * top_k;
  std::vector<int64_t>& begin = groups.begin;
  begin.assign(static_cast<size_t>(num_experts) + 1, 0);
  groups.rows.resize(static_cast<size_t>(pairs));
  groups.pair_of.resize(static_cast<size_t>(pairs));
  for (int64_t i = 0; i < pairs; ++i) ++begin[static_cast<size_t>(ids[i]) + 1];
  for (size_t e = 0; e < static_cast<size_t>(num_experts); ++e) begin[e + 1] += begin[e];
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t pair = begin[static_cast<size_t>(ids[i])]++;  // for now the next free one
    groups.rows[static_cast<size_t>(pair)] = static_cast<int32_t>(i / top_k);
    groups.pair_of[static_cast<size_t>(i)] = static_cast<int32_t>(pair);
  }
  // Each has become the begin of the expert behind it.
  std::copy_backward(begin.begin(), begin.end() - 1, begin.end());
  begin[0] = 0;
}

}  // namespace hearth
