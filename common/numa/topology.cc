// Reading the machine's shape. Contract: topology.h. Room: common/numa.
#include "common/numa/topology.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace hearth {
namespace {

constexpr int kCpuMax = 1 << 16;

std::string FirstLine(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// A list that /proc/self/status gives ("Cpus_allowed_list: 0-3"): it already is what the cpuset leaves over.
std::optional<std::vector<int>> AllowedList(const std::string& root, std::string_view key) {
  std::ifstream in(root + "/proc/self/status");
  std::string line;
  while (std::getline(in, line)) {
    if (line.compare(0, key.size(), key) != 0) continue;
    absl::StatusOr<std::vector<int>> list = ParseCpuList(std::string_view(line).substr(key.size()));
    if (list.ok()) return *std::move(list);
  }
  return std::nullopt;
}

std::vector<int> AffinityCpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

std::vector<int> Common(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

// nodeN/meminfo: "Node 0 MemTotal:  24000000 kB".
void ReadMemory(const std::string& path, NumaNode& node) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string node_word, key;
    int id = 0;
    uint64_t kib = 0;
    if (!(words >> node_word >> id >> key >> kib)) continue;
    if (key == "MemTotal:") node.memory_bytes = kib * 1024;
    if (key == "MemFree:" || key == "Active(file):" || key == "Inactive(file):") node.free_bytes += kib * 1024;
  }
}

std::vector<int> NodeIds(const std::string& dir_path) {
  std::vector<int> ids;
  DIR* dir = opendir(dir_path.c_str());
  if (dir == nullptr) return ids;
  while (const dirent* entry = readdir(dir)) {
    const std::string_view name = entry->d_name;
    int id = 0;
    if (name.substr(0, 4) == "node" && absl::SimpleAtoi(Sv(name.substr(4)), &id) && id >= 0) ids.push_back(id);
  }
  closedir(dir);
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

std::vector<int> Topology::AllCpus() const {
  std::vector<int> all;
  for (const NumaNode& node : nodes) all.insert(all.end(), node.cpus.begin(), node.cpus.end());
  std::sort(all.begin(), all.end());
  return all;
}

absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text) {
  std::vector<int> cpus;
  const absl::string_view trimmed = absl::StripAsciiWhitespace(Sv(text));
  if (trimmed.empty()) return cpus;
  for (const absl::string_view part : absl::StrSplit(trimmed, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends[0], &first) || !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first ||
        last > kCpuMax) {
      return absl::InvalidArgumentError(absl::StrCat("\"", trimmed, "\" is not a list of numbers such as 0-3,8"));
    }
    for (int i = first; i <= last; ++i) cpus.push_back(i);
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

Topology DiscoverTopology(const std::string& root) {
  Topology topology;
  std::optional<std::vector<int>> allowed = AllowedList(root, "Cpus_allowed_list:");
  if (root.empty()) {  // taskset narrows a thread's own mask further than the process's status may say
    allowed = AffinityCpus();
  }
  const std::optional<std::vector<int>> allowed_memory = AllowedList(root, "Mems_allowed_list:");
  const std::string dir = root + "/sys/devices/system/node";
  const std::vector<int> ids = NodeIds(dir);
  std::vector<std::vector<int>> all_distances;
  for (const int id : ids) {
    NumaNode node;
    node.id = id;
    const std::string node_dir = absl::StrCat(dir, "/node", id);
    if (absl::StatusOr<std::vector<int>> cpus = ParseCpuList(FirstLine(node_dir + "/cpulist")); cpus.ok()) {
      node.cpus = allowed ? Common(*cpus, *allowed) : *std::move(cpus);
      if (node.cpus.empty()) {
        topology.notes.push_back(absl::StrCat("NUMA node ", id, " has no CPU that this process may use"));
      }
    }
    ReadMemory(node_dir + "/meminfo", node);
    if (node.memory_bytes == 0) {
      topology.notes.push_back(absl::StrCat("NUMA node ", id, " has no memory: its CPUs work on that of the nearest node"));
    } else if (allowed_memory && !std::binary_search(allowed_memory->begin(), allowed_memory->end(), id)) {
      node.memory_bytes = node.free_bytes = 0;
      topology.notes.push_back(absl::StrCat("NUMA node ", id, " has memory that the cpuset keeps from this process"));
    }
    std::istringstream words(FirstLine(node_dir + "/distance"));
    for (int distance; words >> distance;) node.distances.push_back(distance);
    if (node.distances.size() != ids.size()) node.distances.clear();
    topology.nodes.push_back(std::move(node));
  }
  if (topology.AllCpus().empty()) {
    topology.nodes.assign(1, NumaNode{});
    topology.nodes[0].cpus = allowed && !allowed->empty() ? *allowed : AffinityCpus();
    topology.notes.push_back(absl::StrCat("no NUMA information under ", dir, ": one node of ", topology.nodes[0].cpus.size(), " CPUs is assumed"));
  }
  return topology;
}

absl::StatusOr<Topology> PretendTopology(const Topology& real, int num_nodes) {
  if (num_nodes < 1 || num_nodes > 64) {
    return absl::InvalidArgumentError(absl::StrCat("a pretended topology of ", num_nodes, " nodes: supported are 1 to 64"));
  }
  const std::vector<int> cpus = real.AllCpus();
  uint64_t memory = 0, free = 0;
  for (const NumaNode& node : real.nodes) {
    memory += node.memory_bytes;
    free += node.free_bytes;
  }
  Topology topology;
  topology.pretended = true;
  const int total = static_cast<int>(cpus.size());
  for (int i = 0; i < num_nodes; ++i) {
    NumaNode node;
    node.id = i;
    if (num_nodes <= total) {
      node.cpus.assign(cpus.begin() + i * total / num_nodes, cpus.begin() + (i + 1) * total / num_nodes);
    } else {
      node.cpus.assign(1, cpus[static_cast<size_t>(i % total)]);
    }
    node.memory_bytes = memory / static_cast<uint64_t>(num_nodes);
    node.free_bytes = free / static_cast<uint64_t>(num_nodes);
    topology.nodes.push_back(std::move(node));
  }
  topology.notes.push_back(absl::StrCat("pretended topology: ", num_nodes, " nodes on a machine of ", real.nodes.size()));
  return topology;
}

std::vector<ShardHome> PlaceShards(const Topology& topology, int num_shards) {
  const std::vector<NumaNode>& nodes = topology.nodes;
  std::vector<size_t> whole;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].memory_bytes > 0 && !nodes[i].cpus.empty()) whole.push_back(i);
  }
  if (whole.empty()) {  // CPUs here, memory there: which of them matters less than that there is one
    size_t with_memory = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].memory_bytes > nodes[with_memory].memory_bytes) with_memory = i;
    }
    return std::vector<ShardHome>(static_cast<size_t>(num_shards), ShardHome{nodes[with_memory].id, topology.AllCpus()});
  }
  std::vector<std::vector<int>> cpus;
  for (const size_t i : whole) cpus.push_back(nodes[i].cpus);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].memory_bytes > 0 || nodes[i].cpus.empty()) continue;
    size_t nearest = 0;
    for (size_t w = 1; w < whole.size() && !nodes[i].distances.empty(); ++w) {
      if (nodes[i].distances[whole[w]] < nodes[i].distances[whole[nearest]]) nearest = w;
    }
    cpus[nearest].insert(cpus[nearest].end(), nodes[i].cpus.begin(), nodes[i].cpus.end());
  }
  std::vector<ShardHome> homes;
  const size_t shards = static_cast<size_t>(num_shards);
  for (size_t k = 0; k < shards; ++k) {
    const size_t w = k * whole.size() / shards;
    homes.push_back(ShardHome{nodes[whole[w]].id, cpus[w]});
  }
  return homes;
}

}  // namespace hearth
