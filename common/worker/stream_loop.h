// What the two workers' loops have in common: submissions and page events come in as messages, streams live in one list that only the loop
// touches, prefill chunks run between other work, and whatever ends gives its pages back.
// Room: common/worker. May touch: common/{model,device,rpc,shm,base}. Threads: Submit, Wake and Stats from any; Step and Run on one actor.
// If a peer dies: the sink's stream is marked cancelled and leaves within one step. If the store dies: docs/shared-memory.md; nothing stops here.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/device/device.h"
#include "common/model/forward.h"
#include "common/model/step_order.h"
#include "common/rpc/page_store.h"
#include "common/shm/kv_pool.h"
#include "common/worker/loop_stats.h"
#include "common/worker/page_keeper.h"
#include "common/worker/prefill_gate.h"
#include "common/worker/stream.h"

namespace hearth {

// Spare pages a running stream keeps ahead: at 20 tokens/s four pages last 12 s, longer than a store's restart (DESIGN 3.2).
inline constexpr int64_t kSparePages = 4;
// While a stream lacks a page, an idle loop looks again so often.
inline constexpr int64_t kStarvedLookNs = 500'000'000;
// How long the only stream here that has pages waits for one more before it gives them up.
inline constexpr int64_t kLonelyWaitNs = 2'000'000'000;

struct StreamLoopOptions {
  int64_t max_streams = 6;          // places; further submissions wait
  int64_t max_waiting = 1024;       // beyond it Submit is ResourceExhausted
  int64_t busy_chunk_tokens = 64;   // of a prefill chunk while streams are being decoded here
  int64_t idle_chunk_tokens = 512;  // while none is; either 0: what the device likes
  std::optional<int64_t> drafts;    // that a decode step verifies for a stream; none: as many as pay
  // Of a decode step with several streams (common/model/step_runner.h); none: measured.
  std::optional<StepOrder> step_order;
  // What a decode worker's streams are to be spared of prompts: a time per output token, or how much longer than alone it may get.
  int64_t tpot_target_ns = 0;  // 0: measured
  double tpot_rise = 0.2;
  // Turns with workers on the same cores; null: there are none. The slot is claimed by this process.
  std::shared_ptr<TurnBoard> turns;
  int turn_slot = 0;
  CpuSet cpus;
  std::shared_ptr<PrefillGate> gate;  // prefill: through which the device's ops go
};

class StreamLoop {
 public:
  virtual ~StreamLoop();

  // Accepts a stream. The same id again supersedes the one that runs (its sink gets Aborted); its pages pass to the new one.
  // Errors: Unavailable when draining; ResourceExhausted when too many wait; InvalidArgument for what this model or pool can never serve.
  absl::Status Submit(StreamRequest request, std::shared_ptr<StreamSink> sink, std::shared_ptr<LiveStream>* live);
  // A stream was cancelled or stop was asked for: look now.
  void Wake() { signal_->Notify(); }

  // One round: messages, cancellations, admission, work. False: there was nothing to do.
  bool Step();
  // Rounds until Stop; waits on the device's signal when idle.
  void Run();
  // Ends Run: whoever runs is offered to the next worker and told `preempted`.
  void Stop();
  // After Run: works off the last page calls and ends the keeper's actor, on the caller's thread. Nothing but Stats may be called then.
  virtual void Close() { keeper_.reset(); }
  // Accepts nothing more; running streams go on. Idle() tells when the last has ended.
  void Drain();
  bool Idle() const;

  LoopStats::View Stats() const;
  const PrefillGate* gate() const { return options_.gate.get(); }
  // The order of steps that the operator asked for; none: measured.
  std::optional<StepOrder> step_order() const { return options_.step_order; }
  // The loop is idle, or its last round began not long ago. False: it is wedged, and a service manager should restart the process.
  bool Responsive(int64_t now_ns) const;

 protected:
  StreamLoop(Device& device, const Model& model, const KvPool& kv, PageStore& store, StreamLoopOptions options);

  // The worker's own part of a round, after admission.
  virtual bool Work() = 0;
  // Pages that the stream needs before it can start.
  virtual int64_t InitialPages(const StreamRequest& request) const = 0;
  // The store knows that the next worker may take the stream; called once after Offer, unless it was cancelled meanwhile.
  virtual void OnOffered(LiveStream& stream) {}

