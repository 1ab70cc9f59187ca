#include "services/weightstore/single_instance.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

namespace hearth {

absl::StatusOr<std::unique_ptr<SingleInstance>> SingleInstance::Acquire(const std::string& lock_path) {
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) {
    const std::string message =
        absl::StrCat("opening ", lock_path, ": ", strerror(errno), ": node.runtime_dir must be there and writable by user ", geteuid());
    return errno == ENOENT ? absl::NotFoundError(message) : absl::PermissionDeniedError(message);
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    char pid[32] = {};
    const ssize_t got = pread(fd, pid, sizeof(pid) - 1, 0);
    close(fd);
    return absl::FailedPreconditionError(absl::StrCat("this node has a weight store already: process ", got > 0 ? pid : "unknown", " holds ",
                                                      lock_path, "; stop it, or choose another node.name"));
  }
  const std::string pid = std::to_string(getpid());
  if (ftruncate(fd, 0) != 0 || pwrite(fd, pid.data(), pid.size(), 0) < 0) {
    // A full disk: the lock holds all the same, only its reader learns no number.
  }
  return std::unique_ptr<SingleInstance>(new SingleInstance(fd));
}

SingleInstance::~SingleInstance() { close(fd_); }

}  // namespace hearth
