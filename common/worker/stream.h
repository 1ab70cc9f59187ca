// A stream as a worker sees it: the value that came with Continue, where its events go, and where its KV lies.
// Room: common/worker. May touch: common/{rpc,shm,base}. Threads: a LiveStream belongs to its loop; `cancelled` may be set by any thread.
// A stream is a value (DESIGN section 4): everything a worker computes is a function of StreamRequest; LiveStream adds only a place.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"

namespace hearth {

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;
  int32_t top_k = 0;  // 0: all
  float min_p = 0.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  std::vector<std::pair<int32_t, float>> logit_bias;
};

struct StreamRequest {
  Hash128 id;
  uint64_t epoch = 0;
  std::vector<int32_t> tokens;  // prompt, then output so far
  int64_t prompt_size = 0;
  int64_t max_new_tokens = 0;
  int64_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> eos_ids;
  int32_t num_logprobs = -1;  // -1: none; 0: the chosen token's; k: and the k best
  uint64_t seed = 0;
  SamplingParams sampling;
  bool shared_pass = false;  // a prefill worker that leads a group computes it with all ranks
  bool begun = false;        // it has run before, in this generation: a draining worker still takes it (DESIGN 3.1)

  int64_t output_size() const { return static_cast<int64_t>(tokens.size()) - prompt_size; }
  // Positions below were or will be computed by the prefill form, the others by the decode form (DESIGN section 7).
  int64_t prefill_until() const { return prompt_size - 1; }
};

struct TokenScore {
  int32_t id = 0;
  float logprob = 0;
};

struct TokenEvent {
  int64_t index = 0;  // in the output
  int32_t id = 0;
  float logprob = 0;  // of the model's own distribution, before temperature, penalties and bias
  std::vector<TokenScore> top;
};

enum class FinishReason { kEos, kLength, kPreempted };

// Where a stream's events go. Called by the loop's thread; implementations never block.
class StreamSink {
 public:
  virtual ~StreamSink() = default;
  virtual void OnStarted(int64_t cached_tokens) = 0;
  virtual void OnPrefilled(int64_t tokens) = 0;  // the prefill worker's end: the pages are offered
  virtual void OnToken(const TokenEvent& token) = 0;
  virtual void OnFinished(FinishReason reason) = 0;
  virtual void OnError(const absl::Status& status) = 0;
};

struct LiveStream {
  LiveStream(StreamRequest request, std::shared_ptr<StreamSink> sink, uint64_t serial)
      : request(std::move(request)), sink(std::move(sink)), serial(serial) {}

  StreamRequest request;
  std::shared_ptr<StreamSink> sink;
  const uint64_t serial;               // tells one Continue from the next of the same id
  std::atomic<bool> cancelled{false};  // the client is gone: stop within one step
  std::atomic<bool> left{false};       // it has left its loop: pages that were still to come are not wanted any more
  bool gone() const { return cancelled.load(std::memory_order_acquire) || left.load(std::memory_order_acquire); }

  // Owned by the loop:
  bool prepared = false;       // pages and `valid` are known
  bool growing = false;        // a request for more pages is under way
  bool out_of_pages = false;   // the pool had none for it
  std::vector<int32_t> pages;  // page i holds positions [64 i, 64 i + 64)
  int64_t valid = 0;           // positions [0, valid) have their KV in every layer
  int64_t sealed_pages = 0;    // pages [0, sealed_pages) are published, or asked to be
  // With an MTP module: the hidden state at position `hidden_at`, from which the MTP slot of the next one is made. Only this process has it: who takes
  // a stream over queries that position again.
  std::vector<float> hidden;
  int64_t hidden_at = -1;
};

}  // namespace hearth
