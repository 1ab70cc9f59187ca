// hearth-prefill: computes prompts and hands their pages to decode. Flags, life and signals: common/worker/worker_process.h.
#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/experts/disk_expert_source.h"
#include "common/experts/ring_expert_source.h"
#include "common/rpc/store_client.h"
#include "common/shm/weight_image.h"
#include "common/slp/slp_engine.h"
#include "common/worker/worker_process.h"
#include "services/prefill/prefill_loop.h"

namespace hearth {
namespace {

// Chunked: one is computed; the next already has its pages, so that no pass waits for the store. More would only hold pages longer.
constexpr int64_t kStreams = 2;
// Streamed: those that wait share the next pass, whose time is the weights' more than the tokens'.
constexpr int64_t kStreamsOfAPass = 8;

// On a host device the weights are where it computes already: streaming them past it would only copy them. So there auto is chunked; but weights on disk are
// better read once for all tokens than once for each chunk.
bool StreamsWeights(const NodeConfig& config) {
  return config.prefill_path == "slp" || (config.prefill_path == "auto" && config.image_bytes_max > 0);
}

// Where the loader gets experts from. `source` null: from the model's own, the image, which a host device reads where it lies.
struct Experts {
  std::shared_ptr<ExpertSource> source;
  std::function<DiskExpertSource::View()> look_at_disk;  // empty: no disk is read, or through the image's mapping only
};

absl::StatusOr<Experts> ExpertsOf(const Model& model, StoreClient& store, const NodeConfig& config) {
  if (config.expert_source == "image") return Experts{};
  const StoreView attached = store.View();
  ASSIGN_OR_RETURN(std::shared_ptr<const WeightImage> image, WeightImage::Attach(attached.place, *attached.generation));
  Experts experts;
  std::unique_ptr<DiskExpertSource> disk;
  if (image->disk_bytes() > 0) {
    ASSIGN_OR_RETURN(disk, DiskExpertSource::Make(*model.weights().experts, std::move(image), config.ring_slots));
    experts.look_at_disk = [source = disk.get()] { return source->Look(); };
    const DiskReader::View reader = disk->Look().reader;
    spdlog::info("experts on disk are read by {}{}", reader.kind, reader.note.empty() ? "" : " (" + reader.note + ")");
  }
  if (config.expert_source != "ring") {
    experts.source = std::move(disk);
    return experts;
  }
  if (model.weights().experts == nullptr) {
    return absl::InvalidArgumentError("the model has no routed experts: set prefill.expert_source = \"image\"");
  }
  const absl::StatusOr<uint64_t> lease = store.MakeRings(config.ring_slots, [] {
    NotifyWatchdog();
    return StopRequested();
  });
  // Asking again would not mend it: the configuration wants more memory than the node has.
  if (absl::IsResourceExhausted(lease.status())) return absl::InvalidArgumentError(lease.status().message());
  RETURN_IF_ERROR(lease.status());
  const StoreView view = store.View();
  ASSIGN_OR_RETURN(std::unique_ptr<RingExpertSource> rings,
                   RingExpertSource::Open(*model.weights().experts, view.place, *view.generation, *lease, std::move(disk)));
  spdlog::info("experts come through {} rings of {} slots", model.num_shards(), config.ring_slots);
  experts.source = std::move(rings);
  return experts;
}

// By bytes: between ranks on one host a collective costs next to nothing beside them.
ExpertExchange ExchangeOf(const ModelConfig& model, const DeviceCaps& caps, int64_t ranks) {
  constexpr ExchangeLink kHostMemory{.bytes_per_s = 10e9, .latency_s = 5e-6};
  return ChooseExchange(ExchangeOfModel(model, ranks, 8192, caps.activation_terms), kHostMemory);
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  using namespace hearth;
  return RunWorkerProcess(
      argc, argv,
      {.kind = "prefill",
       .description =
           "hearth-prefill computes prompts (all tokens but the last) over the shared weight image and leaves their KV pages to a decode "
           "worker.\nIt attaches to hearth-weightstore and serves hearth-router on a Unix socket; restarting it costs no accepted request.",
       .options =
           [](const NodeConfig& c) {
             return StreamLoopOptions{.max_streams = StreamsWeights(c) ? kStreamsOfAPass : kStreams,
                                      .busy_chunk_tokens = c.prefill_chunk_tokens,
                                      .idle_chunk_tokens = c.prefill_chunk_tokens};
           },
       .make_loop = [](Device& device, const Model& model, const KvPool& kv, StoreClient& store, const NodeConfig& config, StreamLoopOptions options,
                       int64_t index) -> absl::StatusOr<std::shared_ptr<StreamLoop>> {
         std::unique_ptr<SlpEngine> slp;
         std::unique_ptr<PrefillGroup> group;
         Experts experts;
         if (StreamsWeights(config)) {
           ASSIGN_OR_RETURN(experts, ExpertsOf(model, store, config));
           const int64_t ranks = config.prefill_group_ranks();
           ASSIGN_OR_RETURN(slp, SlpEngine::Make(device, model,
                                                 {.chunk_rows = options.idle_chunk_tokens,
                                                  .experts = experts.source,
                                                  .ranks = ranks,
                                                  .exchange = ExchangeOf(model.config(), device.caps(), ranks)}));
           // Those behind the last full group compute alone.
           if (ranks > 1 && index < ranks) group = std::make_unique<PrefillGroup>(device, model, store, PrefillGroup::Options{index, ranks});
           spdlog::info("weights are streamed: {} tokens a pass, {} at once; {} slots for experts, {} beside that many tokens", slp->max_rows(),
                        slp->chunk_rows(), slp->SlotsBeside(1), slp->SlotsBeside(slp->max_rows()));
         }
         return std::make_shared<PrefillLoop>(device, model, kv, store, options, std::move(slp), std::move(group), std::move(experts.look_at_disk));
       },
       .threads = [](const NodeConfig& c) { return c.prefill_threads; },
       .device_memory_bytes = [](const NodeConfig& c) { return c.prefill_device_memory_bytes; },
       .device_memory_min = [](const Device& device, const Model& model, const NodeConfig& c) -> absl::StatusOr<uint64_t> {
         if (!StreamsWeights(c)) return absl::UnimplementedError("the chunked path takes what a batch needs when it comes");
         const int64_t ranks = c.prefill_group_ranks();
         return SlpEngine::BudgetMin(
             device, model, {.chunk_rows = c.prefill_chunk_tokens, .ranks = ranks, .exchange = ExchangeOf(model.config(), device.caps(), ranks)});
       }});
}
