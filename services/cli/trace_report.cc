#include "services/cli/trace_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/rpc/rpc.h"
#include "common/trace/trace.h"

namespace hearth {
namespace {

constexpr int kWordsOfSpan = 8;

bool IsEnd(const std::string& state) { return state == "done" || state == "cancelled" || state == "failed"; }

}  // namespace

TraceReport::Process& TraceReport::ProcessOf(const v1::TraceChunk& chunk, size_t& index) {
  const auto it = std::find_if(processes_.begin(), processes_.end(),
                               [&](const Process& process) { return process.name == chunk.process() && process.pid == chunk.pid(); });
  index = static_cast<size_t>(it - processes_.begin());
  if (it == processes_.end()) processes_.push_back({.name = chunk.process(), .pid = chunk.pid(), .names = {}, .tracks = {}});
  return processes_[index];
}

absl::Status TraceReport::Add(const v1::TraceChunk& chunk) {
  if (!chunk.note().empty()) notes_.push_back(chunk.note());
  streams_.insert(streams_.end(), chunk.streams().begin(), chunk.streams().end());
  if (chunk.process().empty()) return absl::OkStatus();
  size_t index = 0;
  Process& process = ProcessOf(chunk, index);
  for (const auto& name : chunk.names()) process.names[name.id()] = name.text();
  for (const auto& track : chunk.tracks()) process.tracks[track.id()] = track.text();
  process.lost += chunk.lost();
  const auto foreign = [&] { return absl::InvalidArgumentError(absl::StrCat(process.name, " sends spans that this program does not understand")); };
  if (chunk.spans_size() % kWordsOfSpan != 0) return foreign();
  for (int i = 0; i < chunk.spans_size(); i += kWordsOfSpan) {
    const uint64_t* words = chunk.spans().data() + i;
    const auto name = process.names.find(words[2]), keys = process.names.find(words[3]);
    const auto track = process.tracks.find(words[4]);
    if (name == process.names.end() || (words[3] != 0 && keys == process.names.end()) || track == process.tracks.end()) return foreign();
    const int64_t values[] = {static_cast<int64_t>(words[5]), static_cast<int64_t>(words[6]), static_cast<int64_t>(words[7])};
    spans_.push_back({.process = index,
                      .track = track->second,
                      .name = name->second,
                      .detail = words[3] == 0 ? "" : DetailText(keys->second, values),
                      .begin_ns = static_cast<int64_t>(words[0]),
                      .end_ns = static_cast<int64_t>(words[1])});
  }
  return absl::OkStatus();
}

int64_t TraceReport::FirstNs() const {
  int64_t first = INT64_MAX;
  for (const Span& span : spans_) first = std::min(first, span.begin_ns);
  for (const auto& stream : streams_) first = std::min(first, stream.states(0).at_ns());
  return first == INT64_MAX ? 0 : first;
}

int64_t TraceReport::LastNs() const {
  int64_t last = 0;
  for (const Span& span : spans_) last = std::max(last, span.end_ns);
  for (const auto& stream : streams_) last = std::max(last, stream.states(stream.states_size() - 1).at_ns());
  return last;
}

Timeline TraceReport::ToTimeline() const {
  Timeline timeline;
  const int64_t first_ns = FirstNs(), last_ns = LastNs();
  for (const auto& stream : streams_) {
    const int track = timeline.AddTrack("router", absl::StrCat(stream.request_id(), "[", stream.choice(), "]"));
    const absl::StatusOr<Hash128> id = HashFromBytes(stream.id());
    const int64_t values[] = {id.ok() ? TraceId(*id) : 0};
    for (int i = 0; i < stream.states_size(); ++i) {
      const auto& state = stream.states(i);
      if (IsEnd(state.name())) continue;
      const int64_t end_ns = i + 1 < stream.states_size() ? stream.states(i + 1).at_ns() : last_ns;
      std::string detail = DetailText("stream", values);
      if (state.name() == "prefilling") absl::StrAppend(&detail, " prompt=", stream.prompt_tokens(), " cached=", stream.cached_tokens());
      if (state.name() == "decoding") absl::StrAppend(&detail, " tokens=", stream.output_tokens());
      if (i + 1 < stream.states_size() && IsEnd(stream.states(i + 1).name())) absl::StrAppend(&detail, " then=", stream.states(i + 1).name());
      timeline.AddSpan({.track = track, .begin_ns = state.at_ns() - first_ns, .end_ns = end_ns - first_ns, .name = state.name(), .detail = detail});
    }
    if (stream.first_token_ns() > 0) {
      timeline.AddSpan({.track = timeline.AddTrack("router", absl::StrCat(stream.request_id(), "[", stream.choice(), "] to first token")),
                        .begin_ns = stream.states(0).at_ns() - first_ns,
                        .end_ns = stream.first_token_ns() - first_ns,
                        .name = "first token",
                        .detail = DetailText("stream", values)});
    }
  }
  // A process's rows together, processes by name; a restarted one has rows of its own.
  std::vector<size_t> order(processes_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto rank = [&](size_t i) { return processes_[i].name.starts_with("prefill") ? 0 : processes_[i].name.starts_with("decode") ? 1 : 2; };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::pair(rank(a), processes_[a].name) < std::pair(rank(b), processes_[b].name); });
  for (size_t i = 0; i < order.size(); ++i) {
    const Process& process = processes_[order[i]];
    const bool again = i > 0 && processes_[order[i - 1]].name == process.name;
    const std::string name = again ? absl::StrCat(process.name, " (process ", process.pid, ")") : process.name;
    for (const Span& span : spans_) {
      if (span.process != order[i]) continue;
      timeline.AddSpan({.track = timeline.AddTrack(name, span.track),
                        .begin_ns = span.begin_ns - first_ns,
                        .end_ns = span.end_ns - first_ns,
                        .name = span.name,
                        .detail = span.detail});
    }
  }
  for (const std::string& note : Notes()) timeline.AddNote(note);
  return timeline;
}

std::pair<int64_t, int64_t> TraceReport::RequestsWindow() const {
  const int64_t first_ns = FirstNs(), last_ns = LastNs();
  if (streams_.empty()) return {0, last_ns - first_ns};
  int64_t begin_ns = INT64_MAX, end_ns = 0;
  for (const auto& stream : streams_) {
    const auto& last = stream.states(stream.states_size() - 1);
    begin_ns = std::min(begin_ns, stream.states(0).at_ns());
    end_ns = std::max(end_ns, IsEnd(last.name()) ? last.at_ns() : last_ns);
  }
  return {begin_ns - first_ns, end_ns - first_ns};
}

std::vector<std::string> TraceReport::Notes() const {
  std::vector<std::string> notes = notes_;
  for (const Process& process : processes_) {
    if (process.lost > 0)
      notes.push_back(absl::StrCat(process.name, ": ", process.lost, " spans came faster than they were fetched and are missing"));
  }
  return notes;
}

}  // namespace hearth
