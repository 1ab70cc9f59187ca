// The router put together: everything that one process of it owns, in construction order. main.cc runs one, tests run several.
// Room: services/router.
//
// Threads: one loop thread of its own (event_loop.h), gRPC's, a small pool. Start and the destructor belong to the caller's thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/node_config.h"
#include "common/base/status.h"
#include "common/rpc/store_client.h"
#include "services/router/scheduler.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace hearth::v1 {
class RouterStatus;
}

namespace hearth::router {

class ApiKeys;
class CorsOrigins;
class Health;
class HttpApi;
class HttpServer;
class InferenceService;
class NodeTrace;
class PrefixPeek;
class ServedModel;
class StatusService;

struct RouterTimes {
  LinkTimes link;
  absl::Duration give_up = absl::Seconds(60);
  absl::Duration admit_grace = absl::Seconds(5);
  absl::Duration store_grace = absl::Seconds(3);
  absl::Duration comment_every = absl::Seconds(5);
};

class Router {
 public:
  // `store`: null: the node's. Errors: InvalidArgument and NotFound are the configuration's, others may pass.
  static absl::StatusOr<std::unique_ptr<Router>> Start(const NodeConfig& config, std::unique_ptr<StoreClient> store, RouterTimes times = {});
  ~Router();

  const std::vector<std::string>& http_addresses() const;
  const std::vector<std::string>& grpc_addresses() const { return grpc_addresses_; }

  // Whether the loop takes work within `limit`: for the service manager's watchdog.
  bool Responds(absl::Duration limit);
  // New requests are refused; returns when running ones have ended, or after `drain_ms`, when they are ended with an error event. Once.
  void Drain();

 private:
  explicit Router(const NodeConfig& config);
  absl::Status Init(std::unique_ptr<StoreClient> store, const RouterTimes& times);
  absl::Status StartHttp(const RouterTimes& times);
  absl::Status StartGrpc();
  absl::Status StartAdmin();
  void RunOnLoop(std::function<void()> work);  // and waits for it
  void FillStatus(v1::RouterStatus* status);
  void UpdateReadiness();
  void PlanCostsOf(const std::string& model_dir);  // on the pool; the scheduler starts from them

  const NodeConfig config_;
  const int64_t started_ns_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<ApiKeys> keys_;
  std::unique_ptr<CorsOrigins> origins_;
  std::unique_ptr<StoreClient> store_;
  std::unique_ptr<ServedModel> model_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<PrefixPeek> peek_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Health> health_;
  std::unique_ptr<HttpApi> http_api_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<InferenceService> inference_;
  std::unique_ptr<StatusService> status_service_;
  std::unique_ptr<NodeTrace> node_trace_;
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<grpc::Server> admin_;
  std::vector<std::string> grpc_addresses_;
  std::shared_ptr<void> readiness_timer_;
  std::optional<bool> was_ready_;  // as last said to the watchers
  std::thread thread_;
};

}  // namespace hearth::router
