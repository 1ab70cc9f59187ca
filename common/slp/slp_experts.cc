// The model's part of a pass in the routed experts: what goes between the ranks before and after them, and the order of the sums.
#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/experts/expert_quarters.h"
#include "common/slp/slp_pass.h"

namespace hearth {
namespace {

// Experts ascending inside each id-quarter, then (q0 + q1) + (q2 + q3): the order of DESIGN section 7. Of a rank's quarters, in which sum each is made.
constexpr int kSumOf[kExpertQuarters] = {0, 1, 1, 2};

}  // namespace

absl::Status SlpPass::BringRows() {
  if (dispatches()) {
    RETURN_IF_ERROR(ReadChoices(own_rows_));
    return SendRows();
  }
  if (!alone()) {
    const int64_t top_k = config_.num_experts_per_tok;
    const std::vector<uint64_t> inputs = RankBytes(config_.hidden_size * c_.memory.chunk->terms * 2), choices = RankBytes(top_k * 4);
    c_.group->AllGather(*compute_, {.name = "rows", .data = c_.memory.normed.data(), .bytes = inputs.data()});
    c_.group->AllGather(*compute_, {.name = "gate", .data = c_.memory.expert_ids.data(), .bytes = choices.data(), .steers = true});
    c_.group->AllGather(*compute_, {.name = "gate", .data = c_.memory.expert_weights.data(), .bytes = choices.data(), .steers = true});
  }
  RETURN_IF_ERROR(ReadChoices(all_rows_));
  GroupByExpert(ids_.data(), all_rows_, config_.num_experts_per_tok, config_.n_routed_experts, groups_);
  WeightsByPair(groups_);
  PutGroups(groups_, c_.memory.rows_by_expert, c_.memory.weights_by_expert);
  return absl::OkStatus();
}

// Who chose what, to the host.
absl::Status SlpPass::ReadChoices(int64_t rows) {
  const int64_t top_k = config_.num_experts_per_tok;
  const uint64_t bytes = static_cast<uint64_t>(rows * top_k) * 4;
  ids_.resize(static_cast<size_t>(rows * top_k));
  gate_weights_.resize(ids_.size());
  ops_.ToHost(*compute_, {.device = c_.memory.expert_ids.data(), .host = ids_.data(), .bytes = bytes});
  ops_.ToHost(*compute_, {.device = c_.memory.expert_weights.data(), .host = gate_weights_.data(), .bytes = bytes});
  RETURN_IF_ERROR(compute_->Synchronize());
  if (alone()) return absl::OkStatus();
  const ExchangeShape shape = ExchangeOfModel(config_, ranks_, rows, c_.memory.chunk->terms);
  stats_.dedup_dispatch_bytes += DedupDispatchBytes(ids_.data() + c_.memory.own_begin * top_k, own_rows_, rank_, shape);
  return absl::OkStatus();
}

void SlpPass::WeightsByPair(const ExpertGroups& groups) {
  pair_weights_.resize(gate_weights_.size());
  for (size_t i = 0; i < gate_weights_.size(); ++i) pair_weights_[static_cast<size_t>(groups.pair_of[i])] = gate_weights_[i];
}

void SlpPass::PutGroups(const ExpertGroups& groups, Buffer& rows, Buffer& weights) {
  const uint64_t bytes = groups.rows.size() * 4;
  ops_.ToDevice(*compute_, {.host = groups.rows.data(), .device = rows.data(), .bytes = bytes, .stop = &board_.stop()});
  ops_.ToDevice(*compute_, {.host = pair_weights_.data(), .device = weights.data(), .bytes = bytes, .stop = &board_.stop()});
}

// A copy of each row to the rank of each expert that it chose. What a rank gets lies by the rank it comes from, then by expert, then by row.
absl::Status SlpPass::SendRows() {
  const int64_t experts = config_.n_routed_experts;
  const int64_t input_bytes = config_.hidden_size * c_.memory.chunk->terms * 2;
  GroupByExpert(ids_.data(), own_rows_, config_.num_experts_per_tok, experts, own_groups_);
  WeightsByPair(own_groups_);
  PutGroups(own_groups_, c_.memory.own_rows_by_expert, c_.memory.own_weights_by_expert);
  counts_.assign(static_cast<size_t>(ranks_ * experts), 0);
  const std::vector<uint64_t> count_bytes(static_cast<size_t>(ranks_), static_cast<uint64_t>(experts) * 4);
  for (int64_t e = 0; e < experts; ++e) counts_[static_cast<size_t>(rank_ * experts + e)] = static_cast<int32_t>(own_groups_.count(e));
  ops_.ToDevice(*compute_, {.host = &counts_[static_cast<size_t>(rank_ * experts)],
                            .device = c_.memory.counts.as<int32_t>() + rank_ * experts,
                            .bytes = count_bytes[0],
                            .stop = &board_.stop(),
                            .steers = true});
  c_.group->AllGather(*compute_, {.name = "counts", .data = c_.memory.counts.data(), .bytes = count_bytes.data(), .steers = true});
  ops_.ToHost(*compute_, {.device = c_.memory.counts.data(), .host = counts_.data(), .bytes = counts_.size() * 4});
  // A row of BF16 is copied as half as many floats.
  ops_.GatherRows(*compute_, {.x = c_.memory.normed.as<float>(),
                              .rows = c_.memory.own_rows_by_expert.as<int32_t>(),
                              .m = static_cast<int64_t>(own_groups_.rows.size()),
                              .n = input_bytes / 4,
                              .out = c_.memory.sent.as<float>()});
  RETURN_IF_ERROR(compute_->Synchronize());

  out_bytes_.clear();
  in_bytes_.clear();
  std::vector<int64_t> next;  // by rank: its first pair that has not been given to an expert
  int64_t received = 0;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    const size_t first = static_cast<size_t>(FirstExpertOf(rank, ranks_, experts)),
                 end = static_cast<size_t>(FirstExpertOf(rank + 1, ranks_, experts));
    out_bytes_.push_back(static_cast<uint64_t>((own_groups_.begin[end] - own_groups_.begin[first]) * input_bytes));
    const auto counts = counts_.begin() + rank * experts;
    const int64_t pairs = std::accumulate(counts + c_.plan.experts_begin(), counts + c_.plan.experts_end(), int64_t{0});
    in_bytes_.push_back(static_cast<uint64_t>(pairs * input_bytes));
    next.push_back(received);
    received += pairs;
  }
  c_.group->AllToAll(*compute_, {.name = "rows",
                                 .from = c_.memory.sent.data(),
                                 .send_bytes = out_bytes_.data(),
                                 .to = c_.memory.received.data(),
                                 .receive_bytes = in_bytes_.data()});
  groups_.begin.assign(static_cast<size_t>(experts) + 1, 0);
  groups_.rows.clear();
  for (int64_t e = 0; e < experts; ++e) {
    if (e >= c_.plan.experts_begin() && e < c_.plan.experts_end()) {
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        for (int32_t i = 0; i < counts_[static_cast<size_t>(rank * experts + e)]; ++i) {
          groups_.rows.push_back(static_cast<int32_t>(next[static_cast<size_t>(rank)]++));
        }
      }
    }
    groups_.begin[static_cast<size_t>(e) + 1] = static_cast<int64_t>(groups_.rows.size());
  }
  pair_weights_.assign(groups_.rows.size(), 1.0f);  // the owner weighs
  PutGroups(groups_, c_.memory.rows_by_expert, c_.memory.weights_by_expert);
  return absl::OkStatus();
}

