// One Attach stream at the store's side of the wire: reads hello and beats, queues events, and ends in order.
// Room: services/weightstore. May touch: proto, gRPC. Threads: gRPC's, and whoever sends; nothing here blocks.
// A peer that is stopped and reads nothing costs one queue of kQueueMax events; beats and progress are dropped first.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "hearth/v1/store.grpc.pb.h"
#include "services/weightstore/store.h"

namespace hearth {

void FillLoadEvent(const LoadState& state, v1::LoadEvent* event);

class AttachReactor final : public grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>, public AttachSink {
 public:
  // Lives until gRPC is done with it and nobody holds it as a sink. Without a caller the stream ends with that status.
  static grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>* Make(Store& store, const NodeConfig& config, absl::StatusOr<Caller> caller,
                                                                           std::function<void(const std::shared_ptr<AttachReactor>&, bool)> track);

  void SendReady(const GenerationPtr& generation) override;
  void SendSwitch(const GenerationPtr& generation) override;
  void SendLoading(const LoadState& loading) override;
  void End(const absl::Status& status);  // after what is queued; once

 private:
  AttachReactor(Store& store, const NodeConfig& config, Caller caller) : store_(store), config_(config), caller_(caller) {}
  void Start();
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void HandleHello(const v1::AttachRequest::Hello& message);
  void Send(v1::AttachEvent event, bool may_be_dropped);
  void Pump();

  static constexpr size_t kQueueMax = 32;

  Store& store_;
  const NodeConfig& config_;
  const Caller caller_;
  std::function<void(const std::shared_ptr<AttachReactor>&, bool)> track_;
  std::shared_ptr<AttachReactor> self_;  // gRPC's hold, let go in OnDone
  v1::AttachRequest in_;
  bool greeted_ = false;  // reads come one after another

  std::mutex mutex_;
  std::deque<v1::AttachEvent> queue_;
  v1::AttachEvent out_;
  bool busy_ = false;  // a write or the end is under way
  bool finished_ = false;
  std::optional<grpc::Status> end_;
};

}  // namespace hearth
