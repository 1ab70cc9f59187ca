// Expert rings in shared memory for a test: a thread each that fills them from an image as a store does, and the source at their other end.
// Room: tests. Threads: the source as RingExpertSource has it; the rest the test's own.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "common/base/align.h"
#include "common/experts/ring_expert_source.h"
#include "common/model/forward.h"
#include "common/shm/expert_ring.h"

namespace hearth {

class ServedRings {
 public:
  // `second`: behind the rings, as RingExpertSource has it.
  ServedRings(const WeightImage& image, const Model& model, uint32_t slots, std::unique_ptr<ExpertSource> second = nullptr) : image_(image) {
    char dir[] = "/dev/shm/hearth_served_rings_XXXXXX";
    place_ = {mkdtemp(dir), "test"};
    uint64_t record_bytes = 0;
    for (int64_t layer = 0; layer < model.config().num_hidden_layers; ++layer) {
      for (int64_t expert = 0; model.config().IsMoeLayer(layer) && expert < model.config().n_routed_experts; ++expert) {
        for (int64_t shard = 0; shard < image.num_shards(); ++shard) {
          record_bytes = std::max(record_bytes, image.Expert(layer, expert, shard)->record_bytes);
        }
      }
    }
    const uint64_t slot_bytes = AlignUp(record_bytes, kRingSlotAlign);
    for (uint32_t shard = 0; shard < image.num_shards(); ++shard) {
      const ExpertRingGeometry geometry{.lease_id = kLease, .shard = shard, .num_slots = slots, .slot_bytes = slot_bytes};
      threads_.emplace_back(&ServedRings::Fill, this, *ExpertRing::Create(place_, image.generation(), geometry));
    }
    source_ = *RingExpertSource::Open(*model.weights().experts, place_, image.generation(), kLease, std::move(second));
  }
  ~ServedRings() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
    std::filesystem::remove_all(place_.dir);
  }
  std::shared_ptr<RingExpertSource> source() { return source_; }
  void Refuse() { refuse_ = true; }  // everything from now on
  // The experts of any layer that the source ever asked for, wanted or not.
  std::set<int64_t> asked() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return asked_;
  }

 private:
  static constexpr uint64_t kLease = 9;

  void Fill(std::unique_ptr<ExpertRing> ring) {
    const int64_t shard = ring->geometry().shard;
    ExpertRingFiller filler(std::move(ring));
    while (!stop_) {
      const auto request = filler.AwaitRequest(10'000'000, &stop_);
      if (!request.ok() || !request->has_value()) continue;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        asked_.insert((*request)->expert);
      }
      const auto expert = image_.Expert((*request)->layer, (*request)->expert, shard);
      if ((*request)->wanted && expert.ok()) std::memcpy((*request)->record, expert->record, expert->record_bytes);
      filler.Filled(refuse_ ? FillOutcome::kRefused : (*request)->wanted ? FillOutcome::kRecord : FillOutcome::kUnwanted);
    }
  }

  const WeightImage& image_;
  RegionPlace place_;
  std::atomic<bool> stop_{false}, refuse_{false};
  std::mutex mutex_;
  std::set<int64_t> asked_;
  std::vector<std::thread> threads_;
  std::shared_ptr<RingExpertSource> source_;
};

}  // namespace hearth
