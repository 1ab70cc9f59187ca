#include "common/worker/continue_service.h"

#include <unistd.h>

#include <fstream>

#include "absl/strings/numbers.h"
#include "common/base/time.h"
#include "common/rpc/disk_reads.h"
#include "common/rpc/event_sender.h"
#include "common/rpc/rpc.h"

namespace hearth {
namespace {

// One call: the loop sends into it. Lives until the loop and gRPC have let go of it.
class StreamCall final : public EventSender<grpc::ServerWriteReactor<v1::StreamEvent>, v1::StreamEvent>, public StreamSink {
 public:
  StreamCall(uint64_t epoch, std::string generation) : epoch_(epoch), generation_(std::move(generation)) {}

  // Called once, before any event; `self` keeps the object until OnDone.
  void Begin(std::shared_ptr<StreamCall> self, std::shared_ptr<StreamLoop> loop) {
    self_ = std::move(self);
    loop_ = std::move(loop);
  }
  void SetLive(std::shared_ptr<LiveStream> live) {
    std::lock_guard lock(mutex_);
    if (ended_) return;  // it came and went meanwhile: holding it would be a circle that nobody breaks
    live_ = std::move(live);
    if (cancelled_ && live_ != nullptr) live_->cancelled.store(true, std::memory_order_release);
  }

  void OnStarted(int64_t cached_tokens) override {
    v1::StreamEvent event;
    event.mutable_started()->set_cached_tokens(static_cast<int32_t>(cached_tokens));
    event.mutable_started()->set_generation(generation_);
    Push(std::move(event));
  }
  void OnPrefilled(int64_t tokens) override {
    v1::StreamEvent event;
    event.mutable_prefilled()->set_tokens(static_cast<int32_t>(tokens));
    Push(std::move(event));
    EndCall(absl::OkStatus());
  }
  void OnToken(const TokenEvent& token) override {
    v1::StreamEvent event;
    v1::StreamEvent::Token& out = *event.mutable_token();
    out.set_index(static_cast<int32_t>(token.index));
    out.set_id(token.id);
    out.set_logprob(token.logprob);
    for (const TokenScore& score : token.top) {
      v1::StreamEvent::TokenScore& t = *out.add_top();
      t.set_id(score.id);
      t.set_logprob(score.logprob);
    }
    Push(std::move(event));
  }
  void OnFinished(FinishReason reason) override {
    v1::StreamEvent event;
    using Finished = v1::StreamEvent::Finished;
    event.mutable_finished()->set_reason(reason == FinishReason::kEos      ? Finished::REASON_EOS
                                         : reason == FinishReason::kLength ? Finished::REASON_LENGTH
                                                                           : Finished::REASON_PREEMPTED);
    Push(std::move(event));
    EndCall(absl::OkStatus());
  }
  void OnError(const absl::Status& status) override { EndCall(status); }

  void OnCancel() override {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    if (live_ != nullptr) live_->cancelled.store(true, std::memory_order_release);
    if (const std::shared_ptr<StreamLoop> loop = loop_.lock()) loop->Wake();
  }
  void OnDone() override { std::shared_ptr<StreamCall> last = std::move(self_); }

 private:
  void Push(v1::StreamEvent event) {
    event.set_epoch(epoch_);
    Send(std::move(event));
  }
  void EndCall(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
      live_.reset();
    }
    End(status);
  }

  const uint64_t epoch_;
  const std::string generation_;
  std::shared_ptr<StreamCall> self_;
  std::weak_ptr<StreamLoop> loop_;  // the loop's streams hold the call: the other way round would be a circle
  std::mutex mutex_;
  std::shared_ptr<LiveStream> live_;
  bool ended_ = false;
  bool cancelled_ = false;
};

// Anonymous resident memory: what this worker costs beside the shared image and pool.
uint64_t PrivateBytes() {
  std::ifstream in("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("Anonymous:", 0) != 0) continue;
    uint64_t kib = 0;
    const size_t digits = line.find_first_of("0123456789");
    const size_t end = line.find(' ', digits);
    if (digits != std::string::npos && absl::SimpleAtoi(line.substr(digits, end - digits), &kib)) return kib * 1024;
  }
  return 0;
}

}  // namespace

