// One thread that fills one expert ring from the image's segment of its own NUMA node, and from that segment's disk part, of which it reads for all posted
// requests at once.
// Room: services/weightstore. May touch: common/{shm,disk,numa,trace,base}. Threads: any; its own one fills.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "common/disk/disk_reader.h"
#include "common/numa/topology.h"
#include "common/shm/expert_ring.h"
#include "common/shm/weight_image.h"
#include "common/trace/trace.h"

namespace hearth {

class RingFiller {
 public:
  // `name`: the worker's, for the log. `home`: where the shard lies; no CPUs: the thread is not pinned. `disk` null: the segment has no disk part.
  RingFiller(std::string name, std::unique_ptr<ExpertRing> ring, std::shared_ptr<const WeightImage> image, const ShardHome& home,
             std::unique_ptr<DiskReader> disk = nullptr);
  ~RingFiller();  // the thread has ended afterwards; the file stays

  struct View {
    uint32_t shard = 0;
    uint32_t slots = 0;
    uint64_t bytes = 0;                    // of the region
    uint64_t records = 0;                  // copied by this store
    uint64_t record_bytes = 0;             // of those
    double busy_seconds = 0;               // spent copying them
    bool broken = false;                   // its worker posted what can't be: it is served no more
    std::optional<DiskReader::View> disk;  // none: the image is all in shared memory
  };
  View Look() const;
  std::string path() const { return filler_.ring().region().path(); }

 private:
  void Run(const ShardHome& home);
  // None: told to stop, and the record may still be under way.
  std::optional<FillOutcome> Fill(const ExpertRingFiller::Request& request);
  // Errors: what Image::Expert says; InvalidArgument for a record larger than a slot.
  absl::StatusOr<ImageExpert> RecordOf(const ExpertRingFiller::Request& request) const;
  void ReadAhead();
  std::optional<FillOutcome> AwaitRead(uint64_t number);

  const std::string name_;
  const std::shared_ptr<const WeightImage> image_;
  ExpertRingFiller filler_;
  const std::unique_ptr<DiskReader> disk_;           // behind the ring, whose memory it reads into: gone first
  uint64_t looked_at_ = 0;                           // requests below it: those that lie on disk are being read
  std::deque<std::pair<uint64_t, uint64_t>> reads_;  // in order: request, number of its read
  const TraceTrack track_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> broken_{false};
  std::atomic<uint64_t> records_{0}, record_bytes_{0};
  std::atomic<int64_t> busy_ns_{0};
  std::thread thread_;  // last: it uses the others
};

}  // namespace hearth