absl::Status SlpPass::RoutedExperts(const MoeWeights& weights, int64_t layer) {
  std::vector<int64_t> unchosen;
  for (int64_t expert = c_.plan.experts_begin(); expert < c_.plan.experts_end(); ++expert) {
    if (groups_.count(expert) == 0) unchosen.push_back(c_.plan.expert(layer, expert));
  }
  board_.Skip(unchosen);
  if (dispatches()) {
    RETURN_IF_ERROR(ExpertOutputs(weights, layer));
    ReturnOutputs();
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(SumQuarters(weights, layer));
  if (!alone()) ExchangeSums();
  return absl::OkStatus();
}

// Over the rank's id-quarters: one of four, the sum of a pair, or all.
absl::Status SlpPass::SumQuarters(const MoeWeights& weights, int64_t layer) {
  const int64_t experts = config_.n_routed_experts;
  const int64_t quarters = kExpertQuarters / ranks_;
  for (int64_t quarter = 0; quarter < quarters; ++quarter) {
    float* sum = c_.memory.sums[static_cast<size_t>(kSumOf[quarter])].as<float>();
    ops_.Clear(*compute_, {.x = sum, .n = all_rows_ * config_.hidden_size});
    const int64_t of_all = rank_ * quarters + quarter;
    for (int64_t expert = ExpertQuarterBegin(of_all, experts); expert < ExpertQuarterBegin(of_all + 1, experts); ++expert) {
      RETURN_IF_ERROR(RunExpert(weights, layer, expert, c_.memory.normed.as<bf16>(), sum));
    }
    if (quarter == 1) AddSum(1, 0, all_rows_);
  }
  if (quarters < kExpertQuarters) return absl::OkStatus();
  AddSum(2, 1, all_rows_);
  AddSum(1, 0, all_rows_);
  return absl::OkStatus();
}

// Each rank gets the others' sums of its own rows and adds them up as one rank would: a sum of two does not hang on their order.
void SlpPass::ExchangeSums() {
  const int64_t sum_bytes = config_.hidden_size * 4;
  const std::vector<uint64_t> out = RankBytes(sum_bytes);
  std::vector<uint64_t> in(static_cast<size_t>(ranks_), static_cast<uint64_t>(own_rows_ * sum_bytes));
  in[static_cast<size_t>(rank_)] = 0;
  c_.group->AllToAll(
      *compute_,
      {.name = "sums", .from = c_.memory.sums[0].data(), .send_bytes = out.data(), .to = c_.memory.sums[1].data(), .receive_bytes = in.data()});
  const int64_t elements = own_rows_ * config_.hidden_size;
  const auto sum_of = [&](int64_t rank) {
    if (rank == rank_) return c_.memory.sums[0].as<float>() + c_.memory.own_begin * config_.hidden_size;
    return c_.memory.sums[1].as<float>() + (rank < rank_ ? rank : rank - 1) * elements;
  };
  const auto add = [&](int64_t from, int64_t to) { ops_.Add(*compute_, {.x = sum_of(from), .y = sum_of(to), .n = elements}); };
  add(rank_ ^ 1, rank_);
  if (ranks_ < kExpertQuarters) return;
  const int64_t other_pair = (rank_ ^ 2) & ~int64_t{1};
  add(other_pair + 1, other_pair);
  add(other_pair, rank_);
}

// With dispatch: outputs [pairs received, hidden], each of one expert and not yet weighed.
absl::Status SlpPass::ExpertOutputs(const MoeWeights& weights, int64_t layer) {
  float* outputs = c_.memory.outputs.as<float>();
  ops_.Clear(*compute_, {.x = outputs, .n = static_cast<int64_t>(groups_.rows.size()) * config_.hidden_size});
  for (int64_t expert = c_.plan.experts_begin(); expert < c_.plan.experts_end(); ++expert) {
    RETURN_IF_ERROR(RunExpert(weights, layer, expert, c_.memory.received.as<bf16>(), outputs));
  }
  return absl::OkStatus();
}

void SlpPass::ReturnOutputs() {
  const uint64_t hidden = static_cast<uint64_t>(config_.hidden_size);
  const uint64_t input_bytes = hidden * static_cast<uint64_t>(c_.memory.chunk->terms) * 2;
  for (std::vector<uint64_t>* bytes : {&out_bytes_, &in_bytes_}) {
    for (uint64_t& b : *bytes) b = b / input_bytes * hidden * 4;
  }
  c_.group->AllToAll(*compute_, {.name = "outputs",
                                 .from = c_.memory.outputs.data(),
                                 .send_bytes = in_bytes_.data(),
                                 .to = c_.memory.returned.data(),
                                 .receive_bytes = out_bytes_.data()});
  for (int64_t quarter = 0; quarter < kExpertQuarters; ++quarter) {
    const auto begin_of = [&](int64_t q) { return own_groups_.begin[static_cast<size_t>(ExpertQuarterBegin(q, config_.n_routed_experts))]; };
    const int64_t begin = begin_of(quarter);
    float* sum = c_.memory.sums[static_cast<size_t>(kSumOf[quarter])].as<float>();
    ops_.Clear(*compute_, {.x = sum, .n = own_rows_ * config_.hidden_size});
    ops_.AddRows(*compute_, {.x = c_.memory.returned.as<float>() + begin * config_.hidden_size,
                             .rows = c_.memory.own_rows_by_expert.as<int32_t>() + begin,
                             .weights = c_.memory.own_weights_by_expert.as<float>() + begin,
                             .m = begin_of(quarter + 1) - begin,
                             .n = config_.hidden_size,
                             .sum = sum});
    if (quarter == 1) AddSum(1, 0, own_rows_);
  }
  AddSum(2, 1, own_rows_);
  AddSum(1, 0, own_rows_);
}

// For the rows of groups_; nothing if there are none.
absl::Status SlpPass::RunExpert(const MoeWeights& weights, int64_t layer, int64_t expert, const bf16* x, float* sum) {
  if (groups_.count(expert) == 0) return absl::OkStatus();
  RETURN_IF_ERROR(StillWanted(layer));
  const int64_t item = c_.plan.expert(layer, expert);
  ASSIGN_OR_RETURN(const int64_t slot, Await(item));
  const int64_t first = groups_.begin[static_cast<size_t>(expert)];
  ops_.ExpertRows(*compute_, {.form = Form::kPrefill,
                              .shards = slot_shards_[static_cast<size_t>(slot)].data(),
                              .num_shards = c_.model.num_shards(),
                              .hidden = config_.hidden_size,
                              .intermediate = config_.moe_intermediate_size,
                              .weight_dtypes = weights.expert_dtypes,
                              .terms = c_.memory.chunk->terms,
                              .x = x,
                              .rows = c_.memory.rows_by_expert.as<int32_t>() + first,
                              .weights = c_.memory.weights_by_expert.as<float>() + first,
                              .n = groups_.count(expert),
                              .sum = sum,
                              .workspace = c_.memory.expert_room.data(),
                              .workspace_bytes = c_.memory.expert_room.bytes()});
  Done(item, slot);
  return absl::OkStatus();
}

void SlpPass::AddSum(int from, int to, int64_t rows) {
  ops_.Add(*compute_, {.x = c_.memory.sums[static_cast<size_t>(from)].as<float>(),
                       .y = c_.memory.sums[static_cast<size_t>(to)].as<float>(),
                       .n = rows * config_.hidden_size});
}

}  // namespace hearth
