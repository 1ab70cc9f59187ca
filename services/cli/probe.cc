// `hearth probe`: measures this machine and writes its hardware profile, for `hearth plan`.
#include <iostream>

#include "absl/strings/str_format.h"
#include "common/base/process.h"
#include "common/device/host/thread_pool.h"
#include "common/roofline/probe.h"
#include "services/cli/command.h"
#include "services/cli/table.h"
#include "services/cli/text_file.h"

namespace hearth {
namespace {

int Probe(int threads, const std::string& out_path) {
  if (const int cores = CoresOfThisProcess(); threads > cores) {
    std::cerr << "hearth probe: note: --threads " << threads << ", but this process may run on " << cores << " cores: measured with " << cores
              << "\n";
  }
  const absl::StatusOr<ProbeReport> report = ProbeThisMachine(threads);
  if (!report.ok()) return Fail("probe", report.status());
  Table table({"what", "measured"});
  for (const auto& [n, rate] : report->read_gb_per_s) {
    table.Add({absl::StrFormat("plain reads, %d thread%s", n, n == 1 ? "" : "s"), absl::StrFormat("%.1f GB/s", rate)});
  }
  table.Add({"FP8 matrix by one row (decode)", absl::StrFormat("%.1f GB/s", report->gemv_gb_per_s)});
  table.Add({"FP8 matrix by 512 rows (prefill)", absl::StrFormat("%.0f GFLOP/s", report->gemm_gflops)});
  table.Add({"VDPBF16PS on registers", report->peak_gflops > 0 ? absl::StrFormat("%.0f GFLOP/s", report->peak_gflops) : "this CPU has none"});
  table.Add({"an op without work", absl::StrFormat("%.1f us", report->op_us)});
  table.Print(std::cerr);
  const std::string text = FormatHardwareProfile(report->profile);
  if (out_path.empty()) {
    std::cout << text;
    return kExitOk;
  }
  const absl::Status written = WriteTextFile(out_path, text);
  return written.ok() ? kExitOk : Fail("probe", written);
}

}  // namespace

void AddProbe(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("probe", "measure this machine and write its hardware profile");
  command->footer(
      "Takes a few seconds. Memory and arithmetic are measured, plain and by the product's own kernels; GPUs are not: add a table [gpu] by hand, as\n"
      "deploy/hardware has it. Whatever else runs on the machine shows in the figures.\n\n"
      "  hearth probe --out this.toml\n"
      "  hearth plan --model qwen3-30b-a3b --hardware this.toml");
  auto threads = std::make_shared<int>(0);
  auto out = std::make_shared<std::string>();
  command->add_option("--threads", *threads, "of which to measure up to (default: as many as this process may use)")->check(CLI::Range(1, 4096));
  command->add_option("--out,-o", *out, "file to write (default: standard output)");
  command->callback([=, &exit_code] { exit_code = Probe(*threads, *out); });
}

}  // namespace hearth
