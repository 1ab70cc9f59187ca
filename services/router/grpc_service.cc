#include "services/router/grpc_service.h"

#include <algorithm>
#include <utility>

#include "common/base/logging.h"
#include "common/rpc/event_sender.h"
#include "common/rpc/rpc.h"
#include "services/router/api_error.h"
#include "services/router/grpc_options.h"
#include "services/router/utf8.h"

namespace hearth::router {
namespace {

absl::StatusOr<int32_t> CheckKey(const ApiKeys& keys, const grpc::CallbackServerContext& context) {
  const auto at = context.client_metadata().find("authorization");
  return keys.Check(at == context.client_metadata().end() ? std::string_view() : std::string_view(at->second.data(), at->second.size()));
}

// One Generate or Chat. gRPC's callbacks only post; all state is the loop's. It holds itself until gRPC says OnDone.
class GenerateReactor final : public EventSender<grpc::ServerWriteReactor<v1::GenerateEvent>, v1::GenerateEvent>,
                              public RequestSink,
                              public std::enable_shared_from_this<GenerateReactor> {
 public:
  GenerateReactor(const InferenceService::Parts& parts, grpc::CallbackServerContext* context) : parts_(parts), context_(context) {}

  void Start(std::function<absl::StatusOr<std::shared_ptr<Request>>(const ModelInfo& model)> parse) {
    self_ = shared_from_this();
    const auto key = CheckKey(*parts_.keys, *context_);
    if (!key.ok()) {
      parts_.loop->Post([self = self_, status = key.status()] { self->EndWith(status); });
      return;
    }
    parts_.loop->Post([self = self_, key = *key, parse = std::move(parse)] {
      self->parts_.model->WhenRead([self, key, parse](absl::StatusOr<ServedModel::InfoPtr> model) {
        if (!model.ok()) return self->EndWith(model.status());
        self->Parse(key, parse, *std::move(model));
      });
    });
  }

  void OnDelta(int32_t choice, const ChoiceDelta& delta) override {
    v1::GenerateEvent event;
    event.set_choice(choice);
    auto* out = event.mutable_delta();
    out->set_text(delta.text);
    if (delta.token) {
      out->add_token_ids(delta.token->id);
      if (request_->options.num_logprobs >= 0) {
        Fill({delta.token->id, delta.token->logprob}, out->add_logprobs());
        auto* top = out->add_top_logprobs();
        for (size_t i = 0; i < delta.token->top.size() && i < static_cast<size_t>(request_->options.num_logprobs); ++i)
          Fill(delta.token->top[i], top->add_entries());
      }
    }
    Push(std::move(event));
  }

  void OnChoiceFinished(int32_t choice, FinishReason reason, const std::string& stop_string) override {
    v1::GenerateEvent event;
    event.set_choice(choice);
    event.mutable_finished()->set_reason(FinishReasonName(reason));
    event.mutable_finished()->set_stop_string(stop_string);
    if (++finished_choices_ == request_->streams.size()) {
      const Usage usage = request_->usage();
      auto* out = event.mutable_finished()->mutable_usage();
      out->set_prompt_tokens(usage.prompt_tokens);
      out->set_completion_tokens(usage.completion_tokens);
      out->set_cached_tokens(usage.cached_tokens);
    }
    Push(std::move(event));
  }

  void OnEnd(const absl::Status& status, const Usage&) override { EndWith(status); }

  // gRPC's side.
  void OnBroken() override {
    parts_.loop->Post([self = shared_from_this()] { self->ClientGone(); });
  }
  void OnCancel() override {
    parts_.loop->Post([self = shared_from_this()] { self->ClientGone(); });
  }
  void OnDone() override {
    // The last reference goes on the loop, where the state is.
    parts_.loop->Post([self = std::move(self_)] {});
  }

 private:
  void Parse(int32_t key, std::function<absl::StatusOr<std::shared_ptr<Request>>(const ModelInfo& model)> parse, ServedModel::InfoPtr model) {
    parts_.loop->Offload([self = shared_from_this(), key, parse = std::move(parse), model = std::move(model)]() mutable {
      auto request = std::make_shared<absl::StatusOr<std::shared_ptr<Request>>>(parse(*model));
      if (request->ok()) {
        (**request)->model = std::move(model);
        (**request)->cached_prefix_tokens = self->parts_.peek->CachedTokens(*(**request)->prompts.front());
      }
      EventLoop* loop = self->parts_.loop;
      loop->Post([self = std::move(self), key, request = std::move(request)] { self->Submit(key, std::move(*request)); });
    });
  }

  void Submit(int32_t key, absl::StatusOr<std::shared_ptr<Request>> request) {
    if (gone_) return EndWith(absl::CancelledError("cancelled by the client"));
    if (!request.ok()) return EndWith(request.status());
    request_ = *request;
    request_->key_index = key;
    request_->sink = shared_from_this();
    if (const absl::Status submitted = parts_.scheduler->Submit(request_); !submitted.ok()) {
      request_->sink = nullptr;
      return EndWith(submitted);
    }
    v1::GenerateEvent event;
    event.mutable_accepted()->set_request_id(request_->id);
    event.mutable_accepted()->set_prompt_tokens(request_->usage().prompt_tokens);
    Push(std::move(event));
  }

  void ClientGone() {
    if (std::exchange(gone_, true)) return;
    if (request_ && !ended_) {
      parts_.scheduler->Cancel(request_);
      if (const auto permit = LogAllowed("client-gone", 30)) spdlog::info("{}: the client is gone, cancelled", request_->id);
    }
    if (request_) request_->sink = nullptr;
    DropQueued();
    if (!ended_) EndWith(absl::CancelledError("cancelled by the client"));
  }

  void Fill(const ScoredToken& token, v1::TokenLogprob* out) const {
    const std::string_view bytes = request_->model->tokenizer->TokenBytes(token.id);
    out->set_id(token.id);
    out->set_text(ReplaceInvalidUtf8(bytes));
    out->set_token_bytes(std::string(bytes));
    out->set_logprob(token.logprob);
  }

  void Push(v1::GenerateEvent event) {
    if (gone_ || ended_) return;
    if (Send(std::move(event)) <= kUnsentBytesMax) return;
    context_->TryCancel();  // nobody reads: what is to come would only pile up here
    ClientGone();
  }

  void EndWith(const absl::Status& status) {
    if (std::exchange(ended_, true)) return;
    const ApiError error = ToApiError(status);
    if (error.retry_after_seconds > 0) context_->AddTrailingMetadata("retry-after-ms", std::to_string(error.retry_after_seconds * 1000));
    End(status);
  }

  const InferenceService::Parts parts_;
  grpc::CallbackServerContext* context_;
  std::shared_ptr<GenerateReactor> self_;
  std::shared_ptr<Request> request_;
  bool ended_ = false;
  bool gone_ = false;
  size_t finished_choices_ = 0;
};

// Runs `work` on the loop and finishes the call with its status.
grpc::ServerUnaryReactor* Unary(const InferenceService::Parts& parts, grpc::CallbackServerContext* context, std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (const auto key = CheckKey(*parts.keys, *context); !key.ok()) {
    reactor->Finish(ToGrpc(key.status()));
    return reactor;
  }
  parts.loop->Post([reactor, work = std::move(work)] { reactor->Finish(ToGrpc(work())); });
  return reactor;
}

// The same on the pool, with the model.
grpc::ServerUnaryReactor* UnaryWithModel(const InferenceService::Parts& parts, grpc::CallbackServerContext* context,
                                         std::function<absl::Status(const ModelInfo& model)> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (const auto key = CheckKey(*parts.keys, *context); !key.ok()) {
    reactor->Finish(ToGrpc(key.status()));
    return reactor;
  }
  parts.loop->Post([reactor, parts, work = std::move(work)] {
    parts.model->WhenRead([reactor, loop = parts.loop, work](absl::StatusOr<ServedModel::InfoPtr> model) {
      if (!model.ok()) return reactor->Finish(ToGrpc(model.status()));
      loop->Offload([reactor, work, model = *std::move(model)] { reactor->Finish(ToGrpc(work(*model))); });
    });
  });
  return reactor;
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateEvent>* InferenceService::Generate(grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  auto reactor = std::make_shared<GenerateReactor>(parts_, context);
  auto* raw = reactor.get();
  raw->Start([limit = parts_.max_tokens_default, message = *request](const ModelInfo& model) { return FromGenerate(message, model, limit); });
  return raw;
}

grpc::ServerWriteReactor<v1::GenerateEvent>* InferenceService::Chat(grpc::CallbackServerContext* context, const v1::ChatRequest* request) {
  auto reactor = std::make_shared<GenerateReactor>(parts_, context);
  auto* raw = reactor.get();
  raw->Start([limit = parts_.max_tokens_default, message = *request](const ModelInfo& model) { return FromChat(message, model, limit); });
  return raw;
}

grpc::ServerUnaryReactor* InferenceService::Cancel(grpc::CallbackServerContext* context, const v1::CancelRequest* request,
                                                   v1::CancelResponse* reply) {
  return Unary(parts_, context, [parts = parts_, request, reply]() -> absl::Status {
    switch (parts.scheduler->CancelById(request->request_id())) {
      case Scheduler::CancelResult::kWasRunning: reply->set_was_running(true); return absl::OkStatus();
      case Scheduler::CancelResult::kHadEnded: return absl::OkStatus();
      case Scheduler::CancelResult::kNeverSeen: break;
    }
    return absl::NotFoundError("no request of that id was seen here");
  });
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context, const v1::TokenizeRequest* request,
                                                     v1::TokenizeResponse* reply) {
  return UnaryWithModel(parts_, context, [request, reply](const ModelInfo& info) -> absl::Status {
    const Tokenizer& tokenizer = *info.tokenizer;
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(request->text(), {.add_special_tokens = request->add_special_tokens(),
                                                                                        .parse_special = request->parse_special()}));
    for (const int32_t id : ids) {
      reply->add_ids(id);
      reply->add_token_bytes(std::string(tokenizer.TokenBytes(id)));
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* InferenceService::Detokenize(grpc::CallbackServerContext* context, const v1::DetokenizeRequest* request,
                                                       v1::DetokenizeResponse* reply) {
  return UnaryWithModel(parts_, context, [request, reply](const ModelInfo& info) -> absl::Status {
    const int32_t known = info.known_ids();
    for (const int32_t id : request->ids()) {
      if (id < 0 || id >= known) return FieldError("ids", absl::StrCat("'ids' holds the token id ", id, ": this model's ids are 0 to ", known - 1));
    }
    reply->set_text(info.tokenizer->Decode({request->ids().begin(), request->ids().end()}, false));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* InferenceService::ListModels(grpc::CallbackServerContext* context, const v1::ListModelsRequest*,
                                                       v1::ListModelsResponse* reply) {
  return Unary(parts_, context, [parts = parts_, reply]() -> absl::Status {
    const ServedModel::InfoPtr& info = parts.model->current();
    if (info == nullptr) return absl::OkStatus();  // the files of another model are being read
    auto* model = reply->add_models();
    model->set_id(info->name);
    model->set_architecture(info->architecture);
    model->set_context_tokens(info->context_tokens);
    model->set_vocab_size(info->vocab_size);
    model->set_ready(parts.health->Check().ready);
    return absl::OkStatus();
  });
}

}  // namespace hearth::router
