// What it measures differs from minute to minute; that it measures, and that the profile is one, does not.
#include "common/roofline/probe.h"

#include <gtest/gtest.h>

namespace hearth {
namespace {

TEST(Probe, WritesAProfileThatIsRead) {
  const auto report = ProbeThisMachine(2);
  if (absl::IsResourceExhausted(report.status())) GTEST_SKIP() << report.status();
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->read_gb_per_s.size(), 2u) << "one thread, two threads";
  for (const auto& [threads, rate] : report->read_gb_per_s) EXPECT_GT(rate, 0.1) << threads;
  EXPECT_GT(report->gemv_gb_per_s, 0.01);
  EXPECT_GT(report->gemm_gflops, 0.1);
  EXPECT_GT(report->op_us, 0);
  const std::string text = FormatHardwareProfile(report->profile);
  const auto read = ParseHardwareProfile(text, "probe");
  ASSERT_TRUE(read.ok()) << read.status() << "\n" << text;
  EXPECT_EQ(read->num_gpus, 0);
  EXPECT_EQ(FormatHardwareProfile(*read), text);
  EXPECT_NEAR(read->cpu.core_gb_per_s / report->read_gb_per_s.front().second, 1, 0.01) << "what one thread reads";
  // The rates that a plan calculates with are the measured ones.
  EXPECT_NEAR(read->cpu.FlopsPerSecond() * 1e-9 / report->gemm_gflops, 1, 0.01);
}

}  // namespace
}  // namespace hearth
