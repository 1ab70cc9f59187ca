// Where the bytes of a routed expert come from: the image itself, a ring that the store fills (ring_expert_source.h), or a disk (disk_expert_source.h).
// Room: common/experts. May touch: common/{device,kernels,shm,base}. Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/kernels/kernels.h"
#include "common/shm/weight_image.h"

namespace hearth {

// One shard of one expert as matrices: gate, up [count, hidden]; down [hidden, count]. count may be 0.
struct ExpertView {
  int64_t count = 0;
  WeightView gate;
  WeightView up;
  WeightView down;
  const uint8_t* record = nullptr;  // all of it as one run of bytes, for one copy to a device; null where it is not kept so
  uint64_t record_bytes = 0;
};

// A shard's record moved to `record`, another place with the same bytes.
ExpertView MovedTo(ExpertView shard, const uint8_t* record);

struct ExpertId {
  int64_t layer = 0;
  int64_t expert = 0;
  friend bool operator==(const ExpertId&, const ExpertId&) = default;
};

class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  virtual int64_t num_shards() const = 0;
  // What Acquire will be called for from now on, in this order, each at most once; some may be left out. What was expected before and has not been
  // acquired is given up. A source that fetches ahead begins with it; waits of Acquire end with `stop`, which is looked at until the next Expect.
  virtual void Expect(const std::vector<ExpertId>&, const StopToken*) {}
  // Experts of a layer that will be acquired at once: where their bytes lie on disk, all of them begin to be fetched, instead of each when it is first read.
  virtual void Fetch(int64_t /*layer*/, const std::vector<int64_t>& /*experts*/) {}
  // The first error of a disk since Expect. What Acquire returns then is of the right shape, and its bytes are anybody's: whoever computes with them must ask
  // first, and fail.
  virtual absl::Status status() const { return absl::OkStatus(); }
  // Experts that may be acquired and not released yet without making others wait, or come another way.
  virtual int64_t max_held() const { return INT64_MAX; }
  // The view stays valid until Release of the same triple.
  virtual ExpertView Acquire(int64_t layer, int64_t expert, int64_t shard) = 0;
  virtual void Release(int64_t layer, int64_t expert, int64_t shard) = 0;

  // Of a source that has rings; zeros else. On the thread of Acquire, or while there is none.
  struct Counts {
    int64_t from_rings = 0;  // records, one a shard
    int64_t from_image = 0;  // records that the rings did not bring, from a disk behind them among these
    int64_t waited_ns = 0;   // for rings that were not filled yet: the source was starved
  };
  virtual Counts counts() const { return {}; }
};

// Straight from the mapped image: Acquire is an array look-up.
absl::StatusOr<std::unique_ptr<ExpertSource>> MakeImageExpertSource(std::shared_ptr<const WeightImage> image, int64_t first_layer, int64_t num_layers,
                                                                    int64_t num_experts, int64_t hidden);
// The same for layers that are no run (moe_layer_freq > 1).
absl::StatusOr<std::unique_ptr<ExpertSource>> MakeImageExpertSource(std::shared_ptr<const WeightImage> image, const std::vector<int64_t>& layers,
                                                                    int64_t num_experts, int64_t hidden);

}  // namespace hearth
