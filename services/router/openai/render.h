// Answers and stream chunks in OpenAI's shapes, from what a request has produced.
// Room: services/router. Pure functions. Threads: any.
// Choices: an end token is counted and listed in logprobs with the text "", so that entries and completion tokens agree; a token that is
// a part of a character shows as U+FFFD in chat (its bytes are beside it) and as bytes:\xf0\x9f in completions, as OpenAI has it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "services/router/openai/parse_options.h"

namespace hearth::router {

struct AnswerMeta {
  std::string id;
  std::string model;
  int64_t created_seconds = 0;
  std::shared_ptr<const Tokenizer> tokenizer;
  AnswerOptions options;
  int32_t num_logprobs = -1;
};

// A part of a choice: one chunk's worth, or all of it.
struct ChoicePart {
  int32_t index = 0;
  std::string text;
  std::string reasoning;              // chat: the thought's part
  std::vector<OutputToken> tokens;    // behind logprobs and token_ids
  std::vector<int32_t> text_offsets;  // of tokens
  std::optional<FinishReason> finish;
  bool first = false;                                // of its choice: names the role
  const std::vector<int32_t>* prompt_ids = nullptr;  // where return_token_ids asks for them
};

std::string RenderChunk(const AnswerMeta& meta, const ChoicePart& part);
std::string RenderUsageChunk(const AnswerMeta& meta, const Usage& usage);
std::string RenderAnswer(const AnswerMeta& meta, const std::vector<ChoicePart>& choices, const Usage& usage);

}  // namespace hearth::router
