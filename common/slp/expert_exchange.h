// How several ranks share a layer's routed experts, each of which is on one of them: what crosses, and which way is cheaper.
// Room: common/slp. May touch: common/{experts,formats}. Threads: any; pure functions.
//
// SmallEP ([SLO] 3.2): all ranks get all rows and the gate's choices, add up what their own experts make of each row, and send each owner of rows one partial
// sum a row. Dispatch: a copy of a row goes to the rank of each expert that it chose, and each expert's output comes back for the owner to weigh and add.
// Experts belong to ranks by id-quarters, which fixes the order of all sums (DESIGN section 7): so both give the bits of one rank.
#pragma once

#include <cstdint>

#include "common/experts/expert_quarters.h"
#include "common/formats/model_config.h"

namespace hearth {

enum class ExpertExchange { kSmallEp, kDispatch };
inline const char* ExchangeName(ExpertExchange exchange) { return exchange == ExpertExchange::kSmallEp ? "SmallEP" : "dispatch"; }

// Ranks that share a model: 1, 2 or 4, so that each has whole id-quarters.
inline bool RanksShareQuarters(int64_t ranks) { return ranks == 1 || ranks == 2 || ranks == kExpertQuarters; }
// Experts [FirstExpertOf(rank), FirstExpertOf(rank + 1)) are the rank's.
inline int64_t FirstExpertOf(int64_t rank, int64_t ranks, int64_t experts) { return ExpertQuarterBegin(rank * kExpertQuarters / ranks, experts); }

struct ExchangeShape {
  int64_t ranks = 2;
  int64_t rows = 0;  // of the pass, spread evenly over the ranks
  int64_t experts = 0, top_k = 0;
  int64_t hidden = 0;
  int64_t terms = 1;  // BF16 terms of an expert's input
};

// Of a model's layers.
ExchangeShape ExchangeOfModel(const ModelConfig& config, int64_t ranks, int64_t rows, int64_t terms);

// Bytes that one rank sends in a layer, with choices spread evenly over the ranks.
double SmallEpBytes(const ExchangeShape& shape);
double DispatchBytes(const ExchangeShape& shape);

// What a rank's link does.
struct ExchangeLink {
  double bytes_per_s = 0;
  double latency_s = 0;  // of a collective
};
// The cheaper way by bytes / link + latency of its collectives; SmallEP where nothing is sent: one rank, or no experts.
ExpertExchange ChooseExchange(const ExchangeShape& shape, const ExchangeLink& link);

// Counted, for comparison: what a dispatch would send of `rows` rows of `rank` that sends a row once to each other rank with an expert that it chose, with
// those choices, and gets one partial sum back. Both directions. ids [rows, top_k].
uint64_t DedupDispatchBytes(const int32_t* ids, int64_t rows, int64_t rank, const ExchangeShape& shape);

}  // namespace hearth
