// POST /v1/completions: JSON -> a request, every field checked. The prompt is a text, a list of texts, token ids, or lists of them.
// Room: services/router. Threads: any (the pool's).
#pragma once

#include "services/router/openai/parse_chat.h"

namespace hearth::router {

absl::StatusOr<ParsedRequest> ParseCompletion(const Json& body, const ModelInfo& model, int64_t max_tokens_default);

}  // namespace hearth::router
