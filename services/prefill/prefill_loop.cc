#include "services/prefill/prefill_loop.h"

#include <algorithm>

#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/roofline/pass_cost.h"
#include "common/worker/stream_pages.h"

namespace hearth {

namespace {

StreamedTotals TotalsOf(const SlpPassStats& pass) {
  return {.passes = 1,
          .tokens = static_cast<uint64_t>(pass.rows),
          .duration_ns = pass.duration_ns,
          .bytes_copied = pass.bytes_loaded,
          .experts_copied = static_cast<uint64_t>(pass.experts_loaded),
          .experts_skipped = static_cast<uint64_t>(pass.experts_skipped),
          .waited_for_copies_ns = pass.waited_ns,
          .waited_for_slots_ns = pass.loader_waited_ns,
          .waited_for_rings_ns = pass.source.waited_ns,
          .records_from_rings = static_cast<uint64_t>(pass.source.from_rings),
          .records_from_image = static_cast<uint64_t>(pass.source.from_image),
          .last_tokens_per_second = static_cast<double>(pass.rows) / (static_cast<double>(pass.duration_ns) * 1e-9)};
}

}  // namespace

PrefillLoop::PrefillLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options,
                         std::unique_ptr<SlpEngine> slp, std::unique_ptr<PrefillGroup> group, std::function<DiskExpertSource::View()> disk)
    : StreamLoop(device, model, kv, store, options), slp_(std::move(slp)), group_(std::move(group)) {
  stats_.SetDisk(std::move(disk));
  if (slp_ != nullptr) stats_.SetPrompts("slp", slp_->max_rows(), 0);
  if (group_ == nullptr) return;
  TellGroup();
  group_->Start([this] { Wake(); });
}

void PrefillLoop::Close() {
  if (group_ != nullptr) group_->Leave();
  StreamLoop::Close();
}

int64_t PrefillLoop::InitialPages(const StreamRequest& request) const { return PagesFor(request.prefill_until()); }

bool PrefillLoop::Work() {
  for (const std::shared_ptr<LiveStream>& stream : std::vector(running_)) {
    if (!stream->prepared || stream->valid < stream->request.prefill_until()) continue;
    Offer(stream);
    return true;
  }
  if (group_ != nullptr) {
    if (const absl::Status status = group_->Refresh(*slp_); !status.ok()) spdlog::error("prefill group: {}", status.ToString());
    TellGroup();
    if (group_->called()) {
      Follow();
      return true;
    }
  }
  if (slp_ != nullptr) {
    const std::vector<Part> parts = PartsOfAPass();
    if (!parts.empty()) StreamWeights(parts);
    return !parts.empty();
  }
  const auto next = std::find_if(running_.begin(), running_.end(), [&](const auto& stream) { return Ready(*stream); });
  if (next == running_.end()) return false;
  const std::shared_ptr<LiveStream> stream = *next;
  PrefillChunk(*stream, options_.idle_chunk_tokens);
  return true;
}

// Its pages are all there; others wait for the store.
bool PrefillLoop::Ready(const LiveStream& stream) const {
  return stream.prepared && static_cast<int64_t>(stream.pages.size()) >= InitialPages(stream.request);
}

void PrefillLoop::OnOffered(LiveStream& stream) { stream.sink->OnPrefilled(stream.request.prefill_until()); }

// Streams in order of admission, as long as there is room for a row of another; the last one's rest waits for the next pass.
std::vector<PrefillLoop::Part> PrefillLoop::PartsOfAPass() const {
  std::vector<Part> parts;
  int64_t room = slp_->max_rows();
  for (const std::shared_ptr<LiveStream>& stream : running_) {
    if (!Ready(*stream) || stream->cancelled.load(std::memory_order_acquire)) continue;
    const int64_t from = PassFrom(*stream);
    const int64_t end = std::min(stream->request.prefill_until(), from + room);
    if (end <= stream->valid) break;
    parts.push_back({.stream = stream, .from = from, .end = end});
    room -= end - from;
  }
  return parts;
}

