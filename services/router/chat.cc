#include "services/router/chat.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/base/hash.h"
#include "services/router/api_error.h"
#include "services/router/utf8.h"

namespace hearth::router {
namespace {

// What the template's own preparation does not judge: the list, its roles, and names that stand for older ones.
absl::StatusOr<Json> CheckMessages(const Json& messages) {
  if (!messages.is_array()) return FieldError("messages", absl::StrCat("'messages' must be a list, not ", Describe(messages)));
  if (messages.empty()) return FieldError("messages", "'messages' is empty: there is nothing to answer");
  Json out = messages;
  for (size_t i = 0; i < out.size(); ++i) {
    Json& message = out[i];
    const std::string where = absl::StrFormat("messages[%d]", i);
    if (!message.is_object()) return FieldError("messages", absl::StrCat(where, " must be an object, not ", Describe(message)));
    if (!message.contains("role") || !message["role"].is_string()) return FieldError("messages", absl::StrCat(where, ".role must be a string"));
    if (IsText(message["role"], "developer")) message["role"] = "system";  // OpenAI's newer name; templates know the older one
    const std::string role = message["role"];
    if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
      return FieldError("messages", absl::StrCat(where, ".role is ", message["role"].dump(), ": use system, user, assistant or tool"));
    }
    // Null is absent, here too.
    for (const char* name : {"name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio", "function_call", "annotations"}) {
      if (message.contains(name) && message[name].is_null()) message.erase(name);
    }
    const bool has_calls = message.contains("tool_calls") && !message["tool_calls"].empty();
    if (!has_calls) message.erase("tool_calls");
    const bool no_content = !message.contains("content") || message["content"].is_null();
    if (no_content && role != "assistant") return FieldError("messages", absl::StrCat(where, ".content is missing"));
    if (no_content && !has_calls) message["content"] = "";
  }
  return out;
}

// The end of the last message's text.
absl::StatusOr<std::string*> TextToContinue(Json& message) {
  Json& content = message["content"];
  if (content.is_null()) content = "";
  Json* text = &content;
  if (content.is_array() && !content.empty() && content.back().is_object() && content.back().contains("text")) text = &content.back()["text"];
  if (!text->is_string()) return FieldError("continue_final_message", "'continue_final_message' needs a last message whose content is text");
  return text->get_ptr<std::string*>();
}

// Cuts the rendered text at the mark: what the template adds to close a turn is left out.
absl::Status CutAt(const std::string& mark, std::vector<RenderedSpan>* spans) {
  std::string whole;
  for (const RenderedSpan& span : *spans) whole += span.text;
  size_t keep = whole.rfind(mark);
  if (keep == std::string::npos) {
    return FieldError("continue_final_message", "the model's chat template does not show the last message as it is: it can't be continued");
  }
  for (size_t i = 0; i < spans->size(); ++i) {
    std::string& part = (*spans)[i].text;
    if (part.size() >= keep) {
      part.resize(keep);
      spans->resize(i + 1);
      break;
    }
    keep -= part.size();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChatPrompt> RenderChat(const ModelInfo& model, const Json& messages, const ChatTemplateOptions& options) {
  if (model.chat_template == nullptr) {
    return FieldError("messages", "this model's checkpoint has no chat template: use /v1/completions with a whole prompt");
  }
  Json context = options.kwargs.is_object() ? options.kwargs : Json::object();
  RenderOptions render;
  for (const auto& [name, value] : context.items()) render.untrusted_names.push_back(name);
  ASSIGN_OR_RETURN(const Json checked, CheckMessages(messages));
  auto prepared = model.chat_template->PrepareMessages(checked);
  if (!prepared.ok()) return WithParam(prepared.status(), "messages");
  // Marks the end of the last message's content, so that it is found again in the rendered text however the template dresses it.
  // Drawn anew each time, so that no message can contain it by design.
  const std::string mark = options.continue_final_message ? RandomHash128().ToHex() : "";
  std::string continued;
  if (options.continue_final_message) {
    ASSIGN_OR_RETURN(std::string * text, TextToContinue(prepared->back()));
    continued = *text;
    *text += mark;
  }
  context["messages"] = *std::move(prepared);
  if (options.continue_final_message && !IsText(checked.back()["role"], "assistant")) {
    return FieldError("continue_final_message", "'continue_final_message' needs an assistant message at the end of 'messages'");
  }
  context["add_generation_prompt"] = options.add_generation_prompt && !options.continue_final_message;
  context["bos_token"] = std::string(model.tokenizer->bos_text());
  context["eos_token"] = std::string(model.tokenizer->eos_text());

  auto rendered = model.chat_template->Render(context, render);
  if (!rendered.ok()) {
    return WithParam(absl::InvalidArgumentError(absl::StrCat("the model's chat template refuses these messages: ", rendered.status().message())),
                     "messages");
  }
  std::vector<RenderedSpan> spans = *std::move(rendered);
  if (options.continue_final_message) RETURN_IF_ERROR(CutAt(mark, &spans));
  ChatPrompt prompt;
  std::vector<TextSpan> texts;
  for (const RenderedSpan& span : spans) {
    prompt.text += span.text;
    texts.push_back({span.text, span.trusted});
  }
  // The template writes BOS itself where the model wants it, as with Transformers.
  auto ids = model.tokenizer->EncodeSpans(texts, false);
  if (!ids.ok()) return WithParam(ids.status(), "messages");
  prompt.ids = *std::move(ids);
  if (prompt.ids.empty()) return FieldError("messages", "the model's chat template makes an empty prompt of these messages");
  const absl::string_view end = absl::StripTrailingAsciiWhitespace(Sv(prompt.text));
  if (options.continue_final_message) {
    // A template may drop a message's thought.
    if (absl::EndsWith(end, absl::StripAsciiWhitespace(Sv(continued)))) prompt.thought = ThoughtAtEndOf(continued);
  } else if (options.add_generation_prompt && absl::EndsWith(end, "<think>")) {
    // Opened by the template: a user may have written the tag.
    const size_t tag = end.size() - std::string_view("<think>").size();
    size_t begin = prompt.text.size();
    for (auto span = spans.rbegin(); span != spans.rend() && span->trusted; ++span) begin -= span->text.size();
    if (tag >= begin) prompt.thought = Thought::kOpened;
  }
  return prompt;
}

}  // namespace hearth::router
