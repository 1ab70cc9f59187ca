// Odd machines as folders of text files; the pool and the policies on the machine at hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "common/base/hash.h"
#include "common/numa/placement.h"
#include "common/numa/topology.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class FakeMachine {
 public:
  FakeMachine() : root_(testing::TempDir() + "/numa_" + RandomHash128().ToHex()) {}
  ~FakeMachine() { fs::remove_all(root_); }
  const std::string& root() const { return root_; }
  void Node(int id, const std::string& cpus, uint64_t memory_kib, const std::string& distance) {
    const std::string dir = root_ + "/sys/devices/system/node/node" + std::to_string(id);
    Write(dir + "/cpulist", cpus + "\n");
    Write(dir + "/distance", distance + "\n");
    const std::string prefix = "Node " + std::to_string(id) + " ";
    Write(dir + "/meminfo", prefix + "MemTotal: " + std::to_string(memory_kib) + " kB\n" + prefix + "MemFree: " + std::to_string(memory_kib / 2) +
                                " kB\n" + prefix + "Active(file): 8 kB\n");
  }
  void Allowed(const std::string& cpus, const std::string& nodes) {
    Write(root_ + "/proc/self/status", "Name:\tx\nCpus_allowed_list:\t" + cpus + "\nMems_allowed_list:\t" + nodes + "\n");
  }

 private:
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << text;
  }
  const std::string root_;
};

