// A request and its streams: values, and the one table of states that everything else reads.
// Room: services/router. May touch: proto, common/{text,base}. Not: sockets, gRPC calls, the store.
// A request is what a client sent; a stream is one choice of one of its prompts, and what a worker is given (DESIGN section 4).
// Threads: the router's loop only.
//
//   QUEUED ----> PREFILLING ----> HANDOFF ----> DECODING ----> DONE
//     |  \__________________________________/^     |
//     |<---- worker lost, preempted --------------- |        and from each of the four: CANCELLED, FAILED
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/hash.h"
#include "hearth/v1/inference.pb.h"

namespace hearth::router {

enum class StreamState { kQueued, kPrefilling, kHandoff, kDecoding, kDone, kCancelled, kFailed };
inline constexpr int kNumStreamStates = 7;
const char* StreamStateName(StreamState state);
bool IsEnd(StreamState state);
bool MayMove(StreamState from, StreamState to);

enum class FinishReason { kStop, kLength, kCancelled };
const char* FinishReasonName(FinishReason reason);  // "stop", "length", "cancelled"

struct ScoredToken {
  int32_t id = 0;
  float logprob = 0;
};

struct OutputToken {
  int32_t id = 0;
  float logprob = 0;
  std::vector<ScoredToken> top;  // best first
  bool is_end = false;           // an end token: counted, but its text is never in the answer
};

// What one token, or the end of a choice, adds to what the client has.
struct ChoiceDelta {
  std::string text;                  // whole characters; may be empty while a character or a stop string is pending
  std::optional<OutputToken> token;  // none: text that the end released
  int32_t text_offset = 0;           // characters of the choice's text before this token
};

// What a client asked for, checked.
struct RequestOptions {
  v1::SamplingParams sampling;  // its seed is not used: see `seed`
  std::optional<int64_t> seed;
  std::optional<int32_t> max_tokens;
  int32_t min_tokens = 0;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  bool skip_special_tokens = true;
  int32_t num_logprobs = -1;  // -1: none; 0: of the chosen token; k: and of the k best
  int32_t n = 1;
  bool wait_in_queue = false;  // also where the first token is expected later than the node promises
};

struct Usage {
  int32_t prompt_tokens = 0;
  int32_t completion_tokens = 0;
  int32_t cached_tokens = 0;
};

// What a client leaves unread of its answers; beyond, it takes nothing and is dropped.
inline constexpr size_t kUnsentBytesMax = 8 << 20;

// Who is told of a request's progress; called on the loop, never after OnEnd.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  virtual void OnDelta(int32_t choice, const ChoiceDelta& delta) = 0;
  virtual void OnChoiceFinished(int32_t choice, FinishReason reason, const std::string& stop_string) = 0;
  // All choices have finished (OK), or the request failed. Not called for a request that its own client cancelled.
  virtual void OnEnd(const absl::Status& status, const Usage& usage) = 0;
};

struct StateChange {
  StreamState state;
  int64_t at_ns;
};

class ChoiceText;
struct ModelInfo;
struct Request;

struct Stream {
  Hash128 id;
  Request* request = nullptr;  // owns this
  int32_t choice = 0;
  std::shared_ptr<const std::vector<int32_t>> prompt_ids;
  uint64_t seed = 0;
  int32_t max_new_tokens = 0;

  std::vector<int32_t> output_ids;
  std::unique_ptr<ChoiceText> text;
  uint64_t epoch = 0;
  std::string generation;  // of the weights that began it; empty before
  std::optional<int32_t> cached_tokens;

  StreamState state = StreamState::kQueued;
  std::vector<StateChange> events;
  int64_t first_token_ns = 0;
  int64_t last_token_ns = 0;

  // The decode form begins at the last prompt token.
  int32_t prefill_until() const { return static_cast<int32_t>(prompt_ids->size()) - 1; }
};

struct Request {
  Request();
  ~Request();
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  std::string id;                          // "chatcmpl-..."; what Cancel takes
  std::shared_ptr<const ModelInfo> model;  // whose tokenizer made the prompts and reads the answers
  int32_t key_index = 0;                   // which API key: fair share is between these
  int64_t arrived_ns = 0;
  std::vector<std::shared_ptr<const std::vector<int32_t>>> prompts;
  std::string prompt_field = "prompt";  // what the client calls it, for errors
  RequestOptions options;
  std::shared_ptr<RequestSink> sink;

  int32_t cached_prefix_tokens = 0;              // of the first prompt, as Peek said; chooses the path, no more
  std::vector<std::shared_ptr<Stream>> streams;  // prompt-major
  absl::Status failure;

  bool ended() const;
  Usage usage() const;  // each prompt counted once, whatever n is
};

// The stream of choice i draws from hash(seed, i); choice 0 from the seed itself, so that n = 1 and n = 2 begin alike.
uint64_t ChoiceSeed(int64_t seed, int32_t index);

}  // namespace hearth::router
