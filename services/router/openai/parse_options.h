// The options that chat and completions share, from JSON to RequestOptions; and what is refused because it is not had.
// Room: services/router. Threads: any. Sampling defaults are OpenAI's (temperature 1, top_p 1, no penalty); generation_config.json's
// are not used.
#pragma once

#include "services/router/model_info.h"
#include "services/router/openai/json_fields.h"
#include "services/router/openai/reasoning.h"
#include "services/router/request.h"

namespace hearth::router {

// How a request is to be answered over HTTP, beyond what the scheduler needs to know.
struct AnswerOptions {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  std::vector<std::string> echo_texts;  // completions with echo: what stands before each prompt's answers
  Thought thought = Thought::kNone;     // that the prompt opened
};

inline constexpr int kChoicesMax = 16;   // n
inline constexpr int kStreamsMax = 128;  // prompts x n
inline constexpr int kStopsMax = 16;
inline constexpr size_t kStopBytesMax = 16 * 1024;
inline constexpr int kTopLogprobsMax = 20;

// "model": absent means the node's own. NotFound for another.
absl::Status CheckModel(Fields& fields, const ModelInfo& model);
// `max_tokens_default`: for requests without max_tokens; 0: up to the context.
absl::Status ParseOptions(Fields& fields, const ModelInfo& model, int64_t max_tokens_default, RequestOptions* options, AnswerOptions* answer);
// response_format, grammar, tools and their like: kept, or refused by name (never accepted and ignored).
absl::Status RefuseUnsupported(Fields& fields);

}  // namespace hearth::router
