// The router's own status on its admin socket, for `hearth status`.
// Room: services/router. Threads: gRPC's; each question is answered on the loop.
#pragma once

#include <functional>

#include "hearth/v1/node.grpc.pb.h"
#include "services/router/event_loop.h"

namespace hearth::router {

class StatusService final : public v1::Router::CallbackService {
 public:
  // `fill` runs on the loop.
  StatusService(EventLoop* loop, std::function<void(v1::RouterStatus*)> fill) : loop_(loop), fill_(std::move(fill)) {}
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context, const v1::RouterStatusRequest* request, v1::RouterStatus* reply) override;

 private:
  EventLoop* loop_;
  std::function<void(v1::RouterStatus*)> fill_;
};

}  // namespace hearth::router