  // Where a pass that computes position `valid` begins: there, or one earlier where the hidden state that its MTP slot needs is not at hand. What lies
  // below `valid` is queried only.
  int64_t PassFrom(const LiveStream& stream) const;
  // The hidden state before `from`, for ForwardBatch::prior_hidden.
  const float* PriorHidden(const LiveStream& stream, int64_t from) const;
  // Where the hidden state at `position`, the last one that is valid, is to be read to, at once.
  float* HiddenAt(int64_t position, LiveStream& stream);
  // Position prefill_until is next, and the hidden state before it, of the prefill form, is not at hand: PrefillChunk queries it.
  bool LacksPrefillHidden(const LiveStream& stream) const;
  // Runs one prefill chunk of at most max_tokens over positions [valid, prefill_until). A cancelled stream is left as it was.
  void PrefillChunk(LiveStream& stream, int64_t max_tokens);
  // Positions [valid, until) are complete in every layer: publishes them and has the pages that became full sealed.
  void Publish(LiveStream& stream, int64_t until);
  // How long this worker's ops have waited for decode, so far.
  int64_t WaitedNs() const { return options_.gate == nullptr ? 0 : options_.gate->counts().waited_ns; }
  // A sign of life for Responsive, within a long pass.
  void StillAlive();
  // What a stream can reach at most: the model's context, or the pool where that is smaller.
  int64_t ContextTokens() const;
  // Positions that the stream can reach: its prompt and all it may output, or the context.
  int64_t PositionsMax(const StreamRequest& request) const;
  void KeepSpare(const std::shared_ptr<LiveStream>& stream);
  // Stop was asked for: a long pass ends at its next look.
  bool stopping() const { return stop_.stopped(); }
  // Some stream here lacks a page that the pool did not have.
  bool pool_short() const;
  // KV from `position` on does not belong to this stream: forget it.
  void TruncateKv(LiveStream& stream, int64_t position);
  // The stream is told, and leaves with its pages in the next round.
  void Fail(LiveStream& stream, const absl::Status& status);
  // The stream leaves the loop; its rows are freed. Events have been sent.
  void Remove(const std::shared_ptr<LiveStream>& stream, bool free_pages);
  // The stream leaves the loop with its pages kept for the next worker.
  void Offer(const std::shared_ptr<LiveStream>& stream);
  Device& device_;
  const Model& model_;
  const KvPool& kv_;
  const StreamLoopOptions options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Model::Workspace> prefill_workspace_;
  std::vector<std::shared_ptr<LiveStream>> running_;  // in order of admission: the last is the youngest
  LoopStats stats_;
  std::unique_ptr<PageKeeper> keeper_;

 private:
  void TakeMessages();
  void Apply(KeeperEvent event);
  void DropCancelled();
  void Admit();
  void OfferAll();
  // Asks for the pages that are lacking up to `want`; less may come.
  void GrowTo(const std::shared_ptr<LiveStream>& stream, int64_t want);
  // Loses its place and pages and comes back by recomputing (DESIGN 3.4): for a full pool.
  void Preempt(const std::shared_ptr<LiveStream>& stream);
  // For a round in which nothing could run.
  void RelieveFullPool();
  // Gives back what running streams hold ahead of need: before anybody is preempted (DESIGN 3.4).
  void ReturnSpares();
  // Null: none of that serial waits for its Offer's answer.
  std::shared_ptr<LiveStream> TakeOffered(uint64_t serial);

  std::unique_ptr<HostSignal> signal_;
  StopToken stop_;
  std::atomic<bool> idle_{true};
  std::atomic<int64_t> last_sign_ns_{0};
  int64_t starved_since_ns_ = 0;  // nothing could run since then, for want of a page; 0: it could
  mutable std::mutex mutex_;      // guards the five below
  std::vector<std::shared_ptr<LiveStream>> submitted_;
  std::vector<KeeperEvent> events_;
  bool draining_ = false;
  int64_t in_loop_ = 0;  // submitted and not yet removed
  uint64_t next_serial_ = 1;
  std::vector<std::shared_ptr<LiveStream>> waiting_;  // the loop's own: no place yet
  std::vector<std::shared_ptr<LiveStream>> offered_;  // the loop's own: the answer to Offer is still out
};

}  // namespace hearth
