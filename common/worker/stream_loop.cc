#include "common/worker/stream_loop.h"

#include <algorithm>

#include "common/base/check.h"
#include "common/base/logging.h"
#include "common/roofline/pass_cost.h"
#include "common/trace/trace.h"
#include "common/worker/stream_pages.h"

namespace hearth {
namespace {

StreamLoopOptions WithChunks(StreamLoopOptions options, const DeviceCaps& caps) {
  for (int64_t* tokens : {&options.busy_chunk_tokens, &options.idle_chunk_tokens}) {
    if (*tokens == 0) *tokens = caps.prefill_chunk_rows;
  }
  return options;
}

}  // namespace

StreamLoop::StreamLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options)
    : device_(device),
      model_(model),
      kv_(kv),
      options_(WithChunks(options, device.caps())),
      stream_(device.MakeStream("loop")),
      signal_(device.MakeSignal()) {
  stats_.SetPrompts("chunked", options_.idle_chunk_tokens, 0);
  keeper_ = std::make_unique<PageKeeper>(device, store, [this](KeeperEvent event) {
    {
      std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
    }
    signal_->Notify();
  });
}

StreamLoop::~StreamLoop() { keeper_.reset(); }

absl::Status StreamLoop::Submit(StreamRequest request, std::shared_ptr<StreamSink> sink, std::shared_ptr<LiveStream>* live) {
  const ModelConfig& config = model_.config();
  if (request.prompt_size < 1 || static_cast<int64_t>(request.tokens.size()) < request.prompt_size) {
    return absl::InvalidArgumentError("a stream needs at least one prompt token");
  }
  for (int32_t id : request.tokens) {
    if (id < 0 || id >= config.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token id ", id, " is outside the vocabulary of ", config.vocab_size));
    }
  }
  if (static_cast<int64_t>(request.tokens.size()) > ContextTokens()) {
    return absl::InvalidArgumentError(absl::StrCat("the stream has ", request.tokens.size(), " tokens, the context holds ",
                                                   config.max_position_embeddings, ", the KV pool ", kv_.geometry().num_pages * kPageTokens,
                                                   " (weightstore.kv_pool_tokens)"));
  }
  std::lock_guard lock(mutex_);
  if ((draining_ && !request.begun) || stop_.stopped()) return absl::UnavailableError("this worker is draining: ask again");
  if (in_loop_ >= options_.max_streams + options_.max_waiting) return absl::ResourceExhaustedError("too many streams wait here");
  auto stream = std::make_shared<LiveStream>(std::move(request), std::move(sink), next_serial_++);
  if (live != nullptr) *live = stream;
  submitted_.push_back(std::move(stream));
  ++in_loop_;
  signal_->Notify();
  return absl::OkStatus();
}

bool StreamLoop::Step() {
  TakeMessages();
  DropCancelled();
  Admit();
  const bool worked = Work();
  if (worked) {
    starved_since_ns_ = 0;
  } else {
    RelieveFullPool();
  }
  int64_t spare = 0;
  for (const auto& s : running_) spare += static_cast<int64_t>(s->pages.size()) - PagesFor(s->valid);
  stats_.SetGauges(static_cast<int64_t>(running_.size()), static_cast<int64_t>(waiting_.size()), spare);
  return worked;
}

void StreamLoop::Run() {
  while (!stop_.stopped()) {
    const uint64_t seen = signal_->Current();
    StillAlive();
    idle_.store(false, std::memory_order_relaxed);
    if (Step()) continue;
    if (options_.gate != nullptr) options_.gate->PassEnded();
    idle_.store(true, std::memory_order_relaxed);
    const int64_t deadline_ns = pool_short() ? device_.Now() + kStarvedLookNs : INT64_MAX;
    device_.HostWait(*signal_, seen, {.deadline_ns = deadline_ns, .stop = &stop_});
  }
  OfferAll();
}

void StreamLoop::Stop() {
  stop_.Stop();
  if (options_.gate != nullptr) options_.gate->Open();
  signal_->Notify();
}

void StreamLoop::Drain() {
  std::lock_guard lock(mutex_);
  draining_ = true;
}

bool StreamLoop::Idle() const {
  std::lock_guard lock(mutex_);
  return in_loop_ == 0;
}

void StreamLoop::StillAlive() { last_sign_ns_.store(device_.Now(), std::memory_order_relaxed); }

