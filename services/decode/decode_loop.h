// The decode worker's step loop: admit, prefill a chunk, gather rows, run the layers, sample, publish. Continuous batching: streams join and
// leave between steps.
// Room: services/decode. May touch: common/{worker,model,device,rpc,shm,base}. Threads: see common/worker/stream_loop.h.
#pragma once

#include <memory>
#include <vector>

#include "common/model/step_runner.h"
#include "common/worker/stream_loop.h"
#include "services/decode/sampler.h"

namespace hearth {

class DecodeLoop : public StreamLoop {
 public:
  DecodeLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options)
      : StreamLoop(device, model, kv, store, options) {}

 protected:
  bool Work() override;
  int64_t InitialPages(const StreamRequest& request) const override;

 private:
  // A stream's part of a step: rows [from, to) of its tokens; logits only where `to` is all of them.
  struct Share {
    std::shared_ptr<LiveStream> stream;
    int64_t from = 0;
    int64_t to = 0;
    bool wants_logits() const { return to == static_cast<int64_t>(stream->request.tokens.size()); }
  };

  bool PrefillOneChunk();
  bool DecodeStep();
  std::vector<Share> Gather();
  // One status for each share; logits_ of those that went well, in order.
  std::vector<absl::Status> RunLayers(const std::vector<Share>& shares);
  void SampleAndSend(const Share& share, const float* logits);

  std::unique_ptr<StepRunner> runner_;
  std::vector<float> logits_;  // [streams, vocab]
  Sampler sampler_;
};

}  // namespace hearth
