// What the router's tests put around it: a worker that plays a script on a Unix socket, a store without a process, an HTTP client that
// shows every byte. Room: services/router, tests only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/node_config.h"
#include "common/rpc/store_client.h"
#include "hearth/v1/worker.grpc.pb.h"
#include "services/router/model_info.h"
#include "services/router/router.h"

namespace hearth::router::testing {

// The demo model's directory.
std::string ModelDir();
const ModelInfo& DemoModel();
// Token ids of a text, without BOS.
std::vector<int32_t> Ids(const std::string& text);

class FakeStore final : public StoreClient {
 public:
  FakeStore();
  StoreView View() const override;
  absl::StatusOr<Hash128> WaitForGeneration(const std::function<bool()>&, int64_t) override { return generation_; }
  absl::StatusOr<uint64_t> MakeRings(int64_t, const std::function<bool()>&) override { return Refused(); }
  absl::StatusOr<uint64_t> JoinGroup(int32_t, int32_t, uint64_t) override { return Refused(); }
  absl::StatusOr<int32_t> Peek(const Hash128&, const std::vector<int32_t>&) override { return peek.load(); }
  absl::StatusOr<std::vector<PageRef>> Match(const Hash128&, const std::vector<int32_t>&) override { return Refused(); }
  absl::StatusOr<std::vector<PageRef>> Alloc(const Hash128&, int32_t, int32_t, int32_t) override { return Refused(); }
  absl::Status Seal(const Hash128&, const std::vector<int32_t>&) override { return Refused(); }
  absl::Status Offer(const Hash128&) override { return Refused(); }
  absl::StatusOr<std::vector<PageRef>> Take(const Hash128&) override { return Refused(); }
  absl::Status Free(const Hash128& request, int32_t from_index) override;

  void SetView(StoreView view);
  // A generation of `model_dir` (empty: the configuration's) that is READY.
  static StoreView ReadyView(const Hash128& generation = {1, 2}, const Hash128& fingerprint = {}, const std::string& model_dir = "",
                             int64_t kv_tokens = 0);
  std::vector<std::string> freed() const;  // request ids as on the wire
  std::atomic<int32_t> peek{0};

 private:
  static absl::Status Refused() { return absl::UnimplementedError("a router asks for no pages and no rings"); }
  mutable std::mutex mutex_;
  StoreView view_;
  std::vector<std::string> freed_;
  Hash128 generation_;
};

// Outlives its router: hand it over as a StoreClient that forwards.
std::unique_ptr<StoreClient> Forward(FakeStore* store);

class FakeWorker final : public v1::Worker::Service {
 public:
  FakeWorker(std::string socket_path, std::string kind);
  ~FakeWorker() override;

  void Start();
  void Kill();  // every open call breaks, the socket is dead

  // What a decode stream outputs: token `i` of a stream. Default: the script, then its end token.
  void SetScript(std::vector<int32_t> output);
  std::function<int32_t(const v1::Stream& stream, int32_t index)> token_of;  // set before Start
  // Of the weights that it says it has; as on the wire. Streams of another one are refused.
  void SetGeneration(const Hash128& generation);
  std::string generation() const;

  std::function<void()> before_started;  // of each Continue

  std::atomic<int64_t> token_delay_us{0};
  std::atomic<int32_t> hold_at{-1};  // before this output index, wait for Release
  std::atomic<int32_t> fail_at{-1};  // at this output index the call ends UNAVAILABLE, once
  std::atomic<bool> fails_always{false};
  std::atomic<int32_t> preempt_at{-1};    // at this output index the stream loses its place, once
  std::atomic<int32_t> refuse{0};         // so many calls are refused: no place
  std::atomic<bool> stale_events{false};  // each call first repeats old tokens and an event of the epoch before
  std::atomic<bool> status_hangs{false};
  std::atomic<bool> ready{true};
  std::atomic<bool> draining{false};
  // Of its passes over prompts: reported from the first Status on. Empty: it says nothing of them.
  void SetPasses(const std::string& path, std::vector<std::pair<int64_t, double>> tokens_and_seconds, int32_t ranks = 1);
  // Rank `rank` of a prefill group of `size`; id 0: the group is not whole.
  void SetGroup(uint64_t id, int32_t rank, int32_t size);
  std::atomic<double> step_ms{0};
  std::atomic<int32_t> max_batch{8};
  std::atomic<int32_t> cached_tokens{0};
  void Release();

  std::vector<v1::Stream> calls() const;
  int running() const { return running_.load(); }
  bool WaitRunning(int n, absl::Duration limit) const;
  // Time of the last cancel seen; nothing before.
  std::optional<absl::Time> cancelled_at() const;

 private:
  grpc::Status Continue(grpc::ServerContext* context, const v1::Stream* stream, grpc::ServerWriter<v1::StreamEvent>* writer) override;
  grpc::Status Status(grpc::ServerContext* context, const v1::WorkerStatusRequest*, v1::WorkerStatus* status) override;
  grpc::Status Play(grpc::ServerContext* context, const v1::Stream& stream, grpc::ServerWriter<v1::StreamEvent>* writer);

  const std::string socket_path_;
  const std::string kind_;
  std::unique_ptr<grpc::Server> server_;
  mutable std::mutex mutex_;
  std::condition_variable released_;
  std::vector<int32_t> script_;
  std::vector<v1::Stream> calls_;
  std::string generation_;
  v1::WorkerStatus::Prompts prompts_;
  std::optional<v1::WorkerStatus::Group> group_;
  std::optional<absl::Time> cancelled_at_;
  std::atomic<int> running_{0};
  std::atomic<bool> dying_{false};
};

struct HttpAnswerText {
  int status = 0;
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;                            // chunks joined
  nlohmann::ordered_json json() const { return nlohmann::ordered_json::parse(body); }
  std::vector<nlohmann::ordered_json> events() const;  // of an event stream, without [DONE]
  bool done() const;                                   // saw [DONE], once and last
  std::string text() const;                            // deltas of all events, choice 0
};

// One connection.
class TestClient {
 public:
  explicit TestClient(const std::string& address);
  ~TestClient();
  void Send(const std::string& bytes);
  void Post(const std::string& path, const std::string& body, const std::string& headers = "Content-Type: application/json\r\n");
  void Get(const std::string& path, const std::string& headers = "", const std::string& method = "GET");
  HttpAnswerText Read(bool head = false);
  std::string ReadUntil(const std::string& text);  // raw bytes up to and with `text`
  bool ClosedByServer(absl::Duration limit);
  void HalfClose();
  void Reset();  // RST
  void Close();
  bool open() const { return fd_ >= 0; }

 private:
  bool Fill();
  int fd_ = -1;
  std::string buffer_;
};

// A node without weights: router, fake store, fake workers.
class TestNode {
 public:
  explicit TestNode(std::function<void(NodeConfig*)> configure = {}, std::function<void(TestNode*)> before_start = {},
                    RouterTimes times = FastTimes());
  ~TestNode();
  static RouterTimes FastTimes();

  void WaitReady();
  HttpAnswerText Post(const std::string& path, const nlohmann::ordered_json& body);
  HttpAnswerText Get(const std::string& path);
  std::string address() const { return router->http_addresses().front(); }
  double Metric(const std::string& line_start);

  std::filesystem::path dir;
  NodeConfig config;
  FakeStore store;
  std::unique_ptr<FakeWorker> decode;
  std::unique_ptr<FakeWorker> prefill;
  std::unique_ptr<Router> router;
};

bool WaitFor(const std::function<bool()>& condition, absl::Duration limit = absl::Seconds(5));

}  // namespace hearth::router::testing
