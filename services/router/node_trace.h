// The node's trace for `hearth trace`: the spans of store and workers, gathered from their own services, and the router's table of transitions of each
// stream that ran meanwhile.
// Room: services/router. May touch: proto, common/{rpc,base}, the scheduler through the loop.
// Threads: gRPC's, one a call for as long as it lasts; each call has one more for each process that it follows. What is the loop's is asked there.
// A process that dies is followed again when it is back; what it had not sent is missing, and the trace says so.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "common/rpc/trace_service.h"
#include "services/router/event_loop.h"
#include "services/router/scheduler.h"

namespace hearth::router {

class NodeTrace final : public v1::Trace::Service {
 public:
  struct Peer {
    std::string name;  // "decode.0"
    std::string socket_path;
  };
  NodeTrace(EventLoop* loop, Scheduler* scheduler, std::vector<Peer> peers) : loop_(loop), scheduler_(scheduler), peers_(std::move(peers)) {}

  // Ends every call soon, with UNAVAILABLE. While calls run the loop must.
  void Stop() { stopping_.store(true); }

  grpc::Status Record(grpc::ServerContext* context, TraceStream* stream) override;

 private:
  EventLoop* const loop_;
  Scheduler* const scheduler_;
  const std::vector<Peer> peers_;
  std::atomic<bool> stopping_{false};
};

}  // namespace hearth::router
