// The scheduler: which stream goes to which worker, when, and what happens when a worker refuses, hangs or dies.
// Room: services/router. May touch: worker links, the store's client, common/base. Not: sockets, JSON.
// Threads: the loop only.
//
// Path: a prompt is computed by a decode worker, in chunks between its steps, or by a prefill worker, from where it goes (HANDOFF) to a decode worker:
// whichever is expected to give the first token sooner (scheduler_paths.cc). Until both have been measured, and where the operator wants it so, length
// decides: at most `chunked_prefill_max_tokens` uncached tokens are decode's. Without a prefill worker decode takes all.
// A long prompt goes to rank 0 of a prefill group whose ranks are all idle: they compute it together (scheduler_groups.cc). If that fails, since a rank is
// gone or hangs, it goes on alone.
// A stream that was accepted stays accepted: a lost worker, a lost place (preemption) or a refusal puts it back to the queue's head and it
// goes on behind the last token that the router has, in a new epoch; where its pages may be gone its path is chosen anew. It fails only when no
// worker could take it for `give_up`, when it has lost `attempts_max` workers in a row without gaining a token (it may be what kills them), or
// when its model was replaced. A worker that drains for a switch comes back by itself: what waits for it is not counted as waiting for a lost one.
// Order: FIFO within an API key, round robin between keys; hand-offs and new streams share decode's places by arrival, so neither starves.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/rpc/store_client.h"
#include "hearth/v1/node.pb.h"
#include "services/router/event_loop.h"
#include "services/router/fair_queue.h"
#include "services/router/leftover_pages.h"
#include "services/router/metrics.h"
#include "services/router/path_choice.h"
#include "services/router/path_costs.h"
#include "services/router/prefix_peek.h"
#include "services/router/request.h"
#include "services/router/served_model.h"
#include "services/router/worker_link.h"

namespace hearth::router {

struct SchedulerOptions {
  int64_t max_queue = 256;
  int64_t chunked_prefill_max_tokens = 2048;
  bool path_by_length = false;                     // that constant always decides
  absl::Duration ttft_slo = absl::ZeroDuration();  // 0: nothing is promised
  int64_t group_prefill_min_tokens = 8192;
  absl::Duration give_up = absl::Seconds(60);
  // Requests that come while no decode worker is ready still queue for so long: a worker's restart takes seconds.
  absl::Duration admit_grace = absl::Seconds(5);
  int attempts_max = 5;
  LinkTimes link_times;
};

// What is expected of a prompt that comes now.
struct PathForecast {
  bool to_prefill = false;
  bool by_time = false;           // times decided, not the prompt's length
  std::string way;                // PathCosts::WayOf the worker that it was made for
  std::optional<double> seconds;  // to the first token; none: nothing was measured yet
  double extra_s = 0;             // in it
  int64_t made_ns = 0;
};

class Scheduler {
 public:
  Scheduler(EventLoop* loop, SchedulerOptions options, ServedModel* model, StoreClient* store, PrefixPeek* peek, Metrics* metrics);
  ~Scheduler();

  void AddWorker(WorkerLink::Kind kind, const std::string& name, const std::string& socket_path);

  // Makes the request's streams and queues them. Errors leave nothing behind: InvalidArgument (longer than the context, with both
  // numbers), ResourceExhausted (queue full), Unavailable (not ready, draining, the model was replaced since the request was parsed).
  absl::Status Submit(std::shared_ptr<Request> request);
  // The client is gone: workers hear of it at once. The sink hears nothing more.
  void Cancel(const std::shared_ptr<Request>& request);
  // Cancel by id, from another client: the sink hears of cancelled choices and the end.
  enum class CancelResult { kWasRunning, kHadEnded, kNeverSeen };
  CancelResult CancelById(const std::string& id);

  // The store's model has become another: what no worker has seen yet can't be served any more, and is told at once.
  void OnModelReplaced();

  // New requests are refused from now on; `on_empty` is called once when nothing runs.
  void Drain(std::function<void()> on_empty);
  void FailAll(const absl::Status& status);

  PathCosts& costs() { return costs_; }
  void FillPaths(v1::RouterStatus* status) const;
  // For traces. OK while a request of this id runs; NotFound, and why, else.
  absl::Status IsRunning(const std::string& id) const;
  // `on_end` is called for each stream that ends, after its last transition, until the handle goes.
  [[nodiscard]] std::shared_ptr<void> WatchEnds(std::function<void(const Stream&)> on_end);
  // All streams of requests that have not ended.
  void ForEachStream(const std::function<void(const Stream&)>& look) const;

