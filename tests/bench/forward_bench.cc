// The forward pass on the host device: decode at batch 1, 2, 4, 6 behind a context, beside a plain read of the very weights that the step read (what a
// step can't be faster than) and beside the sum over its products of the longer of their read and of their multiplications at the cores' BF16 peak;
// and prefill in one pass, beside that peak. Medians.
// Usage: forward_bench [MODEL_DIR] [--threads N] [--isa NAME] [--terms 1|2] [--spin-us N] [--shards S] [--context N] [--steps N] [--prefill N] [--passes N] [--batch N]
//        [--overlap joint|plain|alternate|auto]   auto compares the orders of a step in turn, 24 steps long
// MODEL_DIR: a Hugging Face directory, loaded into an image first; fable-moe of the source tree if absent. Never run by ctest.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "common/base/time.h"
#include "common/formats/tensor_plan.h"
#include "tests/bench/limits.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

struct Flags {
  std::string model_dir;
  ModelHarness::Options harness;
  int64_t context = 128;
  int64_t steps = 32;
  int64_t prefill = 512;
  int64_t passes = 3;  // of prefill, behind one that warms up
  std::vector<size_t> batches = {1, 2, 4, 6};
};

// How many tokens of a step chose an expert, by (layer, expert).
using ExpertTokens = std::map<std::pair<int64_t, int32_t>, int64_t>;

// The weights of a decode step, and what is done with them.
struct StepWeights {
  std::vector<MemoryRun> runs;
  std::vector<double> flop;  // of each run, each term of a token counted

  double bytes() const {
    double sum = 0;
    for (const MemoryRun& run : runs) sum += static_cast<double>(run.bytes);
    return sum;
  }
  // Each run read at `read_rate` (bytes a second) or multiplied at `peak` (FLOP a second), whichever takes longer.
  double SecondsAtLeast(double read_rate, double peak) const {
    double sum = 0;
    for (size_t i = 0; i < runs.size(); ++i) sum += std::max(static_cast<double>(runs[i].bytes) / read_rate, flop[i] / peak);
    return sum;
  }
};

// The tensors that a decode step reads: all but the embedding, and of the routed experts those chosen.
absl::StatusOr<StepWeights> Weights(const ModelHarness& harness, int64_t tokens, int terms, const ExpertTokens& experts) {
  const ModelConfig& config = harness.model().config();
  StepWeights weights;
  for (const PlannedTensor& planned : PlanTensors(config)) {
    if (planned.role == TensorRole::kEmbedding) continue;
    const auto tensor = harness.image().Tensor(planned.name);
    if (!tensor.ok()) continue;  // a routed expert's, or of the MTP module
    uint64_t elements = 1;
    for (const int64_t side : tensor->shape) elements *= static_cast<uint64_t>(side);
    weights.runs.push_back({static_cast<const uint8_t*>(tensor->data), static_cast<int64_t>(DTypeBytes(tensor->dtype, elements))});
    weights.flop.push_back(2.0 * static_cast<double>(elements) * static_cast<double>(tokens * terms));
  }
  for (const auto& [chosen, chosen_by] : experts) {
    for (int64_t shard = 0; shard < harness.image().num_shards(); ++shard) {
      ASSIGN_OR_RETURN(const ImageExpert part, harness.image().Expert(chosen.first, chosen.second, shard));
      if (part.count == 0) continue;
      weights.runs.push_back({static_cast<const uint8_t*>(part.record), static_cast<int64_t>(part.record_bytes)});
      weights.flop.push_back(2.0 * 3 * static_cast<double>(config.hidden_size * part.count) * static_cast<double>(chosen_by * terms));
    }
  }
  return weights;
}

// Weights that one token is multiplied with in a prefill pass: no embedding, no head, top_k of the routed experts.
double MatrixParameters(const ModelHarness& harness) {
  const ModelConfig& config = harness.model().config();
  double params = 0;
  for (const PlannedTensor& planned : PlanTensors(config)) {
    if (planned.shape.size() != 2 || planned.role == TensorRole::kEmbedding || planned.role == TensorRole::kHead) continue;
    const double size = static_cast<double>(planned.shape[0]) * static_cast<double>(planned.shape[1]);
    const bool routed = planned.expert >= 0;
    params += routed ? size * static_cast<double>(config.num_experts_per_tok) / static_cast<double>(config.n_routed_experts) : size;
  }
  return params;
}

