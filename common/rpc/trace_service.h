// The gRPC edge of the recorder (common/trace): a process's spans, for whoever asks. Every process of a node serves one.
// Room: common/rpc. May touch: proto, common/{trace,base}. Threads: gRPC's, one a call for as long as it lasts, and one more each that listens.
// Recording is on while a call lives. A caller that dies ends its call, so recording is never left on.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>

#include "common/trace/trace.h"
#include "hearth/v1/trace.grpc.pb.h"

namespace hearth {

// Spans to the wire. What they are called is said once.
class TraceEncoder {
 public:
  TraceEncoder(std::string process, TraceLevel level);

  // Hands over what was recorded since the last call, in messages of bounded size, until `send` returns false. Whether all were sent.
  bool Send(const std::function<bool(const v1::TraceChunk&)>& send);

 private:
  void AddName(const char* text, v1::TraceChunk& chunk);

  const std::string process_;
  TraceReader reader_;
  std::unordered_set<const char*> named_;
  size_t tracks_ = 0;  // that were named
};

class TraceService final : public v1::Trace::Service {
 public:
  explicit TraceService(std::string process) : process_(std::move(process)) {}

  // Ends every call within kTracePeriod, with UNAVAILABLE: before the server shuts down.
  void Stop() { stopping_.store(true); }

  grpc::Status Record(grpc::ServerContext* context, grpc::ServerReaderWriter<v1::TraceChunk, v1::TraceRequest>* stream) override;

 private:
  const std::string process_;
  std::atomic<bool> stopping_{false};
};

// How often recorded spans are fetched: rare enough to cost nothing, often enough that a ring does not run over.
inline constexpr int64_t kTracePeriodMs = 100;

}  // namespace hearth
