// KV pages of streams that ended while no worker could free them: the router asks the store to, until it has.
// Room: services/router. May touch: the store's client, worker links. Not: streams that still run.
// Threads: the loop only; the store's waiting calls go to the pool.
//
// A worker frees the pages of a stream that it ended or was told to end, a moment later. Should it be lost within that moment, or have offered them to the
// next worker already, nobody else knows that the stream won't go on: the store would keep its rows until a grace ends.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/hash.h"
#include "common/rpc/store_client.h"
#include "services/router/event_loop.h"
#include "services/router/worker_link.h"

namespace hearth::router {

class LeftoverPages {
 public:
  LeftoverPages(EventLoop* loop, StoreClient* store) : loop_(loop), store_(store) {}
  ~LeftoverPages() { *alive_ = false; }

  // The stream has ended and `link`'s process is to free its pages: once it must have done so the store is asked to free what nobody holds.
  void LeftTo(const WorkerLink& link, const Hash128& stream);
  // The stream has ended and no worker has it.
  void Free(const Hash128& stream);
  // A link may have lost its process.
  void Look();

 private:
  struct Left {
    Hash128 stream;
    const WorkerLink* link;
    int32_t pid;
    int64_t since_ns;
  };
  struct Due {
    Hash128 stream;
    int64_t since_ns;
  };

  void FreeDue();
  void SetTimer();

  EventLoop* loop_;
  StoreClient* store_;
  std::vector<Left> left_;
  std::vector<Due> due_;
  int64_t attached_since_ns_ = 0;  // the store was away until then, as far as was looked
  bool asking_ = false;            // the store, for what was due
  std::shared_ptr<void> timer_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace hearth::router
