// hearth-prefill: computes prompts and hands their pages to decode. Flags, life and signals: common/worker/worker_process.h.
#include "common/worker/worker_process.h"
#include "services/prefill/prefill_loop.h"

namespace {

// One is computed; the next already has its pages, so that no pass waits for the store. More would only hold pages longer.
constexpr int64_t kStreams = 2;

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
             return StreamLoopOptions{
                 .max_streams = kStreams, .busy_chunk_tokens = c.prefill_chunk_tokens, .idle_chunk_tokens = c.prefill_chunk_tokens};
           },
       .make_loop = [](Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options)
           -> std::shared_ptr<StreamLoop> { return std::make_shared<PrefillLoop>(device, model, kv, store, options); },
       .threads = [](const NodeConfig& c) { return c.prefill_threads; }});
}
