// What an op costs, as a function of its argument struct alone: arithmetic and bytes per kind of memory traffic.
// One table for the simulator, the policy search, the prediction of first-token times and the "percent of roofline" metric.
// Room: common/device. May touch: common/base. Threads: any; pure functions. Pointers in the structs are not followed, but for `sequences`.
#pragma once

#include <string>

#include "common/device/ops.h"

namespace hearth {

// A multiply-add counts as two flops. Bytes are what an ideal device moves: every operand once.
struct OpCost {
  double flops = 0;
  double weight_bytes = 0;
  double activation_bytes = 0;
  double kv_bytes = 0;

  OpCost& operator+=(const OpCost& o);
  double bytes() const { return weight_bytes + activation_bytes + kv_bytes; }
  std::string ToString() const;  // "flops=1024 weights=512 activations=96 kv=0", exact integers where the numbers are
};

// Weights and their scales.
double WeightViewBytes(const WeightView& w);

// How many different experts M tokens wake that choose top_k of E each, uniformly and independently of each other:
//   E * (1 - (1 - top_k/E)^M).
// An expert stays asleep if M tokens in a row pass it by, each with probability 1 - top_k/E. Real gates are less even, so this is an upper estimate.
double ExpectedDistinctExperts(int64_t num_experts, int64_t top_k, int64_t m);

OpCost CostOf(const EmbedArgs& a);
OpCost CostOf(const RmsNormArgs& a);
OpCost CostOf(const LinearArgs& a);
OpCost CostOf(const ToBf16Args& a);
OpCost CostOf(const SiluMulArgs& a);
OpCost CostOf(const AddArgs& a);
OpCost CostOf(const AddGatedArgs& a);
OpCost CostOf(const AddRowsArgs& a);
OpCost CostOf(const GatherRowsArgs& a);
OpCost CostOf(const MlaWriteKvArgs& a);
OpCost CostOf(const MlaRopeQueryArgs& a);
// kDecode, a row with c positions to see: absorb 2*heads*nope*rank, scores 2*heads*c*(rank+rope), sum 2*heads*c*rank, values 2*heads*rank*v.
// kPrefill: each sequence's positions are expanded once, 2*end*heads*(nope+v)*rank; a row then takes 2*heads*c*(nope+rope+v).
// KV is read once per row (decode) or once per sequence (prefill).
OpCost CostOf(const MlaAttentionArgs& a);
OpCost CostOf(const GqaRotateQueryArgs& a);
OpCost CostOf(const GqaWriteKvArgs& a);
// A row with c positions to see: 4*heads*c*head_dim. A sequence's positions are read once.
OpCost CostOf(const GqaAttentionArgs& a);
OpCost CostOf(const GateArgs& a);
// flops 2 * M*top_k * terms * 3*H*I; weights: ExpectedDistinctExperts(E, top_k, M) records of 3*H*I elements with their scales.
OpCost CostOf(const ExpertsArgs& a);
// The same when so many different experts are really chosen.
OpCost CostOfExperts(const ExpertsArgs& a, double distinct_experts);
// flops 2 * n * terms * 3*H*I; weights: the one record; each row's input is read, its sum read and written.
OpCost CostOf(const ExpertRowsArgs& a);
OpCost CostOf(const ClearArgs& a);
// What crosses the link, as weight bytes: weights are what is loaded.
OpCost CostOf(const ToDeviceArgs& a);
OpCost CostOf(const ToHostArgs& a);

}  // namespace hearth
