// Small gRPC pieces that every process uses: status mapping, Unix-socket channels, ids on the wire.
// Room: common/rpc. May touch: proto, common/base. The one place where absl::Status and grpc::Status meet.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"

namespace hearth {

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// Keep-alive and back-off set so that a restarted server is found within about 100 ms. Each channel has a connection of its own.
std::shared_ptr<grpc::Channel> UnixChannel(const std::string& socket_path);
// Serves on a Unix socket: removes a stale file of a dead server, refuses (FailedPrecondition) one that a living server answers on; mode 0600,
// or 0660 for group access. Credentials of the peer are not kept: the store has its own listener for that.
absl::StatusOr<std::unique_ptr<grpc::Server>> ServeUnix(const std::string& socket_path, int mode, const std::vector<grpc::Service*>& services);

// What ServeUnix does in pieces, for a server that accepts by itself: limits and ping rules that fit UnixChannel, and the check of the path.
void SetServerDefaults(grpc::ServerBuilder& builder);
absl::Status ClearUnixSocketPath(const std::string& socket_path);

std::string ToBytes(const Hash128& id);                           // 16 bytes, low half first, little-endian
absl::StatusOr<Hash128> HashFromBytes(const std::string& bytes);  // InvalidArgument unless 16 bytes

}  // namespace hearth
