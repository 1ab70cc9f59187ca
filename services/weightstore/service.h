// The gRPC edge of the store: decode, call, map the status. No policy.
// Room: services/weightstore. May touch: proto, common/rpc. Threads: gRPC's; one of its own, in which a Load runs.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "common/base/node_config.h"
#include "hearth/v1/store.grpc.pb.h"
#include "services/weightstore/attach_reactor.h"
#include "services/weightstore/load_reactor.h"
#include "services/weightstore/peer_listener.h"
#include "services/weightstore/store.h"

namespace hearth {

class StoreService final : public v1::Store::CallbackService {
 public:
  StoreService(Store& store, const NodeConfig& config);
  ~StoreService() override;

  // The listener must live until the server has shut down.
  void SetListener(const PeerListener* listener) { listener_ = listener; }
  void SetReadySeconds(double seconds) { ready_seconds_ = seconds; }
  // Ends every Attach stream and Load with UNAVAILABLE; returns when the load has stopped.
  void Stop();

 private:
  using Context = grpc::CallbackServerContext;
  grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>* Attach(Context* context) override;
  grpc::ServerUnaryReactor* Peek(Context* context, const v1::PeekRequest* request, v1::PeekResponse* response) override;
  grpc::ServerUnaryReactor* Match(Context* context, const v1::MatchRequest* request, v1::PagesResponse* response) override;
  grpc::ServerUnaryReactor* Alloc(Context* context, const v1::AllocRequest* request, v1::PagesResponse* response) override;
  grpc::ServerUnaryReactor* Seal(Context* context, const v1::SealRequest* request, v1::SealResponse* response) override;
  grpc::ServerUnaryReactor* Offer(Context* context, const v1::StreamRef* request, v1::Empty* response) override;
  grpc::ServerUnaryReactor* Take(Context* context, const v1::StreamRef* request, v1::PagesResponse* response) override;
  grpc::ServerUnaryReactor* Free(Context* context, const v1::FreeRequest* request, v1::Empty* response) override;
  grpc::ServerUnaryReactor* MakeRings(Context* context, const v1::MakeRingsRequest* request, v1::MakeRingsResponse* response) override;
  grpc::ServerUnaryReactor* JoinGroup(Context* context, const v1::JoinGroupRequest* request, v1::JoinGroupResponse* response) override;
  grpc::ServerUnaryReactor* Status(Context* context, const v1::StoreStatusRequest* request, v1::StoreStatus* response) override;
  grpc::ServerWriteReactor<v1::LoadEvent>* Load(Context* context, const v1::LoadRequest* request) override;

  struct LoadJob {
    std::shared_ptr<LoadReactor> caller;
    std::string model_dir;
    bool replace = false;
  };

  absl::StatusOr<Caller> CallerOf(Context* context) const;
  void RunLoads();
  absl::Status RunLoad(const LoadJob& job);

  Store& store_;
  const NodeConfig& config_;
  const int64_t started_ns_;
  std::atomic<const PeerListener*> listener_{nullptr};
  std::atomic<double> ready_seconds_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::set<std::shared_ptr<AttachReactor>> streams_;
  std::condition_variable wake_;  // load_ or stopping_ has changed
  std::optional<LoadJob> load_;   // waits for the thread, or runs in it: there is one at a time
  std::thread load_thread_;       // last: it uses the others
};

}  // namespace hearth
