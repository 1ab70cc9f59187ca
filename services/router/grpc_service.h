// The public gRPC interface (inference.proto): the same requests as over HTTP, by the same checks and the same scheduler.
// Room: services/router. May touch: proto, common/rpc. Threads: gRPC's call in; everything that changes something runs on the loop.
// A client's cancel, deadline or death cancels its request.
#pragma once

#include "hearth/v1/inference.grpc.pb.h"
#include "services/router/access.h"
#include "services/router/event_loop.h"
#include "services/router/health.h"
#include "services/router/prefix_peek.h"
#include "services/router/scheduler.h"
#include "services/router/served_model.h"

namespace hearth::router {

class InferenceService final : public v1::Inference::CallbackService {
 public:
  struct Parts {
    EventLoop* loop;
    ServedModel* model;
    const ApiKeys* keys;
    Scheduler* scheduler;
    Health* health;
    PrefixPeek* peek;
    int64_t max_tokens_default = 0;
  };
  explicit InferenceService(Parts parts) : parts_(parts) {}

  grpc::ServerWriteReactor<v1::GenerateEvent>* Generate(grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerWriteReactor<v1::GenerateEvent>* Chat(grpc::CallbackServerContext* context, const v1::ChatRequest* request) override;
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context, const v1::CancelRequest* request, v1::CancelResponse* reply) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const v1::TokenizeRequest* request, v1::TokenizeResponse* reply) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* reply) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* reply) override;

 private:
  const Parts parts_;
};

}  // namespace hearth::router
