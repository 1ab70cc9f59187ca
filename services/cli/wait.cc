// `hearth wait`: returns once the node answers requests, with its progress meanwhile; for scripts and people who have just typed `hearth up &`.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <thread>

#include "common/base/process.h"
#include "common/base/progress.h"
#include "common/base/time.h"
#include "services/cli/command.h"
#include "services/cli/node_client.h"

namespace hearth {
namespace {

int Wait(const std::string& config_path, double timeout_s) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("wait", absl::InvalidArgumentError(config.status().message()));
  const bool terminal = isatty(STDERR_FILENO);
  const int64_t start = MonotonicNowNs();
  std::string last;
  while (true) {
    const absl::StatusOr<v1::RouterStatus> router = RouterStatusOf(*config);
    if (router.ok() && router->ready()) break;
    std::string line = router.ok() ? router->not_ready_reason() : "the router does not answer yet";
    if (const auto store = StoreStatusOf(*config); store.ok() && store->loading().total_bytes() > 0) {
      const v1::LoadEvent& l = store->loading();
      line = l.phase() + " " + FormatProgress(l.done_bytes(), l.total_bytes(), l.bytes_per_second(), l.eta_seconds(), terminal);
    }
    if (terminal) {
      std::cerr << "\r\033[K" << line << std::flush;
    } else if (line != last) {
      std::cerr << line << "\n";
    }
    last = line;
    if (static_cast<double>(MonotonicNowNs() - start) / 1e9 > timeout_s) {
      if (terminal) std::cerr << "\n";
      return Fail("wait", absl::DeadlineExceededError(absl::StrCat("not ready after ", timeout_s, " s: ", line)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (terminal && !last.empty()) std::cerr << "\r\033[K";
  std::cerr << "ready after " << HumanDuration(static_cast<double>(MonotonicNowNs() - start) / 1e9) << "\n";
  return kExitOk;
}

}  // namespace

void AddWait(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("wait", "wait until the node answers requests");
  auto config = AddConfigOption(*command);
  auto timeout = std::make_shared<double>(600);
  command->add_option("--timeout", *timeout, "seconds to wait at most; then exit code 1")->check(CLI::NonNegativeNumber)->capture_default_str();
  command->callback([=, &exit_code] { exit_code = Wait(*config, *timeout); });
}

}  // namespace hearth
