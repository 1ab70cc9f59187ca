// hearth-weightstore: flags -> config -> logging -> resources -> service -> serve -> drain.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <thread>

#include "common/base/logging.h"
#include "common/base/node_config.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "common/rpc/trace_service.h"
#include "services/weightstore/peer_listener.h"
#include "services/weightstore/progress_view.h"
#include "services/weightstore/service.h"
#include "services/weightstore/single_instance.h"
#include "services/weightstore/store.h"

namespace hearth {
namespace {

constexpr const char* kTeaching = R"(
What it does
  Loads the model of node.toml once into shared memory and keeps it there. Workers map it; when one of them,
  or this process, dies and comes back, nothing is read again: a restarted store adopts what is in memory.

Where things are
  weights, KV pages, table   <node.shm_dir>/hearth.<node.name>.*     (files of mode 0600)
  socket                     <node.runtime_dir>, see `hearth config`
  what it is doing           hearth status

Stopping
  SIGTERM ends it within a second, exit code 0; the model stays in memory for the next start. To give the
  memory back, stop all of the node and run `hearth drop`

Exit codes: 0 stopped, 1 failed (a restart may help), 78 the configuration or the model must be mended first.
)";

// Whether a restart without a change could go better.
int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kDataLoss: return kExitConfig;
    default: return kExitFailure;
  }
}

int Fail(const absl::Status& status, int code) {
  spdlog::error("{}", status.ToString());
  NotifyStatus(std::string(status.message()));
  return code;
}

// Pings the service manager as long as the watch thread and the tables' locks move; returns at the stop.
void ServeUntilStopped(const Store& store, StopEvent& stop) {
  const int64_t interval_us = WatchdogIntervalUs() > 0 ? WatchdogIntervalUs() : 1'000'000;
  int64_t last_ticks = -1;
  while (!stop.WaitFor(std::chrono::microseconds(interval_us))) {
    const int64_t ticks = store.ticks();
    if (ticks != last_ticks) NotifyWatchdog();
    last_ticks = ticks;
  }
}

int Run(const NodeConfig& config) {
  const int64_t started_ns = MonotonicNowNs();
  static StopEvent stop;  // the signal thread outlives this function
  InstallStopSignals([] { stop.Set(); });
  spdlog::debug("effective configuration ({}):\n{}", config.source_path, FormatNodeConfig(config));

  absl::StatusOr<std::unique_ptr<SingleInstance>> instance = SingleInstance::Acquire(config.StoreSocket() + ".lock");
  if (!instance.ok()) return Fail(instance.status(), ExitCodeOf(instance.status()));

  // What is in memory is taken over before anybody can ask for it; this reads no weights.
  Store store(config);
  bool needs_load = true;
  if (const absl::Status adopted = store.generations().Adopt(&needs_load); !adopted.ok()) {
    return StopRequested() ? kExitOk : Fail(adopted, ExitCodeOf(adopted));
  }
  store.WatchAdopted();

  StoreService service(store, config);
  grpc::ServerBuilder builder;
  SetServerDefaults(builder);
  builder.RegisterService(&service);
  TraceService trace("weightstore");
  builder.RegisterService(&trace);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return Fail(absl::InternalError("gRPC does not start"), kExitFailure);
  absl::StatusOr<std::unique_ptr<PeerListener>> listener = PeerListener::Start(config.StoreSocket(), 0660, server.get());
  if (!listener.ok()) return Fail(listener.status(), ExitCodeOf(listener.status()));
  service.SetListener(listener->get());
  spdlog::info("listening on {}", config.StoreSocket());

  int exit_code = kExitOk;
  bool ready = !needs_load;
  std::thread watchdog([&] { ServeUntilStopped(store, stop); });
  if (needs_load) {
    ProgressView view;
    LoadRequestOptions options;
    options.model_dir = config.model_path;
    options.replace = true;  // the configuration has been changed on purpose, and nobody is there to be asked
    options.cancelled = [] { return StopRequested(); };
    options.progress = [&](const LoadState& state) { view.Show(state); };
    const absl::StatusOr<GenerationPtr> loaded = store.generations().Load(options);
    ready = loaded.ok();
    if (!ready && !StopRequested()) {
      exit_code = Fail(Annotate(loaded.status(), "loading " + config.model_path), ExitCodeOf(loaded.status()));
      stop.Set();
    }
  }
  if (ready) {
    const double seconds = static_cast<double>(MonotonicNowNs() - started_ns) * 1e-9;
    service.SetReadySeconds(seconds);
    const GenerationPtr newest = store.generations().Newest();
    const std::string summary = newest == nullptr ? "ready"
                                                  : absl::StrCat(newest->adopted ? "adopted " : "loaded ", newest->image->model_dir(), ", ",
                                                                 HumanBytes(static_cast<double>(newest->image->total_bytes())), ", ",
                                                                 newest->table->num_pages(), " KV pages");
    spdlog::info("READY after {}: {}", HumanDuration(seconds), summary);
    NotifyReady(summary);
  }
  watchdog.join();

  NotifyStopping();
  (*listener)->StopAccepting();
  service.Stop();
  trace.Stop();
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(300));  // calls ask the listener who they are until here
  if (exit_code == kExitOk) spdlog::info("stopped; what is READY stays in {}", config.shm_dir);
  return exit_code;
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::HoldStopSignals();
  CLI::App app("Keeps a model's weights and KV pages in shared memory for the workers of this node.");
  app.footer(hearth::kTeaching);
  std::string config_path = "/etc/hearth/node.toml";
  std::string level;
  app.add_option("--config", config_path, "the node's configuration")->envname("HEARTH_CONFIG")->capture_default_str();
  app.add_option("--log-level", level, "trace, debug, info, warn, error (default: node.log_level)");
  CLI11_PARSE(app, argc, argv);

  const absl::StatusOr<hearth::NodeConfig> config = hearth::ReadNodeConfig(config_path);
  if (const absl::Status logging = hearth::InitLogging("weightstore", !level.empty() ? level
                                                                      : config.ok()  ? config->log_level
                                                                                     : "info");
      !logging.ok()) {
    fprintf(stderr, "%s\n", logging.ToString().c_str());
    return hearth::kExitConfig;
  }
  if (!config.ok()) return hearth::Fail(config.status(), hearth::kExitConfig);
  return hearth::Run(*config);
}
