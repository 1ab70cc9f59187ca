#include "services/router/request.h"

#include <algorithm>

#include "services/router/choice_text.h"
#include "services/router/model_info.h"

namespace hearth::router {

const char* StreamStateName(StreamState state) {
  switch (state) {
    case StreamState::kQueued: return "queued";
    case StreamState::kPrefilling: return "prefilling";
    case StreamState::kHandoff: return "handoff";
    case StreamState::kDecoding: return "decoding";
    case StreamState::kDone: return "done";
    case StreamState::kCancelled: return "cancelled";
    case StreamState::kFailed: return "failed";
  }
  return "unknown";
}

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
  }
  return "unknown";
}

bool IsEnd(StreamState state) { return state == StreamState::kDone || state == StreamState::kCancelled || state == StreamState::kFailed; }

bool MayMove(StreamState from, StreamState to) {
  if (IsEnd(from)) return false;
  if (to == StreamState::kCancelled || to == StreamState::kFailed) return true;
  switch (from) {
    case StreamState::kQueued: return to == StreamState::kPrefilling || to == StreamState::kDecoding;
    case StreamState::kPrefilling: return to == StreamState::kHandoff || to == StreamState::kQueued;
    case StreamState::kHandoff: return to == StreamState::kDecoding;
    case StreamState::kDecoding: return to == StreamState::kDone || to == StreamState::kQueued;
    default: return false;
  }
}

Request::Request() = default;
Request::~Request() = default;

bool Request::ended() const {
  return std::all_of(streams.begin(), streams.end(), [](const auto& stream) { return IsEnd(stream->state); });
}

Usage Request::usage() const {
  Usage usage;
  for (const auto& prompt : prompts) usage.prompt_tokens += static_cast<int32_t>(prompt->size());
  for (size_t i = 0; i < streams.size(); ++i) {
    usage.completion_tokens += static_cast<int32_t>(streams[i]->output_ids.size());
    if (i % static_cast<size_t>(options.n) == 0) usage.cached_tokens += streams[i]->cached_tokens.value_or(0);
  }
  return usage;
}

uint64_t ChoiceSeed(int64_t seed, int32_t index) {
  if (index == 0) return static_cast<uint64_t>(seed);
  const int64_t pair[2] = {seed, index};
  return Xxh3_64(pair, sizeof(pair));
}

}  // namespace hearth::router
