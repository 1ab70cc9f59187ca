// What the router counts, in the two forms that people ask for: Prometheus text and the numbers of `hearth status`.
// Room: services/router. May touch: prometheus-cpp. Everything here is made from the streams' state changes and tokens.
// Threads: the loop only.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hearth/v1/worker.pb.h"
#include "services/router/request.h"

namespace hearth::router {

// The last 1024 values: enough for the percentiles of a status page, and bounded.
class RecentValues {
 public:
  void Add(double value);
  double Percentile(double fraction) const;  // 0 without values
  uint64_t count() const { return count_; }

 private:
  std::vector<double> values_;
  uint64_t count_ = 0;
};

class Metrics {
 public:
  Metrics();
  ~Metrics();

  void OnRequestAccepted(const Request& request);
  void OnRequestRefused(const std::string& reason);  // "queue_full", "ttft_slo", "not_ready", "draining"
  void OnRequestEnd(const Request& request);
  void OnMove(const Stream& stream, StreamState from, int64_t now_ns);  // stream.state is the new one
  void OnAdded();                                                       // a stream, QUEUED
  void OnToken(const Stream& stream, int64_t now_ns);                   // before the stream's token times change
  void OnResume();
  void OnPathChosen(const std::string& path, const std::string& by);             // "decode", "prefill"; "time", "length"
  void OnPrediction(const std::string& way, double predicted_s, double real_s);  // of a first token
  void OnHttpAnswer(int status);
  // What a decode worker said last of its drafts; totals of its process, which begins at 0 again when it is restarted.
  void OnSpeculation(const std::string& worker, uint64_t drafts, uint64_t accepted, int64_t depth);
  // What a worker says of itself, as gauges that bear its name.
  void OnWorkerStatus(const std::string& worker, const v1::WorkerStatus& status);

  // The text exposition format, version 0.0.4.
  std::string Exposition() const;

  int streams(StreamState state) const { return streams_[static_cast<size_t>(state)]; }
  uint64_t requests() const { return requests_; }
  uint64_t failed() const { return failed_; }
  uint64_t cancelled() const { return cancelled_; }
  uint64_t prompt_tokens() const { return prompt_tokens_; }
  uint64_t cached_tokens() const { return cached_tokens_; }
  uint64_t completion_tokens() const { return completion_tokens_; }
  uint64_t resumes() const { return resumes_; }
  double TokensPerSecond(int64_t now_ns) const;  // over the last ten seconds
  const RecentValues& ttft_ms() const { return ttft_ms_; }
  const RecentValues& tpot_ms() const { return tpot_ms_; }

 private:
  struct Families;
  void OnStreamed(const std::string& worker, const v1::WorkerStatus::Streamed& streamed);

  std::unique_ptr<Families> families_;
  std::array<int, kNumStreamStates> streams_{};
  uint64_t requests_ = 0, failed_ = 0, cancelled_ = 0, prompt_tokens_ = 0, cached_tokens_ = 0, completion_tokens_ = 0, resumes_ = 0;
  struct DraftCounts {
    uint64_t drafts = 0, accepted = 0;
  };
  std::map<std::string, DraftCounts> drafts_;                   // as last told, by worker
  std::map<std::string, v1::WorkerStatus::Streamed> streamed_;  // the same
  RecentValues ttft_ms_, tpot_ms_;
  struct SecondCount {
    int64_t second = -1;
    uint64_t tokens = 0;
  };
  std::array<SecondCount, 16> tokens_by_second_{};
};

}  // namespace hearth::router
