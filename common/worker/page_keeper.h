// The actor that talks to the store about pages, so that a step never waits for another process: it prepares streams (take over, match,
// allocate), grows them ahead of need, publishes full pages, and frees or offers what ended. One queue, in order.
// Room: common/worker. May touch: common/{rpc,device,shm,base}. Threads: calls from the loop; `deliver` comes on the keeper's own actor.
// If the store is away: the queue waits and is worked off when it is back; running streams live on their spare pages.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/device/device.h"
#include "common/rpc/page_store.h"
#include "common/trace/trace.h"
#include "common/worker/stream.h"

namespace hearth {

struct KeeperEvent {
  enum class Kind {
    kPrepared,    // rows: all that the stream has; cached_tokens: how many of the prompt came from published pages
    kGrown,       // rows: as the store returned them
    kOutOfPages,  // the pool is full; the request stays in the queue and is asked again
    kOffered,
    kFailed,  // `status` says why; the stream cannot go on here
  };
  Kind kind = Kind::kPrepared;
  uint64_t serial = 0;
  std::vector<PageRef> rows;
  int64_t cached_tokens = 0;
  absl::Status status;
};

class PageKeeper {
 public:
  PageKeeper(Device& device, PageStore& store, std::function<void(KeeperEvent)> deliver);
  ~PageKeeper();  // works off what is queued while the store answers, then ends

  // Take what an earlier worker left; if nothing is left and the stream is new, Match; then Alloc up to `pages` in all.
  void Prepare(std::shared_ptr<LiveStream> stream, int64_t pages);
  void Grow(std::shared_ptr<LiveStream> stream, int64_t first_index, int64_t count);
  void Seal(const Hash128& request, std::vector<int32_t> indexes);
  // Drops rows from this page index on.
  void Free(const Hash128& request, int64_t from_index);
  void Offer(std::shared_ptr<LiveStream> stream);

 private:
  struct Task {
    enum class Kind { kPrepare, kGrow, kSeal, kFree, kOffer } kind;
    std::shared_ptr<LiveStream> stream;  // null where only the id matters
    Hash128 request;
    int64_t first = 0;
    int64_t count = 0;
    std::vector<int32_t> indexes;
    int64_t cached_tokens = 0;
    bool told_out_of_pages = false;
    // A running stream waits for its next page: what is freed is for it, before new streams start.
    bool IsStarved() const { return kind == Kind::kGrow && told_out_of_pages && !stream->gone(); }
  };
  void Push(Task task);
  void Run();
  // Unavailable: try again later. ResourceExhausted: likewise, behind the others.
  absl::StatusOr<std::optional<KeeperEvent>> Perform(Task& task);
  absl::StatusOr<std::optional<KeeperEvent>> PerformPrepare(Task& task);

  Device& device_;
  PageStore& store_;
  std::function<void(KeeperEvent)> deliver_;
  const TraceTrack track_;
  StopToken stop_;
  std::unique_ptr<HostSignal> signal_;
  std::mutex mutex_;
  std::deque<Task> tasks_;
  std::unique_ptr<Actor> actor_;
};

}  // namespace hearth
