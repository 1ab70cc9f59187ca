#include "services/router/openai/parse_chat.h"

#include "common/base/logging.h"
#include "common/base/time.h"
#include "services/router/api_error.h"

namespace hearth::router {
namespace {

// Tool calls in the history are rendered; calls in the answer are not made out of the model's text, so asking for tools is refused.
// A choice of "none" asks for nothing.
absl::Status RefuseTools(Fields& fields) {
  const Json* choice = fields.Get("tool_choice");
  const bool none = choice != nullptr && IsText(*choice, "none");
  if (choice != nullptr && !none && !IsText(*choice, "auto")) {
    return Unsupported("tool_choice", "'tool_choice' may be \"none\" or \"auto\" here: a tool call can't be forced");
  }
  const Json* tools = fields.Get("tools");
  if (tools != nullptr && !tools->is_array()) return FieldError("tools", absl::StrCat("'tools' must be a list, not ", Describe(*tools)));
  if (tools != nullptr && !tools->empty() && !none) {
    return Unsupported("tools", "'tools' are not supported here yet: leave them out or send \"tool_choice\": \"none\"");
  }
  const Json* functions = fields.Get("functions");
  if (functions != nullptr && !functions->empty()) return Unsupported("functions", "'functions' are not supported here");
  const Json* function_call = fields.Get("function_call");
  if (function_call != nullptr && !IsText(*function_call, "none") && !IsText(*function_call, "auto")) {
    return Unsupported("function_call", "'function_call' may be \"none\" or \"auto\" here: a call can't be forced");
  }
  // Without tools there are no calls that could run in parallel, whatever is asked.
  bool parallel = true;
  return fields.Bool("parallel_tool_calls", &parallel);
}

absl::Status RefuseOtherOutputs(Fields& fields) {
  if (fields.Get("audio") != nullptr) return Unsupported("audio", "'audio' is not supported here: this model writes text");
  if (const Json* modalities = fields.Get("modalities")) {
    if (!modalities->is_array()) return FieldError("modalities", absl::StrCat("'modalities' must be a list, not ", Describe(*modalities)));
    for (const Json& modality : *modalities) {
      if (!IsText(modality, "text")) return Unsupported("modalities", "'modalities' may hold \"text\" only: this model writes text");
    }
  }
  if (fields.Get("chat_template") != nullptr) return Unsupported("chat_template", "'chat_template' is not supported here: the model's own is used");
  return absl::OkStatus();
}

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
    if (!kwargs->is_object()) return FieldError("chat_template_kwargs", absl::StrCat("'chat_template_kwargs' must be an object, not ", Describe(*kwargs)));
    options.kwargs = *kwargs;
  }
  return RenderChat(model, *messages, options);
}

absl::StatusOr<ParsedRequest> ParseChat(const Json& body, const ModelInfo& model) {
  ParsedRequest parsed;
  parsed.request = std::make_shared<Request>();
  parsed.request->arrived_ns = MonotonicNowNs();
  parsed.request->id = "chatcmpl-" + RandomHash128().ToHex();
  parsed.answer.chat = true;
  Fields fields(body);
  RETURN_IF_ERROR(CheckModel(fields, model));
  RETURN_IF_ERROR(RefuseTools(fields));
  RETURN_IF_ERROR(RefuseUnsupported(fields));
  RETURN_IF_ERROR(RefuseOtherOutputs(fields));
  RETURN_IF_ERROR(ParseOptions(fields, model, &parsed.request->options, &parsed.answer));
  RETURN_IF_ERROR(ParseLogprobs(fields, &parsed.request->options));
  ASSIGN_OR_RETURN(ChatPrompt prompt, ParseChatPrompt(fields, model));
  parsed.request->prompts.push_back(std::make_shared<const std::vector<int32_t>>(std::move(prompt.ids)));
  parsed.answer.reasoning = prompt.thought_open;
  for (const std::string& name : fields.Unread()) spdlog::debug("chat: the field '{}' is not known here and was ignored", name);
  return parsed;
}

}  // namespace hearth::router
