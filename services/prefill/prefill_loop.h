// The prefill worker's loop: one stream after the other, all prompt tokens but the last, then the pages are offered to decode.
// Room: services/prefill. May touch: common/{worker,model,device,rpc,shm,base}. Threads: see common/worker/stream_loop.h.
#pragma once

#include <memory>

#include "common/worker/stream_loop.h"

namespace hearth {

class PrefillLoop : public StreamLoop {
 public:
  // `options.max_streams`: how many may hold pages at once; the second is prepared while the first is computed.
  PrefillLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options)
      : StreamLoop(device, model, kv, store, options) {}

 protected:
  bool Work() override;
  int64_t InitialPages(const StreamRequest& request) const override;
  void OnOffered(LiveStream& stream) override;
};

}  // namespace hearth
