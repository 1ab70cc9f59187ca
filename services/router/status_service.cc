#include "services/router/status_service.h"

namespace hearth::router {

grpc::ServerUnaryReactor* StatusService::Status(grpc::CallbackServerContext* context, const v1::RouterStatusRequest*, v1::RouterStatus* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_->Post([this, reactor, reply] {
    fill_(reply);
    reactor->Finish(grpc::Status::OK);
  });
  return reactor;
}

}  // namespace hearth::router
