#include "common/worker/memory_facts.h"

namespace hearth {
namespace {

// Places to look at: enough for a percent, some milliseconds of page faults.
constexpr uint64_t kPlaces = 4096;
constexpr int64_t kProbeNs = 250'000'000;

}  // namespace

void MemoryFacts::Tell(v1::WorkerStatus::Memory& out) const {
  if (fetch_ahead.has_value()) {
    out.set_prefetch(fetch_ahead->ToString());
    out.set_prefetch_on(fetch_ahead->on);
    out.set_prefetch_on_gb_per_s(fetch_ahead->on_gb_per_s);
    out.set_prefetch_off_gb_per_s(fetch_ahead->off_gb_per_s);
  }
  out.set_page_sizes(pages.SizesToString());
  out.set_pages_looked_at(pages.size_note.empty() ? pages.looked_at : 0);
  out.set_pages_huge(pages.huge);
  out.set_wrong_node(pages.NodesToString());
  out.set_pages_with_node(pages.nodes_asked);
  out.set_pages_wrong_node(pages.wrong_node);
}

PageSurvey SurveyImage(const WeightImage& image, const Topology& topology, const std::vector<ShardHome>& homes) {
  std::vector<PlacedMemory> memory;
  const std::vector<uint64_t> bytes = image.segment_bytes();
  for (size_t shard = 0; shard < bytes.size(); ++shard) {
    memory.push_back({image.segment_data(static_cast<int64_t>(shard)), bytes[shard], homes[shard].node});
  }
  return SurveyPages(memory, topology, kPlaces);
}

absl::StatusOr<FetchAheadProbe> ProbeImage(std::shared_ptr<const WeightImage> image, const ModelConfig& config, HostDevice& device) {
  int64_t layer = 0;
  while (layer < config.num_hidden_layers && !image->Expert(layer, 0, 0).ok()) ++layer;
  FetchAheadProbe probe;
  if (config.n_routed_experts == 0 || layer == config.num_hidden_layers) {
    probe.note = "the model has no routed experts";
    return probe;
  }
  const int64_t num_shards = image->num_shards();
  ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> source,
                   MakeImageExpertSource(std::move(image), layer, 1, config.n_routed_experts, config.hidden_size));
  return ProbeFetchAhead(device, *source,
                         {.layer = layer,
                          .num_experts = config.n_routed_experts,
                          .top_k = config.num_experts_per_tok,
                          .hidden = config.hidden_size,
                          .intermediate = config.moe_intermediate_size,
                          .num_shards = num_shards},
                         kProbeNs);
}

}  // namespace hearth
