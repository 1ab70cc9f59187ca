// Groups of prefill workers that share passes: made when all ranks have asked, taken over with their leases, ended with the first of them. And whether a
// rank may still be writing into pages that another one's lease holds.
// Room: services/weightstore. May touch: common/{shm,base}. Not: gRPC, whether a caller may ask. Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/shm/group_region.h"

namespace hearth {

class GroupKeeper {
 public:
  explicit GroupKeeper(RegionPlace place) : place_(std::move(place)) {}

  struct Request {
    Hash128 generation;
    GroupMember member;
    std::string worker;
    uint32_t rank = 0;
    uint32_t size = 0;
    uint64_t exchange_bytes = 0;
  };
  // The group that the lease is in, as long as all its ranks live; else it waits for the others, and who comes last makes the group.
  // Errors: Unavailable, which names the ranks that are missing; InvalidArgument for ranks that can't be; as GroupRegion::Create.
  absl::StatusOr<uint64_t> Join(const Request& request);

  // Opens the groups that a former store made for the generation, before its leases are judged. What can't be opened is removed.
  void Open(const Hash128& generation);
  // Of what was opened, the groups with a lease that `lives` does not know end.
  void Settle(const std::function<bool(uint64_t lease)>& lives);

  // Other ranks that live and may be writing into pages which this one's lease, or process, holds. None: what it holds may be given away.
  std::vector<uint64_t> WritersInto(uint64_t lease) const;
  bool HasWritersInto(const ProcessId& process) const;
  // The lease has ended, and its group with it.
  void End(uint64_t lease);
  // Lets go of ended groups in which nobody writes any more.
  void Sweep();

  struct View {
    uint64_t id = 0;                   // 0: the ranks are still coming
    std::vector<std::string> workers;  // by rank; empty: not there yet
    uint64_t bytes = 0;                // of the region
    bool over = false;                 // a rank is gone, another may still be writing
  };
  std::vector<View> Look() const;

 private:
  struct Group {
    Hash128 generation;
    std::unique_ptr<GroupRegion> region;
    std::vector<std::unique_ptr<ProcessWatch>> watches;  // by rank
    std::vector<std::string> workers;                    // by rank
    bool over = false;
  };
  static void Watch(Group& group);
  static std::vector<uint64_t> Writers(const Group& group);
  static bool Has(const Group& group, uint64_t lease);

  const RegionPlace place_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Group> groups_;     // by id
  std::map<uint64_t, Request> waiting_;  // by lease
};

}  // namespace hearth
