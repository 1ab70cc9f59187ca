// The HTTP interface: which path does what. Keys and origins are checked here, bodies on the pool, everything else where it belongs.
// Room: services/router. Threads: the loop only.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "services/router/access.h"
#include "services/router/event_loop.h"
#include "services/router/health.h"
#include "services/router/http/http_server.h"
#include "services/router/metrics.h"
#include "services/router/openai/parse_chat.h"
#include "services/router/prefix_peek.h"
#include "services/router/scheduler.h"
#include "services/router/served_model.h"

namespace hearth::router {

class HttpApi {
 public:
  struct Parts {
    EventLoop* loop;
    ServedModel* model;
    const ApiKeys* keys;
    const CorsOrigins* origins;
    Scheduler* scheduler;
    Health* health;
    Metrics* metrics;
    PrefixPeek* peek;
    int64_t max_tokens_default = 0;
  };
  explicit HttpApi(Parts parts);
  ~HttpApi() { *alive_ = false; }

  void Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder);
  // With what every error has beyond its body: Retry-After, WWW-Authenticate.
  static HttpReply ErrorReply(const absl::Status& status);

 private:
  struct Call {
    HttpRequest request;
    std::shared_ptr<HttpResponder> responder;
    HttpHeaders headers;  // for every answer: CORS, X-Request-Id
    int32_t key_index = 0;
  };
  using CallPtr = std::shared_ptr<Call>;
  using Handler = void (HttpApi::*)(const CallPtr&);
  struct Route {
    bool post = false;
    bool open = false;  // no key needed
    Handler handler = nullptr;
  };
  using InfoPtr = ServedModel::InfoPtr;
  using Parser = std::function<absl::StatusOr<ParsedRequest>(const Json& body, const ModelInfo& model)>;

  const Route* FindRoute(const std::string& path) const;
  HttpHeaders AnswerHeaders(const HttpRequest& request) const;
  void Preflight(const CallPtr& call, const Route* route);
  void Reply(const CallPtr& call, std::string json);
  static void Fail(const CallPtr& call, const absl::Status& status);
  // Goes on with the model's files once they are read; fails the call when they can't be.
  void WithModel(const CallPtr& call, std::function<void(const CallPtr& call, InfoPtr model)> work);
  // Parses on the pool, answers on the loop; the client may go meanwhile.
  void Generate(const CallPtr& call, Parser parser);
  void Submit(const CallPtr& call, ParsedRequest parsed);
  void Compute(const CallPtr& call, std::function<absl::StatusOr<Json>(const Json& body, const ModelInfo& model)> work);

  void Chat(const CallPtr& call);
  void Completion(const CallPtr& call);
  void Models(const CallPtr& call);
  void OneModel(const CallPtr& call);
  void Readiness(const CallPtr& call);
  void Liveness(const CallPtr& call);
  void MetricsText(const CallPtr& call);
  void Tokenize(const CallPtr& call);
  void Detokenize(const CallPtr& call);
  void ApplyTemplate(const CallPtr& call);

  const Parts parts_;
  std::map<std::string, Route> routes_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace hearth::router
