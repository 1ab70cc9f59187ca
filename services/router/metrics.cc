#include "services/router/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cmath>

namespace hearth::router {
namespace {

constexpr size_t kRecent = 1024;
constexpr double kNsPerSecond = 1e9;

prometheus::Histogram::BucketBoundaries TtftSeconds() { return {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120}; }
prometheus::Histogram::BucketBoundaries TpotSeconds() { return {0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1}; }
prometheus::Histogram::BucketBoundaries Ratios() { return {0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4}; }
prometheus::Histogram::BucketBoundaries WholeSeconds() { return {0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}; }

}  // namespace

void RecentValues::Add(double value) {
  if (values_.size() < kRecent) {
    values_.push_back(value);
  } else {
    values_[count_ % kRecent] = value;
  }
  ++count_;
}

double RecentValues::Percentile(double fraction) const {
  if (values_.empty()) return 0;
  std::vector<double> sorted = values_;
  // Nearest rank.
  const auto rank = static_cast<size_t>(std::ceil(fraction * static_cast<double>(sorted.size())));
  const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(std::max<size_t>(rank, 1) - 1);
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

struct Metrics::Families {
  prometheus::Registry registry;

  prometheus::Counter& Count(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
  }
  prometheus::Histogram& Seconds(const char* name, const char* help, prometheus::Histogram::BucketBoundaries buckets) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, std::move(buckets));
  }

