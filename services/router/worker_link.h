// The router's link to one worker process: is it there, what does it say of itself, and calls of Continue.
// Room: services/router. May touch: proto, common/rpc. Not: which stream goes where (scheduler).
// Threads: the loop only; gRPC's threads post to it. A worker may die, hang or be replaced by another process at any time: a link
// outlives them all, asks Status again and again, and counts a worker as away when that is not answered in time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "hearth/v1/worker.grpc.pb.h"
#include "services/router/event_loop.h"

namespace hearth::router {

struct LinkTimes {
  absl::Duration poll_ready = absl::Seconds(1);        // between questions to a worker that answers
  absl::Duration poll_away = absl::Milliseconds(200);  // and to one that does not
  absl::Duration answer = absl::Milliseconds(2500);    // a worker that takes longer is away (stopped, hung)
};

// A running Continue. Events are those of this call only; after `on_done` or Cancel nothing more comes.
class WorkerCall {
 public:
  virtual ~WorkerCall() = default;
  virtual void Cancel() = 0;
};

class WorkerLink {
 public:
  enum class Kind { kPrefill, kDecode };

  // `on_change`: readiness changed. `on_status`: what it says of itself, each time that it answers.
  WorkerLink(EventLoop* loop, Kind kind, std::string name, const std::string& socket_path, LinkTimes times, std::function<void()> on_change,
             std::function<void(const v1::WorkerStatus&)> on_status);
  ~WorkerLink();

  std::shared_ptr<WorkerCall> Continue(const v1::Stream& stream, std::function<void(const v1::StreamEvent&)> on_event,
                                       std::function<void(const absl::Status&)> on_done);
  // A call broke: not ready until Status is answered again.
  void Suspect(const std::string& reason);
  // The worker refused for want of a place or pages: offer it nothing for a moment, longer each time.
  void BackOff();
  void Accepted() { refusals_ = 0; }

  Kind kind() const { return kind_; }
  const std::string& name() const { return name_; }
  bool ready() const { return ready_; }
  // Its process answered the last question: one that is not ready may still finish the streams that it has.
  bool answering() const { return answering_; }
  bool draining() const { return answering_ && state_ == "draining"; }
  // "ready", or "away: <reason>", or what it says of itself: "draining", "waiting for the weight store ...".
  const std::string& state() const { return state_; }
  // Since when it is neither ready nor draining; now while it drains.
  int64_t away_since_ns() const { return away_since_ns_; }
  const v1::WorkerStatus& status() const { return status_; }
  // Places in the worker's batch that no call of ours takes; 0 when away or backing off.
  int FreePlaces() const;
  int running() const { return running_; }
  void AddRunning(int change) { running_ += change; }
  // Of them, those that the ranks of its prefill group compute together.
  int running_shared() const { return running_shared_; }
  void AddRunningShared(int change) { running_shared_ += change; }
  // The prefill group that it was a rank of when it answered last; 0: none. Rank 0 leads.
  uint64_t group() const { return ready_ ? status_.group().id() : 0; }
  int rank() const { return status_.group().rank(); }

 private:
  void Poll();
  void OnStatus(const absl::Status& result, const v1::WorkerStatus& status);
  void SetState(bool ready, std::string state);

  EventLoop* loop_;
  const Kind kind_;
  const std::string name_;
  const LinkTimes times_;
  const std::function<void()> on_change_;
  const std::function<void(const v1::WorkerStatus&)> on_status_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // answers that come after the link is gone see false
  std::shared_ptr<void> poll_timer_;
  std::shared_ptr<void> back_off_timer_;
  struct Question;
  std::shared_ptr<Question> question_;  // asked, not answered
  std::vector<std::weak_ptr<WorkerCall>> calls_;
  bool ready_ = false;
  bool answering_ = false;
  std::string state_ = "away: not asked yet";
  int64_t away_since_ns_;
  v1::WorkerStatus status_;
  int running_ = 0;
  int running_shared_ = 0;
  int refusals_ = 0;
};

}  // namespace hearth::router
