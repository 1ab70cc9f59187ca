// Status mapping, Unix channels and Unix servers. Contract: rpc.h. Room: common/rpc.
#include "common/rpc/rpc.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>

namespace hearth {
namespace {

// Prompts travel as token ids: 1M tokens are about 4 MB of varints, the library's default limit.
constexpr int kMessageBytesMax = 64 << 20;

enum class SocketState { kAbsent, kStale, kAnswered, kNotASocket };

SocketState LookAt(const std::string& path) {
  struct stat st;
  if (lstat(path.c_str(), &st) != 0) return SocketState::kAbsent;
  if (!S_ISSOCK(st.st_mode)) return SocketState::kNotASocket;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.c_str(), path.size());
  const int rc = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  const int error = errno;
  close(fd);
  // A full queue (EAGAIN) has a listener behind it; nobody listening is ECONNREFUSED.
  return rc == 0 || error == EAGAIN || error == EINPROGRESS ? SocketState::kAnswered : SocketState::kStale;
}

}  // namespace

// The two enumerations have the same numbers by design of both libraries; unknown ones become UNKNOWN.
grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(static_cast<int>(status.code())), std::string(status.message()));
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = static_cast<int>(status.error_code());
  return absl::Status(code >= 1 && code <= 16 ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown, status.error_message());
}

std::shared_ptr<grpc::Channel> UnixChannel(const std::string& socket_path) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  // A peer that is stopped (not dead: the kernel tells us of that) is noticed after 15 s; pings only while a call is open.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // One channel is one connection: the store binds a lease to it, and a new channel must not find an old connection.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetMaxReceiveMessageSize(kMessageBytesMax);
  args.SetMaxSendMessageSize(kMessageBytesMax);
  return grpc::CreateCustomChannel("unix:" + socket_path, grpc::InsecureChannelCredentials(), args);
}

void SetServerDefaults(grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.SetMaxSendMessageSize(kMessageBytesMax);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

absl::Status ClearUnixSocketPath(const std::string& socket_path) {
  if (socket_path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path ", socket_path, " has ", socket_path.size(), " characters, the system allows ",
                                                   sizeof(sockaddr_un::sun_path) - 1, ": choose a shorter node.runtime_dir"));
  }
  switch (LookAt(socket_path)) {
    case SocketState::kAbsent: return absl::OkStatus();
    case SocketState::kAnswered:
      return absl::FailedPreconditionError(absl::StrCat("a living server answers on ", socket_path, ": stop it first, or use another node.name"));
    case SocketState::kNotASocket:
      return absl::FailedPreconditionError(absl::StrCat(socket_path, " is there and is not a socket: it is not ours to remove"));
    case SocketState::kStale:
      if (unlink(socket_path.c_str()) != 0 && errno != ENOENT) {
        return absl::PermissionDeniedError(absl::StrCat("removing the stale socket ", socket_path, ": ", strerror(errno)));
      }
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<grpc::Server>> ServeUnix(const std::string& socket_path, int mode, const std::vector<grpc::Service*>& services) {
  // gRPC would only dump its own words to stderr.
  const std::string folder = std::filesystem::path(socket_path).parent_path().string();
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    const std::string what = absl::StrCat("node.runtime_dir ", folder, ": ", strerror(errno), "; it must be there, and writable by user ", geteuid());
    return errno == ENOENT ? absl::NotFoundError(what) : absl::PermissionDeniedError(what);
  }
  RETURN_IF_ERROR(ClearUnixSocketPath(socket_path));
  grpc::ServerBuilder builder;
  SetServerDefaults(builder);
  builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials());
  for (grpc::Service* service : services) builder.RegisterService(service);
  const mode_t old_mask = umask(0777 & ~static_cast<mode_t>(mode));  // the file must not be open to others even for a moment
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  umask(old_mask);
  if (server == nullptr) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", socket_path));
  }
  if (chmod(socket_path.c_str(), static_cast<mode_t>(mode)) != 0) {
    return absl::PermissionDeniedError(absl::StrCat("setting the mode of ", socket_path, ": ", strerror(errno)));
  }
  return server;
}

std::string ToBytes(const Hash128& id) {
  std::string bytes(16, '\0');
  memcpy(bytes.data(), &id.low, 8);
  memcpy(bytes.data() + 8, &id.high, 8);
  return bytes;
}

absl::StatusOr<Hash128> HashFromBytes(const std::string& bytes) {
  if (bytes.size() != 16) return absl::InvalidArgumentError(absl::StrCat("an id of ", bytes.size(), " bytes, it must have 16"));
  Hash128 id;
  memcpy(&id.low, bytes.data(), 8);
  memcpy(&id.high, bytes.data() + 8, 8);
  return id;
}

}  // namespace hearth
