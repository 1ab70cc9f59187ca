// Speculation on the host device: the decode worker's own loop at each depth and batch, in rounds that alternate, so that only figures of one round are
// compared. Prints what a step takes and yields, and what that makes of the speed without drafts.
// Usage: speculation_bench [MODEL_DIR] [--threads N] [--isa NAME] [--terms 1|2] [--tokens N] [--rounds N] [--batch N] [--temperature T]
// MODEL_DIR: a Hugging Face directory with an MTP module; fable-moe of the source tree if absent. Never run by ctest.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "services/decode/decode_loop.h"
#include "tests/bench/limits.h"
#include "tests/keeping_page_store.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

struct Flags {
  std::string model_dir;
  ModelHarness::Options harness;
  int64_t tokens = 128;
  int rounds = 5;
  int64_t batch = 0;  // 0: 1, 2, 4, 6
  float temperature = 0;
};

struct CountingSink : StreamSink {
  explicit CountingSink(int64_t& ended) : ended(ended) {}
  void OnStarted(int64_t) override {}
  void OnPrefilled(int64_t) override {}
  void OnToken(const TokenEvent&) override {}
  void OnFinished(FinishReason) override { ++ended; }
  void OnError(const absl::Status& status) override {
    std::fprintf(stderr, "speculation_bench: %s\n", std::string(status.message()).c_str());
    ++ended;
  }
  int64_t& ended;
};

// Seconds of the steps, and what they yielded.
struct Measured {
  double seconds = 0;
  LoopStats::View stats;
};

Measured Decode(ModelHarness& harness, const Flags& flags, int64_t batch, std::optional<int64_t> depth) {
  harness.Reset();
  KeepingPageStore store;
  DecodeLoop loop(harness.device(), harness.model(), harness.kv(), store, {.max_streams = batch, .idle_chunk_tokens = 128, .drafts = depth});
  int64_t ended = 0;
  for (int64_t i = 0; i < batch; ++i) {
    StreamRequest request;
    request.id = {static_cast<uint64_t>(i) + 1, 0};
    // "Tell me the story of" in fable-moe's own form, each with another word behind it.
    request.tokens = {0, 2, static_cast<int32_t>(300 + 41 * i), static_cast<int32_t>(500 + 7 * i), 3};
    for (int32_t& id : request.tokens) id = static_cast<int32_t>(id % harness.vocab());
    request.prompt_size = static_cast<int64_t>(request.tokens.size());
    request.max_new_tokens = flags.tokens;
    request.ignore_eos = true;
    request.seed = 5 + static_cast<uint64_t>(i);
    request.sampling.temperature = flags.temperature;
    (void)loop.Submit(std::move(request), std::make_shared<CountingSink>(ended), nullptr);
  }
  Measured out;
  while (ended < batch) {
    const uint64_t steps = loop.Stats().steps_total;
    const int64_t begin = harness.device().Now();
    const bool worked = loop.Step();
    if (loop.Stats().steps_total > steps) out.seconds += static_cast<double>(harness.device().Now() - begin) * 1e-9;
    if (!worked) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  out.stats = loop.Stats();
  return out;
}

absl::Status Run(Flags flags) {
  flags.harness.num_pages = 6 * (flags.tokens / kPageTokens + 8);
  ASSIGN_OR_RETURN(auto harness, ModelHarness::Make(flags.model_dir, flags.harness));
  if (!harness->model().has_mtp()) return absl::FailedPreconditionError(flags.model_dir + " has no MTP module");
  std::printf("%s\n%s; %ld tokens a stream, temperature %.1f, medians of %d rounds\n", flags.model_dir.c_str(), harness->description().c_str(),
              static_cast<long>(flags.tokens), flags.temperature, flags.rounds);
  const std::vector<std::optional<int64_t>> depths = {0, 1, 2, 3, std::nullopt};
  for (const int64_t batch : flags.batch > 0 ? std::vector<int64_t>{flags.batch} : std::vector<int64_t>{1, 2, 4, 6}) {
    std::vector<std::vector<double>> step_ms(depths.size()), rates(depths.size()), gains(depths.size());
    std::vector<LoopStats::View> stats(depths.size());
    for (int round = -1; round < flags.rounds; ++round) {  // the first warms up
      double plain_rate = 0;
      for (size_t i = 0; i < depths.size(); ++i) {
        const Measured run = Decode(*harness, flags, batch, depths[i]);
        const double rate = static_cast<double>(run.stats.tokens_total) / run.seconds;
        if (i == 0) plain_rate = rate;
        if (round < 0) continue;
        step_ms[i].push_back(run.seconds * 1e3 / static_cast<double>(run.stats.steps_total));
        rates[i].push_back(rate);
        gains[i].push_back(rate / plain_rate);
        stats[i] = run.stats;
      }
    }
    for (size_t i = 0; i < depths.size(); ++i) {
      const LoopStats::View& s = stats[i];
      std::printf("batch %ld, depth %-4s: %5.1f %% of drafts accepted, %.2f tokens a stream's step, %7.3f ms a step, %8.1f tokens/s, x %.2f\n",
                  static_cast<long>(batch), depths[i].has_value() ? std::to_string(*depths[i]).c_str() : "auto",
                  s.drafts_total == 0 ? 0.0 : 100.0 * static_cast<double>(s.drafts_accepted_total) / static_cast<double>(s.drafts_total),
                  static_cast<double>(s.tokens_total) / static_cast<double>(s.stream_steps_total), Median(step_ms[i]), Median(rates[i]),
                  Median(gains[i]));
    }
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::Flags flags;
  flags.model_dir = hearth::SourceDir() + "/deploy/models/fable-moe";
  const auto take = [&](const std::string& name, const char* value) {
    if (name == "--tokens") {
      flags.tokens = std::atol(value);
    } else if (name == "--rounds") {
      flags.rounds = std::atoi(value);
    } else if (name == "--batch") {
      flags.batch = std::atol(value);
    } else if (name == "--temperature") {
      flags.temperature = std::strtof(value, nullptr);
    } else {
      return false;
    }
    return true;
  };
  if (!hearth::TakeFlags(argc, argv, &flags.harness.device, &flags.model_dir, take)) return 2;
  const absl::Status status = hearth::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "speculation_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
