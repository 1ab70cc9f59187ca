#include "services/router/openai/answer.h"

#include <utility>

#include "services/router/api_error.h"
#include "services/router/utf8.h"

namespace hearth::router {

HttpAnswer::HttpAnswer(AnswerMeta meta, const Request& request, std::shared_ptr<HttpResponder> responder, HttpHeaders headers,
                       std::function<HttpReply(const absl::Status&)> render_error)
    : meta_(std::move(meta)), responder_(std::move(responder)), headers_(std::move(headers)), render_error_(std::move(render_error)) {
  const auto n = static_cast<size_t>(request.options.n);
  choices_.resize(request.prompts.size() * n);
  for (size_t i = 0; i < choices_.size(); ++i) {
    prompts_.push_back(request.prompts[i / n]);
    Choice& choice = choices_[i];
    choice.part.index = static_cast<int32_t>(i);
    choice.part.first = true;
    choice.part.prompt_ids = prompts_.back().get();
    choice.splitter = ReasoningSplitter(meta_.options.thought);
    if (!meta_.options.echo_texts.empty()) {
      choice.part.text = meta_.options.echo_texts[i / n];
      choice.offset = CountCharacters(choice.part.text);
    }
  }
}

void HttpAnswer::Begin() {
  if (!meta_.options.stream) return;
  responder_->StartEvents(headers_);
  // The role goes first and at once in chat; an echo likewise in completions.
  for (Choice& choice : choices_) {
    if (meta_.options.chat || !choice.part.text.empty()) Flush(choice);
  }
}

void HttpAnswer::Take(Choice& choice, const ChoiceDelta& delta) {
  if (meta_.options.chat) {
    ReasoningPart part = choice.splitter.Push(delta.text);
    choice.part.reasoning += part.thought;
    choice.part.text += part.answer;
  } else {
    choice.part.text += delta.text;
  }
  if (delta.token && (meta_.num_logprobs >= 0 || meta_.options.return_token_ids)) {
    choice.part.tokens.push_back(*delta.token);
    choice.part.text_offsets.push_back(choice.offset + delta.text_offset);
  }
}

void HttpAnswer::Flush(Choice& choice) {
  responder_->SendEvent(RenderChunk(meta_, choice.part));
  ChoicePart next;
  next.index = choice.part.index;
  choice.part = std::move(next);
}

void HttpAnswer::OnDelta(int32_t index, const ChoiceDelta& delta) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  Take(choice, delta);
  if (!meta_.options.stream) return;
  if (!choice.part.text.empty() || !choice.part.reasoning.empty() || !choice.part.tokens.empty()) Flush(choice);
}

void HttpAnswer::OnChoiceFinished(int32_t index, FinishReason reason, const std::string&) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (meta_.options.chat) {
    ReasoningPart rest = choice.splitter.Finish();
    choice.part.reasoning += rest.thought;
    choice.part.text += rest.answer;
  }
  choice.part.finish = reason;
  if (meta_.options.stream) Flush(choice);
}

void HttpAnswer::OnEnd(const absl::Status& status, const Usage& usage) {
  if (!meta_.options.stream) {
    if (status.ok()) {
      std::vector<ChoicePart> parts;
      for (Choice& choice : choices_) parts.push_back(std::move(choice.part));
      responder_->Reply({200, "application/json", RenderAnswer(meta_, parts, usage), headers_});
    } else {
      responder_->Reply(render_error_(status));
    }
  } else {
    if (status.ok() && meta_.options.include_usage) responder_->SendEvent(RenderUsageChunk(meta_, usage));
    // The head is long gone: an error is an event of its own, in the shape of any other.
    if (!status.ok()) responder_->SendEvent(RenderError(ToApiError(status)));
    responder_->SendEvent("[DONE]");
    responder_->EndEvents();
  }
  responder_ = nullptr;
}

}  // namespace hearth::router
