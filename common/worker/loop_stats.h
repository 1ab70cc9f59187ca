// Counters of a loop for `status` and metrics: totals, a ten-second rate, step time percentiles.
// Room: common/worker. May touch: common/{experts,model,device,base}. Threads: Add* from the loop, Look from any.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/device/collectives.h"
#include "common/experts/disk_expert_source.h"
#include "common/model/step_order.h"

namespace hearth {

// A prefill worker's part in its group.
struct GroupStats {
  uint64_t id = 0;  // 0: the group is not whole, and prompts are computed alone
  int64_t rank = 0, size = 0;
  std::string waits_for;
  uint64_t passes = 0, passes_failed = 0;
  std::vector<Traffic> sent;
};

// Passes that stream weights past the device (common/slp), since the worker began.
struct StreamedTotals {
  uint64_t passes = 0, tokens = 0;
  int64_t duration_ns = 0;
  uint64_t bytes_copied = 0;
  uint64_t experts_copied = 0, experts_skipped = 0;
  int64_t waited_for_copies_ns = 0;                         // the passes: the link is the limit
  int64_t waited_for_slots_ns = 0;                          // the loader: arithmetic is the limit
  int64_t waited_for_rings_ns = 0;                          // the loader: the store's fillers are the limit
  uint64_t records_from_rings = 0, records_from_image = 0;  // where rings are used
  double last_tokens_per_second = 0;                        // of the last pass
};

class LoopStats {
 public:
  struct Pass {
    uint64_t number = 0;   // set by AddPass
    int64_t tokens = 0;    // computed, of all prompts in it
    double positions = 0;  // that they attended to, summed over them
    int64_t duration_ns = 0;
    int64_t waited_ns = 0;  // of it, for decode on the same cores
    int64_t prompts = 1;
    int64_t ranks = 1;  // that shared it
  };
  // Turns with others on the same cores.
  struct Turns {
    double prompt_share = 0;  // decode: of the time from step to step that prompts get while streams are decoded; 0: not known yet
    uint64_t windows = 0;     // decode: times that it stood aside for others
    int64_t given_ns = 0;     // and for how long
  };
  struct View {
    int64_t running = 0, waiting = 0, spare_pages = 0;
    uint64_t tokens_total = 0, prefill_tokens_total = 0, steps_total = 0;
    uint64_t stream_steps_total =
        0;  // steps, each counted once for every stream that it gave tokens: tokens over these is what a stream's step yields
    uint64_t drafts_total = 0, drafts_accepted_total = 0;
    int64_t draft_depth = 0;       // of the last step
    std::string speculation;       // "auto", a pinned number of drafts, or empty: no drafts can be made
    double tokens_per_second = 0;  // output tokens over the last ten seconds
    double step_ms_p50 = 0, step_ms_p99 = 0;
    std::vector<StepOrderTimes> step_orders;  // of steps that several streams shared
    std::string prompt_path;                  // "chunked", "slp"
    int64_t tokens_at_once = 0, tokens_between_steps = 0;
    std::vector<Pass> passes;         // the last ones, oldest first
    std::optional<GroupStats> group;  // none: there is to be none
    StreamedTotals streamed;
    std::optional<DiskExpertSource::View> disk;
    Turns turns;
  };

  // Asked at each Look.
  void SetDisk(std::function<DiskExpertSource::View()> look) {
    std::lock_guard lock(mutex_);
    look_at_disk_ = std::move(look);
  }

  // A pass over prompt tokens that has ended well.
  void AddPass(Pass pass) {
    std::lock_guard lock(mutex_);
    view_.prefill_tokens_total += static_cast<uint64_t>(pass.tokens);
    pass.number = ++passes_total_;
    view_.passes.push_back(pass);
    if (view_.passes.size() > kPassesKept) view_.passes.erase(view_.passes.begin());
  }

  void SetPrompts(std::string path, int64_t tokens_at_once, int64_t tokens_between_steps) {
    std::lock_guard lock(mutex_);
    view_.prompt_path = std::move(path);
    view_.tokens_at_once = tokens_at_once;
    view_.tokens_between_steps = tokens_between_steps;
  }

