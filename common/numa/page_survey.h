// What pages a mapping lies in, and on which NUMA nodes: asked of the kernel, nothing is moved.
// Room: common/numa. May touch: common/base. Threads: any.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "common/numa/topology.h"

namespace hearth {

// Memory that was meant for a node (the kernel's number).
struct PlacedMemory {
  const void* data = nullptr;
  uint64_t bytes = 0;
  int node = 0;
};

struct PageSurvey {
  uint64_t looked_at = 0;    // places 2 MB apart or more, spread evenly
  uint64_t huge = 0;         // of them in pages of 2 MB or more
  std::string size_note;     // why `huge` is not known
  uint64_t nodes_asked = 0;  // of them, where the kernel told the node
  uint64_t wrong_node = 0;   // of them on another node than was meant
  std::string node_note;     // why nobody needed to ask, or could

  // "2 MB 92%, 4 KB 8%"
  std::string SizesToString() const;
  // "0 of 4230 looked at (0%)"
  std::string NodesToString() const;
};

// Looks at up to `samples` places; each is read, so that it is mapped. Best before anything else reads the memory: pages are counted as they get mapped.
PageSurvey SurveyPages(std::span<const PlacedMemory> memory, const Topology& topology, uint64_t samples);

}  // namespace hearth
