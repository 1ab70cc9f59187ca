#include "services/router/openai/http_api.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "common/base/logging.h"
#include "services/router/api_error.h"
#include "services/router/openai/answer.h"
#include "services/router/openai/parse_completion.h"
#include "services/router/utf8.h"

namespace hearth::router {
namespace {

constexpr std::string_view kModels = "/v1/models";

// What a request of ours may say its body is. Forms and plain text are what a foreign web page could send without asking first.
bool IsJson(const std::string& content_type) {
  const std::string type = absl::AsciiStrToLower(content_type.substr(0, content_type.find(';')));
  const absl::string_view trimmed = absl::StripAsciiWhitespace(type);
  return trimmed.empty() || trimmed == "application/json" || absl::EndsWith(trimmed, "+json");
}

Json ModelObject(const ModelInfo& model) {
  return {
      {"id", model.name}, {"object", "model"}, {"created", model.created_seconds}, {"owned_by", "hearth"}, {"max_model_len", model.context_tokens}};
}

}  // namespace

HttpApi::HttpApi(Parts parts) : parts_(parts) {
  const auto add = [&](const std::string& path, Route route) { routes_[path] = route; };
  const Route chat{true, false, &HttpApi::Chat}, completion{true, false, &HttpApi::Completion}, models{false, false, &HttpApi::Models};
  add("/v1/chat/completions", chat);
  add("/chat/completions", chat);
  add("/v1/completions", completion);
  add("/completions", completion);
  add(std::string(kModels), models);
  add("/models", models);
  for (const char* prefix : {"", "/v1"}) {
    add(absl::StrCat(prefix, "/tokenize"), {true, false, &HttpApi::Tokenize});
    add(absl::StrCat(prefix, "/detokenize"), {true, false, &HttpApi::Detokenize});
    add(absl::StrCat(prefix, "/apply-template"), {true, false, &HttpApi::ApplyTemplate});
    add(absl::StrCat(prefix, "/health"), {false, true, &HttpApi::Readiness});
  }
  add("/readyz", {false, true, &HttpApi::Readiness});
  add("/livez", {false, true, &HttpApi::Liveness});
  add("/metrics", {false, true, &HttpApi::MetricsText});
}

const HttpApi::Route* HttpApi::FindRoute(const std::string& path) const {
  static const Route kOneModel{false, false, &HttpApi::OneModel};
  const auto at = routes_.find(path);
  if (at != routes_.end()) return &at->second;
  for (const std::string_view prefix : {std::string_view("/v1/models/"), std::string_view("/models/")}) {
    if (path.size() > prefix.size() && path.compare(0, prefix.size(), prefix) == 0) return &kOneModel;
  }
  return nullptr;
}

HttpHeaders HttpApi::AnswerHeaders(const HttpRequest& request) const {
  HttpHeaders headers;
  if (const std::string& origin = request.Header("origin"); parts_.origins->Allows(origin)) {
    headers.emplace_back("Access-Control-Allow-Origin", origin);
    headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  }
  headers.emplace_back("Vary", "Origin");
  return headers;
}

void HttpApi::Handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) {
  auto call = std::make_shared<Call>();
  call->headers = AnswerHeaders(request);
  call->request = std::move(request);
  call->responder = std::move(responder);
  const Route* route = FindRoute(call->request.path);
  if (call->request.method == "OPTIONS") return Preflight(call, route);
  if (route == nullptr) {
    return Fail(call, WithCode(absl::NotFoundError(absl::StrCat("there is nothing at ", ReplaceInvalidUtf8(call->request.path),
                                                                "; see /v1/models, /v1/chat/completions, /v1/completions")),
                               "unknown_url"));
  }
  const std::string& method = call->request.method;
  const bool fits = route->post ? method == "POST" : method == "GET" || method == "HEAD";
  if (!fits) {
    const char* allowed = route->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
    call->headers.emplace_back("Allow", allowed);
    return Fail(call, HttpError(405, "method_not_allowed", absl::StrCat(call->request.path, " takes ", allowed)));
  }
  if (!route->open) {
    const auto key = parts_.keys->Check(call->request.Header("authorization"));
    if (!key.ok()) {
      call->headers.emplace_back("WWW-Authenticate", "Bearer realm=\"hearth\"");
      return Fail(call, key.status());
    }
    call->key_index = *key;
  }
  if (route->post && !IsJson(call->request.Header("content-type"))) {
    return Fail(call, HttpError(415, "unsupported_media_type", "the body must be JSON: send \"Content-Type: application/json\""));
  }
  if (const std::string& coding = call->request.Header("content-encoding"); !coding.empty() && !absl::EqualsIgnoreCase(coding, "identity")) {
    call->headers.emplace_back("Accept-Encoding", "identity");  // RFC 9110, 15.5.16: what would have been taken
    return Fail(call,
                HttpError(415, "unsupported_media_type",
                          absl::StrCat("a body with \"Content-Encoding: ", ReplaceInvalidUtf8(coding), "\" is not taken: send it uncompressed")));
  }
  (this->*route->handler)(call);
}

