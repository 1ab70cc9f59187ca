// The sampler: logits -> one token, a pure function of (request, logits). Random draws are a counter-based function of (seed, position), so
// that a stream resumed anywhere draws the same tokens (DESIGN section 7).
// Room: services/decode. May touch: common/{worker,kernels,base}. Threads: one Sampler a loop (it keeps scratch between calls).
//
// Order: logit bias, repetition penalty (prompt and output), presence and frequency penalties (output), no end token before min_tokens;
// then temperature, min_p, top_k, top_p on probabilities; ties go to the lower id.
//
// The vocabulary is walked once for its blocks' largest logits and, where probabilities are needed, once for their sums; everything else looks
// only into blocks that can hold what it wants. Nothing sorts it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/status.h"
#include "common/kernels/kernels.h"
#include "common/worker/stream.h"

namespace hearth {

// Uniform in [0, 1), 53 bits, the same everywhere.
double UniformAt(uint64_t seed, uint64_t position);

class Sampler {
 public:
  explicit Sampler(const KernelTable& kernels = Kernels(SupportedIsas().back())) : kernels_(kernels) {}

  // logits [vocab] f32. `index` of the event is left to the caller. DataLoss where a logit is not finite: nothing can be drawn from that.
  // InvalidArgument where only the request's bias and penalties make it so.
  absl::StatusOr<TokenEvent> Draw(const StreamRequest& request, const float* logits, int64_t vocab);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  static constexpr int32_t kUnseen = -1;

  // Logits with the largest of each block of kBlock.
  struct Scan {
    std::span<const float> logits;
    std::vector<float> block_max;
    float max = 0;  // NaN where a logit is not finite
  };
  void Look(std::span<const float> logits, Scan& scan) const;

  bool Adjusts(const StreamRequest& request) const;
  void Adjust(const StreamRequest& request, std::span<const float> logits);
  void ApplyPenalties(const StreamRequest& request);

  int32_t Choose(const StreamRequest& request, const Scan& scan);
  int32_t DrawFromAll(const Scan& scan, float factor, double uniform);
  int32_t DrawFromCandidates(float max, float factor, double uniform);
  // Sets `candidates_` to what is at least `least`, by ascending id.
  void Gather(const Scan& scan, float least);
  // Sets `candidates_` to the k best that are at least `least`, in no order.
  void GatherBest(const Scan& scan, int64_t k, float least);
  // Leaves the smallest set of best candidates whose weights reach `enough`, by ascending id.
  void CutToNucleus(float max, float factor, double enough);
  // weights_[i] = exp((logit of candidate i - max) * factor). Returns their sum.
  double Weigh(float max, float factor);
  // The index at which the running sum of weights_ passes `left`; where rounding leaves a crumb behind them, the last that has any weight.
  size_t WeightAt(double left) const;
  // block_sums_[b] = sum of exp((logit - max) * factor) over block b. Returns the sum over all.
  double SumBlocks(const Scan& scan, float factor);
  void AddLogprobs(const StreamRequest& request, const Scan& scan, TokenEvent& event);

  const KernelTable& kernels_;
  Scan raw_;                     // the model's own logits
  Scan adjusted_scan_;           // of adjusted_
  std::vector<float> adjusted_;  // [vocab], where bias, penalties or min_tokens change anything
  std::vector<float> block_sums_;
  std::vector<float> largest_;  // scratch of GatherBest
  std::vector<Candidate> candidates_;
  std::vector<float> weights_;  // of candidates, or of one block
  std::vector<float> candidate_logits_;
  std::vector<int32_t> in_output_;  // [vocab]: how often, of tokens that the stream has; kUnseen between calls
  std::vector<int32_t> seen_;
};

}  // namespace hearth
