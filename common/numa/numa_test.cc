// Odd machines as folders of text files; the pool and the policies on the machine at hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "common/base/hash.h"
#include "common/numa/page_survey.h"
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

// Memory of this process, 32 MB that begin on a huge page.
class Mapped {
 public:
  explicit Mapped(int advice) {
    map_ = mmap(nullptr, kBytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(map_, MAP_FAILED);
    data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(map_) + kHuge - 1) / kHuge * kHuge);
    advised_ = madvise(data_, kBytes, advice) == 0;
    for (uint64_t i = 0; i < kBytes; i += kHuge) data_[i] = 1;
  }
  ~Mapped() { munmap(map_, kBytes + kHuge); }
  static constexpr uint64_t kHuge = 2 << 20, kBytes = 32 << 20;
  PlacedMemory On(int node) const { return {data_, kBytes, node}; }
  bool advised() const { return advised_; }

 private:
  void* map_;
  uint8_t* data_;
  bool advised_;
};

// Two real nodes, as far as the survey can tell: the second has memory that nothing lies on.
Topology TwoNodes() {
  Topology topology = DiscoverTopology();
  if (topology.nodes[0].memory_bytes == 0) topology.nodes[0].memory_bytes = 1;
  NumaNode other = topology.nodes[0];
  other.id = topology.nodes.back().id + 1;
  topology.nodes.push_back(other);
  return topology;
}

TEST(PageSurvey, CountsPagesOnAnotherNodeThanWasMeant) {
  const Mapped memory(MADV_NOHUGEPAGE);
  const Topology topology = TwoNodes();
  const PlacedMemory right = memory.On(topology.nodes[0].id);
  const PageSurvey good = SurveyPages({&right, 1}, topology, 1000);
  EXPECT_EQ(good.looked_at, 16u) << "one place every 2 MB";
  if (good.nodes_asked == 0) GTEST_SKIP() << good.node_note;
  if (DiscoverTopology().nodes.size() > 1) GTEST_SKIP() << "where the kernel puts memory is its choice on this machine";
  EXPECT_EQ(good.NodesToString(), "0 of 16 looked at (0%)");
  const PlacedMemory both[] = {right, memory.On(topology.nodes.back().id)};
  const PageSurvey half = SurveyPages(both, topology, 8);
  EXPECT_EQ(half.NodesToString(), "4 of 8 looked at (50%)");
}

TEST(PageSurvey, OneNodeAndAPretendedTopologyNeedNoAsking) {
  const Mapped memory(MADV_NOHUGEPAGE);
  Topology one = DiscoverTopology();
  one.nodes.resize(1);
  const PlacedMemory placed = memory.On(5);
  EXPECT_EQ(SurveyPages({&placed, 1}, one, 8).NodesToString(), "0: the machine has one NUMA node");
  const absl::StatusOr<Topology> pretended = PretendTopology(TwoNodes(), 3);
  ASSERT_TRUE(pretended.ok());
  const PageSurvey survey = SurveyPages({&placed, 1}, *pretended, 8);
  EXPECT_EQ(survey.wrong_node, 0u);
  EXPECT_THAT(survey.NodesToString(), HasSubstr("pretended"));
  const PlacedMemory little = {placed.data, 4096, 0};
  EXPECT_THAT(SurveyPages({&little, 1}, one, 8).SizesToString(), HasSubstr("less than 2 MB"));
}

TEST(PageSurvey, TellsSmallPagesFromHugeOnes) {
  const Topology topology = DiscoverTopology();
  const Mapped small(MADV_NOHUGEPAGE);
  if (!small.advised()) GTEST_SKIP() << "this kernel has no transparent huge pages";
  const PlacedMemory in_small = small.On(0);
  EXPECT_EQ(SurveyPages({&in_small, 1}, topology, 100).SizesToString(), "2 MB 0%, 4 KB 100%");
  const Mapped huge(MADV_HUGEPAGE);
  const PlacedMemory in_huge = huge.On(0);
  const PageSurvey survey = SurveyPages({&in_huge, 1}, topology, 100);
  if (survey.huge == 0) GTEST_SKIP() << "this kernel made no huge pages";
  EXPECT_EQ(survey.SizesToString(), "2 MB 100%, 4 KB 0%");
}

}  // namespace
}  // namespace hearth
