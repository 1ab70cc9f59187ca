#include <errno.h>
#include <liburing.h>
#include <string.h>

#include "common/base/check.h"
#include "common/disk/read_queue.h"

namespace hearth {
namespace {

class UringQueue : public ReadQueue {
 public:
  explicit UringQueue(int64_t depth) : depth_(depth) {}
  ~UringQueue() override {
    if (!made_) return;
    std::vector<EndedRead> ended;
    while (under_way_ > 0) AwaitEnded(100'000'000, ended);
    io_uring_queue_exit(&ring_);
  }
  absl::Status Make() {
    const int error = -io_uring_queue_init(static_cast<unsigned>(depth_), &ring_, 0);
    made_ = error == 0;
    if (made_) return absl::OkStatus();
    const std::string why = error == ENOSYS  ? "this kernel has none"
                            : error == EPERM ? "it is forbidden here (kernel.io_uring_disabled, or the container's seccomp filter)"
                                             : strerror(error);
    return absl::UnavailableError(absl::StrCat("no io_uring: ", why));
  }

  std::string_view kind() const override { return "io_uring"; }
  int64_t depth() const override { return depth_; }

  void Begin(const QueuedRead& read) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    HEARTH_CHECK(entry != nullptr);  // each is submitted at once, so that the submission ring is empty here
    io_uring_prep_read(entry, read.fd, read.to, static_cast<unsigned>(read.bytes), read.offset);
    entry->user_data = read.tag;
    ++under_way_;
    int rc = 0;
    do {
      rc = io_uring_submit(&ring_);
    } while (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY);
    HEARTH_CHECK(rc == 1);
  }

  void AwaitEnded(int64_t timeout_ns, std::vector<EndedRead>& ended) override {
    if (Reap(ended) > 0 || timeout_ns == 0 || under_way_ == 0) return;
    __kernel_timespec timeout{.tv_sec = timeout_ns / 1'000'000'000, .tv_nsec = timeout_ns % 1'000'000'000};
    io_uring_cqe* entry = nullptr;
    io_uring_wait_cqe_timeout(&ring_, &entry, &timeout);
    Reap(ended);
  }

 private:
  int64_t Reap(std::vector<EndedRead>& ended) {
    int64_t count = 0;
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) == 0) {
      ended.push_back({entry->user_data, entry->res});
      io_uring_cqe_seen(&ring_, entry);
      ++count;
    }
    under_way_ -= count;
    return count;
  }

  const int64_t depth_;
  io_uring ring_{};
  bool made_ = false;
  int64_t under_way_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ReadQueue>> MakeUringQueue(int64_t depth) {
  auto queue = std::make_unique<UringQueue>(depth);
  RETURN_IF_ERROR(queue->Make());
  return std::unique_ptr<ReadQueue>(std::move(queue));
}

}  // namespace hearth
