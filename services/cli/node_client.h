// Calls of the operator's command to the node's processes, each with a short deadline: a process that is away must not hold up the answer.
// Room: services/cli. May touch: proto, common/rpc.
#pragma once

#include <memory>
#include <string>

#include "common/base/node_config.h"
#include "common/base/status.h"
#include "hearth/v1/inference.grpc.pb.h"
#include "hearth/v1/node.grpc.pb.h"
#include "hearth/v1/store.grpc.pb.h"
#include "hearth/v1/worker.grpc.pb.h"

namespace hearth {

absl::StatusOr<v1::StoreStatus> StoreStatusOf(const NodeConfig& config);
absl::StatusOr<v1::WorkerStatus> WorkerStatusOf(const NodeConfig& config, const std::string& kind, int64_t index);
absl::StatusOr<v1::RouterStatus> RouterStatusOf(const NodeConfig& config);

// The public interface, by the first address of router.grpc_listen.
std::unique_ptr<v1::Inference::Stub> InferenceStub(const NodeConfig& config);
// Puts the first key of router.api_key_file on a call.
void Authorize(const NodeConfig& config, grpc::ClientContext& context);

}  // namespace hearth
