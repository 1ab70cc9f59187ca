// Streamed prefill on the host device, over a link that is held to a pace: how much of the copy hides behind the arithmetic. A pass takes at least as long
// as the longer of the two; printed is how much longer it took, for links on which the copy alone takes half to twice the arithmetic's time. Arithmetic is
// a pass over a link without a pace, run before and after each one that is judged.
// Usage: slp_bench [MODEL_DIR] [--prefill N] [--chunk N] [--slots N] [--rounds N] [--threads N] [--isa NAME] [--terms 1|2]
//        --slots 0 (the default): a layer's experts
// MODEL_DIR: as forward_bench has it. Never run by ctest.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "common/base/time.h"
#include "common/slp/slp_engine.h"
#include "tests/bench/limits.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

struct Flags {
  std::string model_dir;
  ModelHarness::Options harness;
  SlpOptions slp;
  int64_t prefill = 2048;
  int64_t rounds = 5;
};

// An engine over a link of its own pace, with a prompt to pass through it.
class Link {
 public:
  static absl::StatusOr<std::unique_ptr<Link>> Make(const Flags& flags, int64_t bytes_per_s) {
    auto link = std::make_unique<Link>();
    ModelHarness::Options options = flags.harness;
    options.device.link_bytes_per_s = bytes_per_s;
    ASSIGN_OR_RETURN(link->harness_, ModelHarness::Make(flags.model_dir, options));
    ASSIGN_OR_RETURN(link->engine_, SlpEngine::Make(link->harness_->device(), link->harness_->model(), flags.slp));
    link->prompt_ = link->harness_->NewStream(flags.prefill);
    link->batch_.form = Form::kPrefill;
    for (int64_t i = 0; i < flags.prefill; ++i) link->batch_.token_ids.push_back(static_cast<int32_t>(i * 7919 % link->harness_->vocab()));
    link->batch_.sequences = {{.first_row = 0, .num_rows = flags.prefill, .pages = link->prompt_.pages.data()}};
    RETURN_IF_ERROR(link->engine_->Run(link->harness_->kv(), link->batch_, nullptr, {}));  // warms up
    return link;
  }

  absl::StatusOr<SlpPassStats> Pass() {
    RETURN_IF_ERROR(engine_->Run(harness_->kv(), batch_, nullptr, {}));
    return engine_->last_pass();
  }

  // Seconds that the copy of as many bytes takes with nothing beside it.
  double Copy(uint64_t bytes) {
    const std::vector<uint8_t> from(1 << 20, 1);
    std::vector<uint8_t> to(from.size());
    const auto stream = harness_->device().MakeStream("copy alone");
    const int64_t begin_ns = MonotonicNowNs();
    for (uint64_t at = 0; at < bytes; at += from.size()) {
      harness_->device().ops().ToDevice(*stream, {.host = from.data(), .device = to.data(), .bytes = std::min<uint64_t>(from.size(), bytes - at)});
    }
    return static_cast<double>(MonotonicNowNs() - begin_ns) * 1e-9;
  }

 private:
  std::unique_ptr<ModelHarness> harness_;
  std::unique_ptr<SlpEngine> engine_;
  TestStream prompt_;
  ForwardBatch batch_;
};

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

absl::Status Run(Flags flags) {
  flags.slp.max_rows = flags.prefill;
  flags.harness.num_pages = flags.prefill / kPageTokens + 1;
  ASSIGN_OR_RETURN(const auto unpaced, Link::Make(flags, 0));
  ASSIGN_OR_RETURN(const SlpPassStats first, unpaced->Pass());
  std::printf("%s\n%ld tokens, chunks of %ld, %s, %.1f MB loaded a pass\n", flags.model_dir.c_str(), static_cast<long>(flags.prefill),
              static_cast<long>(flags.slp.chunk_rows),
              flags.slp.expert_slots == 0 ? "a layer's slots" : (std::to_string(flags.slp.expert_slots) + " slots").c_str(),
              static_cast<double>(first.bytes_loaded) * 1e-6);
  std::printf("%12s %10s %12s %10s %10s %26s\n", "link MB/s", "copy ms", "compute ms", "pass ms", "waited ms", "pass / max(copy, compute)");
  for (const double ratio : {0.5, 0.75, 1.0, 1.33, 2.0}) {
    ASSIGN_OR_RETURN(const SlpPassStats recent, unpaced->Pass());
    const double rate = static_cast<double>(recent.bytes_loaded) / (ratio * Seconds(recent.duration_ns));
    ASSIGN_OR_RETURN(const auto paced, Link::Make(flags, static_cast<int64_t>(rate)));
    std::vector<double> copies, computes, passes, waits, ratios;
    for (int64_t round = 0; round < flags.rounds; ++round) {
      // What is compared runs within the same second: shared machines swing.
      ASSIGN_OR_RETURN(const SlpPassStats before, unpaced->Pass());
      ASSIGN_OR_RETURN(const SlpPassStats pass, paced->Pass());
      ASSIGN_OR_RETURN(const SlpPassStats after, unpaced->Pass());
      copies.push_back(paced->Copy(pass.bytes_loaded));
      computes.push_back(Seconds(before.duration_ns + after.duration_ns) / 2);
      passes.push_back(Seconds(pass.duration_ns));
      waits.push_back(Seconds(pass.waited_ns));
      ratios.push_back(passes.back() / std::max(copies.back(), computes.back()));
    }
    std::printf("%12.1f %10.1f %12.1f %10.1f %10.1f %26.2f\n", rate * 1e-6, Median(copies) * 1e3, Median(computes) * 1e3, Median(passes) * 1e3,
                Median(waits) * 1e3, Median(ratios));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  using namespace hearth;
  Flags flags;
  flags.model_dir = SourceDir() + "/deploy/models/fable-moe";
  const bool understood = TakeFlags(argc, argv, &flags.harness.device, &flags.model_dir, [&](const std::string& name, const char* value) {
    const int64_t number = std::atoll(value);
    if (name == "--prefill") return (flags.prefill = number) > 0;
    if (name == "--chunk") return (flags.slp.chunk_rows = number) > 0;
    if (name == "--slots") return (flags.slp.expert_slots = number) >= 0;
    if (name == "--rounds") return (flags.rounds = number) > 0;
    return false;
  });
  if (!understood) return 2;
  if (const absl::Status status = Run(flags); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
}
