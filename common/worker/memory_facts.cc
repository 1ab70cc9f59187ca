#include "common/worker/memory_facts.h"

namespace hearth {
namespace {

// Places to look at: enough for a percent, some milliseconds of page faults.
constexpr uint64_t kPlaces = 4096;
constexpr int64_t kProbeNs = 250'000'000;

// Of a layer's experts those in memory, numbered anew: what the disk takes says nothing of prefetch.
class ResidentExperts : public ExpertSource {
 public:
  ResidentExperts(ExpertSource& source, std::vector<int64_t> experts) : source_(source), experts_(std::move(experts)) {}
  int64_t num_shards() const override { return source_.num_shards(); }
  ExpertView Acquire(int64_t layer, int64_t expert, int64_t shard) override { return source_.Acquire(layer, Real(expert), shard); }
  void Release(int64_t layer, int64_t expert, int64_t shard) override { source_.Release(layer, Real(expert), shard); }

 private:
  int64_t Real(int64_t expert) const { return experts_[static_cast<size_t>(expert)]; }
  ExpertSource& source_;
  const std::vector<int64_t> experts_;
};

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
  std::vector<int64_t> resident;
  for (int64_t expert = 0; expert < config.n_routed_experts; ++expert) {
    bool on_disk = false;
    for (int64_t shard = 0; shard < num_shards; ++shard) {
      ASSIGN_OR_RETURN(const ImageExpert record, image->Expert(layer, expert, shard));
      on_disk |= record.disk_offset.has_value();
    }
    if (!on_disk) resident.push_back(expert);
  }
  const int64_t num_resident = static_cast<int64_t>(resident.size());
  if (num_resident < config.num_experts_per_tok) {
    probe.note = "its experts lie on disk";
    return probe;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> source,
                   MakeImageExpertSource(std::move(image), layer, 1, config.n_routed_experts, config.hidden_size));
  ResidentExperts experts(*source, std::move(resident));
  return ProbeFetchAhead(device, experts,
                         {.layer = layer,
                          .num_experts = num_resident,
                          .top_k = config.num_experts_per_tok,
                          .hidden = config.hidden_size,
                          .intermediate = config.moe_intermediate_size,
                          .num_shards = num_shards},
                         kProbeNs);
}

}  // namespace hearth
