#include "common/worker/worker_process.h"

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <optional>

#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/device/host/host_device.h"
#include "common/experts/cpu_expert_engine.h"
#include "common/formats/model_config.h"
#include "common/kernels/kernels.h"
#include "common/numa/topology.h"
#include "common/rpc/rpc.h"
#include "common/rpc/store_client.h"
#include "common/rpc/trace_service.h"
#include "common/shm/kv_pool.h"
#include "common/shm/weight_image.h"
#include "common/worker/continue_service.h"
#include "common/worker/memory_facts.h"

namespace hearth {
namespace {

// Everything of a worker that exists once a generation is mapped, in the order in which it is made.
struct Engine {
  std::shared_ptr<const WeightImage> image;
  std::shared_ptr<KvPool> kv;
  std::unique_ptr<HostDevice> device;
  std::shared_ptr<PrefillGate> gate;
  std::unique_ptr<Device> gated;  // the same, through the gate; null: it is not
  std::unique_ptr<Model> model;
  std::shared_ptr<StreamLoop> loop;
  MemoryFacts facts;
};

// What the signal thread and the store client's thread say to the main thread and its loop. Shared, since the signal thread outlives main.
class Control {
 public:
  std::atomic<bool> drain{false}, lost{false};

  void SetLoop(std::shared_ptr<StreamLoop> loop) {
    std::lock_guard lock(mutex_);
    loop_ = std::move(loop);
  }
  void ForLoop(const std::function<void(StreamLoop&)>& tell) {
    std::lock_guard lock(mutex_);
    if (loop_ != nullptr) tell(*loop_);
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<StreamLoop> loop_;
};

absl::StatusOr<std::optional<Isa>> ChosenIsa(const NodeConfig& config, const std::string& name) {
  RETURN_IF_ERROR(config.AllowsIsa(name));
  if (name == "auto") return std::optional<Isa>();
  const std::optional<Isa> isa = IsaFromName(name);
  if (!isa.has_value()) return absl::InvalidArgumentError("unknown instruction-set path '" + name + "'");
  return isa;
}

Numerics NumericsOf(const NodeConfig& config) { return config.numerics == "fast" ? Numerics::kFast : Numerics::kExact; }

// Where the threads of each shard's pool run: on the node that holds the shard. On a machine of one node nothing is pinned, since prefill and
// decode share its cores.
std::vector<std::vector<int>> CpusOfShards(const Topology& topology, const std::vector<ShardHome>& homes) {
  std::vector<std::vector<int>> cpus;
  if (topology.nodes.size() < 2) return cpus;
  for (const ShardHome& home : homes) cpus.push_back(home.cpus);
  return cpus;
}

// What this worker needs to take turns with others on the same cores (common/shm/turn_board.h). Without it all goes on, only unprotected from each other.
absl::Status JoinTurns(const RegionPlace& place, const Hash128& generation, bool is_prefill, int64_t index, StreamLoopOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<TurnBoard> board, TurnBoard::Attach(place, generation));
  const int slot = is_prefill ? PrefillTurnSlot(index) : DecodeTurnSlot(index);
  options.cpus = CpusOfThisProcess();
  RETURN_IF_ERROR(board->Claim(slot, SelfProcess(), options.cpus));
  if (is_prefill) options.gate = std::make_shared<PrefillGate>(board, slot, options.cpus);
  options.turns = std::move(board);
  options.turn_slot = slot;
  return absl::OkStatus();
}

absl::StatusOr<Engine> MakeEngine(const NodeConfig& config, const WorkerKindInfo& kind, int64_t index, std::optional<Isa> isa,
                                  const Hash128& generation, StoreClient& store) {
  Engine engine;
  const RegionPlace place = store.View().place;
  ASSIGN_OR_RETURN(engine.image, WeightImage::Attach(place, generation));
  ASSIGN_OR_RETURN(engine.kv, KvPool::Attach(place, generation));
  ASSIGN_OR_RETURN(const ModelConfig model_config, ParseModelConfig(engine.image->config_json(), engine.image->generation_config_json()));
  const Topology topology = DiscoverTopology();
  const std::vector<ShardHome> homes = PlaceShards(topology, static_cast<int>(engine.image->num_shards()));
  engine.facts.pages = SurveyImage(*engine.image, topology, homes);  // before anything else reads it
  ASSIGN_OR_RETURN(engine.device, MakeHostDevice({.isa = isa,
                                                  .numerics = NumericsOf(config),
                                                  .num_threads = static_cast<int>(kind.threads(config)),
                                                  .num_pools = static_cast<int>(engine.image->num_shards()),
                                                  .cpus = CpusOfShards(topology, homes),
                                                  .memory_budget_bytes = static_cast<uint64_t>(kind.device_memory_bytes(config)),
                                                  .activation_terms = static_cast<int>(config.activation_terms),
                                                  .kv_dtype = config.kv_type()}));
  StreamLoopOptions options = kind.options(config);
  if (const absl::Status joined = JoinTurns(place, generation, std::string_view(kind.kind) == "prefill", index, options); !joined.ok()) {
    spdlog::warn("prompts and running streams on the same cores will slow each other down: {}", joined.ToString());
  }
  engine.gate = options.gate;
  if (engine.gate != nullptr) engine.gated = GateOps(*engine.device, *engine.gate);
  Device& device = engine.gated != nullptr ? *engine.gated : *engine.device;
  ASSIGN_OR_RETURN(engine.model, Model::Bind(model_config, engine.image, device));
  if (const absl::Status fits = CheckFits(engine.kv->geometry(), engine.model->kv_geometry()); !fits.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(fits.message(), ": node.kv_dtype or node.activation_terms is another than when the store made ",
                                                      "the pool; restart hearth-weightstore, it makes a new one and keeps the weights"));
  }
  // Fetching ahead is the decode kernels' affair.
  if (std::string_view(kind.kind) == "decode") {
    ASSIGN_OR_RETURN(engine.facts.fetch_ahead, ProbeImage(engine.image, model_config, *engine.device));
    spdlog::info("prefetch: {}", engine.facts.fetch_ahead->ToString());
  }
  spdlog::info("image pages: {}; on the wrong node: {}", engine.facts.pages.SizesToString(), engine.facts.pages.NodesToString());
  ASSIGN_OR_RETURN(engine.loop, kind.make_loop(device, *engine.model, *engine.kv, store, config, options, index));
  return engine;
}

// What a limit of device memory that was too small should have been, for whoever has to set it.
absl::StatusOr<uint64_t> DeviceMemoryMin(const NodeConfig& config, const WorkerKindInfo& kind, std::optional<Isa> isa, const Hash128& generation,
                                         const RegionPlace& place) {
  if (!kind.device_memory_min) return absl::UnimplementedError("not known beforehand");
  ASSIGN_OR_RETURN(const auto image, WeightImage::Attach(place, generation));
  ASSIGN_OR_RETURN(const ModelConfig model_config, ParseModelConfig(image->config_json(), image->generation_config_json()));
  ASSIGN_OR_RETURN(const auto device, MakeHostDevice({.isa = isa,
                                                      .numerics = NumericsOf(config),
                                                      .num_threads = 1,
                                                      .activation_terms = static_cast<int>(config.activation_terms),
                                                      .kv_dtype = config.kv_type()}));
  ASSIGN_OR_RETURN(const auto model, Model::Bind(model_config, image, *device));
  return kind.device_memory_min(*device, *model, config);
}

}  // namespace

