// Tokens a second of the forward pass on the host device: decode at batch 1..6 behind a context, and prefill in one pass.
// Usage: forward_bench [MODEL_DIR] [--threads N] [--isa NAME] [--terms 1|2] [--shards S] [--context N] [--steps N] [--prefill N]
// MODEL_DIR: a Hugging Face directory, loaded into an image first; fable-moe of the source tree if absent. Never run by ctest.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/base/time.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

struct Flags {
  std::string model_dir;
  ModelHarness::Options harness;
  int64_t context = 128;
  int64_t steps = 32;
  int64_t prefill = 512;
};

std::vector<int32_t> Ids(int64_t n, uint32_t seed, int64_t vocab) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    ids.push_back(static_cast<int32_t>((seed >> 8) % static_cast<uint32_t>(vocab)));
  }
  return ids;
}

absl::Status Run(Flags flags) {
  flags.harness.max_rows = std::max<int64_t>(flags.prefill, 128);
  flags.harness.num_pages = 7 * ((flags.context + flags.steps + flags.prefill) / kPageTokens + 2);
  ASSIGN_OR_RETURN(auto harness, ModelHarness::Make(flags.model_dir, flags.harness));
  std::printf("%s\n%s\n", flags.model_dir.c_str(), harness->description().c_str());

  TestStream prompt = harness->NewStream(flags.prefill);
  const std::vector<int32_t> ids = Ids(flags.prefill, 1, harness->vocab());
  int64_t best = INT64_MAX;
  for (int round = 0; round < 3; ++round) {
    prompt.length = 0;
    const int64_t begin = MonotonicNowNs();
    RETURN_IF_ERROR(harness->Step(Form::kPrefill, {{&prompt, ids}}, false).status());
    best = std::min(best, MonotonicNowNs() - begin);
  }
  std::printf("prefill %5ld tokens: %10.1f tokens/s  (%.2f ms, best of 3)\n", static_cast<long>(flags.prefill),
              static_cast<double>(flags.prefill) * 1e9 / static_cast<double>(best), static_cast<double>(best) / 1e6);

  for (size_t batch = 1; batch <= 6; ++batch) {
    harness->Reset();
    std::vector<TestStream> streams;
    for (size_t i = 0; i < batch; ++i) streams.push_back(harness->NewStream(flags.context + flags.steps + 1));
    for (size_t i = 0; i < batch; ++i) {
      RETURN_IF_ERROR(harness->Feed(Form::kPrefill, streams[i], Ids(flags.context, static_cast<uint32_t>(i), harness->vocab()), 128, false).status());
    }
    int64_t begin = 0;
    for (int64_t step = 0; step <= flags.steps; ++step) {
      if (step == 1) begin = MonotonicNowNs();  // the first step warms up
      std::vector<ModelHarness::Part> parts;
      for (size_t i = 0; i < batch; ++i)
        parts.push_back({&streams[i], Ids(1, static_cast<uint32_t>(step * 7 + static_cast<int64_t>(i)), harness->vocab())});
      RETURN_IF_ERROR(harness->Step(Form::kDecode, parts, false).status());
    }
    const double seconds = static_cast<double>(MonotonicNowNs() - begin) / 1e9;
    std::printf("decode  batch %zu:      %10.1f tokens/s  (%.3f ms a step)\n", batch,
                static_cast<double>(batch) * static_cast<double>(flags.steps) / seconds, seconds * 1e3 / static_cast<double>(flags.steps));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::Flags flags;
  flags.model_dir = hearth::SourceDir() + "/deploy/models/fable-moe";
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      flags.model_dir = name;
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "%s wants a value\n", argv[i]);
      return 2;
    }
    const char* value = argv[++i];
    if (name == "--threads") {
      flags.harness.device.num_threads = std::atoi(value);
    } else if (name == "--terms") {
      flags.harness.device.activation_terms = std::atoi(value);
    } else if (name == "--shards") {
      flags.harness.num_shards = flags.harness.device.num_pools = std::atoi(value);
    } else if (name == "--context") {
      flags.context = std::atol(value);
    } else if (name == "--steps") {
      flags.steps = std::atol(value);
    } else if (name == "--prefill") {
      flags.prefill = std::atol(value);
    } else if (name == "--isa" && hearth::IsaFromName(value).has_value()) {
      flags.harness.device.isa = hearth::IsaFromName(value);
    } else {
      std::fprintf(stderr, "unknown flag or value: %s %s\n", name.c_str(), value);
      return 2;
    }
  }
  const absl::Status status = hearth::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "forward_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
