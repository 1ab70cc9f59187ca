// What the scheduler keeps of a stream, of its call and of a request: shared by the scheduler's files. Room: services/router. Threads: the loop.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "services/router/scheduler.h"

namespace hearth::router {

// One Continue in flight; the link's place is given back exactly once.
struct Scheduler::CallRef {
  WorkerLink* link = nullptr;
  int64_t begun_ns = 0;
  bool counted = true;
  bool saw_event = false;
  std::vector<WorkerLink*> ranks;  // that compute it together; empty: its worker alone
  void Release() {
    if (!std::exchange(counted, false)) return;
    link->AddRunning(-1);
    if (!ranks.empty()) link->AddRunningShared(-1);
  }
};

// What the scheduler knows of a stream beyond its value.
struct Scheduler::Track {
  std::shared_ptr<Request> owner;
  std::shared_ptr<Stream> stream;
  std::shared_ptr<WorkerCall> call;
  std::shared_ptr<CallRef> ref;
  std::vector<TrackPtr> followers;  // choices of the same prompt that wait for its pages
  bool touched = false;             // a worker has had it: it may have pages
  bool prefilled = false;           // or no prefill worker is to be asked any more: decode takes it as it is
  int64_t cached_tokens = 0;        // of its prompt, as the store predicted; chooses the path, no more
  bool alone = false;               // a prefill group has failed with it: the next worker computes it alone
  int lost = 0;                     // workers lost in a row without a token gained
  int64_t waiting_since_ns = 0;
  int64_t refused_since_ns = 0;  // 0: not refused since it last ran
  PathForecast forecast;         // when its path was chosen; of no worth after a detour

  int64_t arrived_ns() const { return owner->arrived_ns; }
  PromptWork work() const { return {.before = cached_tokens, .tokens = std::max<int64_t>(stream->prefill_until() - cached_tokens, 0)}; }
};

struct Scheduler::Active {
  std::shared_ptr<Request> request;
  std::vector<TrackPtr> tracks;
  bool waiting = true;  // counted in waiting_requests_
};

}  // namespace hearth::router
