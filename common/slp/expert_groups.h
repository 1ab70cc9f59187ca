// The gate's choices turned round: for each expert the rows that chose it.
// Room: common/slp. May touch: nothing. Threads: any; a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hearth {

struct ExpertGroups {
  std::vector<int64_t> begin;  // [experts + 1]: expert e has [begin[e], begin[e + 1]) of the two below
  std::vector<int32_t> rows;   // ascending within an expert
  std::vector<float> weights;

  int64_t count(int64_t expert) const { return begin[static_cast<size_t>(expert) + 1] - begin[static_cast<size_t>(expert)]; }
};

// ids, weights [rows, top_k]. A counting sort, which keeps the order of rows. `groups` keeps its memory from call to call.
void GroupByExpert(const int32_t* ids, const float* weights, int64_t rows, int64_t top_k, int64_t num_experts, ExpertGroups& groups);

}  // namespace hearth