bool StreamLoop::Responsive(int64_t now_ns) const {
  // One layer of the largest chunk of the largest model takes seconds, even on one socket.
  constexpr int64_t kSilentMaxNs = 120'000'000'000;
  return idle_.load(std::memory_order_relaxed) || now_ns - last_sign_ns_.load(std::memory_order_relaxed) < kSilentMaxNs;
}

LoopStats::View StreamLoop::Stats() const { return stats_.Look(device_.Now()); }

void StreamLoop::TakeMessages() {
  std::vector<std::shared_ptr<LiveStream>> submitted;
  std::vector<KeeperEvent> events;
  {
    std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
    events.swap(events_);
  }
  for (KeeperEvent& event : events) Apply(std::move(event));
  for (auto& stream : submitted) {
    // The router asks again for a stream that still runs here: it lost sight of it. The newer value goes on, on the same pages.
    for (auto* list : {&running_, &waiting_}) {
      const auto old = std::find_if(list->begin(), list->end(), [&](const auto& s) { return s->request.id == stream->request.id; });
      if (old == list->end()) continue;
      const std::shared_ptr<LiveStream> superseded = *old;
      superseded->sink->OnError(absl::AbortedError("a newer Continue of this stream took its place"));
      Remove(superseded, /*free_pages=*/false);
      break;
    }
    waiting_.push_back(std::move(stream));
  }
}

void StreamLoop::Apply(KeeperEvent event) {
  const auto by_serial = [&](const auto& s) { return s->serial == event.serial; };
  if (event.kind == KeeperEvent::Kind::kOffered) {
    const std::shared_ptr<LiveStream> stream = TakeOffered(event.serial);
    if (stream == nullptr) return;
    if (stream->cancelled.load(std::memory_order_acquire)) {
      stream->sink->OnError(absl::CancelledError("the client is gone or has cancelled"));
      keeper_->Free(stream->request.id, 0);
    } else {
      OnOffered(*stream);
    }
    return;
  }
  const auto it = std::find_if(running_.begin(), running_.end(), by_serial);
  if (it == running_.end()) {
    // It left meanwhile, and its rows were or will be freed in order; unless it was the Offer that failed.
    const std::shared_ptr<LiveStream> offered = event.kind == KeeperEvent::Kind::kFailed ? TakeOffered(event.serial) : nullptr;
    if (offered != nullptr) offered->sink->OnError(event.status);
    return;
  }
  const std::shared_ptr<LiveStream> stream = *it;
  switch (event.kind) {
    case KeeperEvent::Kind::kPrepared: {
      const int64_t misfit = AdoptPages(kv_, event.rows, *stream);
      if (misfit < static_cast<int64_t>(event.rows.size())) {
        keeper_->Free(stream->request.id, misfit);
        GrowTo(stream, InitialPages(stream->request));
      }
      if (std::vector<int32_t> full = TakeUnsealed(*stream); !full.empty()) keeper_->Seal(stream->request.id, std::move(full));
      stream->prepared = true;
      stream->out_of_pages = false;
      // Never the last prompt token: it is computed to have its logits.
      stream->sink->OnStarted(std::min(event.cached_tokens, stream->request.prompt_size - 1));
      break;
    }
    case KeeperEvent::Kind::kGrown:
      AppendPages(event.rows, *stream);
      stream->growing = false;
      stream->out_of_pages = false;
      GrowTo(stream, std::min(InitialPages(stream->request), PagesFor(static_cast<int64_t>(stream->request.tokens.size()))));
      break;
    case KeeperEvent::Kind::kOutOfPages:
      stream->out_of_pages = true;
      ReturnSpares();
      break;
    case KeeperEvent::Kind::kFailed:
      stream->sink->OnError(event.status);
      Remove(stream, /*free_pages=*/true);
      break;
    case KeeperEvent::Kind::kOffered: break;
  }
}

std::shared_ptr<LiveStream> StreamLoop::TakeOffered(uint64_t serial) {
  const auto it = std::find_if(offered_.begin(), offered_.end(), [&](const auto& s) { return s->serial == serial; });
  if (it == offered_.end()) return nullptr;
  std::shared_ptr<LiveStream> stream = *it;
  offered_.erase(it);
  return stream;
}

bool StreamLoop::pool_short() const {
  return std::any_of(running_.begin(), running_.end(), [](const auto& s) { return s->out_of_pages; });
}

