// What drawing one token costs, by option, over DeepSeek-V3's vocabulary. Run as:  bench/sampler_bench
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "services/decode/sampler.h"

namespace hearth {
namespace {

void Draw(benchmark::State& state, const SamplingParams& sampling, int32_t num_logprobs) {
  constexpr int64_t kVocab = 129280;
  std::mt19937 random(1);
  std::vector<float> logits(static_cast<size_t>(kVocab));
  for (float& x : logits) x = std::normal_distribution<float>(0, 2.5f)(random);
  logits[77] = 12;  // a likely token: a nucleus of text, not of noise
  StreamRequest request;
  for (int32_t i = 0; i < 2000; ++i) request.tokens.push_back(i * 7 % kVocab);
  request.prompt_size = 1000;
  request.sampling = sampling;
  request.num_logprobs = num_logprobs;
  Sampler sampler;
  for (auto _ : state) {
    ++request.seed;
    benchmark::DoNotOptimize(sampler.Draw(request, logits.data(), kVocab)->id);
  }
}

BENCHMARK_CAPTURE(Draw, greedy, SamplingParams{.temperature = 0}, -1)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Draw, plain, SamplingParams{}, -1)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Draw, top_p_95, (SamplingParams{.temperature = 0.6f, .top_p = 0.95f}), -1)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Draw, top_k_50, SamplingParams{.top_k = 50}, -1)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Draw, min_p_5, SamplingParams{.min_p = 0.05f}, -1)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Draw, penalties, SamplingParams{.presence_penalty = 0.5f}, -1)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(Draw, top_20_logprobs, SamplingParams{}, 20)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace hearth

BENCHMARK_MAIN();
