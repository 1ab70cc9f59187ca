// The gate's choices turned round: for each expert the rows that chose it.
// Room: common/experts. May touch: nothing. Threads: any; a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hearth {

// A pair is a row and one of its choices; pairs of an expert lie beside each other.
struct ExpertGroups {
  std::vector<int64_t> begin;    // [experts + 1]: expert e has pairs [begin[e], begin[e + 1])
  std::vector<int32_t> rows;     // [pairs]: the pair's row, ascending within an expert
  std::vector<int32_t> pair_of;  // [rows, top_k]

  int64_t count(int64_t expert) const { return begin[static_cast<size_t>(expert) + 1] - begin[static_cast<size_t>(expert)]; }
};

// ids [rows, top_k]. A counting sort, which keeps the order of rows. `groups` keeps its memory from call to call.
void GroupByExpert(const int32_t* ids, int64_t rows, int64_t top_k, int64_t num_experts, ExpertGroups& groups);

}  // namespace hearth
