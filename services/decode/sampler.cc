#include "services/decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

namespace hearth {
namespace {

// Elements whose largest logit and whose sum are kept: some 500 blocks for the vocabularies of today.
constexpr int64_t kBlock = 256;

bool HasPenalties(const SamplingParams& p) { return p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f || p.repetition_penalty != 1.0f; }

// Greater logit first; of equal ones the lower id.
template <typename C>
bool Before(const C& a, const C& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

template <typename C>
bool ById(const C& a, const C& b) {
  return a.id < b.id;
}

std::span<const float> BlockOf(std::span<const float> logits, int64_t block) {
  const int64_t begin = block * kBlock;
  return logits.subspan(static_cast<size_t>(begin), static_cast<size_t>(std::min(kBlock, static_cast<int64_t>(logits.size()) - begin)));
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

void Sampler::Look(std::span<const float> logits, Scan& scan) const {
  scan.logits = logits;
  scan.block_max.clear();
  float checked = 0;  // a NaN of any block stays
  for (int64_t block = 0; block * kBlock < static_cast<int64_t>(logits.size()); ++block) {
    const std::span<const float> x = BlockOf(logits, block);
    scan.block_max.push_back(kernels_.max_finite(x.data(), static_cast<int64_t>(x.size())));
    checked += scan.block_max.back() * 0.0f;
  }
  scan.max = *std::max_element(scan.block_max.begin(), scan.block_max.end()) + checked;
}

bool Sampler::Adjusts(const StreamRequest& request) const {
  return !request.sampling.logit_bias.empty() || HasPenalties(request.sampling) || request.output_size() < request.min_tokens;
}

void Sampler::Adjust(const StreamRequest& request, std::span<const float> logits) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  adjusted_.assign(logits.begin(), logits.end());
  for (const auto& [id, bias] : request.sampling.logit_bias) {
    if (id >= 0 && id < vocab) adjusted_[static_cast<size_t>(id)] += bias;
  }
  if (HasPenalties(request.sampling)) ApplyPenalties(request);
  if (request.output_size() < request.min_tokens) {
    for (const int32_t id : request.eos_ids) {
      if (id >= 0 && id < vocab) adjusted_[static_cast<size_t>(id)] = std::numeric_limits<float>::lowest();
    }
  }
}

void Sampler::ApplyPenalties(const StreamRequest& request) {
  const SamplingParams& p = request.sampling;
  in_output_.resize(adjusted_.size(), kUnseen);
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

void Sampler::Gather(const Scan& scan, float least) {
  candidates_.clear();
  for (int64_t block = 0; block < static_cast<int64_t>(scan.block_max.size()); ++block) {
    if (scan.block_max[static_cast<size_t>(block)] < least) continue;
    int32_t id = static_cast<int32_t>(block * kBlock);
    for (const float x : BlockOf(scan.logits, block)) {
      if (x >= least) candidates_.push_back({x, id});
      ++id;
    }
  }
}

void Sampler::GatherBest(const Scan& scan, int64_t k, float least) {
  // The k-th largest of the blocks' largest: at least k logits are as large.
  if (k < static_cast<int64_t>(scan.block_max.size())) {
    largest_ = scan.block_max;
    std::nth_element(largest_.begin(), largest_.begin() + k - 1, largest_.end(), std::greater<>());
    least = std::max(least, largest_[static_cast<size_t>(k - 1)]);
  }
  Gather(scan, least);
  if (k >= static_cast<int64_t>(candidates_.size())) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + k - 1, candidates_.end(), Before<Candidate>);
  candidates_.resize(static_cast<size_t>(k));
}

double Sampler::Weigh(float max, float factor) {
  candidate_logits_.clear();
  for (const Candidate& c : candidates_) candidate_logits_.push_back(c.logit);
  weights_.resize(candidates_.size());
  kernels_.exp_sum(candidate_logits_.data(), static_cast<int64_t>(candidates_.size()), max, factor, weights_.data());
  double sum = 0;
  for (const float weight : weights_) sum += weight;
  return sum;
}

double Sampler::SumBlocks(const Scan& scan, float factor) {
  block_sums_.clear();
  double sum = 0;
  for (int64_t block = 0; block < static_cast<int64_t>(scan.block_max.size()); ++block) {
    const std::span<const float> x = BlockOf(scan.logits, block);
    block_sums_.push_back(kernels_.exp_sum(x.data(), static_cast<int64_t>(x.size()), scan.max, factor, nullptr));
    sum += block_sums_.back();
  }
  return sum;
}

void Sampler::CutToNucleus(float max, float factor, double enough) {
  // A heap gives the best one after the other: the nucleus is small, what it is taken from may not be.
  const auto later = [](const Candidate& a, const Candidate& b) { return Before(b, a); };
  std::make_heap(candidates_.begin(), candidates_.end(), later);
  auto end = candidates_.end();
  double total = 0;
  do {
    std::pop_heap(candidates_.begin(), end, later);
    --end;
    float weight = 0;
    kernels_.exp_sum(&end->logit, 1, max, factor, &weight);
    total += weight;
  } while (total < enough && end != candidates_.begin());
  candidates_.erase(candidates_.begin(), end);
  std::sort(candidates_.begin(), candidates_.end(), ById<Candidate>);
}

size_t Sampler::WeightAt(double left) const {
  size_t chosen = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] == 0) continue;
    chosen = i;
    left -= weights_[i];
    if (left < 0) break;
  }
  return chosen;
}

