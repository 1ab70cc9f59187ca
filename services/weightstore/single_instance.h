// One store a node: a lock file beside the socket, held by flock as long as the process lives, so that nothing is left to clean up.
// Room: services/weightstore. May touch: common/base.
#pragma once

#include <memory>
#include <string>

#include "common/base/status.h"

namespace hearth {

class SingleInstance {
 public:
  // FailedPrecondition names the process that holds it; PermissionDenied or NotFound for the directory.
  static absl::StatusOr<std::unique_ptr<SingleInstance>> Acquire(const std::string& lock_path);
  ~SingleInstance();

 private:
  explicit SingleInstance(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace hearth
