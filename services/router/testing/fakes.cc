#include "services/router/testing/fakes.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/check.h"
#include "common/roofline/pass_cost.h"
#include "common/rpc/rpc.h"
#include "hearth/v1/node.grpc.pb.h"

namespace hearth::router::testing {
namespace {

class ForwardingStore final : public StoreClient {
 public:
  explicit ForwardingStore(FakeStore* store) : store_(store) {}
  StoreView View() const override { return store_->View(); }
  absl::StatusOr<Hash128> WaitForGeneration(const std::function<bool()>& stopped, int64_t deadline) override {
    return store_->WaitForGeneration(stopped, deadline);
  }
  absl::StatusOr<uint64_t> JoinGroup(int32_t rank, int32_t size, uint64_t bytes) override { return store_->JoinGroup(rank, size, bytes); }
  absl::StatusOr<uint64_t> MakeRings(int64_t slots, const std::function<bool()>& stopped) override { return store_->MakeRings(slots, stopped); }
  absl::StatusOr<int32_t> Peek(const Hash128& generation, const std::vector<int32_t>& ids) override { return store_->Peek(generation, ids); }
  absl::StatusOr<std::vector<PageRef>> Match(const Hash128& r, const std::vector<int32_t>& ids) override { return store_->Match(r, ids); }
  absl::StatusOr<std::vector<PageRef>> Alloc(const Hash128& r, int32_t first, int32_t count, int32_t at_least) override {
    return store_->Alloc(r, first, count, at_least);
  }
  absl::Status Seal(const Hash128& r, const std::vector<int32_t>& indexes) override { return store_->Seal(r, indexes); }
  absl::Status Offer(const Hash128& r) override { return store_->Offer(r); }
  absl::StatusOr<std::vector<PageRef>> Take(const Hash128& r) override { return store_->Take(r); }
  absl::Status Free(const Hash128& r, int32_t from) override { return store_->Free(r, from); }

