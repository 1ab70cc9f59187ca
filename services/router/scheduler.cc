#include "services/router/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/check.h"
#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "common/shm/kv_pool.h"
#include "services/router/api_error.h"
#include "services/router/choice_text.h"
#include "services/router/scheduler_track.h"

namespace hearth::router {
namespace {

constexpr size_t kEndedIdsMax = 10'000;
constexpr size_t kDecodedKept = 16;

// How long ago, from CLOCK_MONOTONIC nanoseconds.
absl::Duration Since(int64_t then_ns) { return absl::Nanoseconds(MonotonicNowNs() - then_ns); }

absl::Status OtherWeights(const WorkerLink& link) {
  return absl::UnavailableError(absl::StrCat(link.name(), " has not switched to the present model yet"));
}
absl::Status Replaced() { return absl::UnavailableError("the model was replaced while this request was waiting: send it again"); }

}  // namespace

Scheduler::Scheduler(EventLoop* loop, SchedulerOptions options, ServedModel* model, StoreClient* store, PrefixPeek* peek, Metrics* metrics)
    : loop_(loop),
      options_(std::move(options)),
      model_(model),
      peek_(peek),
      metrics_(metrics),
      started_ns_(MonotonicNowNs()),
      leftovers_(loop, store) {}

Scheduler::~Scheduler() {
  *alive_ = false;
  for (auto& [key, active] : active_) {
    for (const TrackPtr& track : active->tracks) {
      if (track->call) track->call->Cancel();
      track->followers.clear();
    }
  }
}

void Scheduler::AddWorker(WorkerLink::Kind kind, const std::string& name, const std::string& socket_path) {
  const auto on_change = [this] {
    leftovers_.Look();
    ScheduleDispatch();
    if (on_readiness_) on_readiness_();
  };
  const auto on_status = [this, name](const v1::WorkerStatus& status) {
    metrics_->OnWorkerStatus(name, status);
    costs_.OnWorkerStatus(name, status);
    UpdatePeek();
  };
  links_.push_back(std::make_unique<WorkerLink>(loop_, kind, name, socket_path, options_.link_times, on_change, on_status));
}

absl::Status Scheduler::DecodeReadiness() const {
  std::string reasons;
  for (const auto& link : links_) {
    if (link->kind() != WorkerLink::Kind::kDecode) continue;
    if (link->ready()) return absl::OkStatus();
    absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", link->name(), " is ", link->state());
  }
  return absl::UnavailableError(absl::StrCat("no decode worker is ready: ", reasons.empty() ? "none is configured" : reasons));
}

absl::Status Scheduler::Admit(const Request& request) const {
  const ModelInfo& model = *request.model;
  for (const auto& prompt : request.prompts) {
    if (static_cast<int64_t>(prompt->size()) < model.context_tokens) continue;
    const std::string context = model.context_tokens == model.model_context_tokens
                                    ? absl::StrFormat("This model's context is %d tokens", model.context_tokens)
                                    : absl::StrFormat("This node's KV pool holds a context of %d tokens (the model's own is %d)",
                                                      model.context_tokens, model.model_context_tokens);
    return WithCode(
        FieldError(request.prompt_field, absl::StrFormat("%s; the prompt has %d, which leaves none for an answer. Shorten it to at most %d tokens.",
                                                         context, prompt->size(), model.context_tokens - 1)),
        "context_length_exceeded");
  }
  if (draining_) return absl::UnavailableError("the node is stopping: send the request again to its successor");
  // Store and workers are asked for the first time only now.
  const bool just_started = Since(started_ns_) < options_.admit_grace;
  absl::Status ready = gate_ && !just_started ? gate_() : absl::OkStatus();
  if (ready.ok() && !just_started && !DecodeReadiness().ok()) {
    // A worker's restart takes seconds: those who come meanwhile queue.
    if (Since(DecodeAwaySinceNs()) > options_.admit_grace) ready = DecodeReadiness();
  }
  if (ready.ok() && !model_->Serves(model)) ready = Replaced();
  RETURN_IF_ERROR(ready);
  if (waiting_requests_ >= options_.max_queue) {
    return absl::ResourceExhaustedError(absl::StrFormat("%d requests are waiting already (router.max_queue): try again shortly", waiting_requests_));
  }
  return CheckTtft(request);
}

// Since when no decode worker is ready or draining; 0 when none has ever been there.
int64_t Scheduler::DecodeAwaySinceNs() const {
  int64_t away_since_ns = 0;
  for (const auto& link : links_) {
    if (link->kind() != WorkerLink::Kind::kDecode || link->status().pid() == 0) continue;
    away_since_ns = std::max(away_since_ns, link->draining() ? MonotonicNowNs() : link->away_since_ns());
  }
  return away_since_ns;
}

absl::Status Scheduler::Submit(std::shared_ptr<Request> request) {
  model_->Refresh();
  request->model = model_->Named(request->model);
  if (absl::Status admitted = Admit(*request); !admitted.ok()) {
    if (absl::IsResourceExhausted(admitted)) metrics_->OnRequestRefused(*ToApiError(admitted).code);
    if (absl::IsUnavailable(admitted)) metrics_->OnRequestRefused(draining_ ? "draining" : "not_ready");
    return admitted;
  }
  if (by_id_.contains(request->id)) {
    return absl::AlreadyExistsError(absl::StrCat("a request with the id '", request->id, "' is running"));
  }
  auto active = std::make_unique<Active>();
  active->request = std::move(request);
  Active& entry = *active;
  active_.emplace(entry.request.get(), std::move(active));
  by_id_.emplace(entry.request->id, entry.request.get());
  ++waiting_requests_;
  MakeStreams(entry);
  metrics_->OnRequestAccepted(*entry.request);
  if (tick_timer_ == nullptr) tick_timer_ = loop_->After(absl::Seconds(1), [this] { Tick(); });
  ScheduleDispatch();
  return absl::OkStatus();
}

void Scheduler::MakeStreams(Active& active) {
  Request& request = *active.request;
  const int64_t now_ns = MonotonicNowNs();
  const Hash128 drawn = RandomHash128();
  const int64_t seed = request.options.seed.value_or(static_cast<int64_t>(drawn.low));
  for (size_t p = 0; p < request.prompts.size(); ++p) {
    const auto& prompt = request.prompts[p];
    TrackPtr leader;
    for (int32_t i = 0; i < request.options.n; ++i) {
      auto stream = std::make_shared<Stream>();
      stream->id = RandomHash128();
      stream->request = &request;
      stream->choice = static_cast<int32_t>(p) * request.options.n + i;
      stream->prompt_ids = prompt;
      // Without a seed each prompt has its own; with one, each behaves as if it had been sent alone.
      stream->seed = ChoiceSeed(request.options.seed ? seed : seed + static_cast<int64_t>(p), i);
      const auto room = request.model->context_tokens - static_cast<int32_t>(prompt->size());
      stream->max_new_tokens = std::min(room, request.options.max_tokens.value_or(room));
      stream->text = std::make_unique<ChoiceText>(request.model->tokenizer.get(), *prompt, request.options.stop, request.options.skip_special_tokens);
      stream->events.push_back({StreamState::kQueued, now_ns});
      request.streams.push_back(stream);
      metrics_->OnAdded();

      auto track = std::make_shared<Track>();
      track->owner = active.request;
      track->stream = stream;
      track->waiting_since_ns = now_ns;
      if (p == 0 && i == 0) track->cached_tokens = request.cached_prefix_tokens;  // Peek looked at the first prompt
      active.tracks.push_back(track);
      // Shorter prompts publish no page, so their choices gain nothing by waiting for the first.
      if (leader != nullptr && static_cast<int32_t>(prompt->size()) > kPageTokens) {
        leader->followers.push_back(track);
      } else {
        Enqueue(track, false);
        if (leader == nullptr) leader = track;
      }
    }
  }
}

void Scheduler::Enqueue(const TrackPtr& track, bool at_head) {
  // Also for a stream that has output: the prefill form ends before the last prompt token, and decode recomputes what follows.
  if (!track->prefilled) ChoosePath(track);
  FairQueue<TrackPtr>& queue = track->forecast.to_prefill && !track->prefilled ? prefill_queue_ : decode_queue_;
  if (at_head) {
    queue.PushHead(track);
  } else {
    queue.PushBack(track->owner->key_index, track);
  }
}

void Scheduler::ScheduleDispatch() {
  if (std::exchange(dispatch_scheduled_, true)) return;
  loop_->Post([this, alive = alive_] {
    if (!*alive) return;
    dispatch_scheduled_ = false;
    Dispatch();
  });
}

bool Scheduler::AnyReady(WorkerLink::Kind kind) const {
  return std::any_of(links_.begin(), links_.end(), [&](const auto& link) { return link->kind() == kind && link->ready(); });
}

WorkerLink* Scheduler::FreeLink(WorkerLink::Kind kind) const {
  WorkerLink* best = nullptr;
  for (const auto& link : links_) {
    if (link->kind() != kind || link->FreePlaces() == 0) continue;
    if (InSharedPass(*link)) continue;
    if (best == nullptr || link->running() < best->running()) best = link.get();
  }
  return best;
}

Scheduler::TrackPtr Scheduler::NextForDecode() {
  if (handoff_.empty() && decode_queue_.empty()) return nullptr;
  if (decode_queue_.empty() || (!handoff_.empty() && handoff_.front()->arrived_ns() <= decode_queue_.Next()->arrived_ns())) {
    TrackPtr track = std::move(handoff_.front());
    handoff_.pop_front();
    return track;
  }
  return decode_queue_.Pop();
}

void Scheduler::Dispatch() {
  // Without any prefill worker that answers, decode prefills long prompts too: slower, but nobody waits for a process that may not come.
  if (!prefill_queue_.empty() && !AnyReady(WorkerLink::Kind::kPrefill) && AnyReady(WorkerLink::Kind::kDecode)) {
    while (!prefill_queue_.empty()) {
      const TrackPtr track = prefill_queue_.Pop();
      if (track->touched) {
        decode_queue_.PushHead(track);
      } else {
        decode_queue_.PushBack(track->owner->key_index, track);
      }
    }
  }
  while (WorkerLink* link = FreeLink(WorkerLink::Kind::kDecode)) {
    const TrackPtr track = NextForDecode();
    if (track == nullptr) break;
    StartCall(track, link);
  }
  // Prefill runs ahead of decode by what decode could hold, no further: each stream that waits for decode holds its pages.
  size_t ahead_max = 0;
  for (const auto& link : links_) {
    if (link->kind() == WorkerLink::Kind::kDecode) ahead_max += static_cast<size_t>(std::max(1, link->status().max_batch()));
  }
  while (!prefill_queue_.empty() && handoff_.size() < ahead_max) {
    WorkerLink* const group = GroupFor(*prefill_queue_.Next());
    WorkerLink* const link = group != nullptr ? group : FreeLink(WorkerLink::Kind::kPrefill);
    if (link == nullptr) break;
    StartCall(prefill_queue_.Pop(), link, /*shared=*/group != nullptr);
  }
}

void Scheduler::StartCall(const TrackPtr& track, WorkerLink* link, bool shared) {
  Stream& stream = *track->stream;
  track->owner->model = model_->Named(track->owner->model);
  const RequestOptions& options = track->owner->options;
  if (const std::string& weights = link->status().generation();
      stream.generation.empty() && !weights.empty() && !model_->IsOf(weights, *track->owner->model)) {
    if (Refused(track, link, OtherWeights(*link))) Enqueue(track, true);
    return;
  }
  if (Active& active = *active_.at(track->owner.get()); std::exchange(active.waiting, false)) --waiting_requests_;
  ++stream.epoch;
  if (track->touched && stream.state == StreamState::kQueued) metrics_->OnResume();
  track->touched = true;

  v1::Stream value;
  value.set_request_id(ToBytes(stream.id));
  value.set_epoch(stream.epoch);
  value.set_generation(stream.generation);
  value.mutable_prompt_ids()->Add(stream.prompt_ids->begin(), stream.prompt_ids->end());
  value.mutable_output_ids()->Add(stream.output_ids.begin(), stream.output_ids.end());
  *value.mutable_sampling() = options.sampling;
  value.set_seed(stream.seed);
  value.set_max_new_tokens(stream.max_new_tokens);
  value.set_min_tokens(options.min_tokens);
  // Stop tokens that the client named end the stream even where the model's own end tokens are ignored.
  value.set_ignore_eos(options.ignore_eos && options.stop_token_ids.empty());
  if (!options.ignore_eos) value.mutable_eos_ids()->Add(track->owner->model->eos_ids.begin(), track->owner->model->eos_ids.end());
  value.mutable_eos_ids()->Add(options.stop_token_ids.begin(), options.stop_token_ids.end());
  value.set_num_logprobs(options.num_logprobs);
  value.set_prefill_until(stream.prefill_until());
  value.set_shared_pass(shared);

  Move(track, link->kind() == WorkerLink::Kind::kPrefill ? StreamState::kPrefilling : StreamState::kDecoding);
  auto ref = std::make_shared<CallRef>();
  ref->link = link;
  ref->begun_ns = MonotonicNowNs();
  link->AddRunning(1);
  if (shared) {
    ref->ranks = RanksOf(*link);
    link->AddRunningShared(1);
    track->forecast.seconds.reset();  // was for one worker
  }
  track->ref = ref;
  // The closures outlive the scheduler only until it goes: its destructor cancels every call, and a cancelled call is silent.
  track->call = link->Continue(
      value,
      [this, track, ref, alive = alive_](const v1::StreamEvent& event) {
        if (*alive) OnEvent(track, ref, event);
      },
      [this, track, ref, alive = alive_](const absl::Status& status) {
        if (*alive) OnCallDone(track, ref, status);
      });
}

bool Scheduler::Refused(const TrackPtr& track, WorkerLink* link, const absl::Status& why) {
  if (!model_->Serves(*track->owner->model) && track->stream->generation.empty()) {
    FailRequest(track, Replaced());
    return false;
  }
  link->BackOff();
  if (track->refused_since_ns == 0) track->refused_since_ns = MonotonicNowNs();
  int others = 0;
  for (const auto& each : links_) others += each->running();
  if (others == 0 && Since(track->refused_since_ns) > options_.give_up) {
    FailRequest(track, Annotate(why, "no worker takes this request though nothing else runs"));
    return false;
  }
  return true;
}

void Scheduler::OnEvent(const TrackPtr& track, const std::shared_ptr<CallRef>& ref, const v1::StreamEvent& event) {
  Stream& stream = *track->stream;
  if (track->ref != ref || event.epoch() != stream.epoch || IsEnd(stream.state)) return;
  if (event.has_started() && stream.generation.empty() && !model_->IsOf(event.started().generation(), *track->owner->model)) {
    // Here it is certain which weights compute it: of another model they would make text of ids that mean something else.
    WorkerLink* link = ref->link;
    EndCall(track, true);
    if (Refused(track, link, OtherWeights(*link))) Requeue(track, "its worker has other weights", Pages::kKept);
    return;
  }
  ref->saw_event = true;
  ref->link->Accepted();
  track->refused_since_ns = 0;
  switch (event.event_case()) {
    case v1::StreamEvent::kStarted:
      if (stream.generation.empty()) stream.generation = event.started().generation();
      if (!stream.cached_tokens) stream.cached_tokens = event.started().cached_tokens();
      return;
    case v1::StreamEvent::kPrefilled:
      if (stream.state != StreamState::kPrefilling) return;
      track->prefilled = true;
      track->lost = 0;
      last_prefilled_ns_[ref->link] = MonotonicNowNs();
      EndCall(track, false);
      Move(track, StreamState::kHandoff);
      track->waiting_since_ns = MonotonicNowNs();
      handoff_.push_back(track);
      ScheduleDispatch();
      return;
    case v1::StreamEvent::kToken: OnToken(track, event.token()); return;
    case v1::StreamEvent::kFinished:
      if (event.finished().reason() == v1::StreamEvent::Finished::REASON_PREEMPTED) {
        EndCall(track, false);
        Requeue(track, "its place was taken", Pages::kPerhapsLost);
      } else {
        // The router has seen the end itself by the last token; here only what the worker ended for reasons of its own.
        const bool eos = event.finished().reason() == v1::StreamEvent::Finished::REASON_EOS;
        FinishChoice(track, eos ? FinishReason::kStop : FinishReason::kLength);
      }
      return;
    case v1::StreamEvent::EVENT_NOT_SET: return;
  }
}

void Scheduler::OnToken(const TrackPtr& track, const v1::StreamEvent::Token& token) {
  Stream& stream = *track->stream;
  const auto have = static_cast<int32_t>(stream.output_ids.size());
  if (token.index() < have) return;  // a repetition
  if (token.index() > have) {
    const std::string what = absl::StrFormat("%s sent token %d where %d was due", track->ref->link->name(), token.index(), have);
    EndCall(track, true);
    if (++track->lost >= options_.attempts_max) return FailRequest(track, absl::InternalError(what));
    Requeue(track, what, Pages::kPerhapsLost);
    return;
  }
  const RequestOptions& options = track->owner->options;
  const int64_t now_ns = MonotonicNowNs();
  metrics_->OnToken(stream, now_ns);
  if (have == 0) OnFirstToken(track);
  if (stream.first_token_ns == 0) stream.first_token_ns = now_ns;
  stream.last_token_ns = now_ns;
  stream.output_ids.push_back(token.id());
  track->lost = 0;
  ReleaseFollowers(track);

  OutputToken out{token.id(), token.logprob(), {}, false};
  for (const auto& top : token.top()) out.top.push_back({top.id(), top.logprob()});
  const auto among = [&](const std::vector<int32_t>& ids) { return std::find(ids.begin(), ids.end(), token.id()) != ids.end(); };
  out.is_end = have + 1 > options.min_tokens && ((!options.ignore_eos && among(track->owner->model->eos_ids)) || among(options.stop_token_ids));
  const bool is_end = out.is_end;
  const ChoiceDelta delta = stream.text->Push(std::move(out));
  // Held: a sink that finds its client gone cancels the request from within, which lets go of the sink.
  const std::shared_ptr<RequestSink> sink = track->owner->sink;
  sink->OnDelta(stream.choice, delta);
  if (IsEnd(stream.state)) return;

  if (stream.text->stopped() || is_end) {
    FinishChoice(track, FinishReason::kStop);
  } else if (have + 1 >= stream.max_new_tokens) {
    FinishChoice(track, FinishReason::kLength);
  }
}

void Scheduler::OnCallDone(const TrackPtr& track, const std::shared_ptr<CallRef>& ref, const absl::Status& status) {
  ref->Release();
  ScheduleDispatch();
  Stream& stream = *track->stream;
  if (track->ref != ref) return;
  track->ref = nullptr;
  track->call = nullptr;
  if (IsEnd(stream.state)) {
    // Its worker frees the pages of a stream that it ended; one that broke did not.
    if (status.ok()) {
      leftovers_.LeftTo(*ref->link, stream.id);
    } else {
      leftovers_.Free(stream.id);
    }
    return;
  }
  if (absl::IsResourceExhausted(status)) {
    if (Refused(track, ref->link, status)) Requeue(track, std::string(status.message()), Pages::kKept);
    return;
  }
  // Another try would end the same way: our own bug, or a model whose numbers run away (DataLoss).
  if (absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) || absl::IsDataLoss(status)) {
    FailRequest(track, absl::InternalError(absl::StrCat(ref->link->name(), " refused the stream: ", status.message())));
    return;
  }
  if (absl::IsAborted(status)) {
    if (!stream.output_ids.empty()) {
      // The prefill worker has gone on to newer weights; a decode worker may still have the stream's.
      if (ref->link->kind() == WorkerLink::Kind::kPrefill) {
        track->prefilled = true;
        Requeue(track, std::string(status.message()), Pages::kKept);
      } else {
        FailRequest(track, absl::UnavailableError("the model was replaced while this request was running: send it again"));
      }
      return;
    }
    if (!model_->Serves(*track->owner->model)) return FailRequest(track, Replaced());
    stream.generation.clear();
    track->prefilled = false;
    Requeue(track, std::string(status.message()), Pages::kKept);
    return;
  }
  if (!ref->ranks.empty()) track->alone = true;
  const std::string why = status.ok() ? "the worker ended the call early" : std::string(status.message());
  // A call that broke before its first event never reached a worker, or met one that is stopping: that says nothing about the stream.
  if (ref->saw_event && ++track->lost >= options_.attempts_max) {
    FailRequest(track, absl::InternalError(absl::StrFormat("this request lost %d workers in a row (last: %s): giving it up", track->lost, why)));
    return;
  }
  ref->link->Suspect(why);
  Requeue(track, why, ref->saw_event ? Pages::kPerhapsLost : Pages::kKept);
}

