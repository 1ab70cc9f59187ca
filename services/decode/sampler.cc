#include "services/decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace hearth {
namespace {

bool HasPenalties(const SamplingParams& p) { return p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f || p.repetition_penalty != 1.0f; }

bool AllFinite(const float* x, int64_t n) {
  // Any infinity or NaN makes the sum of x - x a NaN.
  float zero = 0;
  for (int64_t i = 0; i < n; ++i) zero += x[i] - x[i];
  return zero == 0;
}

// Greater logit first; of equal ones the lower id.
template <typename C>
bool Before(const C& a, const C& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

}  // namespace

double UniformAt(uint64_t seed, uint64_t position) {
  // SplitMix64's finaliser (Steele, Lea, Flood 2014) over both words: a counter-based generator needs no state.
  const auto mix = [](uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  return static_cast<double>(mix(mix(seed) ^ position) >> 11) * 0x1.0p-53;
}

void Sampler::ApplyPenalties(const StreamRequest& request, int64_t vocab) {
  const SamplingParams& p = request.sampling;
  in_output_.resize(static_cast<size_t>(vocab), kUnseen);
  seen_.clear();
  for (size_t i = 0; i < request.tokens.size(); ++i) {
    const int32_t id = request.tokens[i];
    int32_t& count = in_output_[static_cast<size_t>(id)];
    if (count == kUnseen) {
      seen_.push_back(id);
      count = 0;
    }
    if (static_cast<int64_t>(i) >= request.prompt_size) ++count;
  }
  for (const int32_t id : seen_) {
    float& x = adjusted_[static_cast<size_t>(id)];
    const int32_t count = std::exchange(in_output_[static_cast<size_t>(id)], kUnseen);
    if (p.repetition_penalty != 1.0f) x = x < 0 ? x * p.repetition_penalty : x / p.repetition_penalty;
    if (count > 0) x -= p.presence_penalty + p.frequency_penalty * static_cast<float>(count);
  }
}

int32_t Sampler::Choose(const StreamRequest& request, int64_t vocab) {
  const SamplingParams& p = request.sampling;
  const float* x = adjusted_.data();
  const int32_t best = static_cast<int32_t>(std::max_element(x, x + vocab) - x);  // the first of equals
  if (p.temperature <= 0.0f || p.top_k == 1) return best;

  // Everything below works on exp((logit - max) / T); dividing by the sum is left to the draw.
  const double max = x[best];
  const double inverse_t = 1.0 / static_cast<double>(p.temperature);
  // min_p: p >= min_p * p_max, that is exp((x - max) / T) >= min_p. Without it, what underflows to nothing can be left out as well.
  const double floor = p.min_p > 0.0f ? std::log(static_cast<double>(p.min_p)) : -745.0;
  // Ascending ids throughout: the order of the sums, and so the draw, does not depend on how the set was found. Only a cut disturbs it.
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
  candidates_.clear();
  for (int64_t i = 0; i < vocab; ++i) {
    if ((x[i] - max) * inverse_t >= floor) candidates_.push_back({x[i], static_cast<int32_t>(i)});
  }
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + p.top_k - 1, candidates_.end(), Before<Candidate>);
    candidates_.resize(static_cast<size_t>(p.top_k));
    std::sort(candidates_.begin(), candidates_.end(), by_id);
  }
  double total = 0;
  const auto weigh = [&](const Candidate& c) { return std::exp((c.logit - max) * inverse_t); };
  if (p.top_p < 1.0f) {
    // The smallest set of best tokens whose probability reaches top_p: a heap gives the best one after the other, without sorting the vocabulary.
    double all = 0;
    for (const Candidate& c : candidates_) all += weigh(c);
    const auto later = [](const Candidate& a, const Candidate& b) { return Before(b, a); };
    std::make_heap(candidates_.begin(), candidates_.end(), later);
    auto end = candidates_.end();
    const double enough = std::max(0.0, static_cast<double>(p.top_p)) * all;
    do {
      std::pop_heap(candidates_.begin(), end, later);
      --end;
      total += weigh(*end);
    } while (total < enough && end != candidates_.begin());
    candidates_.erase(candidates_.begin(), end);
    std::sort(candidates_.begin(), candidates_.end(), by_id);
  }
  weights_.resize(candidates_.size());
  total = 0;
  for (size_t i = 0; i < candidates_.size(); ++i) total += weights_[i] = weigh(candidates_[i]);
  double left = UniformAt(request.seed, static_cast<uint64_t>(request.tokens.size())) * total;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    left -= weights_[i];
    if (left < 0) return candidates_[i].id;
  }
  return best;  // rounding left a crumb behind the last one
}

absl::StatusOr<TokenEvent> Sampler::Draw(const StreamRequest& request, const float* logits, int64_t vocab) {
  if (!AllFinite(logits, vocab)) {
    return absl::DataLossError(absl::StrCat("the model's logits at position ", request.tokens.size(),
                                            " are not finite: its weights, or what they make of this text, go beyond F32"));
  }
  const SamplingParams& p = request.sampling;
  adjusted_.assign(logits, logits + vocab);
  for (const auto& [id, bias] : p.logit_bias) {
    if (id >= 0 && id < vocab) adjusted_[id] += bias;
  }
  if (HasPenalties(p)) ApplyPenalties(request, vocab);
  if (request.output_size() < request.min_tokens) {
    for (int32_t id : request.eos_ids) {
      if (id >= 0 && id < vocab) adjusted_[id] = std::numeric_limits<float>::lowest();
    }
  }
  TokenEvent event;
  event.id = Choose(request, vocab);
  if (request.num_logprobs < 0) return event;

  const float max = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - max);
  const double log_sum = max + std::log(sum);
  const auto logprob = [&](int32_t id) { return static_cast<float>(std::min(0.0, static_cast<double>(logits[id]) - log_sum)); };
  event.logprob = logprob(event.id);
  const size_t k = static_cast<size_t>(std::min<int64_t>(request.num_logprobs, vocab));
  if (k > 0) {
    candidates_.clear();
    for (int64_t i = 0; i < vocab; ++i) candidates_.push_back({logits[i], static_cast<int32_t>(i)});
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(k), candidates_.end(), Before<Candidate>);
    for (size_t i = 0; i < k; ++i) event.top.push_back({candidates_[i].id, logprob(candidates_[i].id)});
  }
  return event;
}

}  // namespace hearth
