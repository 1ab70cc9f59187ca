// A request's answer over HTTP: takes what the scheduler tells and writes it, as a stream of events or as one body.
// Room: services/router. Threads: the loop only.
// If the client goes: `on_gone` of the responder cancels the request, and nothing more comes here.
#pragma once

#include <memory>
#include <vector>

#include "services/router/http/http_server.h"
#include "services/router/openai/reasoning.h"
#include "services/router/openai/render.h"
#include "services/router/request.h"

namespace hearth::router {

class HttpAnswer final : public RequestSink {
 public:
  // `render_error`: adds what every answer of this connection has (CORS).
  HttpAnswer(AnswerMeta meta, const Request& request, std::shared_ptr<HttpResponder> responder, HttpHeaders headers,
             std::function<HttpReply(const absl::Status&)> render_error);

  // Once the request is accepted: a stream's head goes out at once.
  void Begin();
  void OnDelta(int32_t choice, const ChoiceDelta& delta) override;
  void OnChoiceFinished(int32_t choice, FinishReason reason, const std::string& stop_string) override;
  void OnEnd(const absl::Status& status, const Usage& usage) override;

 private:
  struct Choice {
    ChoicePart part;  // a stream's: what is not sent yet; else all so far
    ReasoningSplitter splitter{Thought::kNone};
    int32_t offset = 0;  // of the echo
  };
  void Take(Choice& choice, const ChoiceDelta& delta);
  void Flush(Choice& choice);

  const AnswerMeta meta_;
  std::vector<std::shared_ptr<const std::vector<int32_t>>> prompts_;  // one a choice
  std::shared_ptr<HttpResponder> responder_;
  HttpHeaders headers_;
  std::function<HttpReply(const absl::Status&)> render_error_;
  std::vector<Choice> choices_;
};

}  // namespace hearth::router
