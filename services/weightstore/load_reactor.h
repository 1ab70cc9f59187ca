// The answer stream of one Load: progress, then the end. The loading thread sends into it, also when the caller has gone away.
// Room: services/weightstore. Threads: any; nothing blocks. Progress that the caller is too slow for is dropped, the last event is not.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>

#include "common/rpc/event_sender.h"
#include "hearth/v1/store.grpc.pb.h"

namespace hearth {

class LoadReactor final : public EventSender<grpc::ServerWriteReactor<v1::LoadEvent>, v1::LoadEvent> {
 public:
  // Lives until gRPC is done with it, which is after its End, and nobody holds it.
  static std::shared_ptr<LoadReactor> Make() {
    std::shared_ptr<LoadReactor> reactor(new LoadReactor);
    reactor->self_ = reactor;
    return reactor;
  }

  void SendProgress(v1::LoadEvent event) { Send(std::move(event), IfSlow::kDrop); }
  void SendReady(v1::LoadEvent event) { Send(std::move(event)); }
  bool cancelled() const { return cancelled_.load(); }

 private:
  LoadReactor() = default;
  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override { const std::shared_ptr<LoadReactor> last = std::move(self_); }

  std::atomic<bool> cancelled_{false};
  std::shared_ptr<LoadReactor> self_;
};

}  // namespace hearth