void Scheduler::Requeue(const TrackPtr& track, const std::string& why, Pages pages) {
  if (const auto permit = LogAllowed("requeue", 30)) {
    spdlog::info("{}[{}] waits at the queue's head with {} tokens: {}{}", track->owner->id, track->stream->choice, track->stream->output_ids.size(),
                 why, permit->Note());
  }
  Move(track, StreamState::kQueued);
  track->waiting_since_ns = MonotonicNowNs();
  if (pages == Pages::kKept || track->stream->prefill_until() <= peek_->from_tokens()) {
    Enqueue(track, true);
    ScheduleDispatch();
    return;
  }
  // A long prompt whose pages may be gone: recomputed in chunks between decode's steps it would hold up every stream there. What of it the
  // published pages still have says which path it takes.
  loop_->Offload([this, track, prompt = track->stream->prompt_ids, peek = peek_, loop = loop_, alive = alive_]() mutable {
    const int32_t cached = peek->CachedTokens(*prompt);
    loop->Post([this, track = std::move(track), cached, alive] {
      if (!*alive || IsEnd(track->stream->state)) return;
      track->cached_tokens = cached;
      track->prefilled = false;
      Enqueue(track, true);
      ScheduleDispatch();
    });
  });
}

void Scheduler::EndCall(const TrackPtr& track, bool cancel) {
  if (cancel && track->call) {
    track->call->Cancel();  // silent from here: OnCallDone will not come
    track->ref->Release();
    ScheduleDispatch();
  }
  // Without cancel the call goes on to its end by itself, and OnCallDone gives its place back.
  track->call = nullptr;
  track->ref = nullptr;
}

