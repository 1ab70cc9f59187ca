#include "common/trace/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace hearth {
namespace {

// Record `number` of a writer; any mixture of two differs from both.
TraceRecord Numbered(int64_t number) { return {number, number * 3, "numbered", nullptr, number * 5, {number * 7, ~number, number}}; }
bool IsWhole(const TraceRecord& r) {
  return r.end_ns == r.begin_ns * 3 && r.track == r.begin_ns * 5 && r.values[0] == r.begin_ns * 7 && r.values[1] == ~r.begin_ns &&
         r.values[2] == r.begin_ns;
}

TEST(TraceRing, TheNewestWinAndTheOthersAreCounted) {
  TraceRing ring(8);
  std::vector<TraceRecord> read;
  uint64_t next = 0;
  EXPECT_EQ(ring.Read(next, read), 0u);
  EXPECT_TRUE(read.empty());
  for (int64_t i = 0; i < 5; ++i) ring.Write(Numbered(i));
  EXPECT_EQ(ring.Read(next, read), 0u);
  for (int64_t i = 5; i < 25; ++i) ring.Write(Numbered(i));
  EXPECT_EQ(ring.Read(next, read), 12u) << "of 20, the last 8 are there";
  ASSERT_EQ(read.size(), 13u);
  for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i].begin_ns, static_cast<int64_t>(i < 5 ? i : i + 12));
  EXPECT_EQ(ring.Read(next, read), 0u);
  EXPECT_EQ(next, 25u);
}

// A writer that laps its reader all the time.
TEST(TraceRing, NoRecordIsTornAndNoneIsReadTwice) {
  TraceRing ring(16);
  constexpr int64_t kRecords = 400'000;
  std::thread writer([&] {
    for (int64_t i = 0; i < kRecords; ++i) ring.Write(Numbered(i));
  });
  std::vector<TraceRecord> read;
  uint64_t next = 0, lost = 0;
  while (next < kRecords) lost += ring.Read(next, read);
  writer.join();
  EXPECT_EQ(read.size() + lost, static_cast<uint64_t>(kRecords));
  int64_t last = -1;
  for (const TraceRecord& record : read) {
    ASSERT_TRUE(IsWhole(record)) << record.begin_ns;
    ASSERT_GT(record.begin_ns, last);
    last = record.begin_ns;
  }
  EXPECT_EQ(last, kRecords - 1);
}

std::vector<std::string> NamesOf(const std::vector<TraceRecord>& records) {
  std::vector<std::string> names;
  for (const TraceRecord& record : records) names.emplace_back(record.name);
  return names;
}

// All that is there; nothing may have been lost.
std::vector<TraceRecord> TakeAll(TraceReader& reader) {
  std::vector<TraceRecord> records;
  EXPECT_EQ(reader.Take(records), 0u);
  return records;
}

TEST(Trace, RecordsWhileSomebodyReadsAndAsMuchAsHeAsksFor) {
  const TraceTrack track = TraceTrackNamed("a track");
  EXPECT_EQ(TraceTrackNamed("a track").index, track.index);
  EXPECT_NE(TraceTrackNamed("another").index, track.index);
  const auto run = [&](const char* name) { const TraceSpan span(track, name); };
  run("before anybody reads");
  {
    TraceReader phases(TraceLevel::kPhases);
    EXPECT_TRUE(TraceIsOn(TraceLevel::kPhases));
    EXPECT_FALSE(TraceIsOn(TraceLevel::kOps));
    run("first");
    {
      TraceReader ops(TraceLevel::kOps);
      EXPECT_TRUE(TraceIsOn(TraceLevel::kOps));
      run("second");
      EXPECT_THAT(NamesOf(TakeAll(ops)), testing::ElementsAre("second"));
    }
    EXPECT_FALSE(TraceIsOn(TraceLevel::kOps));
    TraceSpanAt(track, "third", 5, 9, "layer", 4);
    { const TraceSpan nowhere(TraceTrack{}, "without a track"); }
    const std::vector<TraceRecord> records = TakeAll(phases);
    EXPECT_THAT(NamesOf(records), testing::ElementsAre("first", "second", "third"));
    EXPECT_EQ(records[2].begin_ns, 5);
    EXPECT_EQ(records[2].end_ns, 9);
    EXPECT_STREQ(records[2].keys, "layer");
    EXPECT_EQ(records[2].values[0], 4);
    EXPECT_EQ(TraceReader::TracksFrom(static_cast<size_t>(records[2].track))[0], "a track");
    EXPECT_TRUE(TakeAll(phases).empty());
  }
  EXPECT_FALSE(TraceIsOn(TraceLevel::kPhases));
}