void HttpApi::Preflight(const CallPtr& call, const Route* route) {
  HttpReply reply;
  reply.status = 204;
  reply.headers = call->headers;
  const char* methods = route == nullptr ? "GET, HEAD, POST, OPTIONS" : route->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
  reply.headers.emplace_back("Allow", methods);
  if (parts_.origins->Allows(call->request.Header("origin"))) {
    reply.headers.emplace_back("Access-Control-Allow-Methods", methods);
    const std::string& asked = call->request.Header("access-control-request-headers");
    reply.headers.emplace_back("Access-Control-Allow-Headers", asked.empty() ? "authorization, content-type" : asked);
    reply.headers.emplace_back("Access-Control-Max-Age", "600");
    if (call->request.Header("access-control-request-private-network") == "true")
      reply.headers.emplace_back("Access-Control-Allow-Private-Network", "true");
  }
  call->responder->Reply(std::move(reply));
}

HttpReply HttpApi::ErrorReply(const absl::Status& status) {
  const ApiError error = ToApiError(status);
  HttpReply reply{error.http_status, "application/json", RenderError(error), {}};
  if (error.retry_after_seconds > 0) reply.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
  return reply;
}

void HttpApi::Fail(const CallPtr& call, const absl::Status& status) {
  HttpReply reply = ErrorReply(status);
  reply.headers.insert(reply.headers.end(), call->headers.begin(), call->headers.end());
  call->responder->Reply(std::move(reply));
}

void HttpApi::Reply(const CallPtr& call, std::string json) { call->responder->Reply({200, "application/json", std::move(json), call->headers}); }

void HttpApi::WithModel(const CallPtr& call, std::function<void(const CallPtr& call, InfoPtr model)> work) {
  auto gone = std::make_shared<bool>(false);
  call->responder->set_on_gone([gone] { *gone = true; });
  parts_.model->WhenRead([call, gone, work = std::move(work), alive = alive_](absl::StatusOr<InfoPtr> model) {
    if (!*alive || *gone) return;
    if (!model.ok()) return Fail(call, model.status());
    work(call, *std::move(model));
  });
}

void HttpApi::Generate(const CallPtr& call, Parser parser) {
  WithModel(call, [this, parser = std::move(parser)](const CallPtr& waited, InfoPtr model) {
    auto gone = std::make_shared<bool>(false);
    waited->responder->set_on_gone([gone] { *gone = true; });
    // The call is moved through, never shared: what hangs on it belongs to the loop, where the last reference must go.
    parts_.loop->Offload(
        [this, call = waited, gone, parser, model = std::move(model), alive = alive_, loop = parts_.loop, peek = parts_.peek]() mutable {
          auto parsed = std::make_shared<absl::StatusOr<ParsedRequest>>(ParsedRequest{});
          if (const auto body = ParseJsonObject(call->request.body); body.ok()) {
            *parsed = parser(*body, *model);
          } else {
            *parsed = body.status();
          }
          if (parsed->ok()) {
            (*parsed)->request->model = std::move(model);
            (*parsed)->request->cached_prefix_tokens = peek->CachedTokens(*(*parsed)->request->prompts.front());
          }
          loop->Post([this, call = std::move(call), gone, parsed, alive] {
            if (!*alive || *gone) return;
            if (!parsed->ok()) return Fail(call, parsed->status());
            Submit(call, **std::move(parsed));
          });
        });
  });
}

