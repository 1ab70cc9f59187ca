// What crosses between prefill ranks, counted in passes on the host device: SmallEP, dispatch, and a dispatch that sends a row once a rank, for comparison.
// Then where the two ways cross by prediction, for a layer of DeepSeek-R1's size on four and two ranks.
// Usage: dslp_bench [MODEL_DIR] [--prefill N] [--chunk N] [--link-gbs N] [--latency-us N] [--threads N] [--isa NAME] [--terms 1|2]
//        --threads: of each rank. MODEL_DIR: as forward_bench has it. Never run by ctest.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/bench/limits.h"
#include "tests/rank_group.h"

namespace hearth {
namespace {

struct Flags {
  std::string model_dir;
  HostDeviceOptions device{.num_threads = 1};
  int64_t prefill = 2048;
  int64_t chunk = 512;
  ExchangeLink link{.bytes_per_s = 25e9, .latency_s = 20e-6};
};

const char* NameOf(ExpertExchange exchange) { return exchange == ExpertExchange::kSmallEp ? "SmallEP" : "dispatch"; }

absl::Status CountPasses(const Flags& flags) {
  std::printf("%s, %ld tokens: bytes that all ranks send in a pass\n", flags.model_dir.c_str(), static_cast<long>(flags.prefill));
  std::printf("%6s %9s %12s %12s %12s %12s %12s %10s\n", "ranks", "exchange", "kv MB", "inputs MB", "sums MB", "experts MB", "dedup MB", "pass ms");
  for (const int ranks : {2, 4}) {
    for (const ExpertExchange exchange : {ExpertExchange::kSmallEp, ExpertExchange::kDispatch}) {
      ASSIGN_OR_RETURN(
          const std::unique_ptr<RankGroup> group,
          RankGroup::Make(flags.model_dir, 1, flags.device, {.chunk_rows = flags.chunk, .max_rows = flags.prefill, .exchange = exchange}, ranks));
      const Model& model = *group->rank(0).model;
      KvGeometry geometry = model.kv_geometry();
      geometry.num_pages = static_cast<uint64_t>(flags.prefill / kPageTokens + 1);
      const auto kv = KvPool::InMemory(geometry);
      std::vector<int32_t> pages;
      for (uint64_t i = 0; i < geometry.num_pages; ++i) pages.push_back(static_cast<int32_t>(i));
      ForwardBatch batch{.form = Form::kPrefill, .token_ids = {}, .sequences = {}, .logit_rows = {}, .prior_hidden = {nullptr}};
      for (int64_t i = 0; i < flags.prefill; ++i) batch.token_ids.push_back(static_cast<int32_t>(i * 7919 % model.config().vocab_size));
      batch.sequences = {{.first_row = 0, .num_rows = flags.prefill, .pages = pages.data()}};
      for (int warm = 0; warm < 2; ++warm) {
        for (const absl::Status& status : group->Run(*kv, batch, nullptr)) RETURN_IF_ERROR(status);
      }
      uint64_t dedup = 0;
      int64_t duration_ns = 0;
      for (size_t r = 0; r < group->size(); ++r) {
        const SlpPassStats& stats = group->rank(r).engine->last_pass();
        dedup += stats.dedup_dispatch_bytes;
        duration_ns = std::max(duration_ns, stats.duration_ns);
      }
      const auto megabytes = [&](const std::vector<std::string>& names) { return static_cast<double>(group->Sent(names)) * 1e-6; };
      std::printf("%6d %9s %12.2f %12.2f %12.2f %12.2f %12.2f %10.1f\n", ranks, NameOf(exchange), megabytes({"kv"}),
                  megabytes({"rows", "gate", "counts"}), megabytes({"sums", "outputs"}), megabytes({"rows", "gate", "counts", "sums", "outputs"}),
                  static_cast<double>(dedup) * 1e-6, static_cast<double>(duration_ns) * 1e-6);
    }
  }
  return absl::OkStatus();
}

void PrintCrossovers(const Flags& flags) {
  std::printf("\nhidden 7168, 256 experts, one BF16 term, %.0f GB/s, %.0f us a collective: SmallEP's bytes of dispatch's, and the cheaper way\n",
              flags.link.bytes_per_s * 1e-9, flags.link.latency_s * 1e6);
  for (const int64_t ranks : {2, 4}) {
    std::printf("%ld ranks", static_cast<long>(ranks));
    for (const int64_t top_k : {1, 2, 3, 4, 5, 6, 8}) {
      const ExchangeShape shape{.ranks = ranks, .rows = 8192, .experts = 256, .top_k = top_k, .hidden = 7168, .terms = 1};
      std::printf("  top-%ld %3.0f%% %s", static_cast<long>(top_k), 100 * SmallEpBytes(shape) / DispatchBytes(shape),
                  NameOf(ChooseExchange(shape, flags.link)));
    }
    std::printf("\n");
  }
  // Few rows: latency counts, and SmallEP makes a collective more.
  const ExchangeShape shape{.ranks = 4, .rows = 1, .experts = 256, .top_k = 8, .hidden = 7168, .terms = 1};
  ExchangeShape rows = shape;
  while (ChooseExchange(rows, flags.link) == ExpertExchange::kDispatch) ++rows.rows;
  std::printf("4 ranks, top-8: SmallEP from %ld rows a pass on\n", static_cast<long>(rows.rows));
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  using namespace hearth;
  Flags flags;
  flags.model_dir = SourceDir() + "/deploy/models/fable-moe";
  const bool understood = TakeFlags(argc, argv, &flags.device, &flags.model_dir, [&](const std::string& name, const char* value) {
    const double number = std::atof(value);
    if (name == "--prefill") return (flags.prefill = static_cast<int64_t>(number)) > 0;
    if (name == "--chunk") return (flags.chunk = static_cast<int64_t>(number)) > 0;
    if (name == "--link-gbs") return (flags.link.bytes_per_s = number * 1e9) > 0;
    if (name == "--latency-us") return (flags.link.latency_s = number * 1e-6) >= 0;
    return false;
  });
  if (!understood) return 2;
  if (const absl::Status status = CountPasses(flags); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  PrintCrossovers(flags);
}
