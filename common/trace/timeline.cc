#include "common/trace/timeline.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/hash.h"
#include "common/base/strings.h"

namespace hearth {
namespace {

std::string JsonText(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

std::string XmlText(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      default: out += c;
    }
  }
  return out;
}

// Of the name alone, so that it is the same in every picture.
std::string ColourOf(const std::string& name) {
  const uint64_t hash = Xxh3_64(name.data(), name.size());
  return absl::StrFormat("hsl(%d,%d%%,%d%%)", hash % 360, 50 + hash / 360 % 3 * 15, 50 + hash / 1080 % 3 * 10);
}

// To the width that a row's name has.
std::string Shortened(const std::string& text) {
  constexpr size_t kBegin = 16, kEnd = 14;
  return text.size() <= kBegin + kEnd + 1 ? text : absl::StrCat(text.substr(0, kBegin), "...", text.substr(text.size() - kEnd));
}

}  // namespace

std::string DetailText(std::string_view keys, std::span<const int64_t> values) {
  std::string text;
  size_t i = 0;
  for (const absl::string_view key : absl::StrSplit(Sv(keys), ' ', absl::SkipEmpty())) {
    if (i == values.size()) break;
    const int64_t value = values[i++];
    absl::StrAppend(&text, text.empty() ? "" : " ", key, "=");
    if (key == "stream") {
      absl::StrAppendFormat(&text, "%08x", static_cast<uint32_t>(value));
    } else {
      absl::StrAppend(&text, value);
    }
  }
  return text;
}

int Timeline::AddTrack(const std::string& process, const std::string& name) {
  for (size_t i = 0; i < tracks_.size(); ++i) {
    if (tracks_[i].process == process && tracks_[i].name == name) return static_cast<int>(i);
  }
  tracks_.push_back({process, name});
  return static_cast<int>(tracks_.size()) - 1;
}

std::string Timeline::ToPerfettoJson() const {
  std::map<std::string, int> processes;
  std::string out = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const char* comma = "";
  for (size_t i = 0; i < tracks_.size(); ++i) {
    const TimelineTrack& track = tracks_[i];
    const auto [process, added] = processes.emplace(track.process, static_cast<int>(processes.size()) + 1);
    if (added) {
      absl::StrAppendFormat(&out, "%s\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":%s}}", comma, process->second,
                            JsonText(track.process));
      comma = ",";
    }
    absl::StrAppendFormat(&out, ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":%s}}", process->second, i + 1,
                          JsonText(track.name));
  }
  for (const TimelineSpan& span : spans_) {
    const TimelineTrack& track = tracks_[static_cast<size_t>(span.track)];
    const int64_t length = span.end_ns - span.begin_ns;
    absl::StrAppendFormat(&out, ",\n{\"ph\":\"X\",\"name\":%s,\"pid\":%d,\"tid\":%d,\"ts\":%d.%03d,\"dur\":%d.%03d,\"args\":{\"shapes\":%s}}",
                          JsonText(span.name), processes.at(track.process), span.track + 1, span.begin_ns / 1000, span.begin_ns % 1000, length / 1000,
                          length % 1000, JsonText(span.detail));
  }
  out += "\n]";
  if (!notes_.empty()) {
    const auto note = [](std::string* text, const std::string& each) { absl::StrAppend(text, JsonText(each)); };
    absl::StrAppend(&out, ",\"otherData\":{\"notes\":[", absl::StrJoin(notes_, ",", note), "]}");
  }
  return out + "}\n";
}

std::string Timeline::ToSvg(const std::string& title, int64_t begin_ns, int64_t end_ns) const {
  constexpr int kLeft = 220, kWidth = 1200, kRow = 26, kTop = 40, kInset = 5, kDepthMax = 4;
  constexpr double kSeen = 0.2;  // of a pixel
  std::set<int> used;
  std::map<std::string, std::string> colours;  // by name
  std::vector<const TimelineSpan*> shown;
  for (const TimelineSpan& span : spans_) {
    if (span.end_ns <= begin_ns || span.begin_ns >= end_ns) continue;
    shown.push_back(&span);
    used.insert(span.track);
    colours.emplace(span.name, ColourOf(span.name));
  }
  // A track's spans from left to right, the enclosing one before what lies in it.
  std::stable_sort(shown.begin(), shown.end(), [](const TimelineSpan* a, const TimelineSpan* b) {
    return std::tuple(a->track, a->begin_ns, -a->end_ns) < std::tuple(b->track, b->begin_ns, -b->end_ns);
  });
  std::map<int, int> row;
  for (const int track : used) row.emplace(track, static_cast<int>(row.size()));
  const int bottom = kTop + static_cast<int>(row.size()) * kRow;
  const int legend_rows = (static_cast<int>(colours.size()) + 5) / 6;
  const double scale = kWidth / static_cast<double>(std::max<int64_t>(end_ns - begin_ns, 1));

  std::string out = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"10\" y=\"20\" font-size=\"14\">%s</text>\n",
      kLeft + kWidth + 50, bottom + 40 + 20 * legend_rows, XmlText(title));
  for (const auto& [track, at] : row) {
    const TimelineTrack& named = tracks_[static_cast<size_t>(track)];
    absl::StrAppendFormat(&out, "<text x=\"10\" y=\"%d\">%s</text>\n", kTop + at * kRow + 17, XmlText(Shortened(named.process + " " + named.name)));
  }
  std::vector<const TimelineSpan*> around;            // the spans that the present one lies in, outermost first
  std::map<std::pair<int, size_t>, double> drawn_to;  // by track and depth
  for (const TimelineSpan* span : shown) {
    while (!around.empty() && (around.back()->track != span->track || around.back()->end_ns < span->end_ns)) around.pop_back();
    const size_t depth = around.size();
    around.push_back(span);
    const double x = static_cast<double>(std::max(span->begin_ns, begin_ns) - begin_ns) * scale;
    const double width = static_cast<double>(std::min(span->end_ns, end_ns) - std::max(span->begin_ns, begin_ns)) * scale;
    double& to = drawn_to.try_emplace({span->track, depth}, -1.0).first->second;
    if (x + width < to + kSeen) continue;
    to = x + std::max(width, kSeen);
    const int inset = kInset * static_cast<int>(std::min<size_t>(depth, kDepthMax - 1));
    absl::StrAppendFormat(&out, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%s %s, %.1f us</title></rect>\n",
                          kLeft + x, kTop + row[span->track] * kRow + 2 + inset, std::max(width, 0.3), kRow - 4 - inset, colours[span->name],
                          XmlText(span->name), XmlText(span->detail), static_cast<double>(span->end_ns - span->begin_ns) * 1e-3);
  }
  for (int tick = 0; tick <= 10; ++tick) {
    const int x = kLeft + kWidth * tick / 10;
    absl::StrAppendFormat(
        &out, "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"#bbb\"/><text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.2f ms</text>\n", x,
        kTop, x, bottom, x, bottom + 15, static_cast<double>((end_ns - begin_ns) * tick) / 10 * 1e-6);
  }
  int n = 0;
  for (const auto& [name, colour] : colours) {
    const int x = 10 + n % 6 * 220, y = bottom + 30 + n / 6 * 20;
    absl::StrAppendFormat(&out, "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n", x, y, colour,
                          x + 18, y + 11, XmlText(name));
    ++n;
  }
  return out + "</svg>\n";
}

}  // namespace hearth
