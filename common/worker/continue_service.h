// The gRPC edge of a worker: decodes a Stream, submits it to the loop, writes its events back; no policy.
// Room: common/worker. May touch: proto, common/rpc. Threads: gRPC's callback threads and the loop's.
// If the router dies or cancels: the stream is marked cancelled and the loop drops it within one step.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/worker/memory_facts.h"
#include "common/worker/stream_loop.h"
#include "hearth/v1/worker.grpc.pb.h"

namespace hearth {

class ContinueService : public v1::Worker::CallbackService {
 public:
  struct Identity {
    std::string kind;        // "prefill", "decode"
    int64_t started_ns = 0;  // MonotonicNowNs at process start
    int64_t max_batch = 0;
  };
  explicit ContinueService(Identity identity) : identity_(std::move(identity)) {}

  // Until this, Continue is Unavailable with `why`.
  void SetWaiting(std::string why);
  struct Ready {
    std::shared_ptr<StreamLoop> loop;
    Hash128 generation;
    std::string device;
    std::string numerics;
    MemoryFacts memory;
    std::vector<std::string> notes;
  };
  void SetReady(Ready ready);
  void SetDraining();
  // Lets go of the loop, at the end: Status answers on, without it.
  void Forget();

  grpc::ServerWriteReactor<v1::StreamEvent>* Continue(grpc::CallbackServerContext* context, const v1::Stream* request) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context, const v1::WorkerStatusRequest* request, v1::WorkerStatus* response) override;

 private:
  const Identity identity_;
  std::mutex mutex_;
  std::string state_ = "starting";
  std::string why_ = "the worker is starting";
  double ready_seconds_ = 0;
  std::shared_ptr<const Ready> ready_;
};

// InvalidArgument for what our own router would never send.
absl::StatusOr<StreamRequest> DecodeStream(const v1::Stream& message);

}  // namespace hearth