absl::StatusOr<StreamRequest> DecodeStream(const v1::Stream& message) {
  StreamRequest request;
  ASSIGN_OR_RETURN(request.id, HashFromBytes(message.request_id()));
  request.epoch = message.epoch();
  request.tokens.assign(message.prompt_ids().begin(), message.prompt_ids().end());
  request.prompt_size = message.prompt_ids_size();
  request.tokens.insert(request.tokens.end(), message.output_ids().begin(), message.output_ids().end());
  request.shared_pass = message.shared_pass();
  request.begun = !message.generation().empty();
  request.max_new_tokens = message.max_new_tokens();
  request.min_tokens = message.min_tokens();
  request.ignore_eos = message.ignore_eos();
  request.eos_ids.assign(message.eos_ids().begin(), message.eos_ids().end());
  request.num_logprobs = message.num_logprobs();
  request.seed = message.seed();
  const v1::SamplingParams& s = message.sampling();
  SamplingParams& out = request.sampling;
  if (s.has_temperature()) out.temperature = s.temperature();
  if (s.has_top_p()) out.top_p = s.top_p();
  if (s.has_top_k()) out.top_k = s.top_k();
  if (s.has_min_p()) out.min_p = s.min_p();
  out.presence_penalty = s.presence_penalty();
  out.frequency_penalty = s.frequency_penalty();
  if (s.has_repetition_penalty()) out.repetition_penalty = s.repetition_penalty();
  out.logit_bias.assign(s.logit_bias().begin(), s.logit_bias().end());
  if (request.max_new_tokens < 1) return absl::InvalidArgumentError("max_new_tokens must be at least 1");
  if (message.prefill_until() != 0 && message.prefill_until() != request.prefill_until()) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefill_until is ", message.prefill_until(), ", this version computes ", request.prefill_until()));
  }
  return request;
}

void ContinueService::SetWaiting(std::string why) {
  std::lock_guard lock(mutex_);
  state_ = why;
  why_ = std::move(why);
}

void ContinueService::SetReady(Ready ready) {
  std::lock_guard lock(mutex_);
  ready_ = std::make_shared<const Ready>(std::move(ready));
  ready_seconds_ = static_cast<double>(MonotonicNowNs() - identity_.started_ns) / 1e9;
  state_ = "ready";
}

void ContinueService::SetDraining() {
  std::lock_guard lock(mutex_);
  state_ = "draining";
}

void ContinueService::Forget() {
  std::lock_guard lock(mutex_);
  ready_.reset();
}

grpc::ServerWriteReactor<v1::StreamEvent>* ContinueService::Continue(grpc::CallbackServerContext* context, const v1::Stream* message) {
  std::shared_ptr<const Ready> ready;
  absl::Status refusal;
  {
    std::lock_guard lock(mutex_);
    ready = ready_;
    if (ready == nullptr) refusal = absl::UnavailableError(why_);
  }
  auto call = std::make_shared<StreamCall>(message->epoch(), ready == nullptr ? "" : ToBytes(ready->generation));
  call->Begin(call, ready == nullptr ? nullptr : ready->loop);
  if (ready != nullptr && !message->generation().empty() && message->generation() != ToBytes(ready->generation)) {
    refusal = absl::AbortedError("the stream's weights are of another generation than this worker's");
  }
  absl::StatusOr<StreamRequest> request = DecodeStream(*message);
  if (refusal.ok()) refusal = request.status();
  if (refusal.ok()) {
    std::shared_ptr<LiveStream> live;
    refusal = ready->loop->Submit(std::move(request).value(), call, &live);
    call->SetLive(std::move(live));
    if (refusal.ok()) ready->loop->Wake();
  }
  if (!refusal.ok()) call->OnError(refusal);
  return call.get();
}