  prometheus::Family<prometheus::Gauge>& streams =
      prometheus::BuildGauge().Name("hearth_streams").Help("Streams that have not ended, by state").Register(registry);
  std::array<prometheus::Gauge*, kNumStreamStates> stream_gauges{};
  prometheus::Gauge& running =
      prometheus::BuildGauge().Name("hearth_running").Help("Streams in a worker: prefilling or decoding").Register(registry).Add({});
  prometheus::Family<prometheus::Counter>& requests =
      prometheus::BuildCounter().Name("hearth_requests_total").Help("Requests that ended, by outcome").Register(registry);
  prometheus::Family<prometheus::Counter>& refused =
      prometheus::BuildCounter().Name("hearth_requests_refused_total").Help("Requests not taken in, by reason").Register(registry);
  prometheus::Family<prometheus::Counter>& http =
      prometheus::BuildCounter().Name("hearth_http_answers_total").Help("HTTP answers, by status").Register(registry);
  prometheus::Family<prometheus::Gauge>& step_order_seconds = prometheus::BuildGauge()
                                                                  .Name("hearth_step_order_seconds")
                                                                  .Help("Median time of a decode step of so many rows, by order of its work")
                                                                  .Register(registry);
  prometheus::Family<prometheus::Gauge>& step_order_chosen =
      prometheus::BuildGauge().Name("hearth_step_order_chosen").Help("1: the order that steps of so many streams take").Register(registry);
  prometheus::Family<prometheus::Gauge>& prefetch_rate =
      prometheus::BuildGauge().Name("hearth_prefetch_bytes_per_second").Help("Experts read with and without software prefetch").Register(registry);
  prometheus::Family<prometheus::Gauge>& prefetch_on =
      prometheus::BuildGauge().Name("hearth_prefetch_on").Help("1: the decode kernels prefetch in software").Register(registry);
  prometheus::Family<prometheus::Gauge>& image_pages = prometheus::BuildGauge()
                                                           .Name("hearth_image_pages_looked_at")
                                                           .Help("Places of the image looked at, by the size of their page")
                                                           .Register(registry);
  prometheus::Family<prometheus::Gauge>& wrong_node =
      prometheus::BuildGauge().Name("hearth_image_pages_wrong_node").Help("Of them, on another NUMA node than was meant").Register(registry);
  prometheus::Family<prometheus::Gauge>& group_whole = prometheus::BuildGauge()
                                                           .Name("hearth_prefill_group_whole")
                                                           .Help("1 while all ranks of the worker's prefill group are there")
                                                           .Register(registry);
  prometheus::Family<prometheus::Gauge>& group_passes = prometheus::BuildGauge()
                                                            .Name("hearth_prefill_group_passes")
                                                            .Help("Passes that the worker shared since it was started, by outcome")
                                                            .Register(registry);
  prometheus::Family<prometheus::Gauge>& group_sent = prometheus::BuildGauge()
                                                          .Name("hearth_prefill_group_sent_bytes")
                                                          .Help("What the worker sent to other ranks since it was started, by collective")
                                                          .Register(registry);
  prometheus::Counter& accepted = Count("hearth_requests_accepted_total", "Requests taken in");
  prometheus::Counter& prompt_tokens = Count("hearth_prompt_tokens_total", "Tokens of accepted prompts");
  prometheus::Counter& cached_tokens = Count("hearth_cached_tokens_total", "Prompt tokens served from published pages");
  prometheus::Counter& completion_tokens = Count("hearth_completion_tokens_total", "Tokens received from decode workers");
  prometheus::Counter& resumes = Count("hearth_resumes_total", "Streams that went on in another worker or after a lost place");
  prometheus::Family<prometheus::Counter>& drafts =
      prometheus::BuildCounter().Name("hearth_drafts_total").Help("Tokens that the MTP module drafted, by worker").Register(registry);
  prometheus::Family<prometheus::Counter>& drafts_accepted = prometheus::BuildCounter()
                                                                 .Name("hearth_drafts_accepted_total")
                                                                 .Help("Drafts that equalled the model's own token, by worker")
                                                                 .Register(registry);
  prometheus::Family<prometheus::Gauge>& draft_depth =
      prometheus::BuildGauge().Name("hearth_draft_depth").Help("Drafts a stream in the last step, by worker").Register(registry);
  prometheus::Family<prometheus::Gauge>& Of(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<prometheus::Gauge>& prompt_share =
      Of("hearth_prompt_share", "Of the time from step to step that decode leaves to prompts, by decode worker");
  prometheus::Family<prometheus::Gauge>& turns_given =
      Of("hearth_turns_given_seconds", "For which decode stood aside for prefill workers on its cores, since it started");
  prometheus::Family<prometheus::Gauge>& turns_waited =
      Of("hearth_turns_waited_seconds", "For which prefill's ops waited for decode on their cores, since it started");
  prometheus::Family<prometheus::Gauge>& ops_held_back = Of("hearth_prefill_ops_held_back", "Ops that waited for decode, since it started");
  prometheus::Family<prometheus::Gauge>& ops_forced = Of("hearth_prefill_ops_forced", "Of them, those that began before their turn");
  prometheus::Family<prometheus::Counter>& paths = prometheus::BuildCounter()
                                                       .Name("hearth_paths_chosen_total")
                                                       .Help("Streams by who computes their prompt, and whether predicted time or length decided")
                                                       .Register(registry);
  prometheus::Family<prometheus::Histogram>& ttft_ratio = prometheus::BuildHistogram()
                                                              .Name("hearth_ttft_real_over_predicted")
                                                              .Help("Time to first token over what was predicted when the path was chosen, by path")
                                                              .Register(registry);
  prometheus::Family<prometheus::Counter>& streamed = prometheus::BuildCounter()
                                                          .Name("hearth_streamed_total")
                                                          .Help(
                                                              "Passes that stream weights past the device, by worker: passes, tokens, bytes_copied, "
                                                              "experts_copied, experts_skipped, records_from_rings, records_from_image")
                                                          .Register(registry);
  prometheus::Family<prometheus::Counter>& streamed_seconds =
      prometheus::BuildCounter()
          .Name("hearth_streamed_seconds_total")
          .Help(
              "Of these passes, by worker: all; waited_for_copies: the link is the limit; waited_for_slots: arithmetic; waited_for_rings: the store")
          .Register(registry);
  prometheus::Histogram& queue = Seconds("hearth_queue_seconds", "Arrival to the first worker", TtftSeconds());
  prometheus::Histogram& ttft = Seconds("hearth_ttft_seconds", "Arrival to the first token", TtftSeconds());
  prometheus::Histogram& tpot = Seconds("hearth_tpot_seconds", "Time per output token after the first, one value a stream", TpotSeconds());
  prometheus::Histogram& itl = Seconds("hearth_itl_seconds", "Gaps between tokens", TpotSeconds());
  prometheus::Histogram& whole = Seconds("hearth_request_seconds", "Arrival to end", WholeSeconds());
};

Metrics::Metrics() : families_(std::make_unique<Families>()) {
  for (int i = 0; i < kNumStreamStates; ++i) {
    const auto state = static_cast<StreamState>(i);
    if (!IsEnd(state)) families_->stream_gauges[static_cast<size_t>(i)] = &families_->streams.Add({{"state", StreamStateName(state)}});
  }
}
Metrics::~Metrics() = default;

void Metrics::OnRequestAccepted(const Request& request) {
  ++requests_;
  families_->accepted.Increment();
  const int32_t tokens = request.usage().prompt_tokens;
  prompt_tokens_ += static_cast<uint64_t>(tokens);
  families_->prompt_tokens.Increment(tokens);
}

void Metrics::OnRequestRefused(const std::string& reason) { families_->refused.Add({{"reason", reason}}).Increment(); }

void Metrics::OnRequestEnd(const Request& request) {
  const auto has = [&](StreamState state) {
    return std::any_of(request.streams.begin(), request.streams.end(), [&](const auto& stream) { return stream->state == state; });
  };
  const char* outcome = "done";
  if (has(StreamState::kFailed)) {
    outcome = "failed";
    ++failed_;
  } else if (has(StreamState::kCancelled)) {
    outcome = "cancelled";
    ++cancelled_;
  }
  families_->requests.Add({{"outcome", outcome}}).Increment();
  const int32_t cached = request.usage().cached_tokens;
  cached_tokens_ += static_cast<uint64_t>(cached);
  families_->cached_tokens.Increment(cached);
  int64_t end_ns = request.arrived_ns;
  for (const auto& stream : request.streams) end_ns = std::max(end_ns, stream->events.back().at_ns);
  families_->whole.Observe(static_cast<double>(end_ns - request.arrived_ns) / kNsPerSecond);
}

void Metrics::OnAdded() {
  ++streams_[static_cast<size_t>(StreamState::kQueued)];
  families_->stream_gauges[static_cast<size_t>(StreamState::kQueued)]->Increment();
}

void Metrics::OnMove(const Stream& stream, StreamState from, int64_t now_ns) {
  --streams_[static_cast<size_t>(from)];
  families_->stream_gauges[static_cast<size_t>(from)]->Decrement();
  if (!IsEnd(stream.state)) {
    ++streams_[static_cast<size_t>(stream.state)];
    families_->stream_gauges[static_cast<size_t>(stream.state)]->Increment();
  }
  families_->running.Set(streams(StreamState::kPrefilling) + streams(StreamState::kDecoding));
  // The first event is QUEUED itself, the second the first worker.
  if (stream.events.size() == 2 && from == StreamState::kQueued && !IsEnd(stream.state)) {
    families_->queue.Observe(static_cast<double>(now_ns - stream.request->arrived_ns) / kNsPerSecond);
  }
  if (stream.state == StreamState::kDone && stream.output_ids.size() > 1) {
    const double seconds =
        static_cast<double>(stream.last_token_ns - stream.first_token_ns) / kNsPerSecond / static_cast<double>(stream.output_ids.size() - 1);
    families_->tpot.Observe(seconds);
    tpot_ms_.Add(seconds * 1e3);
  }
}

void Metrics::OnToken(const Stream& stream, int64_t now_ns) {
  ++completion_tokens_;
  families_->completion_tokens.Increment();
  const int64_t second = now_ns / static_cast<int64_t>(kNsPerSecond);
  SecondCount& slot = tokens_by_second_[static_cast<size_t>(second) % tokens_by_second_.size()];
  if (slot.second != second) slot = {second, 0};
  ++slot.tokens;
  if (stream.first_token_ns == 0) {
    const double seconds = static_cast<double>(now_ns - stream.request->arrived_ns) / kNsPerSecond;
    families_->ttft.Observe(seconds);
    ttft_ms_.Add(seconds * 1e3);
  } else {
    families_->itl.Observe(static_cast<double>(now_ns - stream.last_token_ns) / kNsPerSecond);
  }
}

void Metrics::OnResume() {
  ++resumes_;
  families_->resumes.Increment();
}

void Metrics::OnPathChosen(const std::string& path, const std::string& by) { families_->paths.Add({{"path", path}, {"by", by}}).Increment(); }

void Metrics::OnPrediction(const std::string& way, double predicted_s, double real_s) {
  if (predicted_s > 0) families_->ttft_ratio.Add({{"path", way}}, Ratios()).Observe(real_s / predicted_s);
}

void Metrics::OnHttpAnswer(int status) { families_->http.Add({{"code", std::to_string(status)}}).Increment(); }

void Metrics::OnWorkerStatus(const std::string& worker, const v1::WorkerStatus& status) {
  if (status.has_memory()) {
    const v1::WorkerStatus::Memory& memory = status.memory();
    families_->image_pages.Add({{"worker", worker}, {"page", "2MB"}}).Set(static_cast<double>(memory.pages_huge()));
    families_->image_pages.Add({{"worker", worker}, {"page", "4KB"}}).Set(static_cast<double>(memory.pages_looked_at() - memory.pages_huge()));
    families_->wrong_node.Add({{"worker", worker}}).Set(static_cast<double>(memory.pages_wrong_node()));
    if (!memory.prefetch().empty()) families_->prefetch_on.Add({{"worker", worker}}).Set(memory.prefetch_on() ? 1 : 0);
    if (memory.prefetch_on_gb_per_s() > 0) {
      families_->prefetch_rate.Add({{"worker", worker}, {"prefetch", "on"}}).Set(memory.prefetch_on_gb_per_s() * 1e9);
      families_->prefetch_rate.Add({{"worker", worker}, {"prefetch", "off"}}).Set(memory.prefetch_off_gb_per_s() * 1e9);
    }
  }
  if (status.has_group()) {
    const v1::WorkerStatus::Group& group = status.group();
    families_->group_whole.Add({{"worker", worker}}).Set(group.id() != 0 ? 1 : 0);
    families_->group_passes.Add({{"worker", worker}, {"outcome", "failed"}}).Set(static_cast<double>(group.passes_failed_total()));
    families_->group_passes.Add({{"worker", worker}, {"outcome", "ok"}}).Set(static_cast<double>(group.passes_total() - group.passes_failed_total()));
    for (const v1::WorkerStatus::Traffic& sent : group.sent()) {
      families_->group_sent.Add({{"worker", worker}, {"collective", sent.name()}}).Set(static_cast<double>(sent.bytes()));
    }
  }
  if (status.has_streamed()) OnStreamed(worker, status.streamed());
  if (const v1::WorkerStatus::Prompts& prompts = status.prompts(); status.kind() == "decode") {
    families_->turns_given.Add({{"worker", worker}}).Set(prompts.given_seconds());
    families_->prompt_share.Add({{"worker", worker}}).Set(prompts.share());
  } else if (status.kind() == "prefill") {
    families_->ops_held_back.Add({{"worker", worker}}).Set(static_cast<double>(prompts.ops_held_back()));
    families_->ops_forced.Add({{"worker", worker}}).Set(static_cast<double>(prompts.ops_forced()));
    families_->turns_waited.Add({{"worker", worker}}).Set(prompts.waited_seconds());
  }
  for (const v1::WorkerStatus::StepOrder& order : status.step_orders()) {
    const std::pair<const char*, double> measured[] = {{"joint", order.joint_ms()}, {"plain", order.plain_ms()}, {"alternate", order.alternate_ms()}};
    for (const auto& [name, ms] : measured) {
      const prometheus::Labels labels = {{"worker", worker}, {"streams", std::to_string(order.streams())}, {"order", name}};
      if (ms > 0) families_->step_order_seconds.Add(labels).Set(ms / 1e3);
      families_->step_order_chosen.Add(labels).Set(!order.measuring() && order.chosen() == name ? 1 : 0);
    }
  }
}

void Metrics::OnStreamed(const std::string& worker, const v1::WorkerStatus::Streamed& streamed) {
  v1::WorkerStatus::Streamed& before = streamed_[worker];
  if (streamed.passes() < before.passes()) before.Clear();  // another process
  const auto count = [&](const char* what, uint64_t now, uint64_t then) {
    families_->streamed.Add({{"worker", worker}, {"what", what}}).Increment(static_cast<double>(now - then));
  };
  count("passes", streamed.passes(), before.passes());
  count("tokens", streamed.tokens(), before.tokens());
  count("bytes_copied", streamed.bytes_copied(), before.bytes_copied());
  count("experts_copied", streamed.experts_copied(), before.experts_copied());
  count("experts_skipped", streamed.experts_skipped(), before.experts_skipped());
  count("records_from_rings", streamed.records_from_rings(), before.records_from_rings());
  count("records_from_image", streamed.records_from_image(), before.records_from_image());
  const auto seconds = [&](const char* what, double now, double then) {
    families_->streamed_seconds.Add({{"worker", worker}, {"what", what}}).Increment(now - then);
  };
  seconds("all", streamed.seconds(), before.seconds());
  seconds("waited_for_copies", streamed.waited_for_copies_seconds(), before.waited_for_copies_seconds());
  seconds("waited_for_slots", streamed.waited_for_slots_seconds(), before.waited_for_slots_seconds());
  seconds("waited_for_rings", streamed.waited_for_rings_seconds(), before.waited_for_rings_seconds());
  before = streamed;
}

void Metrics::OnSpeculation(const std::string& worker, uint64_t drafts, uint64_t accepted, int64_t depth) {
  DraftCounts& before = drafts_[worker];
  if (drafts < before.drafts || accepted < before.accepted) before = {};  // another process
  families_->drafts.Add({{"worker", worker}}).Increment(static_cast<double>(drafts - before.drafts));
  families_->drafts_accepted.Add({{"worker", worker}}).Increment(static_cast<double>(accepted - before.accepted));
  families_->draft_depth.Add({{"worker", worker}}).Set(static_cast<double>(depth));
  before = {drafts, accepted};
}

double Metrics::TokensPerSecond(int64_t now_ns) const {
  const int64_t second = now_ns / static_cast<int64_t>(kNsPerSecond);
  uint64_t tokens = 0;
  // The ten whole seconds before this one, which is not over.
  for (const SecondCount& slot : tokens_by_second_) {
    if (slot.second >= second - 10 && slot.second < second) tokens += slot.tokens;
  }
  return static_cast<double>(tokens) / 10.0;
}

std::string Metrics::Exposition() const { return prometheus::TextSerializer().Serialize(families_->registry.Collect()); }

}  // namespace hearth::router
