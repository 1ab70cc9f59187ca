// Accepts the store's connections itself, so that each one's process is known from the socket (SO_PEERCRED), and hands them to gRPC.
// Room: services/weightstore. May touch: common/{rpc,base}. Threads: Of from any, the rest from one; one thread of its own that accepts.
#pragma once

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "common/base/process.h"
#include "common/base/status.h"

namespace hearth {

struct Peer {
  uint64_t connection = 0;  // counts up; never reused
  ProcessId process;
  uid_t uid = 0;
};

class PeerListener {
 public:
  // Listens on `socket_path` with `mode`; `server` must outlive the listener. Errors: as ClearUnixSocketPath; PermissionDenied, NotFound.
  static absl::StatusOr<std::unique_ptr<PeerListener>> Start(const std::string& socket_path, mode_t mode, grpc::Server* server);
  ~PeerListener();  // after the server's shutdown: a call that runs may still ask who is behind it
  PeerListener(const PeerListener&) = delete;
  PeerListener& operator=(const PeerListener&) = delete;

  // Closes the socket, and removes its file if it is still its own. Connections that are there go on. May be called again.
  void StopAccepting();
  // Who is behind a call, from ServerContext::peer(), which reads "fd:17" for a connection that was handed over by its number.
  absl::StatusOr<Peer> Of(const std::string& peer) const;

 private:
  PeerListener(std::string path, int listen_fd, int wake_fd, grpc::Server* server);
  void Run();
  void HandOver(int fd);

  const std::string path_;
  int listen_fd_;
  const int wake_fd_;
  grpc::Server* const server_;
  uint64_t inode_ = 0;
  int next_number_ = 0;
  mutable std::mutex mutex_;
  uint64_t connections_ = 0;
  std::map<int, Peer> by_fd_;
  std::thread thread_;
};

}  // namespace hearth
