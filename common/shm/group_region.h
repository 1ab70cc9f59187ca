// What the prefill workers of a group share beside weights and KV: who its ranks are, which of them may be writing KV for a shared pass, and the memory
// through which they exchange rows. One region a group, made by the store when its ranks have come together; docs/shared-memory.md has the order of stores.
// Room: common/shm. May touch: common/base. Processes: the store makes and reads it; each rank writes its own state word, and the exchange by its own rules.
//
// The pages of a shared pass are held by rank 0's lease alone while all ranks write into them. So a rank says `kComputing` before it can know of any page,
// then looks whether the others live, and takes it back only when it will not write any more. The store gives what a dead rank 0 held to nobody while a
// living rank says so.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/hash.h"
#include "common/base/process.h"
#include "common/base/status.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kGroupRegionVersion = 1;
inline constexpr size_t kGroupRanksMax = 8;
inline constexpr uint64_t kGroupExchangeAlign = 64;

struct GroupMember {
  uint64_t lease_id = 0;
  ProcessId process;
};

struct GroupSpec {
  uint64_t id = 0;                   // names the region; never used before
  std::vector<GroupMember> members;  // by rank; 2 to kGroupRanksMax
  uint64_t exchange_bytes = 0;
};

enum class RankState : uint32_t {
  kIdle = 0,
  kComputing = 1,  // may write into pages of a shared pass
  kLeft = 2,       // takes part in no further pass: its process is stopping
};

// Body of the region: this, then the exchange.
struct GroupHeader {
  struct Member {
    uint64_t lease_id;
    uint64_t start_ticks;
    int32_t pid;
    uint32_t reserved;
  };
  uint64_t id;  // written once, before READY, as is all before the states
  uint64_t size;
  uint64_t exchange_bytes;
  Member members[kGroupRanksMax];
  uint64_t sum;  // XXH3-64 of the bytes before this field
  uint8_t pad0[32];
  struct alignas(64) State {
    std::atomic<uint32_t> state;  // RankState; writer: the rank
  };
  State states[kGroupRanksMax];
};
static_assert(offsetof(GroupHeader, members) == 24 && sizeof(GroupHeader::Member) == 24 && offsetof(GroupHeader, sum) == 216 &&
              offsetof(GroupHeader, states) == 256 && sizeof(GroupHeader) == 256 + 64 * kGroupRanksMax);

// hearth.<node>.<this>.<generation>; and back: the group of a file of that name.
std::string GroupWhat(uint64_t id);
std::optional<uint64_t> IdOfGroup(std::string_view what);

// The mapping. The spec is checked once and kept privately.
class GroupRegion {
 public:
  // All ranks idle, the exchange zero; leaves the region READY. Errors: as ShmRegion::Create; InvalidArgument for the spec.
  static absl::StatusOr<std::unique_ptr<GroupRegion>> Create(const RegionPlace& place, const Hash128& generation, const GroupSpec& spec);
  // Errors: as ShmRegion::Open; FailedPrecondition when not READY; DataLoss for a spec that can't be or is another group's.
  static absl::StatusOr<std::unique_ptr<GroupRegion>> Open(const RegionPlace& place, const Hash128& generation, uint64_t id);

  const GroupSpec& spec() const { return spec_; }
  ShmRegion& region() { return region_; }
  // Sequentially consistent: who has stored kComputing and then sees that rank 0 lives is seen computing by whoever sees rank 0 dead.
  void SetState(size_t rank, RankState state);
  RankState state(size_t rank) const;
  uint8_t* exchange() const { return region_.body() + sizeof(GroupHeader); }  // exchange_bytes, on kGroupExchangeAlign

 private:
  GroupRegion(ShmRegion region, GroupSpec spec) : region_(std::move(region)), spec_(std::move(spec)) {}
  GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(region_.body()); }

  ShmRegion region_;
  const GroupSpec spec_;
};

}  // namespace hearth