int32_t Sampler::DrawFromAll(const Scan& scan, float factor, double uniform) {
  double left = uniform * SumBlocks(scan, factor);
  // Rounding may leave a crumb behind the last block: the last one that has any weight takes it.
  int64_t block = static_cast<int64_t>(block_sums_.size()) - 1;
  while (block > 0 && block_sums_[static_cast<size_t>(block)] == 0) --block;
  for (int64_t b = 0; b < block; ++b) {
    if (left < block_sums_[static_cast<size_t>(b)]) {
      block = b;
      break;
    }
    left -= block_sums_[static_cast<size_t>(b)];
  }
  const std::span<const float> x = BlockOf(scan.logits, block);
  weights_.resize(x.size());
  kernels_.exp_sum(x.data(), static_cast<int64_t>(x.size()), scan.max, factor, weights_.data());
  return static_cast<int32_t>(block * kBlock + static_cast<int64_t>(WeightAt(left)));
}

int32_t Sampler::DrawFromCandidates(float max, float factor, double uniform) { return candidates_[WeightAt(uniform * Weigh(max, factor))].id; }

int32_t Sampler::Choose(const StreamRequest& request, const Scan& scan) {
  const SamplingParams& p = request.sampling;
  const float factor = 1.0f / p.temperature;
  // A temperature next to nothing is none: its reciprocal has no finite value.
  if (p.temperature <= 0.0f || p.top_k == 1 || !std::isfinite(factor)) {
    GatherBest(scan, 1, scan.max);
    return candidates_.front().id;
  }
  const double uniform = UniformAt(request.seed, static_cast<uint64_t>(request.tokens.size()));
  const int64_t vocab = static_cast<int64_t>(scan.logits.size());
  const bool by_k = p.top_k > 0 && p.top_k < vocab;
  const bool by_p = p.top_p < 1.0f;
  const bool by_min = p.min_p > 0.0f;
  if (!by_k && !by_p && !by_min) return DrawFromAll(scan, factor, uniform);

  // Weights are exp((logit - max) / T): dividing by their sum is left to the draw. min_p keeps p >= min_p p_max, that is weights >= min_p.
  const auto with_weight = [&](double weight) { return static_cast<float>(scan.max + std::log(weight) * static_cast<double>(p.temperature)); };
  constexpr double kLeastWeight = 1e-45;  // below it is nothing in F32
  const float least = with_weight(by_min ? std::min(1.0, static_cast<double>(p.min_p)) : kLeastWeight);
  const double top_p = std::max(0.0, static_cast<double>(p.top_p));
  if (by_k) {
    GatherBest(scan, p.top_k, least);
    std::sort(candidates_.begin(), candidates_.end(), ById<Candidate>);
  } else if (by_min) {
    Gather(scan, least);
  } else {
    // top_p alone: what counts are the weights of the whole vocabulary, but a few best tokens will mostly hold enough of them.
    const double enough = top_p * SumBlocks(scan, factor);
    for (const double weight : {0x1p-6, 0x1p-12, 0x1p-24, kLeastWeight}) {
      Gather(scan, with_weight(weight));
      if (Weigh(scan.max, factor) >= enough) break;
    }
    CutToNucleus(scan.max, factor, enough);
    return DrawFromCandidates(scan.max, factor, uniform);
  }
  if (by_p) CutToNucleus(scan.max, factor, top_p * Weigh(scan.max, factor));
  return DrawFromCandidates(scan.max, factor, uniform);
}

void Sampler::AddLogprobs(const StreamRequest& request, const Scan& scan, TokenEvent& event) {
  const double log_sum = scan.max + std::log(SumBlocks(scan, 1.0f));
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(std::min(0.0, static_cast<double>(scan.logits[static_cast<size_t>(id)]) - log_sum));
  };
  event.logprob = logprob(event.id);
  const int64_t k = std::min<int64_t>(request.num_logprobs, static_cast<int64_t>(scan.logits.size()));
  if (k <= 0) return;
  GatherBest(scan, k, std::numeric_limits<float>::lowest());
  std::sort(candidates_.begin(), candidates_.end(), Before<Candidate>);
  for (const Candidate& c : candidates_) event.top.push_back({c.id, logprob(c.id)});
}

absl::StatusOr<TokenEvent> Sampler::Draw(const StreamRequest& request, const float* logits, int64_t vocab) {
  const std::span<const float> all(logits, static_cast<size_t>(vocab));
  Look(all, raw_);
  if (std::isnan(raw_.max)) {
    return absl::DataLossError(absl::StrCat("the model's logits at position ", request.tokens.size(),
                                            " are not finite: its weights, or what they make of this text, go beyond F32"));
  }
  TokenEvent event;
  if (Adjusts(request)) {
    Adjust(request, all);
    Look(adjusted_, adjusted_scan_);
    if (std::isnan(adjusted_scan_.max)) {
      return absl::InvalidArgumentError("this request's bias and penalties take logits beyond F32: use smaller ones");
    }
    event.id = Choose(request, adjusted_scan_);
  } else {
    event.id = Choose(request, raw_);
  }
  if (request.num_logprobs >= 0) AddLogprobs(request, raw_, event);
  return event;
}

}  // namespace hearth
