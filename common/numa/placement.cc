// Memory policy by libnuma. Contract: placement.h. Room: common/numa.
#include "common/numa/placement.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace hearth {

PreferNode::PreferNode(int node) {
  if (numa_available() < 0) {
    note_ = "this kernel has no NUMA policy: memory lies where it falls";
    return;
  }
  bitmask* mask = numa_allocate_nodemask();
  if (node < 0 || static_cast<unsigned long>(node) >= mask->size) {
    numa_free_nodemask(mask);
    note_ = absl::StrCat("NUMA node ", node, " is beyond what this kernel knows");
    return;
  }
  numa_bitmask_setbit(mask, static_cast<unsigned>(node));
  // The system call itself: numa_set_preferred prints to standard error where it is forbidden.
  if (set_mempolicy(MPOL_PREFERRED, mask->maskp, mask->size + 1) == 0) {
    set_ = true;
  } else {
    note_ = absl::StrCat("memory can't be placed on NUMA node ", node, " (set_mempolicy: ", strerror(errno),
                         "): it lies where it falls; a container needs CAP_SYS_NICE for this");
  }
  numa_free_nodemask(mask);
}

PreferNode::~PreferNode() {
  if (set_) set_mempolicy(MPOL_DEFAULT, nullptr, 0);
}

void PinThisThread(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

absl::StatusOr<std::map<int, uint64_t>> SamplePagesPerNode(const void* address, uint64_t bytes, uint64_t samples) {
  if (numa_available() < 0) return absl::UnimplementedError("this kernel has no NUMA policy");
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t pages = bytes / page_bytes;
  const uint64_t count = std::min(samples, pages);
  std::vector<void*> addresses;
  for (uint64_t i = 0; i < count; ++i) {
    // move_pages takes void* but only asks here: no nodes are given.
    uint8_t* page = const_cast<uint8_t*>(static_cast<const uint8_t*>(address)) + i * pages / count * page_bytes;
    const volatile uint8_t touched = *page;
    static_cast<void>(touched);
    addresses.push_back(page);
  }
  std::vector<int> status(count, -1);
  if (count > 0 && move_pages(0, count, addresses.data(), nullptr, status.data(), 0) != 0) {
    return absl::PermissionDeniedError(absl::StrCat("move_pages: ", strerror(errno)));
  }
  std::map<int, uint64_t> nodes;
  for (const int node : status) {
    if (node >= 0) ++nodes[node];
  }
  return nodes;
}

}  // namespace hearth
