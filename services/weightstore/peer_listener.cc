// gRPC names such a connection by its file descriptor only. Numbers are therefore handed out in turn over a wide range: a call that is
// still on its way when its connection closes is not taken for one of the next connection.
#include "services/weightstore/peer_listener.h"

#include <errno.h>
#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "common/base/logging.h"
#include "common/rpc/rpc.h"

namespace hearth {
namespace {

constexpr int kFirstNumber = 128;  // below: the store's own files
constexpr int kNumbersMax = 4096;
constexpr int kBacklog = 128;

uint64_t InodeOf(const std::string& path) {
  struct stat st;
  return lstat(path.c_str(), &st) == 0 ? static_cast<uint64_t>(st.st_ino) : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PeerListener>> PeerListener::Start(const std::string& socket_path, mode_t mode, grpc::Server* server) {
  RETURN_IF_ERROR(ClearUnixSocketPath(socket_path));
  const int wake_fd = eventfd(0, EFD_CLOEXEC);
  const int fd = wake_fd < 0 ? -1 : socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    const int error = errno;
    if (wake_fd >= 0) close(wake_fd);
    return absl::ResourceExhaustedError(absl::StrCat("listening on ", socket_path, ": ", strerror(error)));
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, socket_path.c_str(), socket_path.size());
  const mode_t old_mask = umask(0777 & ~mode);
  const int rc = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  const int error = errno;
  umask(old_mask);
  if (rc != 0 || chmod(socket_path.c_str(), mode) != 0 || listen(fd, kBacklog) != 0) {
    const int why = rc != 0 ? error : errno;
    close(fd);
    close(wake_fd);
    const std::string message =
        absl::StrCat("listening on ", socket_path, ": ", strerror(why), ": is node.runtime_dir there, and writable by user ", geteuid(), "?");
    return why == ENOENT ? absl::NotFoundError(message) : absl::PermissionDeniedError(message);
  }
  auto listener = std::unique_ptr<PeerListener>(new PeerListener(socket_path, fd, wake_fd, server));
  return listener;
}

PeerListener::PeerListener(std::string path, int listen_fd, int wake_fd, grpc::Server* server)
    : path_(std::move(path)), listen_fd_(listen_fd), wake_fd_(wake_fd), server_(server), inode_(InodeOf(path_)) {
  thread_ = std::thread([this] { Run(); });
}

PeerListener::~PeerListener() {
  StopAccepting();
  close(wake_fd_);
}

void PeerListener::StopAccepting() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_fd_, 1);
  thread_.join();
  close(listen_fd_);
  listen_fd_ = -1;
  if (InodeOf(path_) == inode_) unlink(path_.c_str());
}

absl::StatusOr<Peer> PeerListener::Of(const std::string& peer) const {
  int fd = -1;
  if (peer.rfind("fd:", 0) == 0 && absl::SimpleAtoi(Sv(std::string_view(peer).substr(3)), &fd)) {
    std::lock_guard lock(mutex_);
    if (const auto it = by_fd_.find(fd); it != by_fd_.end()) return it->second;
  }
  return absl::PermissionDeniedError(absl::StrCat("the caller's process is not known (", peer, "): the store answers on its Unix socket only"));
}

void PeerListener::Run() {
  while (true) {
    pollfd fds[2] = {{listen_fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    poll(fds, 2, -1);
    if (fds[1].revents != 0) return;
    if (fds[0].revents == 0) continue;
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      HandOver(fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      if (auto permit = LogAllowed("accept", 2)) spdlog::warn("accepting on {}: {}{}", path_, strerror(errno), permit->Note());
      poll(&fds[1], 1, 100);  // the connection stays in the queue
    }
  }
}

void PeerListener::HandOver(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0;
  const absl::StatusOr<ProcessId> process = known ? ProcessOf(credentials.pid) : absl::UnavailableError("no credentials");
  if (!process.ok()) {  // it connected and died
    close(fd);
    return;
  }
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int numbers = std::clamp(static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) - 2 * kFirstNumber, 1, kNumbersMax);
  int number = fcntl(fd, F_DUPFD_CLOEXEC, kFirstNumber + next_number_ % numbers);
  if (number < 0) number = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  close(fd);
  if (number < 0) return;
  next_number_ = (std::max(number, kFirstNumber) - kFirstNumber + 1) % numbers;
  {
    std::lock_guard lock(mutex_);
    by_fd_[number] = Peer{++connections_, *process, credentials.uid};
  }
  grpc::AddInsecureChannelFromFd(server_, number);
}

}  // namespace hearth