 private:
  FakeStore* store_;
};

}  // namespace

bool WaitFor(const std::function<bool()>& condition, absl::Duration limit) {
  const absl::Time end = absl::Now() + limit;
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

std::string ModelDir() {
  const char* root = getenv("HEARTH_SOURCE_DIR");
  return absl::StrCat(root == nullptr ? "." : root, "/deploy/models/fable-moe");
}

const ModelInfo& DemoModel() {
  static const auto& model = *[] {
    NodeConfig config;
    config.model_path = ModelDir();
    config.model_name = "fable-moe";
    auto loaded = ModelInfo::Load(config, config.model_path);
    if (!loaded.ok()) std::fprintf(stderr, "%s\n", loaded.status().ToString().c_str());
    HEARTH_CHECK(loaded.ok());
    return new ModelInfo(*std::move(loaded));
  }();
  return model;
}

std::vector<int32_t> Ids(const std::string& text) { return *DemoModel().tokenizer->Encode(text, {.add_special_tokens = false}); }

FakeStore::FakeStore() : view_(ReadyView()), generation_{1, 2} {}
StoreView FakeStore::ReadyView(const Hash128& generation, const Hash128& fingerprint, const std::string& model_dir, int64_t kv_tokens) {
  StoreView view;
  view.attached = true;
  view.generation = generation;
  view.fingerprint = fingerprint;
  view.model_dir = model_dir;
  view.kv_tokens = kv_tokens;
  return view;
}
StoreView FakeStore::View() const {
  std::lock_guard lock(mutex_);
  return view_;
}
void FakeStore::SetView(StoreView view) {
  std::lock_guard lock(mutex_);
  view_ = std::move(view);
}
absl::Status FakeStore::Free(const Hash128& request, int32_t) {
  std::lock_guard lock(mutex_);
  freed_.push_back(ToBytes(request));
  return absl::OkStatus();
}
std::vector<std::string> FakeStore::freed() const {
  std::lock_guard lock(mutex_);
  return freed_;
}
std::unique_ptr<StoreClient> Forward(FakeStore* store) { return std::make_unique<ForwardingStore>(store); }

FakeWorker::FakeWorker(std::string socket_path, std::string kind)
    : socket_path_(std::move(socket_path)), kind_(std::move(kind)), generation_(ToBytes(Hash128{1, 2})) {}
FakeWorker::~FakeWorker() { Kill(); }

void FakeWorker::Start() {
  dying_ = false;
  auto server = ServeUnix(socket_path_, 0600, {this});
  HEARTH_CHECK(server.ok());
  server_ = *std::move(server);
}

void FakeWorker::Kill() {
  if (!server_) return;
  {
    std::lock_guard lock(mutex_);
    dying_ = true;
  }
  released_.notify_all();
  server_->Shutdown(std::chrono::system_clock::now());
  server_.reset();
}

void FakeWorker::SetScript(std::vector<int32_t> output) {
  std::lock_guard lock(mutex_);
  script_ = std::move(output);
}

void FakeWorker::SetGeneration(const Hash128& generation) {
  std::lock_guard lock(mutex_);
  generation_ = ToBytes(generation);
}

std::string FakeWorker::generation() const {
  std::lock_guard lock(mutex_);
  return generation_;
}

void FakeWorker::Release() {
  {
    std::lock_guard lock(mutex_);
    hold_at = -1;
  }
  released_.notify_all();
}

void FakeWorker::SetGroup(uint64_t id, int32_t rank, int32_t size) {
  std::lock_guard lock(mutex_);
  group_.emplace();
  group_->set_id(id);
  group_->set_rank(rank);
  group_->set_size(size);
}

void FakeWorker::SetPasses(const std::string& path, std::vector<std::pair<int64_t, double>> tokens_and_seconds, int32_t ranks) {
  std::lock_guard lock(mutex_);
  prompts_.set_path(path);
  prompts_.set_tokens_at_once(path == "chunked" ? 512 : 32768);
  prompts_.set_tokens_between_steps(kind_ == "decode" ? 64 : 0);
  for (const auto& [tokens, seconds] : tokens_and_seconds) {
    auto* pass = prompts_.add_passes();
    pass->set_number(static_cast<uint64_t>(prompts_.passes_size()));
    pass->set_tokens(static_cast<int32_t>(tokens));
    pass->set_positions(WorkOf(0, tokens).positions);
    pass->set_seconds(seconds);
    pass->set_ranks(ranks);
  }
}

std::vector<v1::Stream> FakeWorker::calls() const {
  std::lock_guard lock(mutex_);
  return calls_;
}

bool FakeWorker::WaitRunning(int n, absl::Duration limit) const {
  return WaitFor([&] { return running() == n; }, limit);
}

std::optional<absl::Time> FakeWorker::cancelled_at() const {
  std::lock_guard lock(mutex_);
  return cancelled_at_;
}

grpc::Status FakeWorker::Status(grpc::ServerContext* context, const v1::WorkerStatusRequest*, v1::WorkerStatus* status) {
  while (status_hangs && !context->IsCancelled() && !dying_) absl::SleepFor(absl::Milliseconds(5));
  status->set_kind(kind_);
  status->set_pid(static_cast<int32_t>(getpid()));
  status->set_state(draining ? "draining" : ready ? "ready" : "waiting for the store");
  status->set_generation(generation());
  status->set_max_batch(max_batch);
  status->set_step_ms_p50(step_ms);
  {
    std::lock_guard lock(mutex_);
    *status->mutable_prompts() = prompts_;
    if (group_.has_value()) *status->mutable_group() = *group_;
  }
  return grpc::Status::OK;
}

grpc::Status FakeWorker::Continue(grpc::ServerContext* context, const v1::Stream* stream, grpc::ServerWriter<v1::StreamEvent>* writer) {
  // Between Kill and the server's end: a dead process starts nothing more.
  if (dying_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "dead");
  {
    std::lock_guard lock(mutex_);
    calls_.push_back(*stream);
    if (!stream->generation().empty() && stream->generation() != generation_) return grpc::Status(grpc::StatusCode::ABORTED, "other generation");
  }
  if (draining) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
  if (refuse > 0) {
    --refuse;
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no place");
  }
  ++running_;
  const grpc::Status status = Play(context, *stream, writer);
  if (context->IsCancelled()) {
    std::lock_guard lock(mutex_);
    cancelled_at_ = absl::Now();
  }
  --running_;
  return status;
}

grpc::Status FakeWorker::Play(grpc::ServerContext* context, const v1::Stream& stream, grpc::ServerWriter<v1::StreamEvent>* writer) {
  v1::StreamEvent event;
  event.set_epoch(stream.epoch());
  if (before_started) before_started();
  event.mutable_started()->set_cached_tokens(cached_tokens);
  event.mutable_started()->set_generation(generation());
  writer->Write(event);
  if (kind_ == "prefill") {
    std::unique_lock lock(mutex_);
    // Polled: a client's cancel has no wake-up in the synchronous interface.
    while (hold_at == 0 && !context->IsCancelled() && !dying_) released_.wait_for(lock, std::chrono::milliseconds(1));
    lock.unlock();
    if (context->IsCancelled()) return grpc::Status::CANCELLED;
    if (dying_ || fail_at.exchange(-1) == 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "dying");
    event.mutable_prefilled()->set_tokens(stream.prompt_ids_size() - 1);
    writer->Write(event);
    return grpc::Status::OK;
  }
  if (stale_events && stream.output_ids_size() > 0) {
    event.set_epoch(stream.epoch() - 1);
    event.mutable_token()->set_index(stream.output_ids_size());
    event.mutable_token()->set_id(7);
    writer->Write(event);
    event.set_epoch(stream.epoch());
    event.mutable_token()->set_index(0);
    writer->Write(event);
  }
  for (int32_t index = stream.output_ids_size(); index < stream.max_new_tokens(); ++index) {
    int32_t id = 1;
    {
      std::unique_lock lock(mutex_);
      while (hold_at == index && !context->IsCancelled() && !dying_) released_.wait_for(lock, std::chrono::milliseconds(1));
      if (static_cast<size_t>(index) < script_.size()) id = script_[static_cast<size_t>(index)];
    }
    if (token_of) id = token_of(stream, index);
    if (context->IsCancelled()) return grpc::Status::CANCELLED;
    if (dying_ || fails_always || (fail_at == index && fail_at.exchange(-1) == index)) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "dying");
    if (preempt_at == index && preempt_at.exchange(-1) == index) {
      event.mutable_finished()->set_reason(v1::StreamEvent::Finished::REASON_PREEMPTED);
      writer->Write(event);
      return grpc::Status::OK;
    }
    auto* token = event.mutable_token();
    token->set_index(index);
    token->set_id(id);
    token->set_logprob(-0.25F);
    for (int32_t k = 0; k < stream.num_logprobs(); ++k) {
      auto* top = token->add_top();
      top->set_id(k == 0 ? id : 100 + k);
      top->set_logprob(k == 3 ? -std::numeric_limits<float>::infinity() : -0.25F - static_cast<float>(k));
    }
    if (!writer->Write(event)) return grpc::Status::CANCELLED;
    event.clear_token();
    const bool is_end = std::find(stream.eos_ids().begin(), stream.eos_ids().end(), id) != stream.eos_ids().end();
    if (is_end && !stream.ignore_eos() && index + 1 > stream.min_tokens()) {
      event.mutable_finished()->set_reason(v1::StreamEvent::Finished::REASON_EOS);
      writer->Write(event);
      return grpc::Status::OK;
    }
    if (token_delay_us > 0) absl::SleepFor(absl::Microseconds(token_delay_us.load()));
  }
  event.mutable_finished()->set_reason(v1::StreamEvent::Finished::REASON_LENGTH);
  writer->Write(event);
  return grpc::Status::OK;
}

std::vector<nlohmann::ordered_json> HttpAnswerText::events() const {
  std::vector<nlohmann::ordered_json> out;
  for (const absl::string_view line : absl::StrSplit(body, '\n')) {
    if (absl::StartsWith(line, "data: ") && line != "data: [DONE]") out.push_back(nlohmann::ordered_json::parse(std::string(line.substr(6))));
  }
  return out;
}

bool HttpAnswerText::done() const { return absl::EndsWith(body, "data: [DONE]\n\n") && body.find("[DONE]") == body.rfind("[DONE]"); }

std::string HttpAnswerText::text() const {
  std::string out;
  for (const auto& event : events()) {
    if (!event.contains("choices") || event["choices"].empty() || event["choices"][0]["index"] != 0) continue;
    const auto& choice = event["choices"][0];
    if (choice.contains("text")) out += choice["text"].get<std::string>();
    if (choice.contains("delta") && choice["delta"].contains("content")) out += choice["delta"]["content"].get<std::string>();
  }
  return out;
}

TestClient::TestClient(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host[0] == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  HEARTH_CHECK(getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found) == 0);
  fd_ = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd_, found->ai_addr, found->ai_addrlen) != 0) Close();
  freeaddrinfo(found);
}
TestClient::~TestClient() { Close(); }

