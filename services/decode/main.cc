// hearth-decode: draws tokens for the running batch and streams them to the router. Flags, life and signals: common/worker/worker_process.h.
#include "common/worker/worker_process.h"
#include "services/decode/decode_loop.h"

int main(int argc, char** argv) {
  using namespace hearth;
  return RunWorkerProcess(
      argc, argv,
      {.kind = "decode",
       .description =
           "hearth-decode runs the batch: it takes streams over from prefill (or computes short prompts itself between steps), draws their "
           "tokens and streams them to hearth-router.\nIt attaches to hearth-weightstore; a stream outlives it: the next decode worker goes on "
           "from the pages.",
       .options =
           [](const NodeConfig& c) {
             return StreamLoopOptions{.max_streams = c.max_batch,
                                      .busy_chunk_tokens = c.chunk_tokens,
                                      .idle_chunk_tokens = c.prefill_chunk_tokens,
                                      .drafts = c.speculation,
                                      .step_order = StepOrderFromName(c.overlap),
                                      .tpot_target_ns = c.tpot_target_ms * 1'000'000,
                                      .tpot_rise = static_cast<double>(c.tpot_rise_percent) / 100};
           },
       .make_loop = [](Device& device, const Model& model, const KvPool& kv, PageStore& store, const NodeConfig&, StreamLoopOptions options, int64_t)
           -> absl::StatusOr<std::shared_ptr<StreamLoop>> { return std::make_shared<DecodeLoop>(device, model, kv, store, options); },
       .threads = [](const NodeConfig& c) { return c.decode_threads; },
       .device_memory_bytes = [](const NodeConfig&) { return int64_t{0}; }});
}
