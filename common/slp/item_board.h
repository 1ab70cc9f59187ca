// What loader, model and unloader of a pass say to each other about the items of its plan.
// Room: common/slp. May touch: common/{device,base}. Threads: each call names its caller; one board a pass.
//
// An item is waiting -> begun -> loaded -> ended, or ended while it waits: then it is never loaded. An item that the model does without although its
// load has begun ends when it is loaded. Items end in any order: a layer's shared expert outlasts the experts behind it. Events order work on the device: each is recorded on its stream first and said here after, so that whoever
// hears of it waits for the right point (the other order is a race that [SLO]'s published code has: FIELD 1.2).
// Every wait ends when anybody calls Stop; the first status given there is the pass's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"

namespace hearth {

class ItemBoard {
 public:
  ItemBoard(Device& device, int64_t num_items);

  // Loader. False: the model does without it.
  bool Begin(int64_t item);
  // Loader, once the item's copy is enqueued and its `loaded` event recorded.
  void Loaded(int64_t item, int64_t slot);

  // Model. The slot that the item lies in; none: stopped.
  std::optional<int64_t> AwaitLoaded(int64_t item);
  // Model, once the last work that reads the item is enqueued and its `consumed` event recorded.
  void Consumed(int64_t item);
  // Model. It never waits for these items. All at once, so that none of them is begun while others of them are still being told.
  void Skip(const std::vector<int64_t>& items);

  // Unloader. The next item that has a slot and has ended, in the order in which they end; none: stopped, or all items have ended.
  struct End {
    int64_t item = 0;
    int64_t slot = 0;
    bool consumed = false;  // work reads the slot; false: nobody but the copy
  };
  std::optional<End> AwaitEnd();

  // Anybody. An OK status counts as none.
  void Stop(const absl::Status& status);
  const StopToken& stop() const { return stop_; }
  absl::Status status() const;

 private:
  struct Item {
    bool begun = false, loaded = false, consumed = false, skipped = false;
    int64_t slot = -1;
  };
  Item& At(int64_t item) { return items_[static_cast<size_t>(item)]; }
  // Under the lock.
  void Ended(int64_t item);

  Device& device_;
  std::unique_ptr<HostSignal> loaded_signal_;  // for the model
  std::unique_ptr<HostSignal> ended_signal_;   // for the unloader
  StopToken stop_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<Item> items_;
  int64_t items_left_;    // that have not ended
  std::deque<End> ends_;  // that the unloader has not seen
  absl::Status status_;
};

}  // namespace hearth