void Scheduler::FinishChoice(const TrackPtr& track, FinishReason reason) {
  Stream& stream = *track->stream;
  Request* request = stream.request;
  const std::shared_ptr<RequestSink> sink = request->sink;
  if (!stream.text->stopped()) {
    const ChoiceDelta rest = stream.text->Finish();
    if (stream.text->stopped()) reason = FinishReason::kStop;
    if (!rest.text.empty()) sink->OnDelta(stream.choice, rest);
    if (IsEnd(stream.state)) return;
  }
  const bool ended_by_worker = !stream.text->stopped();
  Move(track, StreamState::kDone);
  // A stop string is the router's own finding: the worker must be told. Otherwise the call is watched until its end.
  if (!ended_by_worker) {
    if (track->call != nullptr) leftovers_.LeftTo(*track->ref->link, stream.id);
    EndCall(track, true);
  }
  ReleaseFollowers(track);
  sink->OnChoiceFinished(stream.choice, reason, stream.text->stop_string());
  EndIfComplete(request, true);
}

void Scheduler::FailRequest(const TrackPtr& track, const absl::Status& status) {
  const auto at = active_.find(track->owner.get());
  if (at == active_.end()) return;
  const std::shared_ptr<Request> request = track->owner;
  request->failure = status;
  for (const TrackPtr& each : at->second->tracks) {
    if (!IsEnd(each->stream->state)) Move(each, StreamState::kFailed);
  }
  CancelStreams(*at->second);
  if (const auto permit = LogAllowed("request-failed", 30)) {
    spdlog::warn("{} failed: {}{}", request->id, std::string(status.message()), permit->Note("failures"));
  }
  EndIfComplete(request.get(), true);
}

