// The scheduler's second half: which path a prompt takes, by the times that are to be expected now (path_choice.h, path_costs.h), and whether that
// breaks the node's promise. Room: services/router. Threads: the loop.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_format.h"
#include "common/base/time.h"
#include "services/router/api_error.h"
#include "services/router/scheduler.h"
#include "services/router/scheduler_track.h"

namespace hearth::router {
namespace {

// Prompts that a prefill worker got within so long after its pass began are taken to be in it.
constexpr int64_t kSamePassNs = 20'000'000;
// A published prefix shorter than this changes no path, and its Peek costs a call of the store.
constexpr int64_t kPeekFromMin = 256;

double SecondsSince(int64_t then_ns, int64_t now_ns) { return static_cast<double>(now_ns - then_ns) / 1e9; }

}  // namespace

// How long until a place in decode's batches is free for one that comes now, by how long streams kept theirs lately.
double Scheduler::PlaceSeconds() const {
  int64_t places = 0;
  for (const auto& link : links_) {
    if (link->kind() != WorkerLink::Kind::kDecode || !link->ready()) continue;
    if (link->FreePlaces() > 0) return 0;
    places += std::max(1, link->status().max_batch());
  }
  if (places == 0 || decoded_for_ns_.empty()) return 0;
  const int64_t kept_ns = std::accumulate(decoded_for_ns_.begin(), decoded_for_ns_.end(), int64_t{0}) / static_cast<int64_t>(decoded_for_ns_.size());
  int64_t waiting = static_cast<int64_t>(handoff_.size());
  decode_queue_.ForEach([&](const TrackPtr&) { ++waiting; });
  return static_cast<double>(kept_ns) / 1e9 * static_cast<double>(waiting + 1) / static_cast<double>(places);
}

std::optional<DecodeWay> Scheduler::DecodeWayNow(bool idle) const {
  const WorkerLink* best = nullptr;
  int64_t ready = 0;
  for (const auto& link : links_) {
    if (link->kind() != WorkerLink::Kind::kDecode || !link->ready() || !costs_.CostOf(link->name()).has_value()) continue;
    ++ready;
    if (best == nullptr || link->running() < best->running()) best = link.get();
  }
  if (best == nullptr) return std::nullopt;
  const v1::WorkerStatus& status = best->status();
  DecodeWay way{.name = costs_.WayOf(best->name()),
                .chunk = *costs_.CostOf(best->name()),
                .chunk_tokens = status.prompts().tokens_at_once(),
                .busy_chunk_tokens = status.prompts().tokens_between_steps(),
                .step_s = status.step_ms_p50() / 1e3,
                .share = status.prompts().share()};
  way.extra_s = costs_.ExtraSeconds(way.name);
  if (idle) return way;
  const int64_t now_ns = MonotonicNowNs();
  int64_t computing_since_ns = now_ns;
  for (const auto& [request, active] : active_) {
    for (const TrackPtr& track : active->tracks) {
      if (track->ref == nullptr || track->ref->link != best) continue;
      if (track->prefilled || !track->stream->output_ids.empty()) {
        ++way.streams;
      } else {
        way.ahead.push_back(track->work());
        computing_since_ns = std::min(computing_since_ns, track->ref->begun_ns);
      }
    }
  }
  way.ahead_for_s = SecondsSince(computing_since_ns, now_ns);
  int64_t turn = 0;
  decode_queue_.ForEach([&](const TrackPtr& track) {
    if (turn++ % ready == 0) way.ahead.push_back(track->work());
  });
  way.place_s = PlaceSeconds();
  return way;
}

std::optional<PrefillWay> Scheduler::PrefillWayNow(const WorkerLink& link, bool idle) const {
  const std::optional<PassCost> cost = costs_.CostOf(link.name());
  if (!link.ready() || !cost.has_value()) return std::nullopt;
  const v1::WorkerStatus::Prompts& prompts = link.status().prompts();
  PrefillWay way{
      .name = costs_.WayOf(link.name()), .pass = *cost, .tokens_at_once = prompts.tokens_at_once(), .shares_passes = prompts.path() != "chunked"};
  way.extra_s = costs_.ExtraSeconds(way.name);
  for (const auto& each : links_) {
    if (each->kind() == WorkerLink::Kind::kDecode && each->ready()) way.step_s = each->status().step_ms_p50() / 1e3;
  }
  if (idle) return way;
  if (const std::optional<DecodeWay> decode = DecodeWayNow(/*idle=*/false);
      prompts.shares_cores() && decode.has_value() && decode->streams > 0 && decode->share > 0) {
    way.share = decode->share;
  }
  std::vector<const Track*> given;
  for (const auto& [request, active] : active_) {
    for (const TrackPtr& track : active->tracks) {
      if (track->ref != nullptr && track->ref->link == &link && track->stream->state == StreamState::kPrefilling) given.push_back(track.get());
    }
  }
  std::sort(given.begin(), given.end(), [](const Track* a, const Track* b) { return a->ref->begun_ns < b->ref->begun_ns; });
  const int64_t now_ns = MonotonicNowNs();
  if (!given.empty()) {
    const auto ended = last_prefilled_ns_.find(&link);
    const int64_t begun_ns = std::max(given.front()->ref->begun_ns, ended == last_prefilled_ns_.end() ? 0 : ended->second);
    way.in_pass_for_s = SecondsSince(begun_ns, now_ns);
    for (const Track* track : given) {
      // One after the other, the first is the one that is computed; a shared pass has those that were there when it began.
      const bool in_pass = way.in_pass.empty() || (way.shares_passes && track->ref->begun_ns <= begun_ns + kSamePassNs);
      (in_pass ? way.in_pass : way.waiting).push_back(track->work());
    }
  }
  int64_t ready = 0, turn = 0;
  for (const auto& each : links_) ready += each->kind() == WorkerLink::Kind::kPrefill && each->ready() ? 1 : 0;
  prefill_queue_.ForEach([&](const TrackPtr& track) {
    if (turn++ % ready == 0) way.waiting.push_back(track->work());
  });
  way.place_s = PlaceSeconds();
  return way;
}

PathForecast Scheduler::Forecast(const PromptWork& prompt, bool idle) const {
  PathForecast forecast;
  forecast.to_prefill = prompt.tokens > options_.chunked_prefill_max_tokens;
  const std::optional<DecodeWay> decode = DecodeWayNow(idle);
  const double by_decode_s = decode.has_value() ? SecondsByDecode(*decode, prompt) : 0;
  std::optional<double> by_prefill_s;
  std::string best;
  bool prefill_ready = false;
  for (const auto& link : links_) {
    if (link->kind() != WorkerLink::Kind::kPrefill) continue;
    prefill_ready |= link->ready();
    std::optional<PrefillWay> way = PrefillWayNow(*link, idle);
    if (!way.has_value()) continue;
    const double seconds = SecondsByPrefill(*way, prompt);
    if (by_prefill_s.has_value() && *by_prefill_s <= seconds) continue;
    by_prefill_s = seconds;
    best = std::move(way->name);
  }
  if (prompt.tokens > 0 && decode.has_value() && by_prefill_s.has_value()) {
    forecast.by_time = !options_.path_by_length;
    if (forecast.by_time) forecast.to_prefill = ToPrefill(by_decode_s, *by_prefill_s, prompt.tokens, options_.chunked_prefill_max_tokens);
  }
  // A long prompt with no prefill worker there is decode's: Dispatch moves it.
  if (forecast.to_prefill && prefill_ready) {
    if (!by_prefill_s.has_value()) return forecast;
    forecast.way = std::move(best);
    forecast.seconds = by_prefill_s;
  } else if (decode.has_value()) {
    forecast.way = decode->name;
    forecast.seconds = by_decode_s;
  }
  forecast.extra_s = costs_.ExtraSeconds(forecast.way);
  return forecast;
}

void Scheduler::ChoosePath(const TrackPtr& track) {
  track->forecast = Forecast(track->work(), /*idle=*/false);
  track->forecast.made_ns = MonotonicNowNs();
  metrics_->OnPathChosen(track->forecast.to_prefill ? "prefill" : "decode", track->forecast.by_time ? "time" : "length");
}

absl::Status Scheduler::CheckTtft(const Request& request) const {
  if (options_.ttft_slo <= absl::ZeroDuration() || request.options.wait_in_queue) return absl::OkStatus();
  const double slo_s = absl::ToDoubleSeconds(options_.ttft_slo);
  std::optional<double> worst_s, worst_idle_s;
  for (size_t p = 0; p < request.prompts.size(); ++p) {
    const int64_t cached = p == 0 ? request.cached_prefix_tokens : 0;
    const PromptWork work{.before = cached, .tokens = std::max<int64_t>(static_cast<int64_t>(request.prompts[p]->size()) - 1 - cached, 0)};
    if (const PathForecast now = Forecast(work, false); now.seconds.has_value() && *now.seconds > worst_s.value_or(0)) {
      worst_s = now.seconds;
      worst_idle_s = Forecast(work, true).seconds;
    }
  }
  if (!worst_s.has_value() || *worst_s <= slo_s) return absl::OkStatus();
  const std::string alone =
      worst_idle_s.value_or(0) > slo_s ? absl::StrFormat(" (%.1f s on an idle node: no wait makes it short enough)", *worst_idle_s) : std::string();
  const absl::Status refusal = absl::ResourceExhaustedError(
      absl::StrFormat("the first token is expected after %.1f s%s, and this node promises %.1f s (router.ttft_slo_ms): try again later, or send "
                      "\"wait_in_queue\": true to wait",
                      *worst_s, alone, slo_s));
  return WithRetryAfter(WithCode(refusal, "ttft_slo"), static_cast<int>(std::ceil(*worst_s - slo_s)));
}

void Scheduler::OnFirstToken(const TrackPtr& track) {
  const PathForecast& forecast = track->forecast;
  if (!forecast.seconds.has_value() || forecast.made_ns == 0) return;
  // Another way than was foreseen, or a detour over a second worker: no judgement of the prediction.
  const uint64_t epochs = forecast.to_prefill ? 2 : 1;
  if (track->stream->epoch != epochs) return;
  const double real_s = SecondsSince(forecast.made_ns, MonotonicNowNs());
  costs_.OnFirstToken(forecast.way, *forecast.seconds, forecast.extra_s, real_s);
  metrics_->OnPrediction(forecast.way, *forecast.seconds, real_s);
}

std::optional<int64_t> Scheduler::CrossoverTokens() const {
  const std::optional<DecodeWay> decode = DecodeWayNow(/*idle=*/true);
  if (!decode.has_value() || options_.path_by_length) return std::nullopt;
  std::optional<int64_t> shortest;
  bool known = false;
  for (const auto& link : links_) {
    if (link->kind() != WorkerLink::Kind::kPrefill) continue;
    const std::optional<PrefillWay> way = PrefillWayNow(*link, /*idle=*/true);
    if (!way.has_value()) continue;
    known = true;
    const std::optional<int64_t> from = Crossover(*decode, *way, options_.chunked_prefill_max_tokens, kCrossoverMax);
    if (from.has_value() && *from < shortest.value_or(INT64_MAX)) shortest = from;
  }
  return known ? shortest.value_or(kCrossoverMax) : shortest;
}

void Scheduler::FillPaths(v1::RouterStatus* status) const {
  const std::optional<int64_t> crossover = CrossoverTokens();
  v1::RouterStatus::Paths& paths = *status->mutable_paths();
  paths.set_by_time(crossover.has_value());
  paths.set_prefill_from_tokens(crossover.value_or(options_.chunked_prefill_max_tokens + 1));
  paths.set_decode_takes_all(crossover.value_or(0) == kCrossoverMax);
  paths.set_pinned(options_.path_by_length);
  paths.set_ttft_slo_ms(absl::ToDoubleMilliseconds(options_.ttft_slo));
  for (const PathCosts::Line& line : costs_.lines()) {
    v1::RouterStatus::PathCost& out = *paths.add_costs();
    out.set_worker(line.worker);
    out.set_way(line.way);
    out.set_fixed_ms(line.cost.fixed_s * 1e3);
    out.set_token_us(line.cost.per_token_s * 1e6);
    out.set_position_ns(line.cost.per_position_s * 1e9);
    out.set_passes(static_cast<uint64_t>(line.passes));
  }
  for (const PathCosts::Trust& trust : costs_.trust()) {
    v1::RouterStatus::Prediction& out = *paths.add_predictions();
    out.set_way(trust.way);
    out.set_count(trust.count);
    out.set_ratio_p50(trust.ratio_p50);
    out.set_error_p50(trust.error_p50);
    out.set_error_p90(trust.error_p90);
  }
}

void Scheduler::UpdatePeek() {
  // A promise is about every prompt; without one a prefix matters only to prompts that could go to prefill.
  const int64_t from =
      options_.ttft_slo > absl::ZeroDuration() ? 0 : std::min(CrossoverTokens().value_or(INT64_MAX), options_.chunked_prefill_max_tokens);
  peek_->set_from_tokens(options_.path_by_length ? options_.chunked_prefill_max_tokens : std::max(from, kPeekFromMin));
}

}  // namespace hearth::router