absl::Status Run(Flags flags) {
  flags.harness.max_rows = std::max<int64_t>(flags.prefill, 128);
  flags.harness.num_pages = 7 * ((flags.context + flags.steps + flags.prefill) / kPageTokens + 2);
  ASSIGN_OR_RETURN(auto harness, ModelHarness::Make(flags.model_dir, flags.harness));
  std::printf("%s\n%s\n", flags.model_dir.c_str(), harness->description().c_str());

  ThreadPool& pool = harness->device().pool();
  const double params = MatrixParameters(*harness);
  TestStream prompt = harness->NewStream(flags.prefill);
  const std::vector<int32_t> ids = Ids(flags.prefill, 1, harness->vocab());
  std::vector<double> seconds, peaks;
  for (int64_t round = 0; round <= flags.passes; ++round) {
    prompt.length = 0;
    peaks.push_back(DotPeak(pool));
    const int64_t begin = MonotonicNowNs();
    RETURN_IF_ERROR(harness->Step(Form::kPrefill, {{&prompt, ids}}, false).status());
    if (round > 0) seconds.push_back(static_cast<double>(MonotonicNowNs() - begin) * 1e-9);  // the first pass warms up
  }
  const double flop = 2 * params * static_cast<double>(flags.prefill);
  std::printf("prefill %5ld tokens: %10.1f tokens/s  (%.1f ms; %.0f GFLOP/s in weights", static_cast<long>(flags.prefill),
              static_cast<double>(flags.prefill) / Median(seconds), Median(seconds) * 1e3, flop / Median(seconds) * 1e-9);
  if (Median(peaks) > 0) std::printf(", %.0f %% of the peak %.0f", 100 * flop / Median(seconds) * 1e-9 / Median(peaks), Median(peaks));
  std::printf(")\n");

  for (const size_t batch : flags.batches) {
    harness->Reset();
    std::vector<TestStream> streams;
    for (size_t i = 0; i < batch; ++i) streams.push_back(harness->NewStream(flags.context + flags.steps + 1));
    for (size_t i = 0; i < batch; ++i) {
      RETURN_IF_ERROR(harness->Feed(Form::kPrefill, streams[i], Ids(flags.context, static_cast<uint32_t>(i), harness->vocab()), 128, false).status());
    }
    StepsBesideReads timed;
    std::vector<double> of_longer;
    const double peak = DotPeak(pool) * 1e9;
    for (int64_t step = 0; step <= flags.steps; ++step) {
      std::vector<ModelHarness::Part> parts;
      for (size_t i = 0; i < batch; ++i)
        parts.push_back({&streams[i], Ids(1, static_cast<uint32_t>(step * 7 + static_cast<int64_t>(i)), harness->vocab())});
      // The experts that the gate really chose: with the weights outside the experts they are what the step must read.
      ExpertTokens chosen;
      ForwardHooks hooks;
      hooks.on_gate = [&](int64_t layer, const int32_t* expert_ids, const float*, int64_t m, int64_t top_k) {
        for (int64_t k = 0; k < m * top_k; ++k) ++chosen[{layer, expert_ids[k]}];
      };
      const int64_t begin = MonotonicNowNs();
      RETURN_IF_ERROR(harness->Step(Form::kDecode, parts, false, &hooks).status());
      const double taken = static_cast<double>(MonotonicNowNs() - begin) * 1e-9;
      ASSIGN_OR_RETURN(const StepWeights weights, Weights(*harness, static_cast<int64_t>(batch), flags.harness.device.activation_terms, chosen));
      const double read = SecondsToRead(pool, weights.runs);
      if (step == 0) continue;  // warms up
      timed.Add(taken, read, weights.bytes());
      if (peak > 0) of_longer.push_back(weights.SecondsAtLeast(weights.bytes() / read, peak) / taken);
    }
    for (const StepOrderTimes& times : harness->runner().Look()) {
      if (times.streams != static_cast<int64_t>(batch) || flags.harness.order.has_value()) continue;
      std::printf("decode  batch %zu:      ", batch);
      for (int order = 0; order < kNumStepOrders; ++order) {
        std::printf("%s %.2f ms, ", StepOrderName(static_cast<StepOrder>(order)), times.median_ms[static_cast<size_t>(order)]);
      }
      std::printf("so %s\n", times.decided ? StepOrderName(times.chosen) : "not decided: more --steps");
    }
    std::printf("decode  batch %zu:      %10.1f tokens/s  (%.2f ms a step: %.2f GB of weights, %.1f GB/s, %.0f %% of a plain read's %.1f", batch,
                static_cast<double>(batch) / timed.seconds(), timed.seconds() * 1e3, timed.bytes() * 1e-9, timed.rate() * 1e-9, 100 * timed.of_read(),
                timed.read_rate() * 1e-9);
    if (peak > 0) std::printf("; %.0f %% of the longer of read and products", 100 * Median(of_longer));
    std::printf(")\n");
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
    if (name == "--shards") {
      flags.harness.num_shards = flags.harness.device.num_pools = std::atoi(value);
    } else if (name == "--context") {
      flags.context = std::atol(value);
    } else if (name == "--steps") {
      flags.steps = std::atol(value);
    } else if (name == "--passes") {
      flags.passes = std::atol(value);
    } else if (name == "--batch") {
      flags.batches = {static_cast<size_t>(std::atol(value))};
    } else if (name == "--prefill") {
      flags.prefill = std::atol(value);
    } else if (name == "--overlap") {
      flags.harness.order = hearth::StepOrderFromName(value);
      return flags.harness.order.has_value() || std::string(value) == "auto";
    } else {
      return false;
    }
    return true;
  };
  if (!hearth::TakeFlags(argc, argv, &flags.harness.device, &flags.model_dir, take)) return 2;
  const absl::Status status = hearth::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "forward_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
