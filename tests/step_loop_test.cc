// The decode worker's step loop on the recording device: continuous batching, chunked prefill and the page keeper, stepped deterministically, so that
// the backends to come (sim, cuda) change neither the loop nor the forward pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "common/formats/model_config.h"
#include "common/model/forward.h"
#include "services/decode/decode_loop.h"
#include "tests/model_harness.h"
#include "tests/recording_device.h"

namespace hearth {
namespace {

// A store that never runs out: pages in the order of asking.
class CountingPageStore : public PageStore {
 public:
  absl::StatusOr<std::vector<PageRef>> Match(const Hash128&, const std::vector<int32_t>&) override { return std::vector<PageRef>(); }
  absl::StatusOr<std::vector<PageRef>> Alloc(const Hash128&, int32_t first, int32_t count, int32_t) override {
    std::vector<PageRef> rows;
    for (int32_t i = 0; i < count; ++i) rows.push_back({first + i, next_++, false});
    return rows;
  }
  absl::Status Seal(const Hash128&, const std::vector<int32_t>& indexes) override {
    sealed += static_cast<int>(indexes.size());
    return absl::OkStatus();
  }
  absl::Status Offer(const Hash128&) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<PageRef>> Take(const Hash128&) override { return std::vector<PageRef>(); }
  absl::Status Free(const Hash128&, int32_t) override {
    ++freed;
    return absl::OkStatus();
  }
  int sealed = 0;
  int freed = 0;

 private:
  int32_t next_ = 0;
};

// Writes down when, on the virtual clock, each event came.
class LoggingSink : public StreamSink {
 public:
  LoggingSink(std::string name, Device& device, std::vector<std::string>& log, HostSignal& signal, int& ended)
      : name_(std::move(name)), device_(device), log_(log), signal_(signal), ended_(ended) {}
  void OnStarted(int64_t) override { Note("started"); }
  void OnPrefilled(int64_t) override { Note("prefilled"); }
  void OnToken(const TokenEvent& token) override { Note(absl::StrCat("token ", token.index)); }
  void OnFinished(FinishReason) override { End("finished"); }
  void OnError(const absl::Status& status) override { End(absl::StrCat("error ", status.ToString())); }

 private:
  void Note(const std::string& what) { log_.push_back(absl::StrCat(device_.Now(), " ", name_, " ", what)); }
  void End(const std::string& what) {
    Note(what);
    ++ended_;
    signal_.Notify();
  }
  const std::string name_;
  Device& device_;
  std::vector<std::string>& log_;
  HostSignal& signal_;
  int& ended_;
};

struct Listing {
  std::vector<std::string> events;
  std::vector<std::string> ops;
  int sealed = 0, freed = 0;
};

// Three streams in two places: prompts of 150, 3 and 1 tokens, five output tokens each.
Listing RunLoop(std::optional<StepOrder> order = std::nullopt) {
  Listing out;
  const std::string dir = SourceDir() + "/deploy/models/fable-moe";
  auto config = ReadModelConfig(dir);
  auto image = ImageOf(dir, 1);
  EXPECT_TRUE(config.ok() && image.ok()) << config.status() << image.status();
  auto device = RecordingDevice::Make({});
  auto model = Model::Bind(*config, *image, *device);
  EXPECT_TRUE(model.ok()) << model.status();
  KvGeometry geometry = (*model)->kv_geometry();
  geometry.num_pages = 32;
  auto kv = KvPool::InMemory(geometry);
  CountingPageStore store;
  int ended = 0;
  auto signal = device->MakeSignal();
  {
    DecodeLoop loop(*device, **model, *kv, store,
                    {.max_streams = 2, .busy_chunk_tokens = 32, .idle_chunk_tokens = 64, .step_order = order, .tpot_rise = 100});
    uint64_t id = 1;
    for (const int64_t prompt : {150, 3, 1}) {
      StreamRequest request;
      request.id = {id++, 0};
      request.tokens.assign(static_cast<size_t>(prompt), 9);
      request.prompt_size = prompt;
      request.max_new_tokens = 5;
      request.sampling.temperature = 0;
      auto sink = std::make_shared<LoggingSink>(absl::StrCat("prompt", prompt), *device, out.events, *signal, ended);
      EXPECT_TRUE(loop.Submit(std::move(request), sink, nullptr).ok());
    }
    auto actor = device->Spawn("step-loop", [&] { loop.Run(); });
    while (ended < 3) {
      const uint64_t seen = signal->Current();
      if (ended < 3) device->HostWait(*signal, seen, {});
    }
    loop.Stop();
  }
  out.ops = device->Lines();
  out.sealed = store.sealed;
  out.freed = store.freed;
  return out;
}

TEST(StepLoop, BatchesChunksAndAdmitsBetweenStepsOnTheRecordingDevice) {
  const Listing run = RunLoop();
  const auto count = [](const std::vector<std::string>& lines, const std::string& what) {
    return std::count_if(lines.begin(), lines.end(), [&](const std::string& l) { return l.find(what) != std::string::npos; });
  };
  EXPECT_EQ(count(run.events, " token "), 15);
  EXPECT_EQ(count(run.events, " finished"), 3);
  EXPECT_EQ(count(run.events, " error"), 0);
  const auto at = [&](const std::string& what) {
    return std::find_if(run.events.begin(), run.events.end(), [&](const std::string& l) { return l.ends_with(what); }) - run.events.begin();
  };
  EXPECT_LT(at("prompt3 finished"), at("prompt1 started")) << "the third waits for a place";
  EXPECT_GT(count(run.ops, " mla_attention prefill "), 6 * 3) << "149 positions in chunks of 64 and 32";
  EXPECT_GT(count(run.ops, " mla_attention decode "), 0);
  EXPECT_EQ(run.sealed, 2) << "the long prompt fills two pages";
  EXPECT_EQ(run.freed, 3);
}

// The step orders are measured with the device's clock, so even their choice is the same.
TEST(StepLoop, TwoRunsAreEqualToTheByte) {
  const Listing one = RunLoop(), two = RunLoop();
  EXPECT_EQ(one.events, two.events);
  EXPECT_EQ(one.ops, two.ops);
}

TEST(StepLoop, StreamsThatAlternateAreServedAsThoseInOneBatch) {
  const Listing joint = RunLoop(StepOrder::kJoint), alternate = RunLoop(StepOrder::kAlternate);
  const auto without_times = [](std::vector<std::string> events) {
    for (std::string& event : events) event.erase(0, event.find(' '));
    return events;
  };
  EXPECT_EQ(without_times(joint.events), without_times(alternate.events));
  const auto second = [](const Listing& run) {
    return std::count_if(run.ops.begin(), run.ops.end(),
                         [](const std::string& l) { return l.find(" second micro-batch experts ") != std::string::npos; });
  };
  EXPECT_EQ(second(joint), 0);
  EXPECT_GT(second(alternate), 0);
}

}  // namespace
}  // namespace hearth