TEST(Trace, ASpanLastsUntilItsScopeEndsAndLiesInTheOneAround) {
  const TraceTrack track = TraceTrackNamed("nested");
  TraceReader reader(TraceLevel::kPhases);
  const int64_t before_ns = MonotonicNowNs();
  {
    const TraceSpan outer(track, "outer", "a b c", 1, -2, INT64_MAX);
    { const TraceSpan inner(track, "inner"); }
  }
  const int64_t after_ns = MonotonicNowNs();
  const std::vector<TraceRecord> records = TakeAll(reader);
  ASSERT_THAT(NamesOf(records), testing::ElementsAre("inner", "outer"));
  const TraceRecord& inner = records[0];
  const TraceRecord& outer = records[1];
  EXPECT_LE(before_ns, outer.begin_ns);
  EXPECT_LE(outer.begin_ns, inner.begin_ns);
  EXPECT_LE(inner.begin_ns, inner.end_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);
  EXPECT_LE(outer.end_ns, after_ns);
  EXPECT_THAT(outer.values, testing::ElementsAre(1, -2, INT64_MAX));
}

TEST(Trace, LapsFollowEachOtherWithoutAGap) {
  const TraceTrack track = TraceTrackNamed("laps");
  TraceLaps early(track);
  TraceReader reader(TraceLevel::kPhases);
  early.Lap("begun before anybody read");
  TraceLaps laps(track);
  laps.Lap("first", "layer", 0);
  laps.Lap("second", "layer", 1);
  const std::vector<TraceRecord> records = TakeAll(reader);
  ASSERT_THAT(NamesOf(records), testing::ElementsAre("first", "second"));
  EXPECT_LE(records[0].begin_ns, records[0].end_ns);
  EXPECT_EQ(records[0].end_ns, records[1].begin_ns);
  EXPECT_EQ(records[1].values[0], 1);
}

// Threads come and go, each with a track of its own, while one reader follows.
TEST(Trace, EachThreadsSpansComeInOrderWhoeverItsRingWasBefore) {
  constexpr int kThreads = 4, kGenerations = 5, kSpans = 2000;
  TraceReader reader(TraceLevel::kPhases);
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &running] {
      for (int g = 0; g < kGenerations; ++g) {
        std::thread([t, g] {
          const TraceTrack track = TraceTrackNamed("thread " + std::to_string(t) + "." + std::to_string(g));
          for (int i = 0; i < kSpans; ++i) const TraceSpan span(track, "work", "number", i);
        }).join();
      }
      --running;
    });
  }
  std::map<int64_t, int64_t> next;  // by track: the number that is due
  uint64_t lost = 0;
  size_t read = 0;
  const auto take = [&] {
    std::vector<TraceRecord> records;
    lost += reader.Take(records);
    read += records.size();
    for (const TraceRecord& record : records) ASSERT_EQ(record.values[0], next[record.track]++);
  };
  while (running.load() > 0) take();
  for (std::thread& thread : threads) thread.join();
  take();
  EXPECT_EQ(lost, 0u);
  EXPECT_EQ(read, static_cast<size_t>(kThreads * kGenerations * kSpans));
  EXPECT_EQ(next.size(), static_cast<size_t>(kThreads * kGenerations));
}

}  // namespace
}  // namespace hearth
