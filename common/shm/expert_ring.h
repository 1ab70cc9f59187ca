// An expert ring: records of routed experts, copied for one worker by one thread of the store. One ring a (lease, shard), a region of its own.
// docs/shared-memory.md has the order of stores and what a crash at any instruction leaves.
// Room: common/shm. May touch: common/base. Processes: one worker (ExpertRingReader, one thread at a time), one store (ExpertRingFiller, one thread).
//
//   worker: request n = (layer, expert) for slot n mod slots ---posted---> store: copies the record ---filled[slot] = n + 1---> worker reads it
// Requests are filled in the order in which they are posted. A request names its slot, so posting request n is also the credit for the slot: the worker
// says by it that it reads request n - slots no more.
// If the worker dies: the store removes the ring with the lease. If the store dies: what is filled stays readable, what is not is filled by the next
// store, which goes on at the first slot that does not carry its request's number. Neither end ever waits without a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kExpertRingVersion = 1;
inline constexpr uint64_t kRingSlotAlign = 4096;
inline constexpr uint32_t kRingSlotsMin = 2;  // one is read while the next is filled
inline constexpr uint32_t kRingSlotsMax = 4096;

struct ExpertRingGeometry {
  uint64_t lease_id = 0;
  uint32_t shard = 0;
  uint32_t num_slots = 0;
  uint64_t slot_bytes = 0;  // a multiple of kRingSlotAlign

  uint64_t body_bytes() const;
};

// Body of the region: this, requests [num_slots], slots [num_slots], records from data_offset on. A cache line for each writer.
struct ExpertRingHeader {
  ExpertRingGeometry geometry;  // written once, before READY, as are the next two
  uint64_t data_offset;
  uint64_t sum;  // XXH3-64 of the fields before it
  uint8_t pad0[24];
  // The worker's:
  std::atomic<uint64_t> posted;       // requests [0, posted) have been asked for
  std::atomic<uint64_t> unwanted;     // nobody will read requests below it that are not filled yet: they need no copy
  std::atomic<uint32_t> posted_bell;  // changes after `posted` has: what the store waits on
  uint8_t pad1[44];
  // The store's:
  std::atomic<uint32_t> filled_bell;  // changes after a slot has been filled: what the worker waits on
  uint8_t pad2[60];
};
static_assert(sizeof(ExpertRingHeader) == 192 && offsetof(ExpertRingHeader, sum) == 32 && offsetof(ExpertRingHeader, posted) == 64 &&
              offsetof(ExpertRingHeader, filled_bell) == 128);

enum class FillOutcome : uint32_t {
  kNone = 0,
  kRecord = 1,    // the slot holds the record
  kUnwanted = 2,  // not copied, since nobody will read it
  kRefused = 3,   // the store finds no such expert, or its record does not fit: a bug of the one or the other
};

struct ExpertRingSlot {
  std::atomic<uint64_t> filled;   // number + 1 of the last request that has been dealt with here; the last store
  std::atomic<uint32_t> outcome;  // FillOutcome
  uint32_t reserved;
};
static_assert(sizeof(ExpertRingSlot) == 16);

// hearth.<node>.<this>.<generation>; and back: the lease of a file of that name.
std::string ExpertRingWhat(uint64_t lease_id, uint32_t shard);
std::optional<uint64_t> LeaseOfExpertRing(std::string_view what);

// The mapping. Geometry is checked once and kept privately: later damage moves no slot.
class ExpertRing {
 public:
  // All free; leaves the region READY. Errors: as ShmRegion::Create; InvalidArgument for the geometry.
  static absl::StatusOr<std::unique_ptr<ExpertRing>> Create(const RegionPlace& place, const Hash128& generation, const ExpertRingGeometry& geometry,
                                                            const AllocationHook& on_allocated = {});
  // Errors: as ShmRegion::Open; FailedPrecondition when not READY; DataLoss for a geometry that can't be or is another ring's.
  static absl::StatusOr<std::unique_ptr<ExpertRing>> Open(const RegionPlace& place, const Hash128& generation, uint64_t lease_id, uint32_t shard);

