// Experts through the store's rings (common/shm/expert_ring.h): what Expect names is asked for as far ahead as the slots reach, and Acquire waits for it.
// Room: common/experts. May touch: common/{device,kernels,shm,base}. Threads: one at a time.
//
// Request n goes to all rings alike: an expert is there when its S slots carry the same number. Its slots are asked for anew, in order, when it has been
// released or given up.
// Whatever the rings don't bring comes from the image, or a second source beside it (the disk's, where a part of the image lies there), with the same bytes: what nobody expected, what more than max_held() experts are held for, what the
// store refuses, and, while the store is dead, stopped or far too slow, everything. So no wait here can fail a pass, and none is longer than kPatienceNs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "common/base/status.h"
#include "common/experts/expert_source.h"
#include "common/shm/expert_ring.h"
#include "common/trace/trace.h"

namespace hearth {

class RingExpertSource : public ExpertSource {
 public:
  static constexpr int64_t kPatienceNs = 2'000'000'000;  // as the store's client has with its beats

  // `image` outlives the source. `rings`: one a shard, in their order, each with as many slots. `second`: may be null.
  RingExpertSource(ExpertSource& image, std::vector<std::unique_ptr<ExpertRingReader>> rings, int64_t patience_ns = kPatienceNs,
                   std::unique_ptr<ExpertSource> second = nullptr);
  // Opens the rings of a lease. Errors: ExpertRing::Open, ExpertRingReader::Make.
  static absl::StatusOr<std::unique_ptr<RingExpertSource>> Open(ExpertSource& image, const RegionPlace& place, const Hash128& generation,
                                                                uint64_t lease_id, std::unique_ptr<ExpertSource> second = nullptr);

  int64_t num_shards() const override { return image_.num_shards(); }
  void Expect(const std::vector<ExpertId>& order, const StopToken* stop) override;
  ExpertView Acquire(int64_t layer, int64_t expert, int64_t shard) override;
  void Release(int64_t layer, int64_t expert, int64_t shard) override;

  absl::Status status() const override { return (second_ != nullptr ? *second_ : image_).status(); }

  // One slot less than there are: it is filled meanwhile. What is left out between two that are held takes slots as they do.
  int64_t max_held() const override { return num_slots_ - 1; }

  Counts counts() const override { return counts_; }

 private:
  struct Request {
    uint64_t number = 0;
    ExpertId id;
    bool acquired = false;
    int64_t shards_left = 0;  // to be released; 0: nobody reads its slots any more
  };
  // The request that brings the expert, which is acquired now; none: the image has to.
  std::optional<uint64_t> Begin(const ExpertId& id);
  std::optional<uint64_t> Take(const ExpertId& id);
  const uint8_t* AwaitRecord(ExpertRingReader& ring, uint64_t number);
  // Whether it is, before patience, store or pass have ended.
  bool AwaitFilled(ExpertRingReader& ring, uint64_t number);
  bool AwaitFilledUntil(ExpertRingReader& ring, uint64_t number, int64_t end_ns);
  bool AwaitPostable();
  void GiveUpBefore(uint64_t number);
  void PostAhead();
  bool CanPost() const;
  bool IsAwake();

  ExpertSource& image_;
  const std::vector<std::unique_ptr<ExpertRingReader>> rings_;
  const std::unique_ptr<ExpertSource> second_;
  const int64_t num_slots_;
  const int64_t patience_ns_;
  const TraceTrack track_;
  const StopToken* stop_ = nullptr;
  bool asleep_ = false;            // the store brought nothing for too long: the rings are left alone until it has caught up
  uint64_t posted_ = 0;            // of every ring
  std::deque<ExpertId> expected_;  // not asked for yet
  std::deque<Request> requests_;   // asked for, in order, from the first whose slots may still be read
  Counts counts_;
};

}  // namespace hearth
