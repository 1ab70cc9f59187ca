// Collectives of host devices over memory that the ranks share: threads of one process, or processes. Each pair of ranks has a mailbox of two bounded pieces,
// so what crosses has no limit of its own; waits are futexes with a timeout. On a host device a call has run when it returns.
// Room: common/device/host. May touch: common/base. Threads: one a rank. Processes: any that map the memory; a rank's process is watched by pidfd.
//
// Who writes what, all of it stored after what it announces and never under a lock:
//   a rank's words          the rank; its bell, which carries no state, anybody
//   a mailbox's `sent`      its sender, `taken` its receiver: pass and number of pieces, so that what an older pass left counts for nothing
// A rank that dies at any instruction leaves at worst a piece that nobody was told of. Begin is where all meet: nobody writes into a mailbox of a new pass
// while its receiver still reads the old one.
#pragma once

#include <cstdint>
#include <memory>

#include "common/base/status.h"
#include "common/device/collectives.h"

namespace hearth {

struct ShmCollectivesOptions {
  int rank = 0;
  int size = 2;
  void* memory = nullptr;                 // ShmCollectivesBytes(size), zeros when the first rank joins, on 64 bytes; outlives the group
  int64_t patience_ns = 120'000'000'000;  // with an idle peer that lives: past it the pass ends with DeadlineExceeded
};

inline constexpr int kRanksMax = 8;
uint64_t ShmCollectivesBytes(int size);

// Each rank joins once, in any order; the first Begin waits for all. Errors: InvalidArgument for a rank that can't be, AlreadyExists for one that is taken.
absl::StatusOr<std::unique_ptr<Collectives>> JoinShmCollectives(const ShmCollectivesOptions& options);

}  // namespace hearth
