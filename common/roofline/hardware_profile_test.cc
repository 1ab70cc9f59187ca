#include "common/roofline/hardware_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/roofline/op_time.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

constexpr char kCpu[] = R"(name = "box"
source = "made up"
[cpu]
name = "cpu"
sockets = 2
cores = 16
channels = 4
channel_gb_per_s = 25
core_gb_per_s = 10
memory_gib = 64
cache_mib = 32
bf16_gflops_per_core = 100
memory_efficiency = 0.5
compute_efficiency = 0.25
op_us = 5
)";
constexpr char kGpu[] = R"([gpu]
name = "gpu"
count = 2
memory_gib = 16
memory_gb_per_s = 1000
bf16_tflops = 100
link_gb_per_s = 25
link_us = 8
memory_efficiency = 0.9
compute_efficiency = 0.8
op_us = 4
enqueue_us = 2
)";

std::string Error(const std::string& text) {
  const auto profile = ParseHardwareProfile(text, "box.toml");
  EXPECT_FALSE(profile.ok());
  return std::string(profile.status().message());
}

std::string With(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos);
  return text.replace(at, from.size(), to);
}

TEST(HardwareProfile, SaysWhatTheFileSays) {
  const auto profile = ParseHardwareProfile(std::string(kCpu) + kGpu, "box.toml");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->cpu.BytesPerSecond(), 2 * 4 * 25e9 * 0.5);
  EXPECT_EQ(profile->cpu.AskedBytesPerSecond(), 2 * 16 * 10e9);
  EXPECT_EQ(profile->cpu.FlopsPerSecond(), 2 * 16 * 100e9 * 0.25);
  EXPECT_EQ(profile->num_gpus, 2);
  EXPECT_EQ(profile->gpu.FlopsPerSecond(), 80e12);
  const auto without = ParseHardwareProfile(kCpu, "box.toml");
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(without->num_gpus, 0);
  const auto again = ParseHardwareProfile(FormatHardwareProfile(*without), "again");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->num_gpus, 0);
}

TEST(HardwareProfile, ErrorsNameLineAndKey) {
  EXPECT_THAT(Error(With(kCpu, "cores = 16", "cores = 1.5")), HasSubstr("box.toml:6: cpu.cores must be a whole number"));
  EXPECT_THAT(Error(With(kCpu, "cores = 16", "cores = 0")), HasSubstr("cpu.cores = 0 is outside 1 to 4096"));
  EXPECT_THAT(Error(With(kCpu, "op_us = 5", "op_us = nan")), HasSubstr("cpu.op_us"));
  EXPECT_THAT(Error(With(kCpu, "name = \"cpu\"", "name = 3")), HasSubstr("cpu.name must be a text"));
  EXPECT_THAT(Error(With(kCpu, "cores = 16", "kores = 16")), HasSubstr("unknown key 'cpu.kores': there are name, sockets, cores"));
  EXPECT_THAT(Error(With(kCpu, "cores = 16\n", "")), HasSubstr("cpu.cores is missing"));
  EXPECT_THAT(Error(std::string(kCpu) + With(kGpu, "link_us = 8\n", "")), HasSubstr("gpu.link_us is missing"));
  EXPECT_THAT(Error("name = \"x\"\nsource = \"y\"\n"), HasSubstr("there must be a table [cpu]"));
  EXPECT_THAT(Error(With(kCpu, "cores = 16", "cores = ")), HasSubstr("box.toml:6"));
}

TEST(HardwareProfile, WhatIf) {
  const auto base = ParseHardwareProfile(std::string(kCpu) + kGpu, "box.toml");
  ASSERT_TRUE(base.ok());
  HardwareProfile p = *base;
  for (const char* change : {"gpus=1", "pcie=3", "vram=24GB", "sockets=1", "channels=8", "cores=20"})
    ASSERT_TRUE(ApplyWhatIf(change, p).ok()) << change;
  EXPECT_EQ(p.num_gpus, 1);
  EXPECT_EQ(p.gpu.link_gb_per_s, 12);
  EXPECT_EQ(p.gpu.memory_gib, 24);
  EXPECT_EQ(p.cpu.MemoryBytes(), base->cpu.MemoryBytes()) << "a socket less takes no memory away";
  EXPECT_EQ(p.cpu.channels, 8);
  EXPECT_EQ(p.cpu.cores, 20);
  for (const char* change :
       {"gpus", "gpus=x", "gpus=-1", "gpus=1000000", "cores=1000000000", "sockets=100000", "pcie=6", "vram=0", "colour=3", "channels=0"}) {
    EXPECT_EQ(ApplyWhatIf(change, p).code(), absl::StatusCode::kInvalidArgument) << change;
  }
  p = *base;
  EXPECT_THAT(std::string(ApplyWhatIf("channels=9", p).message()), HasSubstr("evenly over 2 sockets"));
  ASSERT_TRUE(ApplyWhatIf("gpus=0", p).ok());
  EXPECT_THAT(std::string(ApplyWhatIf("pcie=4", p).message()), HasSubstr("has no GPU"));
}

TEST(OpTime, AnOpLastsAsLongAsItsBusiestResource) {
  const auto p = ParseHardwareProfile(std::string(kCpu) + kGpu, "box.toml");
  ASSERT_TRUE(p.ok());
  const OpCost cost = {.flops = 8e9, .weight_bytes = 9e8, .activation_bytes = 1e6, .kv_bytes = 0};
  const OpTime gpu = TimeOnGpu(p->gpu, cost);
  EXPECT_DOUBLE_EQ(gpu.compute_s, 1e-4);
  EXPECT_DOUBLE_EQ(gpu.memory_s, 9.01e8 / 9e11);
  EXPECT_DOUBLE_EQ(gpu.Alone(), 4e-6 + gpu.memory_s);
  const OpTime cpu = TimeOnCpu(p->cpu, cost);
  EXPECT_DOUBLE_EQ(cpu.memory_s, 9e8 / 1e11) << "activations fit into the caches";
  EXPECT_DOUBLE_EQ(cpu.Alone(), 5e-6 + 8e9 / 8e11);
  OpCost large = cost;
  large.activation_bytes = 1e8;
  EXPECT_DOUBLE_EQ(TimeOnCpu(p->cpu, large).memory_s, 1e9 / 1e11) << "and here they don't";
  CpuProfile few = p->cpu;
  few.cores = 2;  // ask for 40 GB/s of the 100 that there are
  EXPECT_DOUBLE_EQ(TimeOnCpu(few, {.flops = 0, .weight_bytes = 4e9, .activation_bytes = 0, .kv_bytes = 0}).Alone(), 5e-6 + 0.1);
  EXPECT_DOUBLE_EQ(SecondsOnLink(p->gpu, 25e9), 1.0);
}

}  // namespace
}  // namespace hearth