TEST(ParseCpuList, Lists) {
  EXPECT_THAT(*ParseCpuList("0-2,5,7-8\n"), ElementsAre(0, 1, 2, 5, 7, 8));
  EXPECT_THAT(*ParseCpuList(""), IsEmpty());
  for (const char* bad : {"a", "3-1", "1-2-3", "-1", "1,,2", "0-99999999"}) {
    EXPECT_EQ(ParseCpuList(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Topology, NodesWithHoles) {
  FakeMachine machine;
  machine.Node(0, "0-3", 1000, "10 20");
  machine.Node(2, "4-7", 2000, "20 10");
  machine.Allowed("0-7", "0,2");
  const Topology t = DiscoverTopology(machine.root());
  ASSERT_EQ(t.nodes.size(), 2u);
  EXPECT_EQ(t.nodes[1].id, 2);
  EXPECT_EQ(t.nodes[1].memory_bytes, 2000u * 1024);
  EXPECT_EQ(t.nodes[1].free_bytes, 1008u * 1024);
  const std::vector<ShardHome> homes = PlaceShards(t, 2);
  EXPECT_EQ(homes[0].node, 0);
  EXPECT_EQ(homes[1].node, 2);
  EXPECT_THAT(homes[1].cpus, ElementsAre(4, 5, 6, 7));
  // More shards than nodes: neighbours share one; fewer: the first nodes.
  const std::vector<ShardHome> four = PlaceShards(t, 4);
  EXPECT_EQ(four[1].node, 0);
  EXPECT_EQ(four[2].node, 2);
  EXPECT_EQ(PlaceShards(t, 1)[0].node, 0);
}

TEST(Topology, NodeWithoutMemoryLendsItsCpusToTheNearest) {
  FakeMachine machine;
  machine.Node(0, "0-1", 1000, "10 20 30");
  machine.Node(1, "2-3", 1000, "20 10 15");
  machine.Node(2, "4-5", 0, "30 15 10");
  machine.Allowed("0-5", "0-1");
  const Topology t = DiscoverTopology(machine.root());
  ASSERT_EQ(t.notes.size(), 1u);
  EXPECT_THAT(t.notes[0], HasSubstr("node 2 has no memory"));
  const std::vector<ShardHome> homes = PlaceShards(t, 2);
  EXPECT_THAT(homes[0].cpus, ElementsAre(0, 1));
  EXPECT_THAT(homes[1].cpus, ElementsAre(2, 3, 4, 5));
}

TEST(Topology, MemoryOnlyNodeHoldsNoShard) {
  FakeMachine machine;
  machine.Node(0, "0-1", 1000, "10 40");
  machine.Node(1, "", 9000, "40 10");
  machine.Allowed("0-1", "0-1");
  const Topology t = DiscoverTopology(machine.root());
  for (const ShardHome& home : PlaceShards(t, 3)) {
    EXPECT_EQ(home.node, 0);
    EXPECT_THAT(home.cpus, ElementsAre(0, 1));
  }
}

TEST(Topology, CpusetOfTwoCpusOnOneNode) {
  FakeMachine machine;
  machine.Node(0, "0-7", 1000, "10 20");
  machine.Node(1, "8-15", 1000, "20 10");
  machine.Allowed("9-10", "1");
  const Topology t = DiscoverTopology(machine.root());
  EXPECT_THAT(t.AllCpus(), ElementsAre(9, 10));
  EXPECT_EQ(t.nodes[0].memory_bytes, 0u);
  for (const ShardHome& home : PlaceShards(t, 2)) {
    EXPECT_EQ(home.node, 1);
    EXPECT_THAT(home.cpus, ElementsAre(9, 10));
  }
}

TEST(Topology, CpusWithoutMemoryAndMemoryWithoutCpus) {
  FakeMachine machine;
  machine.Node(0, "0-1", 0, "10 20");
  machine.Node(1, "", 1000, "20 10");
  machine.Allowed("0-1", "1");
  const std::vector<ShardHome> homes = PlaceShards(DiscoverTopology(machine.root()), 2);
  for (const ShardHome& home : homes) {
    EXPECT_EQ(home.node, 1);
    EXPECT_THAT(home.cpus, ElementsAre(0, 1));
  }
}

TEST(Topology, NoInformationAtAll) {
  FakeMachine machine;
  const Topology t = DiscoverTopology(machine.root());
  ASSERT_EQ(t.nodes.size(), 1u);
  EXPECT_FALSE(t.nodes[0].cpus.empty());
  EXPECT_FALSE(PlaceShards(t, 2)[1].cpus.empty());
  EXPECT_FALSE(t.notes.empty());
}

TEST(Topology, ThisMachineFollowsItsAffinity) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  const Topology all = DiscoverTopology();
  EXPECT_EQ(all.AllCpus().size(), static_cast<size_t>(CPU_COUNT(&before)));
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(all.AllCpus().back(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_THAT(DiscoverTopology().AllCpus(), ElementsAre(all.AllCpus().back()));
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(Topology, Pretended) {
  Topology real;
  real.nodes.resize(1);
  real.nodes[0].cpus = {3, 5, 7};
  real.nodes[0].memory_bytes = 100;
  const absl::StatusOr<Topology> two = PretendTopology(real, 2);
  ASSERT_TRUE(two.ok());
  EXPECT_TRUE(two->pretended);
  EXPECT_THAT(two->nodes[0].cpus, ElementsAre(3));
  EXPECT_THAT(two->nodes[1].cpus, ElementsAre(5, 7));
  const absl::StatusOr<Topology> five = PretendTopology(real, 5);
  ASSERT_TRUE(five.ok());
  for (const ShardHome& home : PlaceShards(*five, 5)) EXPECT_EQ(home.cpus.size(), 1u);
  EXPECT_EQ(PretendTopology(real, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Placement, PagesOfThisMachineAreSeen) {
  constexpr uint64_t kBytes = 64 * 4096;
  const int node = DiscoverTopology().nodes[0].id;
  {
    const PreferNode unknown(1 << 20);
    EXPECT_FALSE(unknown.note().empty());
  }
  const PreferNode prefer(node);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const absl::StatusOr<std::map<int, uint64_t>> pages = SamplePagesPerNode(memory, kBytes, 16);
  munmap(memory, kBytes);
  if (!pages.ok()) GTEST_SKIP() << "the kernel does not tell where pages are: " << std::string(pages.status().message());
  uint64_t total = 0;
  for (const auto& [id, count] : *pages) total += count;
  EXPECT_EQ(total, 16u);
  if (prefer.note().empty()) {
    EXPECT_EQ(pages->at(node), 16u);
  }
}

}  // namespace
}  // namespace hearth