void Scheduler::CancelStreams(Active& active) {
  for (const TrackPtr& track : active.tracks) {
    const bool with_worker = track->call != nullptr && track->ref->link->answering();
    decode_queue_.Remove(track);
    prefill_queue_.Remove(track);
    handoff_.erase(std::remove(handoff_.begin(), handoff_.end(), track), handoff_.end());
    track->followers.clear();
    const bool was_running = !IsEnd(track->stream->state);
    const bool unfinished = was_running || track->stream->state == StreamState::kFailed;
    if (was_running) Move(track, StreamState::kCancelled);
    if (!unfinished) continue;
    // A worker that hears the cancel frees the pages; nobody does for a stream that was between workers.
    if (with_worker) {
      leftovers_.LeftTo(*track->ref->link, track->stream->id);
    } else if (track->touched) {
      leftovers_.Free(track->stream->id);
    }
    EndCall(track, true);
  }
}

void Scheduler::Cancel(const std::shared_ptr<Request>& request) {
  const auto at = active_.find(request.get());
  if (at == active_.end()) return;
  CancelStreams(*at->second);
  EndIfComplete(request.get(), false);
}

Scheduler::CancelResult Scheduler::CancelById(const std::string& id) {
  const auto at = by_id_.find(id);
  if (at == by_id_.end()) return ended_set_.contains(id) ? CancelResult::kHadEnded : CancelResult::kNeverSeen;
  Active& active = *active_.at(at->second);
  const std::shared_ptr<Request> request = active.request;
  std::vector<int32_t> open;
  for (const auto& stream : request->streams) {
    if (!IsEnd(stream->state)) open.push_back(stream->choice);
  }
  CancelStreams(active);
  const std::shared_ptr<RequestSink> sink = request->sink;
  for (const int32_t choice : open) sink->OnChoiceFinished(choice, FinishReason::kCancelled, "");
  EndIfComplete(request.get(), true);
  return CancelResult::kWasRunning;
}

