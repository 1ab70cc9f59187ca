// Which NUMA nodes, CPUs and memory this process may use, as the kernel and the cpuset say; and which node each shard
// of the weights lives on. Room: common/numa. May touch: common/base. Threads: any; plain values. Odd worlds are normal
// here: one node, nodes without memory or without CPUs, numbers with holes, cpusets, containers. What was decided about
// them is in `notes`, for the log.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

struct NumaNode {
  int id = 0;                  // the kernel's number; numbers may have holes
  std::vector<int> cpus;       // those that this process may use; empty: memory only, or shut out by the cpuset
  uint64_t memory_bytes = 0;   // 0: no memory, or shut out by the cpuset
  uint64_t free_bytes = 0;     // free pages and page cache, which goes when asked
  std::vector<int> distances;  // to every node, in the order of Topology::nodes; empty when unknown
};

struct Topology {
  std::vector<NumaNode> nodes;  // ascending ids; never empty
  bool pretended = false;       // the nodes are not the machine's: placing memory on them means nothing
  std::vector<std::string> notes;

  std::vector<int> AllCpus() const;
};

// Where one shard's memory and threads belong.
struct ShardHome {
  int node = 0;           // memory; the kernel's number
  std::vector<int> cpus;  // never empty
};

// Reads <root>/sys/devices/system/node and <root>/proc/self/status; `root` is "" outside of tests. Where nothing can be
// read, one node with the CPUs of this thread's affinity: never an error.
Topology DiscoverTopology(const std::string& root = "");

// The same CPUs dealt out to `num_nodes` nodes: for trying out another machine's shape on this one.
absl::StatusOr<Topology> PretendTopology(const Topology& real, int num_nodes);

// Shard k of S gets the node k * N / S of the N that have both memory and CPUs; a node without memory lends its CPUs to
// the nearest that has some; memory-only nodes hold no shard while others exist. More shards than CPUs share them.
std::vector<ShardHome> PlaceShards(const Topology& topology, int num_shards);

// "0-3,8,10-11" -> numbers. Errors: InvalidArgument.
absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text);

}  // namespace hearth
