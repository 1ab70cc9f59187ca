// The expert rings of this node's workers: made when a worker asks, adopted with its lease, removed with it.
// Room: services/weightstore. May touch: common/{formats,shm,numa,base}. Not: gRPC, whether a caller may ask. Threads: any.
// Ring memory is never handed from one worker to another: a ring's files go with its lease, whoever still maps them keeps them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "services/weightstore/generations.h"
#include "services/weightstore/ring_filler.h"

namespace hearth {

class RingKeeper {
 public:
  explicit RingKeeper(RegionPlace place) : place_(std::move(place)) {}

  // The lease may have rings from now on, until End. Returns at once.
  void Admit(uint64_t lease);
  // Makes one ring of `slots` slots a shard; returns when they are filled on request. OK where they are there already.
  // Errors: ResourceExhausted with both numbers; FailedPrecondition: there with another number of slots; Unavailable: another call is making them;
  // InvalidArgument: the model has no routed experts, or no ring has so many slots; NotFound: the lease was not admitted, or has ended meanwhile.
  absl::Status Make(const Generation& generation, uint64_t lease, const std::string& worker, int64_t slots);
  // Takes over the rings that a former store made for living leases, and removes the others'. What can't be taken over is removed: its worker reads from
  // the image.
  void Adopt(const Generation& generation);
  // Ends the lease's fillers and removes its files; may take as long as a record's copy. No effect without rings.
  void End(uint64_t lease);

  struct View {
    uint64_t lease = 0;
    std::string worker;
    RingFiller::View ring;
  };
  std::vector<View> Look() const;

 private:
  struct Rings {
    std::string worker;
    bool making = false;
    std::vector<std::unique_ptr<RingFiller>> fillers;  // one a shard
  };
  absl::StatusOr<std::vector<std::unique_ptr<ExpertRing>>> Allocate(const Generation& generation, uint64_t lease, const std::string& worker,
                                                                    int64_t slots) const;
  // Errors: those of DiskReader::Open.
  absl::StatusOr<std::vector<std::unique_ptr<RingFiller>>> Serve(const Generation& generation, const std::string& worker,
                                                                 std::vector<std::unique_ptr<ExpertRing>> rings) const;
  void RemoveFiles(const Hash128& generation, uint64_t lease) const;

  const RegionPlace place_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Rings> rings_;  // by lease: those that may have some
};

}  // namespace hearth