int RunWorkerProcess(int argc, char** argv, const WorkerKindInfo& kind) {
  HoldStopSignals();
  const int64_t started_ns = MonotonicNowNs();
  CLI::App app(kind.description);
  std::string config_path = "/etc/hearth/node.toml", isa_flag, level_flag;
  int64_t index = 0;
  app.add_option("--config", config_path, "the node's configuration")->envname("HEARTH_CONFIG")->capture_default_str();
  app.add_option("--index", index, "which worker of its kind this is, from 0: names its socket and lease")->capture_default_str();
  app.add_option("--isa", isa_flag,
                 "force an instruction-set path: scalar, avx2, avx512, avx512bf16, amx (default: decode.isa of the configuration)");
  app.add_option("--log-level", level_flag, "trace, debug, info, warn, error (default: node.log_level)");
  CLI11_PARSE(app, argc, argv);

  const std::string name = absl::StrCat(kind.kind, ".", index);
  const auto fail = [&](const absl::Status& status, int code) {
    std::cerr << "hearth-" << kind.kind << ": " << StdSv(status.message()) << "\n";
    return code;
  };
  absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return fail(config.status(), kExitConfig);
  const int64_t instances = std::string_view(kind.kind) == "prefill" ? config->prefill_instances : config->decode_instances;
  if (index < 0 || index >= instances) {
    return fail(absl::InvalidArgumentError(absl::StrCat("--index ", index, ": the configuration has ", kind.kind, ".instances = ", instances,
                                                        ", so the router would never ask this worker")),
                kExitConfig);
  }
  const absl::StatusOr<std::optional<Isa>> isa = ChosenIsa(*config, isa_flag.empty() ? config->isa : isa_flag);
  if (!isa.ok()) return fail(isa.status(), kExitConfig);
  if (absl::Status s = InitLogging(name, level_flag.empty() ? config->log_level : level_flag); !s.ok()) return fail(s, kExitConfig);

  // The main thread waits for one of: a stop signal, a Switch, the loss of the store's trust.
  const auto control = std::make_shared<Control>();
  InstallStopSignals([control] {
    NotifyStopping();
    control->ForLoop([](StreamLoop& loop) { loop.Stop(); });
  });

  ContinueService service({kind.kind, started_ns, kind.options(*config).max_streams});
  service.SetWaiting("waiting for the weight store at " + config->StoreSocket());
  TraceService trace(name);
  absl::StatusOr<std::unique_ptr<grpc::Server>> server = ServeUnix(config->WorkerSocket(kind.kind, index), 0660, {&service, &trace});
  if (!server.ok()) {
    const bool config_wrong = absl::IsNotFound(server.status()) || absl::IsPermissionDenied(server.status());
    return fail(server.status(), config_wrong ? kExitConfig : kExitFailure);
  }

  // What keeps KV of one kind of arithmetic apart from another's must be said before there is a device.
  const Isa path = isa->value_or(SupportedIsas(NumericsOf(*config)).back());
  const std::string numerics = HostNumerics(path, static_cast<int>(config->activation_terms), config->kv_type());
  std::unique_ptr<StoreClient> store = StoreClient::Start({
      .socket_path = config->StoreSocket(),
      .kind = std::string_view(kind.kind) == "prefill" ? ClientKind::kPrefill : ClientKind::kDecode,
      .name = name,
      .numerics = Xxh3_64(numerics.data(), numerics.size()),
      .on_switch =
          [control](const Hash128&) {
            control->drain.store(true);
            control->ForLoop([](StreamLoop& loop) { loop.Drain(); });
          },
      .on_lost =
          [control](const absl::Status& why) {
            spdlog::error("the weight store no longer knows this worker: {}; ending", why.ToString());
            control->lost.store(true);
            control->ForLoop([](StreamLoop& loop) { loop.Stop(); });
          },
  });
  // It answers Status and Continue from here on, if only with "not yet": what starts behind it need not wait for the weights.
  NotifyReady("waiting for the weight store");
  const auto stopped = [] {
    NotifyWatchdog();
    return StopRequested();
  };
  const absl::StatusOr<Hash128> generation = store->WaitForGeneration(stopped, INT64_MAX);
  if (!generation.ok()) return StopRequested() ? kExitOk : fail(generation.status(), kExitFailure);

  absl::StatusOr<Engine> engine = MakeEngine(*config, kind, index, *isa, *generation, *store);
  if (!engine.ok()) {
    const int64_t budget = kind.device_memory_bytes(*config);
    if (budget > 0 && absl::IsResourceExhausted(engine.status())) {
      const absl::StatusOr<uint64_t> needed = DeviceMemoryMin(*config, kind, *isa, *generation, store->View().place);
      const std::string key = absl::StrCat(kind.kind, ".device_memory_bytes");
      return fail(
          Annotate(engine.status(), absl::StrCat(key, " = ", budget, needed.ok() ? absl::StrCat(", the smallest that works is ", *needed) : "")),
          kExitConfig);
    }
    return fail(engine.status(), absl::IsInvalidArgument(engine.status()) ? kExitConfig : kExitFailure);
  }
  control->SetLoop(engine->loop);
  if (StopRequested() || control->lost.load()) engine->loop->Stop();
  if (control->drain.load()) engine->loop->Drain();
  service.SetReady({engine->loop, *generation, engine->device->caps().description, engine->device->caps().numerics, engine->facts, {}});
  spdlog::info("ready: generation {}, {}, {} after start", generation->ToHex().substr(0, 8), engine->device->caps().description,
               HumanDuration(static_cast<double>(MonotonicNowNs() - started_ns) / 1e9));
  NotifyStatus("serving");

  // The watchdog is fed by the main thread only while the loop makes rounds or is idle: a wedged loop is restarted by the service manager.
  std::unique_ptr<HostSignal> done = engine->device->MakeSignal();
  StopToken finished;
  std::unique_ptr<Actor> runner = engine->device->Spawn("step-loop", [&] {
    engine->loop->Run();
    finished.Stop();
    done->Notify();
  });
  const int64_t watchdog_ns = WatchdogIntervalUs() > 0 ? WatchdogIntervalUs() * 1000 : 1'000'000'000;
  while (!finished.stopped()) {
    const uint64_t seen = done->Current();
    engine->device->HostWait(*done, seen, {.deadline_ns = engine->device->Now() + std::min<int64_t>(watchdog_ns, 500'000'000), .stop = &finished});
    if (engine->loop->Responsive(engine->device->Now())) NotifyWatchdog();
    if (control->drain.load()) {
      service.SetDraining();
      if (engine->loop->Idle()) engine->loop->Stop();
    }
  }
  runner.reset();
  service.SetDraining();
  // The Offers reach the store before the lease ends; then the last events (`preempted`) get out, and no thread of gRPC is left that could hold the loop.
  engine->loop->Close();
  trace.Stop();
  (*server)->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  server->reset();
  control->SetLoop(nullptr);
  service.Forget();
  store.reset();
  engine->loop.reset();
  spdlog::info("stopped");
  return control->lost.load() ? kExitFailure : kExitOk;
}

}  // namespace hearth