void HttpApi::Submit(const CallPtr& call, ParsedRequest parsed) {
  const std::shared_ptr<Request> request = std::move(parsed.request);
  request->key_index = call->key_index;
  call->headers.emplace_back("X-Request-Id", request->id);
  AnswerMeta meta{request->id,
                  request->model->name,
                  absl::ToUnixSeconds(absl::Now()),
                  request->model->tokenizer,
                  std::move(parsed.answer),
                  request->options.num_logprobs};
  auto answer =
      std::make_shared<HttpAnswer>(std::move(meta), *request, call->responder, call->headers, [headers = call->headers](const absl::Status& status) {
        HttpReply reply = ErrorReply(status);
        reply.headers.insert(reply.headers.end(), headers.begin(), headers.end());
        return reply;
      });
  request->sink = answer;
  if (const absl::Status submitted = parts_.scheduler->Submit(request); !submitted.ok()) {
    request->sink = nullptr;
    return Fail(call, submitted);
  }
  call->responder->set_on_gone([this, request, alive = alive_] {
    if (!*alive) return;
    parts_.scheduler->Cancel(request);
    if (const auto permit = LogAllowed("client-gone", 30)) spdlog::info("{}: the client is gone, cancelled", request->id);
  });
  answer->Begin();
}

void HttpApi::Chat(const CallPtr& call) {
  Generate(call, [limit = parts_.max_tokens_default](const Json& body, const ModelInfo& model) { return ParseChat(body, model, limit); });
}

void HttpApi::Completion(const CallPtr& call) {
  Generate(call, [limit = parts_.max_tokens_default](const Json& body, const ModelInfo& model) { return ParseCompletion(body, model, limit); });
}

// While another model's files are being read there is none that a request could name.
void HttpApi::Models(const CallPtr& call) {
  Json models = Json::array();
  if (const InfoPtr& model = parts_.model->current()) models.push_back(ModelObject(*model));
  Reply(call, Json{{"object", "list"}, {"data", std::move(models)}}.dump());
}

void HttpApi::OneModel(const CallPtr& call) {
  const std::string& path = call->request.path;
  const std::string id = path.substr(path.find("models/") + 7);
  const InfoPtr& model = parts_.model->current();
  if (model == nullptr) return Fail(call, parts_.model->Readiness());
  if (id != model->name) {
    return Fail(call, WithCode(WithParam(absl::NotFoundError(absl::StrCat("the model '", ReplaceInvalidUtf8(id),
                                                                          "' is not served here; this node has '", model->name, "'")),
                                         "model"),
                               "model_not_found"));
  }
  Reply(call, ModelObject(*model).dump());
}

void HttpApi::Readiness(const CallPtr& call) {
  const HealthView health = parts_.health->Check();
  if (health.ready) return Reply(call, Json{{"status", "ok"}, {"model", parts_.model->current()->name}}.dump());
  const absl::Status status = absl::UnavailableError(health.reason);
  HttpReply reply = ErrorReply(status);
  Json body = Json::parse(reply.body);
  body["status"] = health.loading ? "loading" : "unavailable";
  body["reason"] = health.reason;
  if (health.loading) {
    body["phase"] = health.phase;
    body["progress_percent"] = 100 * health.progress;
    body["eta_seconds"] = health.eta_seconds;
  }
  reply.body = body.dump();
  reply.headers.insert(reply.headers.end(), call->headers.begin(), call->headers.end());
  call->responder->Reply(std::move(reply));
}