void PrefillLoop::StreamWeights(const std::vector<Part>& parts) {
  ForwardBatch batch;
  batch.form = Form::kPrefill;
  for (const Part& part : parts) {
    const LiveStream& stream = *part.stream;
    batch.sequences.push_back({.first_row = static_cast<int64_t>(batch.token_ids.size()),
                               .num_rows = part.end - part.from,
                               .start_position = part.from,
                               .write_from = stream.valid,
                               .pages = stream.pages.data()});
    batch.token_ids.insert(batch.token_ids.end(), stream.request.tokens.begin() + part.from, stream.request.tokens.begin() + part.end);
    batch.prior_hidden.push_back(PriorHidden(stream, part.from));
  }
  const auto wanted = [&] {
    StillAlive();
    return !stopping() &&
           std::any_of(parts.begin(), parts.end(), [](const Part& part) { return !part.stream->cancelled.load(std::memory_order_acquire); });
  };
  const SlpHooks hooks{.on_layer_done =
                           [&](int64_t layer) {
                             for (const Part& part : parts) PublishProgress(kv_, *part.stream, part.end, layer + 1);
                             return wanted();
                           },
                       .wanted = wanted};
  const int64_t waited_ns = WaitedNs();
  const bool shared = group_ != nullptr && group_->leads() &&
                      std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.stream->request.shared_pass; });
  const absl::Status status = shared ? group_->Lead(*slp_, kv_, batch, hooks) : slp_->Run(kv_, batch, nullptr, hooks);
  if (absl::IsCancelled(status)) return;
  PassWork work;
  for (size_t i = 0; i < parts.size(); ++i) {
    LiveStream& stream = *parts[i].stream;
    if (!status.ok()) {
      Fail(stream, status);
      continue;
    }
    if (model_.has_mtp()) std::ranges::copy(slp_->LastHidden(static_cast<int64_t>(i)), HiddenAt(parts[i].end - 1, stream));
    work += WorkOf(stream.valid, parts[i].end - stream.valid);
    Publish(stream, parts[i].end);
  }
  if (!status.ok()) return;
  const SlpPassStats& pass = slp_->last_pass();
  stats_.AddPass({.tokens = static_cast<int64_t>(work.tokens),
                  .positions = work.positions,
                  .duration_ns = pass.duration_ns,
                  .waited_ns = std::min(WaitedNs() - waited_ns, pass.duration_ns),  // loader and model may have waited at once
                  .prompts = static_cast<int64_t>(parts.size()),
                  .ranks = shared ? group_->size() : 1});
  stats_.AddStreamedPass(TotalsOf(pass));
  spdlog::debug("pass of {} tokens of {} prompts: {} loaded, {} experts loaded, {} skipped, {}, {} of them waiting for weights", pass.rows,
                parts.size(), HumanBytes(static_cast<double>(pass.bytes_loaded)), pass.experts_loaded, pass.experts_skipped,
                HumanDuration(static_cast<double>(pass.duration_ns) / 1e9), HumanDuration(static_cast<double>(pass.waited_ns) / 1e9));
}

void PrefillLoop::Follow() {
  const absl::Status status = group_->Follow(*slp_, kv_, [this] {
    StillAlive();
    return !stopping();
  });
  if (!status.ok()) {
    spdlog::info("a shared pass has ended: {}", std::string(status.message()));
    return;
  }
  stats_.AddStreamedPass(TotalsOf(slp_->last_pass()));
}

void PrefillLoop::TellGroup() {
  const PrefillGroup::View view = group_->Look();
  GroupStats stats{.id = view.id,
                   .rank = view.rank,
                   .size = view.size,
                   .waits_for = view.waits_for,
                   .passes = view.passes,
                   .passes_failed = view.passes_failed,
                   .sent = view.traffic};
  stats_.SetGroup(std::move(stats));
}

}  // namespace hearth
