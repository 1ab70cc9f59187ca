// POST /v1/chat/completions: JSON -> a request, every field checked.
// Room: services/router. Threads: any (the pool's).
#pragma once

#include <memory>

#include "services/router/chat.h"
#include "services/router/openai/parse_options.h"

namespace hearth::router {

struct ParsedRequest {
  std::shared_ptr<Request> request;  // id, prompts and options are set; the model is the caller's to set
  AnswerOptions answer;
};

absl::StatusOr<ParsedRequest> ParseChat(const Json& body, const ModelInfo& model, int64_t max_tokens_default);
// The parts of the body that the template sees, for /apply-template and gRPC too.
absl::StatusOr<ChatPrompt> ParseChatPrompt(Fields& fields, const ModelInfo& model);

}  // namespace hearth::router
