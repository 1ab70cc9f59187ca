#include "common/slp/expert_exchange.h"

namespace hearth {
namespace {

constexpr double kGateBytes = 8;   // of a choice: id and weight
constexpr int kSmallEpCalls = 4;   // rows, ids, weights, partial sums
constexpr int kDispatchCalls = 3;  // counts, rows, outputs

double InputBytes(const ExchangeShape& s) { return static_cast<double>(s.hidden * s.terms * 2); }
double OutputBytes(const ExchangeShape& s) { return static_cast<double>(s.hidden * 4); }

}  // namespace

ExchangeShape ExchangeOfModel(const ModelConfig& config, int64_t ranks, int64_t rows, int64_t terms) {
  return {.ranks = ranks,
          .rows = rows,
          .experts = config.n_routed_experts,
          .top_k = config.num_experts_per_tok,
          .hidden = config.hidden_size,
          .terms = terms};
}

double SmallEpBytes(const ExchangeShape& s) {
  const double own = static_cast<double>(s.rows) / static_cast<double>(s.ranks);
  const double peers = static_cast<double>(s.ranks - 1);
  return own * peers * (InputBytes(s) + kGateBytes * static_cast<double>(s.top_k) + OutputBytes(s));
}

double DispatchBytes(const ExchangeShape& s) {
  const double own = static_cast<double>(s.rows) / static_cast<double>(s.ranks);
  const double peers = static_cast<double>(s.ranks - 1);
  // Of a row's choices those that lie elsewhere go out; as many outputs of others' rows go back.
  return own * static_cast<double>(s.top_k) * peers / static_cast<double>(s.ranks) * (InputBytes(s) + OutputBytes(s)) +
         peers * static_cast<double>(s.experts) * 4;
}

ExpertExchange ChooseExchange(const ExchangeShape& shape, const ExchangeLink& link) {
  if (shape.ranks == 1 || shape.experts == 0) return ExpertExchange::kSmallEp;
  const double small_ep = SmallEpBytes(shape) / link.bytes_per_s + kSmallEpCalls * link.latency_s;
  const double dispatch = DispatchBytes(shape) / link.bytes_per_s + kDispatchCalls * link.latency_s;
  return small_ep <= dispatch ? ExpertExchange::kSmallEp : ExpertExchange::kDispatch;
}

uint64_t DedupDispatchBytes(const int32_t* ids, int64_t rows, int64_t rank, const ExchangeShape& s) {
  uint64_t bytes = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t peer = 0; peer < s.ranks; ++peer) {
      if (peer == rank) continue;
      uint64_t there = 0;
      for (int64_t k = 0; k < s.top_k; ++k) {
        const int64_t id = ids[row * s.top_k + k];
        there += id >= FirstExpertOf(peer, s.ranks, s.experts) && id < FirstExpertOf(peer + 1, s.ranks, s.experts) ? 1 : 0;
      }
      if (there > 0) bytes += static_cast<uint64_t>(InputBytes(s) + OutputBytes(s)) + there * static_cast<uint64_t>(kGateBytes);
    }
  }
  return bytes;
}

}  // namespace hearth