void HttpApi::Liveness(const CallPtr& call) { Reply(call, R"({"status":"alive"})"); }

void HttpApi::MetricsText(const CallPtr& call) {
  for (const auto& link : parts_.scheduler->links()) {
    const v1::WorkerStatus& status = link->status();
    if (link->kind() == WorkerLink::Kind::kDecode && !status.speculation().empty()) {
      parts_.metrics->OnSpeculation(link->name(), status.drafts_total(), status.drafts_accepted_total(), status.draft_depth());
    }
  }
  call->responder->Reply({200, "text/plain; version=0.0.4; charset=utf-8", parts_.metrics->Exposition(), call->headers});
}

void HttpApi::Compute(const CallPtr& call, std::function<absl::StatusOr<Json>(const Json& body, const ModelInfo& model)> work) {
  WithModel(call, [loop = parts_.loop, work = std::move(work)](const CallPtr& waited, InfoPtr model) {
    loop->Offload([call = waited, work, model = std::move(model), loop]() mutable {
      auto result = std::make_shared<absl::StatusOr<Json>>(Json());
      if (const auto body = ParseJsonObject(call->request.body); body.ok()) {
        *result = work(*body, *model);
      } else {
        *result = body.status();
      }
      auto text = std::make_shared<std::string>(result->ok() ? (*result)->dump() : "");
      loop->Post([call = std::move(call), result, text] {
        if (!result->ok()) return Fail(call, result->status());
        call->responder->Reply({200, "application/json", std::move(*text), call->headers});
      });
    });
  });
}

// As llama.cpp's server has it; a piece that is no text by itself is a list of its bytes.
void HttpApi::Tokenize(const CallPtr& call) {
  Compute(call, [](const Json& body, const ModelInfo& model) -> absl::StatusOr<Json> {
    Fields fields(body);
    std::optional<std::string> content;
    EncodeOptions options{.add_special_tokens = false, .parse_special = true};
    bool with_pieces = false;
    RETURN_IF_ERROR(fields.String("content", &content));
    RETURN_IF_ERROR(fields.Bool("add_special", &options.add_special_tokens));
    RETURN_IF_ERROR(fields.Bool("parse_special", &options.parse_special));
    RETURN_IF_ERROR(fields.Bool("with_pieces", &with_pieces));
    if (!content) return FieldError("content", "'content' is missing");
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids, model.tokenizer->Encode(*content, options));
    Json tokens = Json::array();
    for (const int32_t id : ids) {
      if (!with_pieces) {
        tokens.push_back(id);
        continue;
      }
      const std::string_view bytes = model.tokenizer->TokenBytes(id);
      Json piece = Json::array();
      for (const char byte : bytes) piece.push_back(static_cast<unsigned char>(byte));
      tokens.push_back({{"id", id}, {"piece", IsValidUtf8(bytes) ? Json(std::string(bytes)) : piece}});
    }
    return Json{{"tokens", std::move(tokens)}};
  });
}

void HttpApi::Detokenize(const CallPtr& call) {
  Compute(call, [](const Json& body, const ModelInfo& model) -> absl::StatusOr<Json> {
    Fields fields(body);
    const Json* tokens = fields.Get("tokens");
    if (tokens == nullptr) return FieldError("tokens", "'tokens' is missing");
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ReadTokenIds(*tokens, "tokens", model.known_ids()));
    return Json{{"content", model.tokenizer->Decode(ids, false)}};
  });
}

void HttpApi::ApplyTemplate(const CallPtr& call) {
  Compute(call, [](const Json& body, const ModelInfo& model) -> absl::StatusOr<Json> {
    Fields fields(body);
    ASSIGN_OR_RETURN(const ChatPrompt prompt, ParseChatPrompt(fields, model));
    return Json{{"prompt", prompt.text}};
  });
}

}  // namespace hearth::router
