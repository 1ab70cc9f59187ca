// The decode worker's step loop: admit, prefill a chunk, gather rows, draft, run the layers, sample, publish. Continuous batching: streams join and
// leave between steps.
// Speculation: the MTP module drafts a stream's next tokens, one pass computes them all behind its last one, and the sampler draws at each as ever. A draft that
// equals what was drawn has its KV there already; the first that does not ends the step, and what was computed behind it is never published.
// Room: services/decode. May touch: common/{worker,model,device,rpc,shm,base}. Threads: see common/worker/stream_loop.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/model/step_runner.h"
#include "common/roofline/pass_cost.h"
#include "common/worker/stream_loop.h"
#include "services/decode/decode_turns.h"
#include "services/decode/draft_depth.h"
#include "services/decode/sampler.h"
#include "services/decode/slack.h"

namespace hearth {

class DecodeLoop : public StreamLoop {
 public:
  DecodeLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options)
      : StreamLoop(device, model, kv, store, options),
        depth_(model.has_mtp() ? options.drafts : 0),
        slack_({.tpot_target_ns = options.tpot_target_ns, .rise = options.tpot_rise}),
        turns_(options.turns, options.turn_slot, options.cpus) {
    stats_.SetPrompts("chunked", options.idle_chunk_tokens, options.busy_chunk_tokens);
    if (model.has_mtp()) stats_.SetSpeculation(options.drafts.has_value() ? std::to_string(*options.drafts) : "auto");
  }

 protected:
  bool Work() override;
  int64_t InitialPages(const StreamRequest& request) const override;

 private:
  // A stream's part of a step: rows [from, to) of its tokens, then its drafts; logits only where `to` is all of the tokens.
  struct Share {
    std::shared_ptr<LiveStream> stream;
    int64_t from = 0;
    int64_t to = 0;
    bool wants_logits = false;
    std::vector<int32_t> drafts;
    std::vector<float> state;  // of the MTP module, behind the last draft
    int64_t first_row = 0;

    int64_t rows() const { return to - from + static_cast<int64_t>(drafts.size()); }
    int64_t logit_rows() const { return wants_logits ? 1 + static_cast<int64_t>(drafts.size()) : 0; }
  };

  // Whose time a chunk takes: the slack of the streams that are decoded, or nobody's, since no step can run.
  enum class Pay { kFromSlack, kNobody };
  enum class Chunk { kNone, kRan, kSavesUp, kOthersTurn };  // nobody needs one; it ran; its slack is not there yet; a window comes first
  Chunk PrefillOneChunk(Pay pay);
  bool DecodeStep();
  // Tokens of the stream's next chunk: as many as the slack pays for; 0: it must be saved up first.
  int64_t TokensWithinSlack(const LiveStream& stream);
  std::vector<Share> Gather();
  // The layers' runner and room for logits, once.
  absl::Status MakeRunner();
  // How many drafts the stream has room for: pages, output and context end somewhere, and a stream that catches up has none.
  int64_t DraftRoom(const Share& share) const;
  absl::Status MakeDrafts(std::vector<Share>& shares, int64_t depth);
  // One status for each share; logits_ of all, in order.
  std::vector<absl::Status> RunLayers(std::vector<Share>& shares);
  // Draws and sends the share's tokens, one and as many more as drafts hold.
  void Advance(const Share& share, const float* logits, LoopStats::Step& step);
  // False: the stream has ended.
  bool SampleAndSend(const std::shared_ptr<LiveStream>& stream, const float* logits);

  DraftDepth depth_;
  std::unique_ptr<StepRunner> runner_;
  std::vector<float> logits_;  // [streams, 1 + drafts, vocab]
  Sampler sampler_;
  Slack slack_;
  DecodeTurns turns_;
  PassFit chunk_cost_;
  bool chunk_was_last_ = false;  // of a chunk here and a window for others: the two take turns at the slack
};

}  // namespace hearth