  bool draining() const { return draining_; }
  // OK, or Unavailable with the reason: whether a decode worker is ready now.
  absl::Status DecodeReadiness() const;
  size_t active_requests() const { return active_.size(); }
  const std::vector<std::unique_ptr<WorkerLink>>& links() const { return links_; }
  // Called when a link's readiness changes.
  void set_on_readiness(std::function<void()> callback) { on_readiness_ = std::move(callback); }
  // Further conditions of taking requests in (the store): OK or the reason.
  void set_gate(std::function<absl::Status()> gate) { gate_ = std::move(gate); }

 private:
  struct CallRef;
  struct Track;
  struct Active;
  using TrackPtr = std::shared_ptr<Track>;

  absl::Status Admit(const Request& request) const;
  int64_t DecodeAwaySinceNs() const;
  void MakeStreams(Active& active);
  void Enqueue(const TrackPtr& track, bool at_head);
  void Dispatch();
  void ScheduleDispatch();
  TrackPtr NextForDecode();
  WorkerLink* FreeLink(WorkerLink::Kind kind) const;
  bool AnyReady(WorkerLink::Kind kind) const;
  void StartCall(const TrackPtr& track, WorkerLink* link, bool shared = false);
  // The worker has other weights than the request's model, or no room: not this one, not now.
  bool Refused(const TrackPtr& track, WorkerLink* link, const absl::Status& why);
  void OnEvent(const TrackPtr& track, const std::shared_ptr<CallRef>& ref, const v1::StreamEvent& event);
  void OnToken(const TrackPtr& track, const v1::StreamEvent::Token& token);
  void OnCallDone(const TrackPtr& track, const std::shared_ptr<CallRef>& ref, const absl::Status& status);
  enum class Pages { kKept, kPerhapsLost };
  void Requeue(const TrackPtr& track, const std::string& why, Pages pages);
  void EndCall(const TrackPtr& track, bool cancel);
  void FinishChoice(const TrackPtr& track, FinishReason reason);
  void FailRequest(const TrackPtr& track, const absl::Status& status);
  void CancelStreams(Active& active);
  void EndIfComplete(Request* request, bool tell);
  void Move(const TrackPtr& track, StreamState to);
  void ReleaseFollowers(const TrackPtr& track);
  void Tick();

  // scheduler_groups.cc.
  std::vector<WorkerLink*> RanksOf(const WorkerLink& link) const;
  bool InSharedPass(const WorkerLink& link) const;
  WorkerLink* GroupFor(const Track& track) const;

  // scheduler_paths.cc. `idle`: as if nothing ran or waited.
  double PlaceSeconds() const;
  std::optional<DecodeWay> DecodeWayNow(bool idle) const;
  std::optional<PrefillWay> PrefillWayNow(const WorkerLink& link, bool idle) const;
  PathForecast Forecast(const PromptWork& prompt, bool idle) const;
  void ChoosePath(const TrackPtr& track);
  // ResourceExhausted with a retry time: the first token is expected later than the node promises.
  absl::Status CheckTtft(const Request& request) const;
  void OnFirstToken(const TrackPtr& track);
  // Uncached tokens from which on a prompt goes to prefill while nothing else runs; kCrossoverMax: decode takes all. None: not by time.
  static constexpr int64_t kCrossoverMax = int64_t{1} << 20;
  std::optional<int64_t> CrossoverTokens() const;
  void UpdatePeek();

  EventLoop* loop_;
  const SchedulerOptions options_;
  ServedModel* model_;
  PrefixPeek* peek_;
  Metrics* metrics_;
  PathCosts costs_;
  std::function<void()> on_readiness_;
  std::function<absl::Status()> gate_;
  std::function<void()> on_empty_;
  bool draining_ = false;
  const int64_t started_ns_;
  bool dispatch_scheduled_ = false;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);

  absl::flat_hash_map<const Request*, std::unique_ptr<Active>> active_;
  absl::flat_hash_map<std::string, const Request*> by_id_;
  std::vector<std::weak_ptr<const std::function<void(const Stream&)>>> end_watches_;
  std::deque<std::string> ended_ids_;  // the last ones, for CancelById
  absl::flat_hash_map<std::string, int> ended_set_;
  FairQueue<TrackPtr> decode_queue_;
  FairQueue<TrackPtr> prefill_queue_;
  std::deque<TrackPtr> handoff_;
  std::deque<int64_t> decoded_for_ns_;  // the last streams that ended held their places
  absl::flat_hash_map<const WorkerLink*, int64_t> last_prefilled_ns_;
  int64_t waiting_requests_ = 0;  // of which no stream has been with a worker yet
  std::shared_ptr<void> tick_timer_;
  std::vector<std::unique_ptr<WorkerLink>> links_;
  LeftoverPages leftovers_;
};

}  // namespace hearth::router
