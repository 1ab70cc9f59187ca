#include "services/router/openai/parse_chat.h"

#include "common/base/logging.h"
#include "common/base/time.h"
#include "services/router/api_error.h"

namespace hearth::router {
namespace {

absl::Status ParseLogprobs(Fields& fields, RequestOptions* options) {
  bool logprobs = false;
  RETURN_IF_ERROR(fields.Bool("logprobs", &logprobs));
  std::optional<int64_t> top;
  RETURN_IF_ERROR(fields.Integer("top_logprobs", 0, kTopLogprobsMax, &top));
  if (top && !logprobs && *top > 0) return FieldError("top_logprobs", "'top_logprobs' needs \"logprobs\": true");
  if (logprobs) options->num_logprobs = static_cast<int32_t>(top.value_or(0));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChatPrompt> ParseChatPrompt(Fields& fields, const ModelInfo& model) {
  const Json* messages = fields.Get("messages");
  if (messages == nullptr) return FieldError("messages", "'messages' is missing");
  ChatTemplateOptions options;
  RETURN_IF_ERROR(fields.Bool("add_generation_prompt", &options.add_generation_prompt));
  RETURN_IF_ERROR(fields.Bool("continue_final_message", &options.continue_final_message));
  if (const Json* kwargs = fields.Get("chat_template_kwargs")) {
    if (!kwargs->is_object())
      return FieldError("chat_template_kwargs", absl::StrCat("'chat_template_kwargs' must be an object, not ", Describe(*kwargs)));
    options.kwargs = *kwargs;
  }
  return RenderChat(model, *messages, options);
}

absl::StatusOr<ParsedRequest> ParseChat(const Json& body, const ModelInfo& model, int64_t max_tokens_default) {
  ParsedRequest parsed;
  parsed.request = std::make_shared<Request>();
  parsed.request->arrived_ns = MonotonicNowNs();
  parsed.request->id = "chatcmpl-" + RandomHash128().ToHex();
  parsed.answer.chat = true;
  parsed.request->prompt_field = "messages";
  Fields fields(body);
  RETURN_IF_ERROR(CheckModel(fields, model));
  RETURN_IF_ERROR(RefuseUnsupported(fields));
  RETURN_IF_ERROR(ParseOptions(fields, model, max_tokens_default, &parsed.request->options, &parsed.answer));
  RETURN_IF_ERROR(ParseLogprobs(fields, &parsed.request->options));
  ASSIGN_OR_RETURN(ChatPrompt prompt, ParseChatPrompt(fields, model));
  parsed.request->prompts.push_back(std::make_shared<const std::vector<int32_t>>(std::move(prompt.ids)));
  parsed.answer.thought = prompt.thought;
  for (const std::string& name : fields.Unread()) spdlog::debug("chat: the field '{}' is not known here and was ignored", name);
  return parsed;
}

}  // namespace hearth::router
