// The sampler: logits -> one token, a pure function of (request, logits). Random draws are a counter-based function of (seed, position), so
// that a stream resumed anywhere draws the same tokens (DESIGN section 7).
// Room: services/decode. May touch: common/{worker,base}. Threads: one Sampler a loop (it keeps scratch between calls).
//
// Order: logit bias, repetition penalty (prompt and output), presence and frequency penalties (output), no end token before min_tokens;
// then temperature, min_p, top_k, top_p on probabilities; ties go to the lower id.
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/status.h"
#include "common/worker/stream.h"

namespace hearth {

// Uniform in [0, 1), 53 bits, the same everywhere.
double UniformAt(uint64_t seed, uint64_t position);

class Sampler {
 public:
  // logits [vocab] f32. `index` of the event is left to the caller. DataLoss where a logit is not finite: nothing can be drawn from that.
  absl::StatusOr<TokenEvent> Draw(const StreamRequest& request, const float* logits, int64_t vocab);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  static constexpr int32_t kUnseen = -1;
  void ApplyPenalties(const StreamRequest& request, int64_t vocab);
  int32_t Choose(const StreamRequest& request, int64_t vocab);

  std::vector<float> adjusted_;  // [vocab]
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
  std::vector<int32_t> in_output_;  // [vocab]: how often, of tokens that the stream has; kUnseen between calls
  std::vector<int32_t> seen_;
};

}  // namespace hearth