void StreamLoop::RelieveFullPool() {
  // If somebody lacks a page that the pool does not have, the youngest gives its own up (DESIGN 3.4). The only one that has any waits first for
  // what other workers may free; but two workers must not wait for each other's pages for ever.
  if (!pool_short()) {
    starved_since_ns_ = 0;
    return;
  }
  const int64_t now_ns = device_.Now();
  if (starved_since_ns_ == 0) starved_since_ns_ = now_ns;
  const auto holds_pages = [](const auto& s) { return s->prepared; };
  const int64_t holders = std::count_if(running_.begin(), running_.end(), holds_pages);
  if (holders < 2 && now_ns - starved_since_ns_ < kLonelyWaitNs) return;
  starved_since_ns_ = 0;
  const auto youngest = std::find_if(running_.rbegin(), running_.rend(), holds_pages);
  // One that is still being prepared may hold what a former worker left it.
  const std::shared_ptr<LiveStream> victim = youngest == running_.rend() ? running_.back() : *youngest;
  Preempt(victim);
}

void StreamLoop::ReturnSpares() {
  for (const auto& stream : running_) {
    const int64_t needed = PagesFor(std::max(static_cast<int64_t>(stream->request.tokens.size()), stream->valid));
    if (!stream->prepared || stream->growing || static_cast<int64_t>(stream->pages.size()) <= needed) continue;
    keeper_->Free(stream->request.id, needed);
    stream->pages.resize(static_cast<size_t>(needed));
  }
}

void StreamLoop::DropCancelled() {
  for (auto* list : {&running_, &waiting_}) {
    const std::vector<std::shared_ptr<LiveStream>> copy = *list;
    for (const auto& stream : copy) {
      if (!stream->cancelled.load(std::memory_order_acquire)) continue;
      stream->sink->OnError(absl::CancelledError("the client is gone or has cancelled"));
      Remove(stream, /*free_pages=*/true);
    }
  }
}

void StreamLoop::Admit() {
  while (!waiting_.empty() && static_cast<int64_t>(running_.size()) < options_.max_streams) {
    std::shared_ptr<LiveStream> stream = waiting_.front();
    waiting_.erase(waiting_.begin());
    running_.push_back(stream);
    keeper_->Prepare(stream, InitialPages(stream->request));
  }
}

int64_t StreamLoop::PassFrom(const LiveStream& stream) const {
  const bool lacks_hidden = model_.has_mtp() && stream.valid > 0 && stream.hidden_at != stream.valid - 1;
  return lacks_hidden ? stream.valid - 1 : stream.valid;
}

const float* StreamLoop::PriorHidden(const LiveStream& stream, int64_t from) const {
  return model_.has_mtp() && from > 0 && stream.hidden_at == from - 1 ? stream.hidden.data() : nullptr;
}

float* StreamLoop::HiddenAt(int64_t position, LiveStream& stream) {
  stream.hidden.resize(static_cast<size_t>(model_.config().hidden_size));
  stream.hidden_at = position;
  return stream.hidden.data();
}

bool StreamLoop::LacksPrefillHidden(const LiveStream& stream) const {
  return stream.valid == stream.request.prefill_until() && PassFrom(stream) < stream.valid;
}

void StreamLoop::PrefillChunk(LiveStream& stream, int64_t max_tokens) {
  if (prefill_workspace_ == nullptr) {
    // One row more than a chunk: the position before it.
    auto made = model_.MakeWorkspace(std::max(options_.idle_chunk_tokens, options_.busy_chunk_tokens) + 1, 0);
    if (!made.ok()) return Fail(stream, made.status());
    prefill_workspace_ = std::move(made).value();
  }
  const int64_t start = stream.valid;
  const int64_t end = std::min({start + max_tokens, stream.request.prefill_until(), static_cast<int64_t>(stream.pages.size()) * kPageTokens});
  const int64_t from = PassFrom(stream);
  if (end <= from) return;
  const TraceSpan span(stream_->trace_track(), "prefill", "stream from until", TraceId(stream.request.id), from, end);
  ForwardBatch batch;
  batch.form = Form::kPrefill;
  batch.token_ids.assign(stream.request.tokens.begin() + from, stream.request.tokens.begin() + end);
  batch.sequences.push_back({.first_row = 0, .num_rows = end - from, .start_position = from, .write_from = start, .pages = stream.pages.data()});
  batch.prior_hidden.push_back(PriorHidden(stream, from));
  ForwardHooks hooks;
  hooks.on_layer_done = [&](int64_t layer) {
    StillAlive();
    const TraceSpan publishing(stream_->trace_track(), "publish", "layer", layer);
    PublishProgress(kv_, stream, end, layer + 1);
    return !stream.cancelled.load(std::memory_order_acquire);
  };
  const int64_t begin_ns = device_.Now(), waited_ns = WaitedNs();
  absl::Status status = model_.Forward(*stream_, *prefill_workspace_, kv_, batch, nullptr, &hooks);
  if (absl::IsCancelled(status)) return;
  if (status.ok() && model_.has_mtp()) status = model_.ReadHidden(*stream_, *prefill_workspace_, end - from - 1, HiddenAt(end - 1, stream));
  if (!status.ok()) return Fail(stream, status);
  stats_.AddPass({.tokens = end - start,
                  .positions = WorkOf(start, end - start).positions,
                  .duration_ns = device_.Now() - begin_ns,
                  .waited_ns = WaitedNs() - waited_ns});
  Publish(stream, end);
}

