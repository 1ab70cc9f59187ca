// A queue with faults: what a disk, a file system or a kernel may answer. Room: common/disk, tests only.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common/base/time.h"
#include "common/disk/read_queue.h"

namespace hearth {

// What is to become of a read: bytes to read less than asked for, or -errno in place of a result, and when its end is told.
struct ReadFault {
  uint64_t bytes_max = UINT64_MAX;
  int64_t error = 0;
  int64_t delay_ns = 0;
};

class FaultyQueue : public ReadQueue {
 public:
  // `fault` is asked for each read, on the thread that begins it.
  FaultyQueue(std::unique_ptr<ReadQueue> queue, std::function<ReadFault(const QueuedRead&)> fault)
      : queue_(std::move(queue)), fault_(std::move(fault)) {}

  std::string_view kind() const override { return queue_->kind(); }
  int64_t depth() const override { return queue_->depth(); }
  void Begin(const QueuedRead& read) override {
    const ReadFault fault = fault_(read);
    const int64_t due_ns = MonotonicNowNs() + fault.delay_ns;
    if (fault.error != 0 || fault.bytes_max == 0) {
      late_.push_back({due_ns, {read.tag, fault.error}});
      return;
    }
    if (fault.delay_ns > 0) slow_.push_back({due_ns, {read.tag, 0}});
    QueuedRead shorter = read;
    shorter.bytes = std::min(read.bytes, fault.bytes_max);
    queue_->Begin(shorter);
  }
  void AwaitEnded(int64_t timeout_ns, std::vector<EndedRead>& ended) override {
    const int64_t end_ns = MonotonicNowNs() + timeout_ns;
    do {
      std::vector<EndedRead> now;
      queue_->AwaitEnded(std::min<int64_t>(timeout_ns, 1'000'000), now);
      for (const EndedRead& read : now) late_.push_back({DueOf(read.tag), read});
      std::deque<Late> waiting;
      bool any = false;
      for (const Late& late : late_) {
        if (late.due_ns > MonotonicNowNs()) {
          waiting.push_back(late);
          continue;
        }
        ended.push_back(late.read);
        any = true;
      }
      late_ = std::move(waiting);
      if (any) return;
    } while (MonotonicNowNs() < end_ns);
  }

 private:
  struct Late {
    int64_t due_ns = 0;
    EndedRead read;
  };
  int64_t DueOf(uint64_t tag) {
    for (auto it = slow_.begin(); it != slow_.end(); ++it) {
      if (it->read.tag != tag) continue;
      const int64_t due_ns = it->due_ns;
      slow_.erase(it);
      return due_ns;
    }
    return 0;
  }

  const std::unique_ptr<ReadQueue> queue_;
  const std::function<ReadFault(const QueuedRead&)> fault_;
  std::deque<Late> late_;  // ended, not told
  std::deque<Late> slow_;  // under way
};

}  // namespace hearth