grpc::ServerUnaryReactor* ContinueService::Status(grpc::CallbackServerContext* context, const v1::WorkerStatusRequest*, v1::WorkerStatus* response) {
  std::shared_ptr<const Ready> ready;
  {
    std::lock_guard lock(mutex_);
    ready = ready_;
    response->set_state(state_);
    response->set_ready_seconds(ready_seconds_);
  }
  response->set_kind(identity_.kind);
  response->set_pid(getpid());
  response->set_uptime_seconds(static_cast<double>(MonotonicNowNs() - identity_.started_ns) / 1e9);
  response->set_max_batch(static_cast<int32_t>(identity_.max_batch));
  response->set_resident_private_bytes(PrivateBytes());
  if (ready != nullptr) {
    const LoopStats::View stats = ready->loop->Stats();
    response->set_generation(ToBytes(ready->generation));
    response->set_device(ready->device);
    response->set_numerics(ready->numerics);
    response->set_running(static_cast<int32_t>(stats.running));
    response->set_waiting(static_cast<int32_t>(stats.waiting));
    response->set_spare_pages(static_cast<int32_t>(stats.spare_pages));
    response->set_tokens_total(stats.tokens_total);
    response->set_prefill_tokens_total(stats.prefill_tokens_total);
    response->set_tokens_per_second(stats.tokens_per_second);
    response->set_step_ms_p50(stats.step_ms_p50);
    response->set_step_ms_p99(stats.step_ms_p99);
    response->set_steps_total(stats.steps_total);
    ready->memory.Tell(*response->mutable_memory());
    response->set_speculation(stats.speculation);
    response->set_draft_depth(static_cast<int32_t>(stats.draft_depth));
    response->set_drafts_total(stats.drafts_total);
    response->set_drafts_accepted_total(stats.drafts_accepted_total);
    response->set_stream_steps_total(stats.stream_steps_total);
    if (stats.group.has_value()) {
      v1::WorkerStatus::Group& group = *response->mutable_group();
      group.set_id(stats.group->id);
      group.set_rank(static_cast<int32_t>(stats.group->rank));
      group.set_size(static_cast<int32_t>(stats.group->size));
      group.set_waits_for(stats.group->waits_for);
      group.set_passes_total(stats.group->passes);
      group.set_passes_failed_total(stats.group->passes_failed);
      for (const Traffic& sent : stats.group->sent) {
        v1::WorkerStatus::Traffic& traffic = *group.add_sent();
        traffic.set_name(sent.name);
        traffic.set_calls(sent.calls);
        traffic.set_bytes(sent.bytes);
      }
    }
    for (const StepOrderTimes& times : stats.step_orders) {
      v1::WorkerStatus::StepOrder& order = *response->add_step_orders();
      order.set_streams(static_cast<int32_t>(times.streams));
      if (times.decided) order.set_chosen(StepOrderName(times.chosen));
      order.set_measuring(!times.decided);
      order.set_joint_ms(times.median_ms[static_cast<size_t>(StepOrder::kJoint)]);
      order.set_plain_ms(times.median_ms[static_cast<size_t>(StepOrder::kPlain)]);
      order.set_alternate_ms(times.median_ms[static_cast<size_t>(StepOrder::kAlternate)]);
    }
    if (stats.disk.has_value()) {
      Tell(stats.disk->reader, *response->mutable_disk());
      response->mutable_disk()->set_through_mapping(stats.disk->through_mapping);
    }
    v1::WorkerStatus::Prompts& prompts = *response->mutable_prompts();
    prompts.set_path(stats.prompt_path);
    prompts.set_tokens_at_once(stats.tokens_at_once);
    prompts.set_tokens_between_steps(stats.tokens_between_steps);
    for (const LoopStats::Pass& pass : stats.passes) {
      v1::WorkerStatus::Prompts::Pass& out = *prompts.add_passes();
      out.set_number(pass.number);
      out.set_tokens(static_cast<int32_t>(pass.tokens));
      out.set_positions(pass.positions);
      out.set_seconds(static_cast<double>(pass.duration_ns) / 1e9);
      out.set_prompts(static_cast<int32_t>(pass.prompts));
      out.set_ranks(static_cast<int32_t>(pass.ranks));
      out.set_waited_seconds(static_cast<double>(pass.waited_ns) / 1e9);
    }
    prompts.set_share(stats.turns.prompt_share);
    prompts.set_windows(stats.turns.windows);
    prompts.set_given_seconds(static_cast<double>(stats.turns.given_ns) / 1e9);
    if (const PrefillGate* gate = ready->loop->gate()) {
      const PrefillGate::Counts counts = gate->counts();
      prompts.set_shares_cores(gate->shares_cores());
      prompts.set_ops_held_back(counts.held_back);
      prompts.set_ops_forced(counts.forced);
      prompts.set_waited_seconds(static_cast<double>(counts.waited_ns) / 1e9);
    }
    if (const StreamedTotals& s = stats.streamed; s.passes > 0) {
      v1::WorkerStatus::Streamed& out = *response->mutable_streamed();
      out.set_passes(s.passes);
      out.set_tokens(s.tokens);
      out.set_seconds(static_cast<double>(s.duration_ns) * 1e-9);
      out.set_bytes_copied(s.bytes_copied);
      out.set_experts_copied(s.experts_copied);
      out.set_experts_skipped(s.experts_skipped);
      out.set_waited_for_copies_seconds(static_cast<double>(s.waited_for_copies_ns) * 1e-9);
      out.set_waited_for_slots_seconds(static_cast<double>(s.waited_for_slots_ns) * 1e-9);
      out.set_waited_for_rings_seconds(static_cast<double>(s.waited_for_rings_ns) * 1e-9);
      out.set_records_from_rings(s.records_from_rings);
      out.set_records_from_image(s.records_from_image);
      out.set_last_tokens_per_second(s.last_tokens_per_second);
    }
    response->set_step_order_pinned(ready->loop->step_order().has_value());
    for (const std::string& note : ready->notes) response->add_notes(note);
  }
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace hearth
