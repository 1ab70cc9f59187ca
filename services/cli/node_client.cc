#include "services/cli/node_client.h"

#include <chrono>
#include <fstream>

#include "common/base/listen_host.h"
#include "common/rpc/rpc.h"

namespace hearth {
namespace {

void Deadline(grpc::ClientContext& context, int ms) { context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(ms)); }

constexpr int kStatusMs = 1000;

}  // namespace

absl::StatusOr<v1::StoreStatus> StoreStatusOf(const NodeConfig& config) {
  auto stub = v1::Store::NewStub(UnixChannel(config.StoreSocket()));
  grpc::ClientContext context;
  Deadline(context, kStatusMs);
  v1::StoreStatus status;
  RETURN_IF_ERROR(FromGrpc(stub->Status(&context, {}, &status)));
  return status;
}

absl::StatusOr<v1::WorkerStatus> WorkerStatusOf(const NodeConfig& config, const std::string& kind, int64_t index) {
  auto stub = v1::Worker::NewStub(UnixChannel(config.WorkerSocket(kind, index)));
  grpc::ClientContext context;
  Deadline(context, kStatusMs);
  v1::WorkerStatus status;
  RETURN_IF_ERROR(FromGrpc(stub->Status(&context, {}, &status)));
  return status;
}

absl::StatusOr<v1::RouterStatus> RouterStatusOf(const NodeConfig& config) {
  auto stub = v1::Router::NewStub(UnixChannel(config.RouterAdminSocket()));
  grpc::ClientContext context;
  Deadline(context, kStatusMs);
  v1::RouterStatus status;
  RETURN_IF_ERROR(FromGrpc(stub->Status(&context, {}, &status)));
  return status;
}

std::unique_ptr<v1::Inference::Stub> InferenceStub(const NodeConfig& config) {
  // Checked with the configuration, so it can be read.
  ListenHost listen = config.grpc_listen.empty() ? ListenHost{"localhost", kGrpcPort} : *ParseListen(config.grpc_listen.front(), kGrpcPort);
  // An address to listen on everywhere is reached here.
  if (listen.host == "0.0.0.0" || listen.host == "::") listen.host = "localhost";
  const bool v6 = listen.host.find(':') != std::string::npos;
  const std::string address = absl::StrCat(v6 ? "[" : "", listen.host, v6 ? "]:" : ":", listen.port);
  return v1::Inference::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

void Authorize(const NodeConfig& config, grpc::ClientContext& context) {
  if (config.api_key_file.empty()) return;
  std::ifstream in(config.api_key_file);
  std::string key;
  if (std::getline(in, key) && !key.empty()) context.AddMetadata("authorization", "Bearer " + key);
}

}  // namespace hearth
