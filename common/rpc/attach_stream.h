// One Attach stream of one connection, as the store client's thread sees it: events come out of a queue, beats and the goodbye go in.
// Room: common/rpc. May touch: proto. Threads: the client's thread; gRPC's threads inside. Never blocks on the network.
// If the store dies or stops: `Next` says closed, or nothing at all; the client decides.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "hearth/v1/store.grpc.pb.h"

namespace hearth {

class AttachStream final : public grpc::ClientBidiReactor<v1::AttachRequest, v1::AttachEvent> {
 public:
  AttachStream(const std::string& socket_path, v1::AttachRequest hello);
  // Cancels what is still open and waits for gRPC to let go of this object, which is a matter of microseconds.
  ~AttachStream() override;

  // The next event; empty when `until` has passed, `Wake` was called, or the stream has closed.
  std::optional<v1::AttachEvent> Next(std::chrono::steady_clock::time_point until);
  bool closed();
  grpc::Status Close();  // cancels, and says how the stream ended
  void Wake();
  void SendBeat();  // skipped while an earlier write is still under way
  void SendGoodbye();

  v1::Store::Stub& stub() { return *stub_; }

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Store::Stub> stub_;
  grpc::ClientContext context_;
  v1::AttachRequest out_;  // of the write under way
  v1::AttachEvent in_;     // of the read under way
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::AttachEvent> events_;
  bool writing_ = true;
  bool goodbye_waits_ = false;
  bool woken_ = false;
  bool read_closed_ = false;
  bool hold_ = true;
  bool done_ = false;
  grpc::Status status_;
};

}  // namespace hearth
