#include "common/worker/page_keeper.h"

#include <algorithm>
#include <utility>

#include "common/base/logging.h"
#include "common/shm/kv_pool.h"
#include "common/trace/trace.h"

namespace hearth {
namespace {

// How long the store may be away before a queued task is tried again: short against the 12 s that spare pages last.
constexpr int64_t kRetryNs = 50'000'000;
// At the end the queue is worked off, but a store that is away must not hold up the exit.
constexpr int64_t kDrainNs = 2'000'000'000;

// As traces call them: what of the store's is asked for.
constexpr const char* kTaskNames[] = {"take or match", "alloc", "seal", "free", "offer"};

}  // namespace

PageKeeper::PageKeeper(Device& device, PageStore& store, std::function<void(KeeperEvent)> deliver)
    : device_(device), store_(store), deliver_(std::move(deliver)), track_(TraceTrackNamed("pages")), signal_(device.MakeSignal()) {
  actor_ = device_.Spawn("page-keeper", [this] { Run(); });
}

PageKeeper::~PageKeeper() {
  stop_.Stop();
  signal_->Notify();
  actor_.reset();
}

void PageKeeper::Push(Task task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  signal_->Notify();
}

void PageKeeper::Prepare(std::shared_ptr<LiveStream> stream, int64_t pages) {
  const Hash128 id = stream->request.id;
  Push({.kind = Task::Kind::kPrepare, .stream = std::move(stream), .request = id, .first = 0, .count = pages});
}
void PageKeeper::Grow(std::shared_ptr<LiveStream> stream, int64_t first_index, int64_t count) {
  const Hash128 id = stream->request.id;
  Push({.kind = Task::Kind::kGrow, .stream = std::move(stream), .request = id, .first = first_index, .count = count});
}
void PageKeeper::Seal(const Hash128& request, std::vector<int32_t> indexes) {
  Push({.kind = Task::Kind::kSeal, .request = request, .indexes = std::move(indexes)});
}
void PageKeeper::Free(const Hash128& request, int64_t from_index) { Push({.kind = Task::Kind::kFree, .request = request, .first = from_index}); }
void PageKeeper::Offer(std::shared_ptr<LiveStream> stream) {
  const Hash128 id = stream->request.id;
  Push({.kind = Task::Kind::kOffer, .stream = std::move(stream), .request = id});
}

absl::StatusOr<std::optional<KeeperEvent>> PageKeeper::PerformPrepare(Task& task) {
  const StreamRequest& request = task.stream->request;
  KeeperEvent event{.kind = KeeperEvent::Kind::kPrepared, .serial = task.stream->serial};
  ASSIGN_OR_RETURN(event.rows, store_.Take(request.id));
  const bool matched = event.rows.empty();
  if (matched) {
    // Only the prompt is looked up, also for a stream that comes back without its pages: what it had output is then recomputed in the decode
    // form, as it was the first time.
    const std::vector<int32_t> prompt(request.tokens.begin(), request.tokens.begin() + request.prompt_size);
    ASSIGN_OR_RETURN(event.rows, store_.Match(request.id, prompt));
    // Kept with the task: after a call without an answer the next try takes over what was matched here.
    task.cached_tokens = static_cast<int64_t>(event.rows.size()) * kPageTokens;
  }
  event.cached_tokens = task.cached_tokens;
  const int64_t have = static_cast<int64_t>(event.rows.size());
  if (have < task.count) {
    absl::StatusOr<std::vector<PageRef>> more = store_.Alloc(request.id, static_cast<int32_t>(have), static_cast<int32_t>(task.count - have));
    if (absl::IsResourceExhausted(more.status()) && matched) {
      // Two streams that each hold a long prefix and wait for the rest would wait for each other: a stream waits with nothing in its hands.
      const absl::Status freed = store_.Free(request.id, 0);
      if (!freed.ok()) spdlog::debug("store: {}", freed.ToString());
    }
    RETURN_IF_ERROR(more.status());
    for (const PageRef& row : *more) {
      if (row.index >= have) event.rows.push_back(row);
    }
  }
  return event;
}

absl::StatusOr<std::optional<KeeperEvent>> PageKeeper::Perform(Task& task) {
  const bool gone = task.stream != nullptr && task.stream->gone();
  const TraceSpan span(track_, kTaskNames[static_cast<size_t>(task.kind)], "stream", TraceId(task.request));
  switch (task.kind) {
    case Task::Kind::kPrepare:
      if (!gone) return PerformPrepare(task);
      break;
    case Task::Kind::kGrow: {
      if (gone) break;
      KeeperEvent event{.kind = KeeperEvent::Kind::kGrown, .serial = task.stream->serial};
      ASSIGN_OR_RETURN(event.rows, store_.Alloc(task.request, static_cast<int32_t>(task.first), static_cast<int32_t>(task.count), /*at_least=*/1));
      return event;
    }
    case Task::Kind::kSeal: RETURN_IF_ERROR(store_.Seal(task.request, task.indexes)); break;
    case Task::Kind::kFree: RETURN_IF_ERROR(store_.Free(task.request, static_cast<int32_t>(task.first))); break;
    case Task::Kind::kOffer: {
      RETURN_IF_ERROR(store_.Offer(task.request));
      return KeeperEvent{.kind = KeeperEvent::Kind::kOffered, .serial = task.stream->serial};
    }
  }
  return std::nullopt;
}

void PageKeeper::Run() {
  int64_t drain_deadline = 0;
  size_t failed_in_row = 0;
  while (true) {
    const uint64_t seen = signal_->Current();
    if (stop_.stopped() && drain_deadline == 0) drain_deadline = device_.Now() + kDrainNs;
    if (drain_deadline != 0 && device_.Now() > drain_deadline) return;
    Task task;
    bool have = false, yields = false;
    {
      std::lock_guard lock(mutex_);
      if (!tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
        have = true;
        yields = task.kind == Task::Kind::kPrepare && std::any_of(tasks_.begin(), tasks_.end(), [](const Task& t) { return t.IsStarved(); });
      }
    }
    if (!have) {
      if (stop_.stopped()) return;
      device_.HostWait(*signal_, seen, {.stop = &stop_});
      continue;
    }
    absl::StatusOr<std::optional<KeeperEvent>> done = absl::ResourceExhaustedError("running streams come first");
    if (!yields) done = Perform(task);
    if (done.ok()) {
      if (done->has_value()) deliver_(**std::move(done));
      failed_in_row = 0;
      continue;
    }
    const absl::Status& status = done.status();
    const bool waits_for_page = absl::IsResourceExhausted(status);
    // FailedPrecondition of a stream to come: another worker still holds it; it is being killed or will offer it. Of one that is ours already it
    // is final, and must not stand before the stream's later tasks.
    const bool waits_for_worker = task.kind == Task::Kind::kPrepare && absl::IsFailedPrecondition(status);
    const bool retry = waits_for_page || waits_for_worker || absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
    if (!retry) {
      if (task.kind == Task::Kind::kSeal || task.kind == Task::Kind::kFree) {
        // Nothing of the stream depends on it: the page stays unpublished, or its rows go with the lease.
        if (auto n = LogAllowed("page-keeper", 10)) {
          spdlog::warn("store: {}{}", status.ToString(), n->Note());
        }
      } else if (task.stream != nullptr) {
        deliver_({.kind = KeeperEvent::Kind::kFailed, .serial = task.stream->serial, .status = status});
      }
      continue;
    }
    if (waits_for_page && task.stream != nullptr && !task.told_out_of_pages) {
      task.told_out_of_pages = true;
      deliver_({.kind = KeeperEvent::Kind::kOutOfPages, .serial = task.stream->serial});
    }
    bool all_failed;
    {
      // What waits for a page or for another worker goes behind the others (one of them may free it), and the later tasks of its stream, which rely
      // on the order, go with it; a store that is away stops everything, in order.
      std::lock_guard lock(mutex_);
      if (waits_for_page || waits_for_worker) {
        const auto behind = std::stable_partition(tasks_.begin(), tasks_.end(), [&](const Task& t) { return t.request != task.request; });
        tasks_.insert(behind, std::move(task));
        all_failed = ++failed_in_row >= tasks_.size();
      } else {
        tasks_.push_front(std::move(task));
        all_failed = true;
      }
    }
    if (all_failed) {
      failed_in_row = 0;
      device_.HostWait(*signal_, seen, {.deadline_ns = device_.Now() + kRetryNs, .stop = &stop_});
    }
  }
}

}  // namespace hearth
