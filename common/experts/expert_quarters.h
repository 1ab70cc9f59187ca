// The quarters of expert ids in which outputs are summed (DESIGN section 7): ascending by id inside each, then (q0 + q1) + (q2 + q3).
// Room: common/experts. May touch: nothing. Threads: pure functions.
#pragma once

#include <cstdint>

namespace hearth {

inline constexpr int64_t kExpertQuarters = 4;

// Quarter q has the ids [ExpertQuarterBegin(q), ExpertQuarterBegin(q + 1)).
inline int64_t ExpertQuarterBegin(int64_t quarter, int64_t num_experts) { return quarter * num_experts / kExpertQuarters; }

}  // namespace hearth
