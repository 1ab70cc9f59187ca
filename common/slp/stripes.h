// Context parallelism by stripes ([SLO] 3.2): which rows of a batch each rank computes.
// Room: common/slp. May touch: common/device. Threads: any; a pure function.
//
// A row attends all positions before it, so a sequence is cut into 2n stripes of which a rank takes one from the front and its mirror from the back: every
// rank then has nearly the same number of rows and of pairs (row, position before it). Which pair a rank takes changes from sequence to sequence so that
// short ones, whose stripes are not all alike, fill the ranks evenly.
#pragma once

#include <cstdint>
#include <vector>

#include "common/device/ops.h"

namespace hearth {

struct Stripe {
  int64_t sequence = 0;
  int64_t first_row = 0;  // of the batch
  int64_t num_rows = 0;   // at least 1
  int64_t rank = 0;
};

struct Stripes {
  std::vector<Stripe> all;         // in the order of the batch
  std::vector<int64_t> rank_rows;  // [ranks]
};

// With one rank a sequence is one stripe.
Stripes CutIntoStripes(const std::vector<KvSequence>& sequences, int64_t ranks);

}  // namespace hearth
