#include "services/weightstore/attach_reactor.h"

#include "common/rpc/rpc.h"

namespace hearth {
namespace {

void FillGeneration(const Generation& generation, v1::Generation* message) {
  message->set_id(ToBytes(generation.id));
  message->set_model_dir(generation.image->model_dir());
  message->set_fingerprint(ToBytes(generation.image->fingerprint()));
  message->set_kv_tokens(static_cast<int64_t>(generation.pool->geometry().num_pages) * kPageTokens);
}

}  // namespace

void FillLoadEvent(const LoadState& state, v1::LoadEvent* event) {
  event->set_phase(state.phase);
  event->set_done_bytes(state.progress.done_bytes);
  event->set_total_bytes(state.progress.total_bytes);
  event->set_bytes_per_second(state.progress.bytes_per_second);
  event->set_eta_seconds(state.progress.eta_seconds);
}

grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>* AttachReactor::Make(
    Store& store, const NodeConfig& config, absl::StatusOr<Caller> caller, std::function<void(const std::shared_ptr<AttachReactor>&, bool)> track) {
  auto reactor = std::shared_ptr<AttachReactor>(new AttachReactor(store, config, caller.ok() ? *caller : Caller{}));
  reactor->self_ = reactor;
  reactor->track_ = std::move(track);
  reactor->track_(reactor, true);
  if (caller.ok()) {
    reactor->Start();
  } else {
    reactor->End(caller.status());
  }
  return reactor.get();
}

void AttachReactor::Start() { StartRead(&in_); }

void AttachReactor::OnReadDone(bool ok) {
  if (!ok) {
    End(absl::OkStatus());
    return;
  }
  switch (in_.message_case()) {
    case v1::AttachRequest::kHello:
      if (greeted_) return End(absl::InvalidArgumentError("Attach: a second hello"));
      greeted_ = true;
      HandleHello(in_.hello());
      break;
    case v1::AttachRequest::kBeat: {
      store_.Beat(this);
      v1::AttachEvent event;
      event.mutable_beat();
      Send(std::move(event), IfSlow::kDrop);
      break;
    }
    case v1::AttachRequest::kGoodbye: store_.Goodbye(this); return End(absl::OkStatus());
    case v1::AttachRequest::MESSAGE_NOT_SET:
      return End(absl::InvalidArgumentError("Attach: a message of an unknown kind; is the client newer than the store?"));
  }
  StartRead(&in_);
}

void AttachReactor::HandleHello(const v1::AttachRequest::Hello& message) {
  Hello hello;
  hello.router = message.kind() == v1::WORKER_KIND_ROUTER;
  hello.spec.kind = message.kind() == v1::WORKER_KIND_PREFILL ? LeaseKind::kPrefill : LeaseKind::kDecode;
  hello.spec.numerics = message.numerics();
  hello.spec.name = message.name();
  hello.lease_id = message.lease_id();
  hello.attempt = message.attempt();
  if (message.kind() == v1::WORKER_KIND_UNSPECIFIED || !v1::WorkerKind_IsValid(message.kind())) {
    return End(absl::InvalidArgumentError("Attach: a hello must name its kind: prefill, decode or router"));
  }
  if (hello.spec.name.empty() || hello.spec.name.size() > 31) {
    return End(absl::InvalidArgumentError(absl::StrCat("Attach: name '", hello.spec.name, "' must have 1 to 31 characters")));
  }
  if (!message.generation().empty()) {
    const absl::StatusOr<Hash128> generation = HashFromBytes(message.generation());
    if (!generation.ok()) return End(generation.status());
    hello.generation = *generation;
  }
  for (const v1::StreamPages& pages : message.holds()) {
    const absl::StatusOr<Hash128> request = HashFromBytes(pages.request_id());
    if (!request.ok()) return End(request.status());
    hello.holds.push_back({*request, {pages.pages().begin(), pages.pages().end()}});
  }
  const absl::StatusOr<Welcome> welcome = store_.Attach(caller_, hello, self_);
  if (!welcome.ok()) return End(welcome.status());
  v1::AttachEvent event;
  v1::AttachEvent::Welcome& answer = *event.mutable_welcome();
  answer.set_lease_id(welcome->lease_id);
  answer.set_shm_dir(config_.shm_dir);
  answer.set_node(config_.node_name);
  if (welcome->generation != nullptr) FillGeneration(*welcome->generation, answer.mutable_generation());
  if (welcome->loading.active) FillLoadEvent(welcome->loading, answer.mutable_loading());
  Send(std::move(event));
  if (welcome->drain) SendSwitch(welcome->newest);
}

void AttachReactor::SendReady(const GenerationPtr& generation) {
  v1::AttachEvent event;
  FillGeneration(*generation, event.mutable_generation_ready()->mutable_generation());
  Send(std::move(event));
}

void AttachReactor::SendSwitch(const GenerationPtr& generation) {
  v1::AttachEvent event;
  event.mutable_switch_();
  if (generation != nullptr) FillGeneration(*generation, event.mutable_switch_()->mutable_generation());
  Send(std::move(event));
}

void AttachReactor::SendLoading(const LoadState& loading) {
  v1::AttachEvent event;
  FillLoadEvent(loading, event.mutable_loading());
  Send(std::move(event), IfSlow::kDrop);
}

void AttachReactor::OnBroken() { End(absl::CancelledError("the stream broke")); }

// The peer is gone, or the server shuts down: reads and writes under way end by themselves.
void AttachReactor::OnCancel() { End(absl::CancelledError("the stream broke")); }

void AttachReactor::OnDone() {
  store_.Detach(this);
  track_(self_, false);
  const std::shared_ptr<AttachReactor> last = std::move(self_);
}

}  // namespace hearth
