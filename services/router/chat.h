// From a conversation to prompt ids: messages checked and put into one form, rendered by the model's template, tokenized so that
// special tokens count only where the template wrote them (a user can't forge a turn).
// Room: services/router. May touch: common/text. Threads: any; pure.
//
// Content that comes as parts is joined without a separator, in every role, unless the template walks over parts itself. Arguments of tool
// calls in the history go to the template as it handles them: as sent where it adds them as text, as a value where it prints JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "services/router/model_info.h"
#include "services/router/openai/json_fields.h"
#include "services/router/openai/reasoning.h"

namespace hearth::router {

struct ChatPrompt {
  std::vector<int32_t> ids;
  std::string text;
  Thought thought = Thought::kNone;  // that the generation prompt, or the message to be continued, opened
};

struct ChatTemplateOptions {
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the prompt ends with the last assistant message's text
  Json kwargs;                          // further variables for the template; an object or null
};

// Errors: InvalidArgument with the field's name, or with the template's own sentence where it refuses.
absl::StatusOr<ChatPrompt> RenderChat(const ModelInfo& model, const Json& messages, const ChatTemplateOptions& options);

}  // namespace hearth::router
