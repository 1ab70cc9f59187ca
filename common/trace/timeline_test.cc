#include "common/trace/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

namespace hearth {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000;

size_t Rectangles(const std::string& svg) {
  size_t n = 0;
  for (size_t at = svg.find("<rect x="); at != std::string::npos; at = svg.find("<rect x=", at + 1)) ++n;
  return n;
}

TEST(Timeline, DetailsAreKeysWithTheirValues) {
  const int64_t values[] = {3, -1, 0x1234};
  EXPECT_EQ(DetailText("layer rows until", values), "layer=3 rows=-1 until=4660");
  EXPECT_EQ(DetailText("layer", values), "layer=3");
  EXPECT_EQ(DetailText("", values), "");
  EXPECT_EQ(DetailText("a b stream", values), "a=3 b=-1 stream=00001234");
  EXPECT_EQ(DetailText("a b c d", values), "a=3 b=-1 c=4660") << "a key without a value is none";
}

TEST(Timeline, ItsJsonIsWhatPerfettoReads) {
  Timeline timeline;
  const int loop = timeline.AddTrack("decode.0", "loop");
  const int pages = timeline.AddTrack("decode.0", "pages");
  EXPECT_EQ(timeline.AddTrack("decode.0", "loop"), loop);
  const int odd = timeline.AddTrack("router", "a \"quoted\" \\ id\n");
  timeline.AddSpan({.track = loop, .begin_ns = 1'234'567, .end_ns = 2'000'001, .name = "step", .detail = "streams=1"});
  timeline.AddSpan({.track = odd, .begin_ns = 0, .end_ns = 7, .name = "queued", .detail = ""});
  timeline.AddSpan({.track = pages, .begin_ns = 5, .end_ns = 5, .name = "seal", .detail = ""});
  const nlohmann::json plain = nlohmann::json::parse(timeline.ToPerfettoJson());
  EXPECT_FALSE(plain.contains("otherData"));
  timeline.AddNote("prefill.0 went away (\"why\")");
  const nlohmann::json json = nlohmann::json::parse(timeline.ToPerfettoJson());
  EXPECT_EQ(json["otherData"]["notes"][0], "prefill.0 went away (\"why\")");
  const auto& events = json["traceEvents"];
  ASSERT_EQ(events.size(), 2u + 3u + 3u) << "processes, tracks, spans";
  std::map<int, std::string> processes;
  for (const auto& event : events) {
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
  }
  const auto step = std::find_if(events.begin(), events.end(), [](const auto& event) { return event["name"] == "step"; });
  EXPECT_EQ(processes.at((*step)["pid"]), "decode.0");
  EXPECT_NEAR((*step)["ts"], 1234.567, 1e-9);
  EXPECT_NEAR((*step)["dur"], 765.434, 1e-9);
  EXPECT_EQ((*step)["args"]["shapes"], "streams=1");
}

TEST(Timeline, APictureShowsWhatLiesInWhatWhateverOrderItCameIn) {
  Timeline timeline;
  const int track = timeline.AddTrack("p", "t");
  const int other = timeline.AddTrack("p", "outside");
  timeline.AddSpan({.track = track, .begin_ns = 2 * kMs, .end_ns = 4 * kMs, .name = "inner", .detail = ""});
  timeline.AddSpan({.track = track, .begin_ns = 1 * kMs, .end_ns = 5 * kMs, .name = "outer", .detail = "rows=1"});
  timeline.AddSpan({.track = track, .begin_ns = 6 * kMs, .end_ns = 7 * kMs, .name = "inner", .detail = ""});
  timeline.AddSpan({.track = other, .begin_ns = 20 * kMs, .end_ns = 21 * kMs, .name = "later", .detail = ""});
  const std::string svg = timeline.ToSvg("a <title>", 0, 10 * kMs);
  EXPECT_THAT(svg, HasSubstr("a &lt;title&gt;"));
  EXPECT_THAT(svg, Not(HasSubstr("outside"))) << "a track without a span in the window has no row";
  const size_t outer = svg.find("<title>outer rows=1, 4000.0 us"), inner = svg.find("<title>inner , 2000.0 us"),
               after = svg.find("<title>inner , 1000.0 us");
  ASSERT_TRUE(outer != std::string::npos && inner != std::string::npos && after != std::string::npos) << svg;
  EXPECT_LT(outer, inner) << "drawn over it";
  // 1200 pixels from 220 on are 10 ms: the row of 22 pixels, the inner one lower by an inset.
  EXPECT_THAT(svg, HasSubstr("<rect x=\"340.00\" y=\"42\" width=\"480.00\" height=\"22\""));
  EXPECT_THAT(svg, HasSubstr("<rect x=\"460.00\" y=\"47\" width=\"240.00\" height=\"17\""));
  EXPECT_THAT(svg, HasSubstr("<rect x=\"940.00\" y=\"42\" width=\"120.00\" height=\"22\""));
}

TEST(Timeline, ANameHasOneColourInAllPictures) {
  const auto colour = [](const std::vector<std::string>& names) {
    Timeline timeline;
    const int track = timeline.AddTrack("p", "t");
    for (size_t i = 0; i < names.size(); ++i) {
      timeline.AddSpan(
          {.track = track, .begin_ns = static_cast<int64_t>(i) * kMs, .end_ns = static_cast<int64_t>(i + 1) * kMs, .name = names[i], .detail = ""});
    }
    const std::string svg = timeline.ToSvg("t", 0, 9 * kMs);
    const size_t at = svg.rfind("fill=\"", svg.find("<title>attention"));
    return svg.substr(at, svg.find("><title>", at) - at);
  };
  EXPECT_EQ(colour({"attention"}), colour({"add", "attention", "experts", "linear"}));
  EXPECT_NE(colour({"attention"}), "");
}

TEST(Timeline, APictureLeavesOutWhatNobodyCouldSee) {
  Timeline timeline;
  const int track = timeline.AddTrack("p", "t");
  for (int i = 0; i < 100'000; ++i) timeline.AddSpan({.track = track, .begin_ns = i * 100, .end_ns = i * 100 + 50, .name = "tiny", .detail = ""});
  const size_t drawn = Rectangles(timeline.ToSvg("t", 0, 10 * kMs));
  EXPECT_GT(drawn, 1000u) << "of 1200 pixels";
  EXPECT_LT(drawn, 10'000u);
}

}  // namespace
}  // namespace hearth