  // `pass`: what it alone did, as a total of one.
  void AddStreamedPass(const StreamedTotals& pass) {
    std::lock_guard lock(mutex_);
    StreamedTotals& all = view_.streamed;
    all.passes += pass.passes;
    all.tokens += pass.tokens;
    all.duration_ns += pass.duration_ns;
    all.bytes_copied += pass.bytes_copied;
    all.experts_copied += pass.experts_copied;
    all.experts_skipped += pass.experts_skipped;
    all.waited_for_copies_ns += pass.waited_for_copies_ns;
    all.waited_for_slots_ns += pass.waited_for_slots_ns;
    all.waited_for_rings_ns += pass.waited_for_rings_ns;
    all.records_from_rings += pass.records_from_rings;
    all.records_from_image += pass.records_from_image;
    all.last_tokens_per_second = pass.last_tokens_per_second;
  }

  void SetSpeculation(std::string setting) {
    std::lock_guard lock(mutex_);
    view_.speculation = std::move(setting);
  }

  struct Step {
    int64_t duration_ns = 0;
    int64_t streams = 0;  // that it gave tokens
    int64_t tokens = 0;
    int64_t depth = 0;
    int64_t drafts = 0, accepted = 0;
  };
  void AddStep(int64_t now_ns, const Step& step) {
    std::lock_guard lock(mutex_);
    view_.tokens_total += static_cast<uint64_t>(step.tokens);
    view_.stream_steps_total += static_cast<uint64_t>(step.streams);
    view_.drafts_total += static_cast<uint64_t>(step.drafts);
    view_.drafts_accepted_total += static_cast<uint64_t>(step.accepted);
    view_.draft_depth = step.depth;
    steps_[view_.steps_total++ % steps_.size()] = step.duration_ns;
    const int64_t second = now_ns / kSecond;
    Bucket& bucket = buckets_[static_cast<size_t>(second) % buckets_.size()];
    if (bucket.second != second) bucket = {second, 0};
    bucket.tokens += step.tokens;
  }

  void SetGauges(int64_t running, int64_t waiting, int64_t spare_pages) {
    std::lock_guard lock(mutex_);
    view_.running = running;
    view_.waiting = waiting;
    view_.spare_pages = spare_pages;
  }

  void SetTurns(const Turns& turns) {
    std::lock_guard lock(mutex_);
    view_.turns = turns;
  }

  void SetStepOrders(std::vector<StepOrderTimes> orders) {
    std::lock_guard lock(mutex_);
    view_.step_orders = std::move(orders);
  }

  void SetGroup(GroupStats group) {
    std::lock_guard lock(mutex_);
    view_.group = std::move(group);
  }

  View Look(int64_t now_ns) const {
    std::lock_guard lock(mutex_);
    View view = view_;
    if (look_at_disk_) view.disk = look_at_disk_();
    int64_t tokens = 0;
    for (const Bucket& bucket : buckets_) {
      // The ten whole seconds before this one.
      const int64_t age = now_ns / kSecond - bucket.second;
      if (age >= 1 && age <= 10) tokens += bucket.tokens;
    }
    view.tokens_per_second = static_cast<double>(tokens) / 10.0;
    std::vector<int64_t> sorted(steps_.begin(), steps_.begin() + static_cast<int64_t>(std::min<uint64_t>(view.steps_total, steps_.size())));
    if (!sorted.empty()) {
      std::sort(sorted.begin(), sorted.end());
      view.step_ms_p50 = static_cast<double>(sorted[sorted.size() / 2]) / 1e6;
      view.step_ms_p99 = static_cast<double>(sorted[sorted.size() * 99 / 100]) / 1e6;
    }
    return view;
  }

 private:
  static constexpr int64_t kSecond = 1'000'000'000;
  static constexpr size_t kPassesKept = 32;  // the router asks once a second
  struct Bucket {
    int64_t second = -1;
    int64_t tokens = 0;
  };
  mutable std::mutex mutex_;
  std::function<DiskExpertSource::View()> look_at_disk_;
  View view_;
  uint64_t passes_total_ = 0;
  std::array<Bucket, 16> buckets_{};
  std::array<int64_t, 1024> steps_{};
};

}  // namespace hearth
