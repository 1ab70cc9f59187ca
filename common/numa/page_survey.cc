#include "common/numa/page_survey.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "absl/strings/str_format.h"
#include "common/base/align.h"
#include "common/base/time.h"
#include "common/numa/placement.h"

namespace hearth {
namespace {

constexpr uint64_t kHugeBytes = 2 << 20;

// Bytes of the mapping around `data` that are mapped in huge pages now; UINT64_MAX: all of it (hugetlbfs). None: the kernel does not tell.
std::optional<uint64_t> MappedHuge(const void* data) {
  std::ifstream in("/proc/self/smaps");
  const uint64_t wanted = reinterpret_cast<uintptr_t>(data);
  bool inside = false, found = false;
  uint64_t huge = 0;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    uint64_t begin = 0, end = 0;
    char dash = 0;
    std::string key;
    if (line.find('-') < line.find(' ') && words >> std::hex >> begin >> dash >> end && dash == '-') {
      if (inside) break;
      inside = found = begin <= wanted && wanted < end;
      continue;
    }
    if (!inside) continue;
    std::istringstream field(line);
    uint64_t kib = 0;
    if (!(field >> key >> kib)) continue;
    if (key == "KernelPageSize:" && kib >= kHugeBytes / 1024) return UINT64_MAX;
    if (key == "AnonHugePages:" || key == "ShmemPmdMapped:" || key == "FilePmdMapped:") huge += kib * 1024;
  }
  if (!found) return std::nullopt;
  return huge;
}

// Whole 2 MB places of the memory: first address and how many.
struct Places {
  const uint8_t* first;
  uint64_t count;
};
Places PlacesOf(const PlacedMemory& memory) {
  const uint64_t begin = reinterpret_cast<uintptr_t>(memory.data);
  const uint64_t aligned = AlignUp(begin, kHugeBytes);
  const uint64_t end = begin + memory.bytes;
  return {reinterpret_cast<const uint8_t*>(aligned), aligned < end ? (end - aligned) / kHugeBytes : 0};
}

}  // namespace

std::string PageSurvey::SizesToString() const {
  if (!size_note.empty()) return size_note;
  const double percent = looked_at == 0 ? 0 : 100 * static_cast<double>(huge) / static_cast<double>(looked_at);
  return absl::StrFormat("2 MB %.0f%%, 4 KB %.0f%%", percent, 100 - percent);
}

std::string PageSurvey::NodesToString() const {
  if (!node_note.empty()) return node_note;
  return absl::StrFormat("%d of %d looked at (%.0f%%)", wrong_node, nodes_asked,
                         nodes_asked == 0 ? 0 : 100 * static_cast<double>(wrong_node) / static_cast<double>(nodes_asked));
}

PageSurvey SurveyPages(std::span<const PlacedMemory> memory, const Topology& topology, uint64_t samples) {
  PageSurvey survey;
  uint64_t all_places = 0;
  for (const PlacedMemory& m : memory) all_places += PlacesOf(m).count;
  if (all_places == 0) {
    survey.size_note = survey.node_note = "less than 2 MB of memory";
    return survey;
  }
  const auto with_memory = std::count_if(topology.nodes.begin(), topology.nodes.end(), [](const NumaNode& node) { return node.memory_bytes > 0; });
  if (topology.pretended) {
    survey.node_note = "the topology is pretended: its nodes are not the machine's";
  } else if (with_memory < 2) {
    survey.node_note = "0: the machine has one NUMA node";
  }
  for (const PlacedMemory& m : memory) {
    const Places places = PlacesOf(m);
    if (places.count == 0) continue;
    // Each mapping gets its share of the samples, in whole strides.
    const uint64_t wanted = std::clamp<uint64_t>(samples * places.count / all_places, 1, places.count);
    for (uint64_t i = 0; i < wanted; ++i) {
      const volatile uint8_t touched = *(places.first + i * places.count / wanted * kHugeBytes);
      static_cast<void>(touched);
    }
    survey.looked_at += wanted;
    const std::optional<uint64_t> huge = MappedHuge(m.data);
    if (huge.has_value()) {
      survey.huge += std::min(wanted, *huge / kHugeBytes);
    } else {
      survey.size_note = "not known: /proc/self/smaps cannot be read";
    }
    if (!survey.node_note.empty()) continue;
    const auto nodes = SamplePagesPerNode(places.first, places.count * kHugeBytes, wanted);
    if (!nodes.ok()) {
      survey.node_note = "not known: " + std::string(nodes.status().message());
      continue;
    }
    for (const auto& [node, count] : *nodes) {
      survey.nodes_asked += count;
      if (node != m.node) survey.wrong_node += count;
    }
  }
  return survey;
}

}  // namespace hearth
