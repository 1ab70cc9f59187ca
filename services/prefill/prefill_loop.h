// The prefill worker's loop: all prompt tokens but the last, then the pages are offered to decode. Chunked, one stream after the other; or with weights
// streamed past the device (common/slp), all streams that wait in one pass; in a prefill group (prefill_group.h) also as one of several ranks.
// Room: services/prefill. May touch: common/{worker,slp,model,device,rpc,shm,base}. Threads: see common/worker/stream_loop.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "common/slp/slp_engine.h"
#include "common/worker/stream_loop.h"
#include "services/prefill/prefill_group.h"

namespace hearth {

class PrefillLoop : public StreamLoop {
 public:
  // `options.max_streams`: how many may hold pages at once. `slp` null: chunked. `group` null: always alone; else `slp` is made for as many ranks.
  // `disk`: for status; may be empty.
  PrefillLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options,
              std::unique_ptr<SlpEngine> slp = nullptr, std::unique_ptr<PrefillGroup> group = nullptr,
              std::function<DiskExpertSource::View()> disk = nullptr);
  void Close() override;

 protected:
  bool Work() override;
  int64_t InitialPages(const StreamRequest& request) const override;
  void OnOffered(LiveStream& stream) override;

 private:
  // A stream's rows of a pass: positions [from, end); those below its valid ones are queried only.
  struct Part {
    std::shared_ptr<LiveStream> stream;
    int64_t from = 0;
    int64_t end = 0;
  };

  bool Ready(const LiveStream& stream) const;
  std::vector<Part> PartsOfAPass() const;
  void StreamWeights(const std::vector<Part>& parts);
  void Follow();
  void TellGroup();

  const std::unique_ptr<SlpEngine> slp_;
  const std::unique_ptr<PrefillGroup> group_;
};

}  // namespace hearth