void Scheduler::EndIfComplete(Request* request, bool tell) {
  const auto at = active_.find(request);
  if (at == active_.end() || !request->ended()) return;
  const std::unique_ptr<Active> active = std::move(at->second);
  active_.erase(at);
  by_id_.erase(request->id);
  ended_ids_.push_back(request->id);
  ++ended_set_[request->id];
  if (ended_ids_.size() > kEndedIdsMax) {
    if (const auto old = ended_set_.find(ended_ids_.front()); --old->second == 0) ended_set_.erase(old);
    ended_ids_.pop_front();
  }
  if (active->waiting) --waiting_requests_;
  metrics_->OnRequestEnd(*request);
  const Usage usage = request->usage();
  if (const auto permit = LogAllowed("request-end", 60)) {
    const Stream& first = *request->streams.front();
    spdlog::info("{} {}: {} prompt tokens ({} cached), {} out, first token after {} ms, {} s in all{}", request->id, StreamStateName(first.state),
                 usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens,
                 first.first_token_ns ? fmt::format("{:.0f}", static_cast<double>(first.first_token_ns - request->arrived_ns) / 1e6) : "-",
                 fmt::format("{:.2f}", absl::ToDoubleSeconds(Since(request->arrived_ns))), permit->Note("requests"));
  }
  // Let go here: a sink may hold its request.
  const std::shared_ptr<RequestSink> sink = std::exchange(request->sink, nullptr);
  if (tell) sink->OnEnd(request->failure, usage);
  if (active_.empty()) {
    tick_timer_.reset();
    if (on_empty_) std::exchange(on_empty_, nullptr)();
  }
}

