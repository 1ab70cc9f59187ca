// One Attach stream at the store's side of the wire: reads hello and beats, queues events, and ends in order.
// Room: services/weightstore. May touch: proto, gRPC. Threads: gRPC's, and whoever sends; nothing here blocks.
// A peer that is stopped and reads nothing costs a short queue of beats and progress, and the few events that matter.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>

#include "common/rpc/event_sender.h"
#include "hearth/v1/store.grpc.pb.h"
#include "services/weightstore/store.h"

namespace hearth {

void FillLoadEvent(const LoadState& state, v1::LoadEvent* event);

class AttachReactor final : public EventSender<grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>, v1::AttachEvent>, public AttachSink {
 public:
  // Lives until gRPC is done with it and nobody holds it as a sink. Without a caller the stream ends with that status.
  static grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>* Make(Store& store, const NodeConfig& config, absl::StatusOr<Caller> caller,
                                                                           std::function<void(const std::shared_ptr<AttachReactor>&, bool)> track);

  void SendReady(const GenerationPtr& generation) override;
  void SendSwitch(const GenerationPtr& generation) override;
  void SendLoading(const LoadState& loading) override;

 private:
  AttachReactor(Store& store, const NodeConfig& config, Caller caller) : store_(store), config_(config), caller_(caller) {}
  void Start();
  void OnReadDone(bool ok) override;
  void OnBroken() override;
  void OnCancel() override;
  void OnDone() override;

  void HandleHello(const v1::AttachRequest::Hello& message);

  Store& store_;
  const NodeConfig& config_;
  const Caller caller_;
  std::function<void(const std::shared_ptr<AttachReactor>&, bool)> track_;
  std::shared_ptr<AttachReactor> self_;  // gRPC's hold, let go in OnDone
  v1::AttachRequest in_;
  bool greeted_ = false;  // reads come one after another
};

}  // namespace hearth
