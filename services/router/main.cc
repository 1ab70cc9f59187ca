// hearth-router: the node's door. Clients come by HTTP and gRPC; their requests go to the workers by gRPC.
// Table of contents: flags -> configuration -> logging -> router -> serve -> drain.
#include <CLI/CLI.hpp>

#include <cstdio>

#include "common/base/logging.h"
#include "common/base/node_config.h"
#include "common/base/process.h"
#include "services/router/router.h"

namespace {

int ExitCodeOf(const absl::Status& status) {
  const bool config =
      absl::IsInvalidArgument(status) || absl::IsNotFound(status) || absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status);
  return config ? hearth::kExitConfig : hearth::kExitFailure;
}

}  // namespace

int main(int argc, char** argv) {
  hearth::HoldStopSignals();
  CLI::App app{"hearth-router: takes requests by HTTP and gRPC and runs them on the node's workers"};
  std::string config_path = "/etc/hearth/node.toml";
  app.add_option("--config", config_path, "node.toml of the node")->envname("HEARTH_CONFIG");
  std::string level;
  app.add_option("--log-level", level, "trace, debug, info, warn, error (default: node.log_level)");
  CLI11_PARSE(app, argc, argv);

  const auto config = hearth::ReadNodeConfig(config_path);
  if (!config.ok()) {
    std::fprintf(stderr, "hearth-router: %s\n", std::string(config.status().message()).c_str());
    return hearth::kExitConfig;
  }
  if (const absl::Status logging = hearth::InitLogging("router", level.empty() ? config->log_level : level); !logging.ok())
    return hearth::kExitConfig;

  static hearth::StopEvent stop;  // the signals' thread outlives this function
  hearth::InstallStopSignals([] { stop.Set(); });

  auto router = hearth::router::Router::Start(*config, nullptr);
  if (!router.ok()) {
    spdlog::error("{}", std::string(router.status().message()));
    return ExitCodeOf(router.status());
  }
  for (const std::string& address : (*router)->http_addresses()) spdlog::info("HTTP on http://{}", address);
  for (const std::string& address : (*router)->grpc_addresses()) spdlog::info("gRPC on {}", address);
  if (config->http_listen.empty()) spdlog::warn("HTTP is off: router.http_listen is empty");
  if (config->grpc_listen.empty()) spdlog::warn("gRPC for clients is off: router.grpc_listen is empty");
  hearth::NotifyReady("listening");

  if (const int64_t watchdog_us = hearth::WatchdogIntervalUs(); watchdog_us > 0) {
    while (!stop.WaitFor(std::chrono::microseconds(watchdog_us))) {
      // The loop must answer, or the service manager replaces the process.
      if ((*router)->Responds(absl::Microseconds(watchdog_us))) hearth::NotifyWatchdog();
    }
  } else {
    stop.Wait();
  }
  spdlog::info("stopping: running requests may end within {} ms", config->drain_ms);
  hearth::NotifyStopping();
  (*router)->Drain();
  router->reset();
  spdlog::info("stopped");
  return hearth::kExitOk;
}
