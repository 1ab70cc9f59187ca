#include "services/decode/decode_loop.h"

#include <algorithm>

#include "common/base/logging.h"
#include "common/worker/stream_pages.h"

namespace hearth {
namespace {

// A resumed stream recomputes what its pages lack in the decode form, several positions a step: enough to catch up fast, few enough that the
// other streams of the step hardly notice.
constexpr int64_t kForcedRowsMax = 16;

}  // namespace

int64_t DecodeLoop::InitialPages(const StreamRequest& request) const {
  const int64_t size = static_cast<int64_t>(request.tokens.size());
  // One page ahead will do to start; the spare ones follow by Grow.
  return std::max(PagesFor(size), std::min(PagesFor(size) + 1, PagesFor(PositionsMax(request))));
}

bool DecodeLoop::Work() {
  const bool prefilled = PrefillOneChunk();
  const bool decoded = DecodeStep();
  return prefilled || decoded;
}

bool DecodeLoop::PrefillOneChunk() {
  bool decoding = false;
  std::shared_ptr<LiveStream> next;
  for (const auto& stream : running_) {
    if (!stream->prepared) continue;
    if (stream->valid >= stream->request.prefill_until()) {
      decoding = true;
    } else if (next == nullptr && static_cast<int64_t>(stream->pages.size()) * kPageTokens > stream->valid) {
      next = stream;
    }
  }
  if (next == nullptr) return false;
  PrefillChunk(*next, decoding ? options_.busy_chunk_tokens : options_.idle_chunk_tokens);
  return true;
}

std::vector<DecodeLoop::Share> DecodeLoop::Gather() {
  std::vector<Share> shares;
  for (const auto& stream : running_) {
    if (!stream->prepared || stream->valid < stream->request.prefill_until() || stream->cancelled.load(std::memory_order_acquire)) continue;
    const int64_t size = static_cast<int64_t>(stream->request.tokens.size());
    // Where the last token's KV is there already (a former worker had computed it) it is queried again, which gives the same logits.
    const int64_t from = std::min(stream->valid, size - 1);
    const int64_t covered = static_cast<int64_t>(stream->pages.size()) * kPageTokens;
    const int64_t to = std::min({size, from + kForcedRowsMax, covered});
    if (to > from) shares.push_back({stream, from, to});
  }
  return shares;
}

std::vector<absl::Status> DecodeLoop::RunLayers(const std::vector<Share>& shares) {
  if (runner_ == nullptr) {
    auto runner = StepRunner::Make(
        device_, model_, {.max_rows = options_.max_streams * kForcedRowsMax, .max_logit_rows = options_.max_streams, .order = options_.step_order});
    if (!runner.ok()) return std::vector<absl::Status>(shares.size(), runner.status());
    runner_ = *std::move(runner);
    logits_.resize(static_cast<size_t>(options_.max_streams * model_.config().vocab_size));
  }
  ForwardBatch batch;
  batch.form = Form::kDecode;
  for (const Share& share : shares) {
    const std::vector<int32_t>& tokens = share.stream->request.tokens;
    batch.sequences.push_back({.first_row = static_cast<int64_t>(batch.token_ids.size()),
                               .num_rows = share.to - share.from,
                               .start_position = share.from,
                               .write_from = share.stream->valid,
                               .pages = share.stream->pages.data()});
    batch.token_ids.insert(batch.token_ids.end(), tokens.begin() + share.from, tokens.begin() + share.to);
    if (share.wants_logits()) batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()) - 1);
  }
  ForwardHooks hooks;
  hooks.on_layer_done = [this](int64_t) {
    StillAlive();
    return true;
  };
  return runner_->Run(*stream_, kv_, batch, logits_.data(), &hooks);
}

bool DecodeLoop::DecodeStep() {
  const std::vector<Share> shares = Gather();
  if (shares.empty()) return false;
  const int64_t start_ns = device_.Now();
  const std::vector<absl::Status> statuses = RunLayers(shares);
  const float* next_logits = logits_.data();
  int64_t sampled = 0;
  bool failed = false;
  for (size_t i = 0; i < shares.size(); ++i) {
    const Share& share = shares[i];
    const float* logits = next_logits;
    if (share.wants_logits()) next_logits += model_.config().vocab_size;
    if (!statuses[i].ok()) {
      // Our own bug or no memory: every stream of the pass that failed gets the reason; nothing half-computed is published.
      spdlog::error("a decode step failed: {}", statuses[i].ToString());
      failed = true;
      share.stream->sink->OnError(statuses[i]);
      Remove(share.stream, /*free_pages=*/true);
      continue;
    }
    Publish(*share.stream, share.to);  // nothing where it was queried only
    if (!share.wants_logits()) {
      KeepSpare(share.stream);
      continue;
    }
    SampleAndSend(share, logits);
    ++sampled;
  }
  // An error kills a device's stream; who comes next is to find one that lives.
  if (failed) stream_ = device_.MakeStream("loop");
  if (runner_ != nullptr) stats_.SetStepOrders(runner_->Look());
  const int64_t now_ns = device_.Now();
  stats_.AddStep(now_ns, now_ns - start_ns, sampled);
  return true;
}

void DecodeLoop::SampleAndSend(const Share& share, const float* logits) {
  const std::shared_ptr<LiveStream>& stream = share.stream;
  StreamRequest& request = stream->request;
  absl::StatusOr<TokenEvent> drawn = sampler_.Draw(request, logits, model_.config().vocab_size);
  if (!drawn.ok()) {
    stream->sink->OnError(drawn.status());
    Remove(stream, /*free_pages=*/true);
    return;
  }
  TokenEvent token = *std::move(drawn);
  token.index = request.output_size();
  request.tokens.push_back(token.id);
  const int64_t size = static_cast<int64_t>(request.tokens.size());
  if (stream->valid >= size) {
    // A former worker had gone on from here: its KV counts only if it drew the same token.
    const int32_t page = stream->pages[(size - 1) / kPageTokens];
    if (kv_.header(page).token_ids[(size - 1) % kPageTokens] != token.id) TruncateKv(*stream, size - 1);
  }
  stream->sink->OnToken(token);
  const bool ended = !request.ignore_eos && std::find(request.eos_ids.begin(), request.eos_ids.end(), token.id) != request.eos_ids.end();
  if (ended || request.output_size() >= request.max_new_tokens || size >= ContextTokens()) {
    stream->sink->OnFinished(ended ? FinishReason::kEos : FinishReason::kLength);
    Remove(stream, /*free_pages=*/true);
    return;
  }
  KeepSpare(stream);
}

}  // namespace hearth
