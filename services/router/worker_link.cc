#include "services/router/worker_link.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"

namespace hearth::router {
namespace {

// Keeps itself and the loop alive until gRPC is done with it; what it hands to the loop is dropped there once the call was cancelled.
class ContinueCall final : public WorkerCall, public grpc::ClientReadReactor<v1::StreamEvent>, public std::enable_shared_from_this<ContinueCall> {
 public:
  ContinueCall(EventLoop* loop, const v1::Stream& stream, std::function<void(const v1::StreamEvent&)> on_event,
               std::function<void(const absl::Status&)> on_done)
      : loop_(loop), keep_running_(loop->KeepRunning()), stream_(stream), on_event_(std::move(on_event)), on_done_(std::move(on_done)) {}

  void Start(v1::Worker::Stub* stub) {
    self_ = shared_from_this();
    context_.set_wait_for_ready(false);
    stub->async()->Continue(&context_, &stream_, this);
    StartRead(&event_);
    StartCall();
  }

  void Cancel() override {
    cancelled_ = true;
    context_.TryCancel();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    loop_->Post([self = shared_from_this(), event = std::make_shared<v1::StreamEvent>(std::move(event_))] {
      if (!self->cancelled_) self->on_event_(*event);
    });
    event_.Clear();
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    loop_->Post([self = std::move(self_), result = FromGrpc(status)] {
      if (!self->cancelled_) self->on_done_(result);
      // The callbacks hold the stream, which holds this call.
      self->on_event_ = nullptr;
      self->on_done_ = nullptr;
      self->keep_running_ = nullptr;
    });
  }

 private:
  EventLoop* loop_;
  std::shared_ptr<void> keep_running_;
  const v1::Stream stream_;
  std::function<void(const v1::StreamEvent&)> on_event_;
  std::function<void(const absl::Status&)> on_done_;
  grpc::ClientContext context_;
  v1::StreamEvent event_;
  bool cancelled_ = false;  // the loop's
  std::shared_ptr<ContinueCall> self_;
};

}  // namespace

WorkerLink::WorkerLink(EventLoop* loop, Kind kind, std::string name, const std::string& socket_path, LinkTimes times, std::function<void()> on_change,
                       std::function<void(const v1::WorkerStatus&)> on_status)
    : loop_(loop),
      kind_(kind),
      name_(std::move(name)),
      times_(times),
      on_change_(std::move(on_change)),
      on_status_(std::move(on_status)),
      stub_(v1::Worker::NewStub(UnixChannel(socket_path))),
      away_since_ns_(MonotonicNowNs()) {
  Poll();
}

struct WorkerLink::Question {
  grpc::ClientContext context;
  v1::WorkerStatusRequest request;
  v1::WorkerStatus answer;
  std::shared_ptr<void> keep_running;
};

WorkerLink::~WorkerLink() {
  *alive_ = false;
  if (question_) question_->context.TryCancel();
  for (const auto& call : calls_) {
    if (const auto live = call.lock()) live->Cancel();
  }
}

std::shared_ptr<WorkerCall> WorkerLink::Continue(const v1::Stream& stream, std::function<void(const v1::StreamEvent&)> on_event,
                                                 std::function<void(const absl::Status&)> on_done) {
  auto call = std::make_shared<ContinueCall>(loop_, stream, std::move(on_event), std::move(on_done));
  call->Start(stub_.get());
  calls_.erase(std::remove_if(calls_.begin(), calls_.end(), [](const auto& old) { return old.expired(); }), calls_.end());
  calls_.push_back(call);
  return call;
}

void WorkerLink::Suspect(const std::string& reason) {
  answering_ = false;
  SetState(false, "away: " + reason);
  if (!question_) Poll();
}

void WorkerLink::BackOff() {
  refusals_ = std::min(refusals_ + 1, 6);
  // 50 ms doubling to 1.6 s: a place is free after some steps, pages after some streams.
  back_off_timer_ = loop_->After(absl::Milliseconds(25) * (1 << refusals_), [this] {
    back_off_timer_.reset();
    on_change_();
  });
}

int WorkerLink::FreePlaces() const {
  if (!ready_ || back_off_timer_ != nullptr) return 0;
  return std::max(0, std::max(1, status_.max_batch()) - running_);
}

void WorkerLink::Poll() {
  poll_timer_.reset();
  auto question = std::make_shared<Question>();
  question->keep_running = loop_->KeepRunning();
  question_ = question;
  question->context.set_deadline(absl::ToChronoTime(absl::Now() + times_.answer));
  stub_->async()->Status(&question->context, &question->request, &question->answer,
                         [this, question, loop = loop_, alive = alive_](const grpc::Status& status) {
                           loop->Post([this, question, alive, result = FromGrpc(status)] {
                             if (*alive) OnStatus(result, question->answer);
                             question->keep_running = nullptr;
                           });
                         });
}

void WorkerLink::OnStatus(const absl::Status& result, const v1::WorkerStatus& status) {
  question_ = nullptr;
  answering_ = result.ok();
  if (result.ok()) {
    status_ = status;
    on_status_(status);
    SetState(status.state() == "ready", status.state());
  } else if (absl::IsDeadlineExceeded(result)) {
    SetState(false, absl::StrCat("away: its process does not answer (", absl::FormatDuration(times_.answer), ")"));
  } else {
    SetState(false, absl::StrCat("away: ", result.message()));
  }
  poll_timer_ = loop_->After(ready_ ? times_.poll_ready : times_.poll_away, [this] { Poll(); });
}

void WorkerLink::SetState(bool ready, std::string state) {
  const bool changed = ready != ready_;
  // A worker that drains for a switch comes back by itself: what waits for it is not counted as waiting for a lost one.
  if ((changed && !ready) || state == "draining") away_since_ns_ = MonotonicNowNs();
  if (changed) {
    if (const auto permit = LogAllowed("link-" + name_, 10)) {
      spdlog::info("{} is {}{}", name_, state, permit->Note("changes"));
    }
  }
  ready_ = ready;
  state_ = std::move(state);
  if (changed) on_change_();
}

}  // namespace hearth::router