void TestClient::Send(const std::string& bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;
    sent += static_cast<size_t>(n);
  }
}
void TestClient::Post(const std::string& path, const std::string& body, const std::string& headers) {
  Send(absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: test\r\n", headers, "Content-Length: ", body.size(), "\r\n\r\n", body));
}
void TestClient::Get(const std::string& path, const std::string& headers, const std::string& method) {
  Send(absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: test\r\n", headers, "\r\n"));
}

bool TestClient::Fill() {
  pollfd poll_fd{fd_, POLLIN, 0};
  if (poll(&poll_fd, 1, 20'000) <= 0) return false;
  char bytes[8192];
  const ssize_t n = recv(fd_, bytes, sizeof(bytes), 0);
  if (n <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(n));
  return true;
}

std::string TestClient::ReadUntil(const std::string& text) {
  size_t at;
  while ((at = buffer_.find(text)) == std::string::npos) {
    if (!Fill()) return std::exchange(buffer_, {});
  }
  std::string out = buffer_.substr(0, at + text.size());
  buffer_.erase(0, at + text.size());
  return out;
}

HttpAnswerText TestClient::Read(bool head) {
  HttpAnswerText answer;
  const std::string header = ReadUntil("\r\n\r\n");
  const std::vector<std::string> lines = absl::StrSplit(header, "\r\n");
  if (lines[0].size() < 12 || !absl::SimpleAtoi(lines[0].substr(9, 3), &answer.status)) return answer;
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::pair<std::string, std::string> field = absl::StrSplit(lines[i], absl::MaxSplits(": ", 1));
    if (!field.first.empty()) answer.headers[absl::AsciiStrToLower(field.first)] = field.second;
  }
  if (answer.status == 100) return Read(head);
  if (head || answer.status == 204) return answer;
  if (answer.headers.count("transfer-encoding")) {
    while (true) {
      const std::string size_line = ReadUntil("\r\n");
      const size_t size = strtoul(size_line.c_str(), nullptr, 16);
      while (buffer_.size() < size + 2 && Fill()) {
      }
      answer.body += buffer_.substr(0, size);
      buffer_.erase(0, size + 2);
      if (size == 0) break;
    }
  } else if (answer.headers.count("content-length")) {
    size_t size = 0;
    HEARTH_CHECK(absl::SimpleAtoi(answer.headers["content-length"], &size));
    while (buffer_.size() < size && Fill()) {
    }
    answer.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
  } else {
    while (Fill()) {
    }
    answer.body = std::exchange(buffer_, {});
  }
  return answer;
}

bool TestClient::ClosedByServer(absl::Duration limit) {
  pollfd poll_fd{fd_, POLLIN, 0};
  if (poll(&poll_fd, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) <= 0) return false;
  char byte;
  return recv(fd_, &byte, 1, MSG_PEEK) <= 0;
}
void TestClient::HalfClose() { shutdown(fd_, SHUT_WR); }
void TestClient::Reset() {
  const linger now{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  Close();
}
void TestClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

RouterTimes TestNode::FastTimes() {
  RouterTimes times;
  times.link.poll_ready = absl::Milliseconds(50);
  times.link.poll_away = absl::Milliseconds(20);
  times.link.answer = absl::Milliseconds(300);
  times.give_up = absl::Seconds(2);
  times.admit_grace = absl::Milliseconds(500);
  times.store_grace = absl::Milliseconds(100);
  times.comment_every = absl::Milliseconds(100);
  return times;
}

TestNode::TestNode(std::function<void(NodeConfig*)> configure, std::function<void(TestNode*)> before_start, RouterTimes times) {
  char name[] = "/tmp/hearth_router_test.XXXXXX";
  HEARTH_CHECK(mkdtemp(name) != nullptr);
  dir = name;
  config.model_path = ModelDir();
  config.model_name = "fable-moe";
  config.runtime_dir = dir.string();
  config.http_listen = {"127.0.0.1:0"};
  config.grpc_listen = {"127.0.0.1:0"};
  config.drain_ms = 300;
  if (configure) configure(&config);
  decode = std::make_unique<FakeWorker>(config.WorkerSocket("decode", 0), "decode");
  prefill = std::make_unique<FakeWorker>(config.WorkerSocket("prefill", 0), "prefill");
  decode->SetScript(Ids("Once upon a time"));
  if (before_start) {
    before_start(this);
  } else {
    decode->Start();
    prefill->Start();
  }
  auto started = Router::Start(config, Forward(&store), times);
  if (!started.ok()) std::fprintf(stderr, "%s\n", started.status().ToString().c_str());
  HEARTH_CHECK(started.ok());
  router = *std::move(started);
  if (before_start) return;
  WaitReady();
  // /health asks for decode only; until prefill has answered once, long prompts go past it.
  auto stub = v1::Router::NewStub(UnixChannel(config.RouterAdminSocket()));
  HEARTH_CHECK(WaitFor([&] {
    grpc::ClientContext context;
    v1::RouterStatus status;
    if (!stub->Status(&context, {}, &status).ok()) return false;
    return std::all_of(status.workers().begin(), status.workers().end(), [](const auto& worker) { return worker.state() == "ready"; });
  }));
}

TestNode::~TestNode() {
  router.reset();
  decode.reset();
  prefill.reset();
  std::error_code ignored;
  std::filesystem::remove_all(dir, ignored);
}

void TestNode::WaitReady() {
  HEARTH_CHECK(WaitFor([&] { return Get("/health").status == 200; }));
}

HttpAnswerText TestNode::Post(const std::string& path, const nlohmann::ordered_json& body) {
  TestClient client(address());
  client.Post(path, body.dump());
  return client.Read();
}
HttpAnswerText TestNode::Get(const std::string& path) {
  TestClient client(address());
  client.Get(path);
  return client.Read();
}

double TestNode::Metric(const std::string& line_start) {
  const std::string text = Get("/metrics").body;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, line_start) && absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) return value;
  }
  return -1;
}

}  // namespace hearth::router::testing