void Scheduler::ReleaseFollowers(const TrackPtr& track) {
  for (const TrackPtr& follower : std::exchange(track->followers, {})) {
    follower->cached_tokens = follower->stream->prefill_until();  // the leader has published its pages by now
    Enqueue(follower, false);
  }
  ScheduleDispatch();
}

void Scheduler::Move(const TrackPtr& track, StreamState to) {
  Stream& stream = *track->stream;
  const StreamState from = stream.state;
  HEARTH_CHECK(MayMove(from, to));
  const int64_t now_ns = MonotonicNowNs();
  stream.state = to;
  stream.events.push_back({to, now_ns});
  metrics_->OnMove(stream, from, now_ns);
  if (IsEnd(to) && from == StreamState::kDecoding) {
    decoded_for_ns_.push_back(now_ns - stream.events[stream.events.size() - 2].at_ns);
    if (decoded_for_ns_.size() > kDecodedKept) decoded_for_ns_.pop_front();
  }
  if (!IsEnd(to)) return;
  for (const auto& watch : end_watches_) {
    if (const auto on_end = watch.lock()) (*on_end)(stream);
  }
}

absl::Status Scheduler::IsRunning(const std::string& id) const {
  if (by_id_.contains(id)) return absl::OkStatus();
  if (ended_set_.contains(id)) return absl::NotFoundError(absl::StrCat("the request '", id, "' has ended"));
  return absl::NotFoundError(absl::StrCat("no request with the id '", id, "' is running: the answer's `id` names it"));
}

