// The gRPC edge of the recorder (common/trace): a process's spans, for whoever asks. Every process of a node serves one.
// Room: common/rpc. May touch: proto, common/{trace,base}. Threads: gRPC's, one a call for as long as it lasts, and one more each that listens.
// Recording is on while a call lives. A caller that dies ends its call, so recording is never left on.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "common/trace/trace.h"
#include "hearth/v1/trace.grpc.pb.h"

namespace hearth {

// Spans to the wire. What they are called is said once.
class TraceEncoder {
 public:
  TraceEncoder(std::string process, TraceLevel level);

  // Takes what was recorded since the last call out of the rings, and hands over the oldest `spans_max` of what was taken and not handed over yet, in
  // messages of bounded size, until `send` returns false. Whether all of them were sent. Copying spans out costs little, sending them to another process
  // costs more: so a model whose steps take microseconds keeps most of them here until the trace is over.
  bool Send(size_t spans_max, const std::function<bool(const v1::TraceChunk&)>& send);
  size_t num_kept() const { return kept_.size() - sent_; }

 private:
  void AddName(const char* text, v1::TraceChunk& chunk);

  const std::string process_;
  TraceReader reader_;
  std::vector<TraceRecord> kept_;
  size_t sent_ = 0;  // of those
  uint64_t lost_ = 0;
  std::unordered_set<const char*> named_;
  size_t tracks_ = 0;  // that were named
};

using TraceStream = grpc::ServerReaderWriter<v1::TraceChunk, v1::TraceRequest>;

// Whether a trace's caller has heard enough, or is gone: a thread of its own reads until then, since a read can't be given up in time.
class CallersEnd {
 public:
  explicit CallersEnd(TraceStream* stream) : reader_([this, stream] { Read(stream); }) {}

  bool come() const { return come_.load(); }
  // Returns with the caller gone, whether or not it wanted to go.
  void CutOff(grpc::ServerContext* context) {
    if (!come()) context->TryCancel();
    reader_.join();
  }

 private:
  void Read(TraceStream* stream) {
    for (v1::TraceRequest more; stream->Read(&more);) {
    }
    come_.store(true);
  }

  std::atomic<bool> come_{false};
  std::thread reader_;  // last: it uses the others
};

class TraceService final : public v1::Trace::Service {
 public:
  explicit TraceService(std::string process) : process_(std::move(process)) {}

  // Asks every caller to end its call, and gets what has been recorded to those that do within a second: before the server shuts down.
  void Stop() { stopping_.store(true); }

  grpc::Status Record(grpc::ServerContext* context, TraceStream* stream) override;

 private:
  const std::string process_;
  std::atomic<bool> stopping_{false};
};

// How often recorded spans are taken out of the rings: rare enough to cost nothing, often enough that a ring does not run over.
inline constexpr int64_t kTracePeriodMs = 100;
// Of these so many are sent at once: all that a large model records. The rest waits for the end of the trace, unless it becomes too much (128 MB).
inline constexpr size_t kTraceSpansAPeriod = 1024;
inline constexpr size_t kTraceSpansKept = 2 << 20;

}  // namespace hearth
