#include "services/router/router.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "services/router/access.h"
#include "services/router/api_error.h"
#include "services/router/grpc_service.h"
#include "services/router/http/listen_address.h"
#include "services/router/node_trace.h"
#include "services/router/openai/http_api.h"
#include "services/router/planned_costs.h"
#include "services/router/status_service.h"

namespace hearth::router {
namespace {

constexpr int kPoolThreads = 4;  // tokenizing is quick; calls of the store may wait a second each
constexpr int64_t kExtendStopUs = 15'000'000;

class Latch {
 public:
  void Done() {
    std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }
  bool WaitFor(absl::Duration limit) {
    std::unique_lock lock(mutex_);
    const auto done = [&] { return done_; };
    if (limit != absl::InfiniteDuration()) return changed_.wait_for(lock, absl::ToChronoMilliseconds(limit), done);
    changed_.wait(lock, done);  // an infinite wait_for would overflow the clock and return at once
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Router>> Router::Start(const NodeConfig& config, std::unique_ptr<StoreClient> store, RouterTimes times) {
  std::unique_ptr<Router> router(new Router(config));
  RETURN_IF_ERROR(router->Init(std::move(store), times));
  return router;
}

Router::Router(const NodeConfig& config) : config_(config), started_ns_(MonotonicNowNs()) {}

absl::Status Router::Init(std::unique_ptr<StoreClient> store, const RouterTimes& times) {
  RETURN_IF_ERROR(CheckHardware(config_));
  ASSIGN_OR_RETURN(ModelInfo model, ModelInfo::Load(config_, config_.model_path));
  ASSIGN_OR_RETURN(ApiKeys keys, ApiKeys::Load(config_.api_key_file));
  keys_ = std::make_unique<ApiKeys>(std::move(keys));
  origins_ = std::make_unique<CorsOrigins>(config_.cors_origins);
  loop_ = std::make_unique<EventLoop>(kPoolThreads);
  if (store != nullptr) {
    store_ = std::move(store);
  } else {
    StoreClientOptions options;
    options.socket_path = config_.StoreSocket();
    options.kind = ClientKind::kRouter;
    options.name = "router";
    options.on_switch = [this](const Hash128&) { loop_->Post([this] { model_->Refresh(); }); };
    store_ = StoreClient::Start(std::move(options));
  }
  model_ = std::make_unique<ServedModel>(loop_.get(), store_.get(), config_, std::move(model));
  metrics_ = std::make_unique<Metrics>();
  peek_ = std::make_unique<PrefixPeek>(store_.get(), config_.chunked_prefill_max_tokens);

  SchedulerOptions options;
  options.max_queue = config_.max_queue;
  options.chunked_prefill_max_tokens = config_.chunked_prefill_max_tokens;
  options.path_by_length = config_.path_choice == "length";
  options.ttft_slo = absl::Milliseconds(config_.ttft_slo_ms);
  options.group_prefill_min_tokens = config_.group_prefill_min_tokens;
  options.give_up = times.give_up;
  options.admit_grace = times.admit_grace;
  options.link_times = times.link;
  scheduler_ = std::make_unique<Scheduler>(loop_.get(), std::move(options), model_.get(), store_.get(), peek_.get(), metrics_.get());
  health_ = std::make_unique<Health>(store_.get(), model_.get(), scheduler_.get(), times.store_grace);
  model_->set_on_replaced([this] {
    scheduler_->OnModelReplaced();
    PlanCostsOf(store_->View().model_dir);
  });
  scheduler_->set_gate([this] { return health_->StoreReadiness(); });

  RETURN_IF_ERROR(StartHttp(times));
  RETURN_IF_ERROR(StartGrpc());
  RETURN_IF_ERROR(StartAdmin());
  // From here the loop owns what was made.
  thread_ = std::thread([this] { loop_->Run(); });
  RunOnLoop([this] {
    for (int64_t i = 0; i < config_.decode_instances; ++i) {
      scheduler_->AddWorker(WorkerLink::Kind::kDecode, absl::StrCat("decode.", i), config_.WorkerSocket("decode", i));
    }
    for (int64_t i = 0; i < config_.prefill_instances; ++i) {
      scheduler_->AddWorker(WorkerLink::Kind::kPrefill, absl::StrCat("prefill.", i), config_.WorkerSocket("prefill", i));
    }
    scheduler_->set_on_readiness([this] { UpdateReadiness(); });
    UpdateReadiness();
    PlanCostsOf(config_.model_path);
  });
  return absl::OkStatus();
}

void Router::PlanCostsOf(const std::string& model_dir) {
  loop_->Offload([this, model_dir] {
    auto planned = std::make_shared<absl::StatusOr<std::vector<PlannedCost>>>(PlanCosts(config_, model_dir));
    loop_->Post([this, planned] {
      if (!planned->ok()) {
        spdlog::warn("first-token times are not predicted before passes were measured: {}", planned->status().ToString());
        return;
      }
      if (scheduler_ == nullptr) return;
      for (const PlannedCost& each : **planned) scheduler_->costs().StartFrom(each.way, each.cost, each.shape_only);
    });
  });
}

absl::Status Router::StartHttp(const RouterTimes& times) {
  HttpApi::Parts parts{loop_.get(),    model_.get(),     keys_.get(),
                       origins_.get(), scheduler_.get(), health_.get(),
                       metrics_.get(), peek_.get(),      config_.max_tokens_default};
  http_api_ = std::make_unique<HttpApi>(parts);
  HttpServerOptions options;
  options.max_body_bytes = config_.max_body_bytes;
  options.keep_alive = absl::Milliseconds(config_.keep_alive_ms);
  options.comment_every = times.comment_every;
  options.unsent_bytes_max = kUnsentBytesMax;
  options.render_error = &HttpApi::ErrorReply;
  options.on_answer = [this](int status) { metrics_->OnHttpAnswer(status); };
  ASSIGN_OR_RETURN(http_, HttpServer::Start(loop_.get(), config_.http_listen, std::move(options),
                                            [this](HttpRequest request, std::shared_ptr<HttpResponder> responder) {
                                              http_api_->Handle(std::move(request), std::move(responder));
                                            }));
  return absl::OkStatus();
}

absl::Status Router::StartGrpc() {
  inference_ = std::make_unique<InferenceService>(
      InferenceService::Parts{loop_.get(), model_.get(), keys_.get(), scheduler_.get(), health_.get(), peek_.get(), config_.max_tokens_default});
  if (config_.grpc_listen.empty()) return absl::OkStatus();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetServerDefaults(builder);
  builder.RegisterService(inference_.get());
  struct Port {
    NumericAddress address;
    int bound = 0;
  };
  std::vector<std::unique_ptr<Port>> ports;
  for (const std::string& text : config_.grpc_listen) {
    ASSIGN_OR_RETURN(const ListenHost host, ParseListen(text, kGrpcPort));
    ASSIGN_OR_RETURN(const std::vector<NumericAddress> addresses, ResolveListen(host));
    for (const NumericAddress& address : addresses) {
      // gRPC says only that it failed; our own attempt says why.
      RETURN_IF_ERROR(Annotate(CheckBindable(address, host.port), absl::StrCat("listening for gRPC on ", text)));
      ports.push_back(std::make_unique<Port>(Port{address}));
      builder.AddListeningPort(FormatAddress(address, host.port), grpc::InsecureServerCredentials(), &ports.back()->bound);
    }
  }
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) return absl::UnavailableError("gRPC can't listen on router.grpc_listen: is another process there?");
  for (const auto& port : ports) grpc_addresses_.push_back(FormatAddress(port->address, static_cast<uint16_t>(port->bound)));
  return absl::OkStatus();
}

absl::Status Router::StartAdmin() {
  status_service_ = std::make_unique<StatusService>(loop_.get(), [this](v1::RouterStatus* status) { FillStatus(status); });
  std::vector<NodeTrace::Peer> traced;
  for (int64_t i = 0; i < config_.prefill_instances; ++i) traced.push_back({absl::StrCat("prefill.", i), config_.WorkerSocket("prefill", i)});
  for (int64_t i = 0; i < config_.decode_instances; ++i) traced.push_back({absl::StrCat("decode.", i), config_.WorkerSocket("decode", i)});
  traced.push_back({"weightstore", config_.StoreSocket()});
  node_trace_ = std::make_unique<NodeTrace>(loop_.get(), scheduler_.get(), std::move(traced));
  ASSIGN_OR_RETURN(admin_, ServeUnix(config_.RouterAdminSocket(), 0660, {status_service_.get(), node_trace_.get()}));
  return absl::OkStatus();
}

Router::~Router() {
  const auto now = std::chrono::system_clock::now();
  // Servers first: their calls end, and with them what they run on the loop.
  if (thread_.joinable()) {
    RunOnLoop([this] {
      scheduler_->FailAll(absl::UnavailableError("the node has stopped"));
      model_->Stop();
      http_.reset();
      // Links may still change while the servers' calls end: that must not set the timer anew.
      scheduler_->set_on_readiness(nullptr);
      readiness_timer_.reset();
    });
  }
  if (node_trace_) node_trace_->Stop();
  if (grpc_) grpc_->Shutdown(now + std::chrono::milliseconds(500));
  if (admin_) admin_->Shutdown(now + std::chrono::milliseconds(500));
  if (!thread_.joinable()) return;
  loop_->DrainPool();
  RunOnLoop([this] { scheduler_.reset(); });
  loop_->Stop();
  thread_.join();
}

const std::vector<std::string>& Router::http_addresses() const { return http_->addresses(); }

void Router::RunOnLoop(std::function<void()> work) {
  Latch latch;
  loop_->Post([&] {
    work();
    latch.Done();
  });
  latch.Wait();
}

bool Router::Responds(absl::Duration limit) {
  auto latch = std::make_shared<Latch>();
  loop_->Post([latch] { latch->Done(); });
  return latch->WaitFor(limit);
}

void Router::Drain() {
  auto empty = std::make_shared<Latch>();
  RunOnLoop([&] {
    http_->Drain();
    scheduler_->Drain([empty] { empty->Done(); });
    UpdateReadiness();
  });
  // The service manager is told every second that the drain goes on: its own limit on stopping is for a process that does not.
  const absl::Time end = absl::Now() + absl::Milliseconds(config_.drain_ms);
  bool is_empty = false;
  while (!is_empty && absl::Now() < end) {
    NotifyExtendTimeout(kExtendStopUs);
    NotifyWatchdog();
    is_empty = empty->WaitFor(std::clamp(end - absl::Now(), absl::ZeroDuration(), absl::Seconds(1)));
  }
  if (!is_empty) {
    RunOnLoop([&] { scheduler_->FailAll(absl::UnavailableError("the node is stopping and its drain time is over: send the request again")); });
  }
  // Last answers are on their way to clients; a client that does not read them is not waited for.
  for (int i = 0; i < 50; ++i) {
    size_t open = 0;
    RunOnLoop([&] { open = http_->connections(); });
    if (open == 0) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
}

void Router::UpdateReadiness() {
  const HealthView health = health_->Check();
  if (health.ready != was_ready_) {
    // Only what has changed: each setting is sent to every watcher.
    if (auto* service = grpc_ == nullptr ? nullptr : grpc_->GetHealthCheckService()) {
      // By name: setting all of them at once would also set what clients watch that does not exist.
      for (const char* name : {"", "hearth.v1.Inference"}) service->SetServingStatus(name, health.ready);
    }
    was_ready_ = health.ready;
    if (const auto permit = LogAllowed("readiness", 10)) spdlog::info("{}", health.ready ? "ready" : "not ready: " + health.reason);
  }
  NotifyStatus(health.ready ? "ready" : health.reason);
  // The store's state has no callback: looked at once a second, which costs nothing.
  readiness_timer_ = loop_->After(absl::Seconds(1), [this] { UpdateReadiness(); });
}

void Router::FillStatus(v1::RouterStatus* status) {
  const int64_t now_ns = MonotonicNowNs();
  const HealthView health = health_->Check();
  status->set_pid(getpid());
  status->set_uptime_seconds(static_cast<double>(now_ns - started_ns_) / 1e9);
  if (model_->current() != nullptr) status->set_model(model_->current()->name);
  status->set_ready(health.ready);
  status->set_not_ready_reason(health.reason);
  status->set_queued(metrics_->streams(StreamState::kQueued));
  status->set_prefilling(metrics_->streams(StreamState::kPrefilling) + metrics_->streams(StreamState::kHandoff));
  status->set_decoding(metrics_->streams(StreamState::kDecoding));
  status->set_requests_total(metrics_->requests());
  status->set_requests_failed(metrics_->failed());
  status->set_requests_cancelled(metrics_->cancelled());
  status->set_prompt_tokens_total(metrics_->prompt_tokens());
  status->set_cached_tokens_total(metrics_->cached_tokens());
  status->set_completion_tokens_total(metrics_->completion_tokens());
  status->set_tokens_per_second(metrics_->TokensPerSecond(now_ns));
  const auto latency = [](const RecentValues& values, v1::RouterStatus::Latency* out) {
    out->set_p50_ms(values.Percentile(0.5));
    out->set_p90_ms(values.Percentile(0.9));
    out->set_p99_ms(values.Percentile(0.99));
    out->set_count(values.count());
  };
  latency(metrics_->ttft_ms(), status->mutable_ttft());
  latency(metrics_->tpot_ms(), status->mutable_tpot());
  for (const std::string& address : http_->addresses()) status->add_listening("http://" + address);
  for (const std::string& address : grpc_addresses_) status->add_listening("grpc://" + address);
  for (const auto& link : scheduler_->links()) {
    auto* out = status->add_workers();
    out->set_name(link->name());
    out->set_state(link->state());
  }
  status->set_resumes_total(metrics_->resumes());
  scheduler_->FillPaths(status);
}

}  // namespace hearth::router