std::shared_ptr<void> Scheduler::WatchEnds(std::function<void(const Stream&)> on_end) {
  std::erase_if(end_watches_, [](const auto& watch) { return watch.expired(); });
  auto watch = std::make_shared<std::function<void(const Stream&)>>(std::move(on_end));
  end_watches_.push_back(watch);
  return watch;
}

void Scheduler::ForEachStream(const std::function<void(const Stream&)>& look) const {
  for (const auto& [request, active] : active_) {
    for (const auto& stream : request->streams) look(*stream);
  }
}

void Scheduler::OnModelReplaced() {
  std::vector<TrackPtr> waiting;
  for (const auto& [request, active] : active_) {
    if (active->waiting && !model_->Serves(*request->model)) waiting.push_back(active->tracks.front());
  }
  for (const TrackPtr& track : waiting) FailRequest(track, Replaced());
}

void Scheduler::Drain(std::function<void()> on_empty) {
  draining_ = true;
  if (active_.empty()) {
    on_empty();
  } else {
    on_empty_ = std::move(on_empty);
  }
}

void Scheduler::FailAll(const absl::Status& status) {
  std::vector<TrackPtr> firsts;
  for (const auto& [request, active] : active_) firsts.push_back(active->tracks.front());
  for (const TrackPtr& track : firsts) FailRequest(track, status);
}