  const ExpertRingGeometry& geometry() const { return geometry_; }
  ShmRegion& region() { return region_; }
  const ShmRegion& region() const { return region_; }
  ExpertRingHeader& header() const { return *reinterpret_cast<ExpertRingHeader*>(region_.body()); }
  std::atomic<uint64_t>& request(uint64_t number) const;  // layer in the upper half, expert in the lower
  ExpertRingSlot& slot(uint64_t number) const;
  uint8_t* record(uint64_t number) const;

 private:
  ExpertRing(ShmRegion region, const ExpertRingGeometry& geometry) : region_(std::move(region)), geometry_(geometry) {}
  uint64_t IndexOf(uint64_t number) const { return number % geometry_.num_slots; }

  ShmRegion region_;
  const ExpertRingGeometry geometry_;
};

// The worker's end.
class ExpertRingReader {
 public:
  // FailedPrecondition for a ring that somebody has posted to: a worker's rings are its own.
  static absl::StatusOr<std::unique_ptr<ExpertRingReader>> Make(std::unique_ptr<ExpertRing> ring);

  int64_t num_slots() const { return ring_->geometry().num_slots; }
  uint64_t posted() const { return posted_; }
  // Whether the slot of the next request is empty, or what was asked for there has been dealt with.
  bool CanPost() const { return posted_ < ring_->geometry().num_slots || Filled(posted_ - ring_->geometry().num_slots); }
  // Returns the request's number. CanPost is true, and nobody reads the record that lies in its slot.
  uint64_t Post(int64_t layer, int64_t expert);
  // Requests below `number` that are not filled yet will not be read. It never falls.
  void GiveUpBefore(uint64_t number);
  bool Filled(uint64_t number) const { return ring_->slot(number).filled.load(std::memory_order_acquire) == number + 1; }
  // Waits until it is filled; false when `timeout_ns` has passed first.
  bool AwaitFilled(uint64_t number, int64_t timeout_ns) const;
  // Of a filled request: its record, until its slot is posted anew; null unless the outcome is kRecord.
  const uint8_t* Record(uint64_t number) const;
  // Whether the store that owns the ring runs (it may be stopped or stuck all the same).
  bool StoreAlive() const;

 private:
  explicit ExpertRingReader(std::unique_ptr<ExpertRing> ring) : ring_(std::move(ring)) {}
  const std::unique_ptr<ExpertRing> ring_;
  uint64_t posted_ = 0;
  uint64_t unwanted_ = 0;
};

// The store's end. Believes nothing that the worker writes: numbers are checked here, layers and experts by the caller.
class ExpertRingFiller {
 public:
  // Goes on where the last store ended.
  explicit ExpertRingFiller(std::unique_ptr<ExpertRing> ring);

  struct Request {
    int64_t layer = 0;
    int64_t expert = 0;
    bool wanted = true;
    uint8_t* record = nullptr;  // slot_bytes of room
  };
  // Waits for a request that has not been filled; none when `timeout_ns` has passed first, or `stop` is set. DataLoss: the worker has posted what can't be.
  absl::StatusOr<std::optional<Request>> AwaitRequest(int64_t timeout_ns, const std::atomic<bool>* stop = nullptr);
  // Number of the request that AwaitRequest returns next.
  uint64_t next() const { return next_; }
  // A request that has been posted and is not filled: what takes its time may be copied in any order, though Filled is said in theirs.
  std::optional<Request> Posted(uint64_t number) const;
  // Of the request that AwaitRequest returned: its slot holds the record, or says why not.
  void Filled(FillOutcome outcome);
  // After `stop` was set, from another thread: a wait of AwaitRequest ends now (one that is just about to begin, after its time).
  void Wake();
  const ExpertRing& ring() const { return *ring_; }

 private:
  Request At(uint64_t number) const;

  const std::unique_ptr<ExpertRing> ring_;
  uint64_t next_ = 0;
};

}  // namespace hearth
