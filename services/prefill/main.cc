// hearth-prefill: computes prompts and hands their pages to decode. Flags, life and signals: common/worker/worker_process.h.
#include "common/base/logging.h"
#include "common/slp/slp_engine.h"
#include "common/worker/worker_process.h"
#include "services/prefill/prefill_loop.h"

namespace {

// Chunked: one is computed; the next already has its pages, so that no pass waits for the store. More would only hold pages longer.
constexpr int64_t kStreams = 2;
// Streamed: those that wait share the next pass, whose time is the weights' more than the tokens'.
constexpr int64_t kStreamsOfAPass = 8;

// On a host device the weights are where it computes already: streaming them past it would only copy them. So there auto is chunked.
bool StreamsWeights(const hearth::NodeConfig& config) { return config.prefill_path == "slp"; }

}  // namespace

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
       .make_loop = [](Device& device, const Model& model, const KvPool& kv, PageStore& store, const NodeConfig& config,
                       StreamLoopOptions options) -> absl::StatusOr<std::shared_ptr<StreamLoop>> {
         std::unique_ptr<SlpEngine> slp;
         if (StreamsWeights(config)) {
           ASSIGN_OR_RETURN(slp, SlpEngine::Make(device, model, {.chunk_rows = options.idle_chunk_tokens}));
           spdlog::info("weights are streamed: {} tokens a pass, {} slots for experts", slp->max_rows(), slp->expert_slots());
         }
         return std::make_shared<PrefillLoop>(device, model, kv, store, options, std::move(slp));
       },
       .threads = [](const NodeConfig& c) { return c.prefill_threads; },
       .device_memory_bytes = [](const NodeConfig& c) { return c.prefill_device_memory_bytes; }});
}