void Scheduler::Tick() {
  tick_timer_ = loop_->After(absl::Seconds(1), [this] { Tick(); });
  const bool decode_ready = AnyReady(WorkerLink::Kind::kDecode);
  const int64_t decode_away_since_ns = DecodeAwaySinceNs();
  std::vector<TrackPtr> give_up, move;
  for (const auto& [request, active] : active_) {
    for (const TrackPtr& track : active->tracks) {
      if (IsEnd(track->stream->state)) continue;
      if (track->ref == nullptr) {
        if (!decode_ready && Since(std::max(track->waiting_since_ns, decode_away_since_ns)) > options_.give_up) give_up.push_back(track);
      } else if (const WorkerLink& link = *track->ref->link; link.answering()) {
        // It answers, but has lost something that it needs (the store), and with it the stream.
        const int64_t since_ns = std::max({link.away_since_ns(), track->stream->last_token_ns, track->waiting_since_ns});
        if (!link.ready() && !link.draining() && Since(since_ns) > options_.give_up) give_up.push_back(track);
        // Rank 0 would wait for another rank that is stopped or hangs.
        const std::vector<WorkerLink*>& ranks = track->ref->ranks;
        if (std::any_of(ranks.begin(), ranks.end(), [](const WorkerLink* rank) { return !rank->answering(); })) {
          track->alone = true;
          move.push_back(track);
        }
      } else {
        // The process is there but does not answer (stopped, hung). It may wake: its call stays open while nobody else could take the stream.
        if (AnyReady(track->ref->link->kind())) {
          move.push_back(track);
        } else if (Since(track->ref->link->away_since_ns()) > options_.give_up) {
          give_up.push_back(track);
        }
      }
    }
  }
  for (const TrackPtr& track : move) {
    std::string why = track->ref->link->name() + " is " + track->ref->link->state();
    for (const WorkerLink* rank : track->ref->ranks) {
      if (!rank->answering()) why = absl::StrCat(rank->name(), ", which computes with ", track->ref->link->name(), ", is ", rank->state());
    }
    EndCall(track, true);
    Requeue(track, why, Pages::kPerhapsLost);
  }
  for (const TrackPtr& track : give_up) {
    FailRequest(track, absl::UnavailableError(absl::StrCat("no worker has taken this request for ", absl::FormatDuration(options_.give_up), ": ",
                                                           DecodeReadiness().message())));
  }
  ScheduleDispatch();
}

}  // namespace hearth::router