void StreamLoop::Fail(LiveStream& stream, const absl::Status& status) {
  stream.sink->OnError(status);
  stream.cancelled.store(true);
}

void StreamLoop::Publish(LiveStream& stream, int64_t until) {
  const std::vector<int32_t> full = PublishPositions(kv_, until, stream);
  if (!full.empty()) keeper_->Seal(stream.request.id, full);
}

int64_t StreamLoop::ContextTokens() const {
  return std::min(model_.config().max_position_embeddings, static_cast<int64_t>(kv_.geometry().num_pages) * kPageTokens);
}

int64_t StreamLoop::PositionsMax(const StreamRequest& request) const {
  return std::min(request.prompt_size + request.max_new_tokens, ContextTokens());
}

void StreamLoop::KeepSpare(const std::shared_ptr<LiveStream>& stream) {
  // Never more than the stream can still use, and nothing ahead of need while another one lacks a page now.
  const int64_t spare = pool_short() ? 0 : kSparePages;
  GrowTo(stream, std::min(PagesFor(static_cast<int64_t>(stream->request.tokens.size())) + spare, PagesFor(PositionsMax(stream->request))));
}

void StreamLoop::GrowTo(const std::shared_ptr<LiveStream>& stream, int64_t want) {
  const int64_t have = static_cast<int64_t>(stream->pages.size());
  if (stream->growing || have >= want) return;
  stream->growing = true;
  keeper_->Grow(stream, have, want - have);
}

void StreamLoop::TruncateKv(LiveStream& stream, int64_t position) {
  const int64_t index = position / kPageTokens;
  stream.valid = std::min(stream.valid, position);
  if (position % kPageTokens != 0 && index >= stream.sealed_pages) {
    kv_.header(stream.pages[index]).tokens_valid.store(static_cast<uint32_t>(position % kPageTokens), std::memory_order_release);
    return;
  }
  // A published page is immutable: its row is dropped and a fresh page takes the index.
  keeper_->Free(stream.request.id, index);
  stream.pages.resize(static_cast<size_t>(index));
  stream.sealed_pages = std::min(stream.sealed_pages, index);
  stream.valid = index * kPageTokens;
}

void StreamLoop::Remove(const std::shared_ptr<LiveStream>& stream, bool free_pages) {
  stream->left.store(true, std::memory_order_release);
  if (free_pages) keeper_->Free(stream->request.id, 0);
  std::erase(running_, stream);
  std::erase(waiting_, stream);
  std::lock_guard lock(mutex_);
  --in_loop_;
}

void StreamLoop::Offer(const std::shared_ptr<LiveStream>& stream) {
  offered_.push_back(stream);
  keeper_->Offer(stream);
  Remove(stream, /*free_pages=*/false);
}

void StreamLoop::Preempt(const std::shared_ptr<LiveStream>& stream) {
  stream->sink->OnFinished(FinishReason::kPreempted);
  Remove(stream, /*free_pages=*/true);
}

void StreamLoop::OfferAll() {
  TakeMessages();
  DropCancelled();
  for (auto* list : {&running_, &waiting_}) {
    while (!list->empty()) {
      const std::shared_ptr<LiveStream> stream = list->front();
      // The rows stay for the next worker's Take; nobody here writes to them any more.
      keeper_->Offer(stream);
      stream->sink->OnFinished(FinishReason::kPreempted);
      Remove(stream, /*free_pages=*/false);
    }
  }
  // Their Offer is on its way to the store; whether it arrives is not waited for.
  for (const auto& stream : std::exchange(offered_, {})) stream->sink->OnFinished(FinishReason::kPreempted);
}

}  // namespace hearth
