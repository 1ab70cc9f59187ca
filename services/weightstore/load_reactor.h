// The answer stream of one Load. The loading thread sends into `LoadEvents`, which outlives the stream if the caller goes away.
// Room: services/weightstore. Threads: any; nothing blocks. Progress that the caller is too slow for is dropped, the last event is not.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "common/rpc/rpc.h"
#include "hearth/v1/store.grpc.pb.h"

namespace hearth {

class LoadEvents {
 public:
  void Send(v1::LoadEvent event) {
    {
      std::lock_guard lock(mutex_);
      if (queue_.size() >= kQueueMax) queue_.pop_front();
      queue_.push_back(std::move(event));
    }
    Pump();
  }
  void End(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      end_ = ToGrpc(status);
    }
    Pump();
  }
  bool cancelled() {
    std::lock_guard lock(mutex_);
    return cancelled_;
  }

 private:
  friend class LoadReactor;
  static constexpr size_t kQueueMax = 16;

  void Pump();

  std::mutex mutex_;
  grpc::ServerWriteReactor<v1::LoadEvent>* reactor_ = nullptr;  // null once gRPC is done with it
  std::deque<v1::LoadEvent> queue_;
  v1::LoadEvent out_;
  bool busy_ = false;
  bool cancelled_ = false;
  std::optional<grpc::Status> end_;
};

class LoadReactor final : public grpc::ServerWriteReactor<v1::LoadEvent> {
 public:
  LoadReactor() : events_(std::make_shared<LoadEvents>()) { events_->reactor_ = this; }
  std::shared_ptr<LoadEvents> events() { return events_; }
  void End(const absl::Status& status) { events_->End(status); }

 private:
  void OnWriteDone(bool ok) override {
    {
      std::lock_guard lock(events_->mutex_);
      events_->busy_ = false;
      if (!ok) events_->queue_.clear();
    }
    events_->Pump();
  }
  void OnCancel() override {
    {
      std::lock_guard lock(events_->mutex_);
      events_->cancelled_ = true;
    }
  }
  void OnDone() override { delete this; }

  const std::shared_ptr<LoadEvents> events_;
};

// gRPC may run other reactions inside the call that starts an operation: none is started under the mutex. After `Finish` nothing follows.
inline void LoadEvents::Pump() {
  grpc::ServerWriteReactor<v1::LoadEvent>* reactor;
  bool finish = false;
  grpc::Status status;
  {
    std::lock_guard lock(mutex_);
    if (busy_ || reactor_ == nullptr) return;
    reactor = reactor_;
    if (!queue_.empty()) {
      out_ = std::move(queue_.front());
      queue_.pop_front();
    } else if (end_.has_value()) {
      finish = true;
      status = *end_;
      reactor_ = nullptr;
    } else {
      return;
    }
    busy_ = true;
  }
  if (finish) {
    reactor->Finish(status);
  } else {
    reactor->StartWrite(&out_);
  }
}

}  // namespace hearth
