// gRPC may run a reaction inside the call that starts an operation, so no operation is started under the mutex.
#include "common/rpc/attach_stream.h"

#include "common/rpc/rpc.h"

namespace hearth {

AttachStream::AttachStream(const std::string& socket_path, v1::AttachRequest hello)
    : channel_(UnixChannel(socket_path)), stub_(v1::Store::NewStub(channel_)), out_(std::move(hello)) {
  stub_->async()->Attach(&context_, this);
  AddHold();  // beats are started from the client's thread, outside any reaction
  StartWrite(&out_);
  StartRead(&in_);
  StartCall();
}

AttachStream::~AttachStream() { Close(); }

std::optional<v1::AttachEvent> AttachStream::Next(std::chrono::steady_clock::time_point until) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [this] { return !events_.empty() || woken_ || read_closed_; });
  woken_ = false;
  if (events_.empty()) return std::nullopt;
  v1::AttachEvent event = std::move(events_.front());
  events_.pop_front();
  return event;
}

bool AttachStream::closed() {
  std::lock_guard lock(mutex_);
  return read_closed_ && events_.empty();
}

grpc::Status AttachStream::Close() {
  bool let_go;
  bool cancel;
  {
    std::lock_guard lock(mutex_);
    let_go = std::exchange(hold_, false);
    cancel = !read_closed_;
  }
  if (cancel) context_.TryCancel();
  if (let_go) RemoveHold();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  return status_;
}

void AttachStream::Wake() {
  std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

void AttachStream::SendBeat() {
  {
    std::lock_guard lock(mutex_);
    if (writing_ || read_closed_ || goodbye_waits_) return;
    writing_ = true;
    out_.Clear();
    out_.mutable_beat();
  }
  StartWrite(&out_);
}

void AttachStream::SendGoodbye() {
  {
    std::lock_guard lock(mutex_);
    if (read_closed_) return;
    if (writing_) {
      goodbye_waits_ = true;
      return;
    }
    writing_ = true;
    out_.Clear();
    out_.mutable_goodbye();
  }
  StartWrite(&out_);
}

void AttachStream::OnReadDone(bool ok) {
  {
    std::lock_guard lock(mutex_);
    if (ok) {
      events_.push_back(std::move(in_));
    } else {
      read_closed_ = true;
    }
    changed_.notify_all();
  }
  if (ok) StartRead(&in_);
}

void AttachStream::OnWriteDone(bool ok) {
  {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (!ok || !goodbye_waits_) return;
    goodbye_waits_ = false;
    writing_ = true;
    out_.Clear();
    out_.mutable_goodbye();
  }
  StartWrite(&out_);
}

void AttachStream::OnDone(const grpc::Status& status) {
  std::lock_guard lock(mutex_);
  status_ = status;
  done_ = true;
  changed_.notify_all();
}

}  // namespace hearth
