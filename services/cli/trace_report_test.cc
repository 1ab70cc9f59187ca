#include "services/cli/trace_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/rpc/rpc.h"

namespace hearth {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A span of a process: name 100, keys 101, track 0.
v1::TraceChunk Chunk(const std::string& process, int32_t pid, uint64_t begin_ns, uint64_t end_ns) {
  v1::TraceChunk chunk;
  chunk.set_process(process);
  chunk.set_pid(pid);
  for (const auto& [id, text] : {std::pair(100, "step"), std::pair(101, "streams drafts")}) {
    chunk.add_names()->set_id(static_cast<uint64_t>(id));
    chunk.mutable_names()->rbegin()->set_text(text);
  }
  chunk.add_tracks()->set_text("loop");
  for (const uint64_t word : {begin_ns, end_ns, uint64_t{100}, uint64_t{101}, uint64_t{0}, uint64_t{2}, uint64_t{3}, uint64_t{0}})
    chunk.add_spans(word);
  return chunk;
}

v1::TraceChunk Request(const std::string& id, std::initializer_list<std::pair<const char*, int64_t>> states, int64_t first_token_ns) {
  v1::TraceChunk chunk;
  v1::TraceChunk::Stream& stream = *chunk.add_streams();
  stream.set_request_id(id);
  stream.set_id(ToBytes({.low = 1, .high = uint64_t{0xabcdef01} << 32}));
  stream.set_first_token_ns(first_token_ns);
  for (const auto& [name, at_ns] : states) {
    stream.add_states()->set_name(name);
    stream.mutable_states()->rbegin()->set_at_ns(at_ns);
  }
  return chunk;
}

std::vector<std::string> Lines(const Timeline& timeline) {
  std::vector<std::string> lines;
  for (const TimelineSpan& span : timeline.spans()) {
    const TimelineTrack& track = timeline.tracks()[static_cast<size_t>(span.track)];
    lines.push_back(absl::StrCat(track.process, "/", track.name, " ", span.begin_ns, "-", span.end_ns, " ", span.name, " ", span.detail));
  }
  return lines;
}

TEST(TraceReport, ProcessesAndRequestsOnOneClock) {
  TraceReport report;
  ASSERT_TRUE(report.Add(Chunk("weightstore", 7, 1500, 1600)).ok());
  ASSERT_TRUE(report.Add(Chunk("decode.0", 8, 1200, 1400)).ok());
  ASSERT_TRUE(report.Add(Chunk("decode.0", 9, 1700, 1800)).ok()) << "restarted";
  ASSERT_TRUE(report.Add(Request("a", {{"queued", 1100}, {"decoding", 1150}, {"done", 1450}}, 1300)).ok());
  EXPECT_THAT(Lines(report.ToTimeline()), ElementsAre("router/a[0] 0-50 queued stream=abcdef01",                         //
                                                      "router/a[0] 50-350 decoding stream=abcdef01 tokens=0 then=done",  //
                                                      "router/a[0] to first token 0-200 first token stream=abcdef01",    //
                                                      "decode.0/loop 100-300 step streams=2 drafts=3",                   //
                                                      "decode.0 (process 9)/loop 600-700 step streams=2 drafts=3",       //
                                                      "weightstore/loop 400-500 step streams=2 drafts=3"));
  EXPECT_EQ(report.RequestsWindow(), std::pair(int64_t{0}, int64_t{350}));
  ASSERT_TRUE(report.Add(Request("b", {{"queued", 1650}}, 0)).ok()) << "still waiting at the end";
  EXPECT_THAT(Lines(report.ToTimeline()), testing::Contains("router/b[0] 550-700 queued stream=abcdef01"));
  EXPECT_EQ(report.RequestsWindow(), std::pair(int64_t{0}, int64_t{700}));
}

TEST(TraceReport, SaysWhatIsMissing) {
  TraceReport report;
  EXPECT_EQ(report.RequestsWindow(), std::pair(int64_t{0}, int64_t{0}));
  v1::TraceChunk lost = Chunk("decode.0", 8, 1, 2);
  lost.set_lost(40);
  ASSERT_TRUE(report.Add(lost).ok());
  ASSERT_TRUE(report.Add(lost).ok());
  v1::TraceChunk note;
  note.set_note("prefill.0 is not there");
  ASSERT_TRUE(report.Add(note).ok());
  EXPECT_THAT(report.Notes(), ElementsAre("prefill.0 is not there", HasSubstr("decode.0: 80 spans")));
  EXPECT_THAT(report.ToTimeline().ToPerfettoJson(), HasSubstr("prefill.0 is not there"));
}

TEST(TraceReport, RefusesSpansThatItCannotName) {
  v1::TraceChunk half = Chunk("decode.0", 8, 1, 2);
  half.mutable_spans()->RemoveLast();
  v1::TraceChunk nameless = Chunk("decode.0", 8, 1, 2);
  nameless.mutable_names(0)->set_id(5);
  v1::TraceChunk trackless = Chunk("decode.0", 8, 1, 2);
  trackless.clear_tracks();
  v1::TraceChunk keyless = Chunk("decode.0", 8, 1, 2);
  keyless.mutable_names(1)->set_id(6);
  for (const v1::TraceChunk& chunk : {half, nameless, trackless, keyless}) {
    TraceReport report;
    EXPECT_TRUE(absl::IsInvalidArgument(report.Add(chunk))) << chunk.ShortDebugString();
  }
}

}  // namespace
}  // namespace hearth
