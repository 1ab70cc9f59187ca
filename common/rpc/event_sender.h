// The sending half of a server's stream: events in order, then the end, one gRPC operation at a time.
// Room: common/rpc. Threads: any; nothing blocks. Operations are started outside the mutex, since gRPC may run other reactions inside the call that
// starts one.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "common/base/status.h"
#include "common/rpc/rpc.h"

namespace hearth {

// `Reactor`: grpc::ServerWriteReactor<Event> or grpc::ServerBidiReactor<Request, Event>.
template <class Reactor, class Event>
class EventSender : public Reactor {
 public:
  // Sent behind what is queued, once: what comes after the end is ignored. gRPC calls OnDone only after it.
  void End(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      if (end_.has_value()) return;
      end_ = ToGrpc(status);
    }
    Pump();
  }

 protected:
  // What a peer that does not read costs: everything (kQueue), or no more than a short queue (kDrop: for what the next event says anew).
  enum class IfSlow { kQueue, kDrop };

  // Returns the bytes that gRPC has not taken yet.
  size_t Send(Event event, IfSlow if_slow = IfSlow::kQueue) {
    size_t unsent = 0;
    {
      std::lock_guard lock(mutex_);
      if (end_.has_value() || (if_slow == IfSlow::kDrop && queue_.size() >= kShortQueue)) return unsent_bytes_;
      unsent_bytes_ += event.ByteSizeLong();
      queue_.push_back(std::move(event));
      unsent = unsent_bytes_;
    }
    Pump();
    return unsent;
  }

  // Forgets what is queued: the peer is gone.
  void DropQueued() {
    std::lock_guard lock(mutex_);
    queue_.clear();
    unsent_bytes_ = 0;
  }

  // A write failed: the peer is gone. OnCancel comes, too, or has come.
  virtual void OnBroken() {}

 private:
  static constexpr size_t kShortQueue = 32;

  void OnWriteDone(bool ok) final {
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
    }
    if (!ok) {
      DropQueued();
      OnBroken();
    }
    Pump();
  }

  // Starts the next operation if none is under way.
  void Pump() {
    bool finish = false;
    {
      std::lock_guard lock(mutex_);
      if (busy_) return;
      if (!queue_.empty()) {
        out_ = std::move(queue_.front());
        queue_.pop_front();
        unsent_bytes_ -= out_.ByteSizeLong();
      } else if (end_.has_value()) {
        finish = true;
      } else {
        return;
      }
      busy_ = true;  // for good, at the end
    }
    if (finish) {
      this->Finish(*end_);
    } else {
      this->StartWrite(&out_);
    }
  }

  std::mutex mutex_;
  std::deque<Event> queue_;
  size_t unsent_bytes_ = 0;
  Event out_;                        // being written
  std::optional<grpc::Status> end_;  // const once set
  bool busy_ = false;                // a write or the end is under way
};

}  // namespace hearth
