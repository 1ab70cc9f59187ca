#include "services/decode/decode_loop.h"

#include <algorithm>
#include <utility>

#include "common/base/logging.h"
#include "common/trace/trace.h"
#include "common/worker/stream_pages.h"

namespace hearth {
namespace {

// A resumed stream recomputes what its pages lack in the decode form, several positions a step: enough to catch up fast, few enough that the
// other streams of the step hardly notice.
constexpr int64_t kForcedRowsMax = 16;

bool EndsAnswer(const StreamRequest& request, int32_t token) {
  return !request.ignore_eos && std::find(request.eos_ids.begin(), request.eos_ids.end(), token) != request.eos_ids.end();
}

}  // namespace

int64_t DecodeLoop::InitialPages(const StreamRequest& request) const {
  const int64_t size = static_cast<int64_t>(request.tokens.size());
  // One page ahead will do to start; the spare ones follow by Grow.
  return std::max(PagesFor(size), std::min(PagesFor(size) + 1, PagesFor(PositionsMax(request))));
}

bool DecodeLoop::Work() {
  const Chunk chunk = PrefillOneChunk(Pay::kFromSlack);
  if (!DecodeStep()) {
    turns_.Free();
    // Streams that wait for a page earn no slack: who waits for it would wait with them.
    return chunk == Chunk::kRan || PrefillOneChunk(Pay::kNobody) == Chunk::kRan;
  }
  // Chunks here and windows for others take turns at the slack: neither spends what the other saves up.
  if (chunk != Chunk::kRan && chunk != Chunk::kSavesUp && turns_.GiveWay(slack_)) chunk_was_last_ = false;
  const DecodeTurns::Counts counts = turns_.Look();
  stats_.SetTurns({.prompt_share = slack_.share(), .windows = counts.windows, .given_ns = counts.given_ns});
  return true;
}

DecodeLoop::Chunk DecodeLoop::PrefillOneChunk(Pay pay) {
  bool decoding = false;
  std::shared_ptr<LiveStream> next;
  for (const auto& stream : running_) {
    if (!stream->prepared) continue;
    if (stream->valid >= stream->request.prefill_until() && !LacksPrefillHidden(*stream)) {
      decoding = true;
    } else if (next == nullptr && static_cast<int64_t>(stream->pages.size()) * kPageTokens > PassFrom(*stream)) {
      next = stream;
    }
  }
  const bool asked = turns_.Asked();
  if (next == nullptr) {
    if (!asked) slack_.Keep(0);
    return Chunk::kNone;
  }
  const bool paid = decoding && pay == Pay::kFromSlack;
  if (paid && chunk_was_last_ && asked) return Chunk::kOthersTurn;
  const int64_t tokens = paid ? TokensWithinSlack(*next) : decoding ? options_.busy_chunk_tokens : options_.idle_chunk_tokens;
  if (tokens == 0) return Chunk::kSavesUp;
  const int64_t valid = next->valid, begin_ns = device_.Now();
  PrefillChunk(*next, tokens);
  const int64_t took_ns = device_.Now() - begin_ns;
  chunk_cost_.Add({.work = WorkOf(valid, next->valid - valid), .seconds = static_cast<double>(took_ns) / 1e9});
  if (paid) slack_.Spend(took_ns);
  chunk_was_last_ = true;
  return Chunk::kRan;
}

int64_t DecodeLoop::TokensWithinSlack(const LiveStream& stream) {
  // Fewer tokens read nearly as many weights.
  constexpr int64_t kWorthIt = 16;
  const int64_t left = std::max<int64_t>(stream.request.prefill_until() - stream.valid, 1);
  const int64_t most = std::min(options_.busy_chunk_tokens, left);
  const std::optional<PassCost> cost = chunk_cost_.cost();
  if (!cost.has_value()) return most;
  const auto ns_of = [&](int64_t tokens) { return static_cast<int64_t>(cost->Seconds(WorkOf(stream.valid, tokens)) * 1e9); };
  slack_.Keep(ns_of(most));
  int64_t low = std::min(kWorthIt, most);
  if (ns_of(low) > slack_.available_ns()) return 0;
  for (int64_t high = most + 1; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    (ns_of(middle) <= slack_.available_ns() ? low : high) = middle;
  }
  return low;
}

std::vector<DecodeLoop::Share> DecodeLoop::Gather() {
  std::vector<Share> shares;
  for (const auto& stream : running_) {
    if (!stream->prepared || stream->valid < stream->request.prefill_until() || stream->cancelled.load(std::memory_order_acquire)) continue;
    if (LacksPrefillHidden(*stream)) continue;
    const int64_t size = static_cast<int64_t>(stream->request.tokens.size());
    // Where the last token's KV is there already (a former worker had computed it) it is queried again, which gives the same logits.
    const int64_t from = std::min(PassFrom(*stream), size - 1);
    const int64_t covered = static_cast<int64_t>(stream->pages.size()) * kPageTokens;
    const int64_t to = std::min({size, from + kForcedRowsMax, covered});
    if (to > from) shares.push_back({.stream = stream, .from = from, .to = to, .wants_logits = to == size});
  }
  return shares;
}

absl::Status DecodeLoop::MakeRunner() {
  if (runner_ != nullptr) return absl::OkStatus();
  const int64_t logit_rows = options_.max_streams * (1 + (model_.has_mtp() ? DraftDepth::kMax : 0));
  ASSIGN_OR_RETURN(runner_, StepRunner::Make(device_, model_,
                                             {.max_rows = options_.max_streams * (kForcedRowsMax + DraftDepth::kMax),
                                              .max_logit_rows = logit_rows,
                                              .order = options_.step_order}));
  logits_.resize(static_cast<size_t>(logit_rows * model_.config().vocab_size));
  return absl::OkStatus();
}

int64_t DecodeLoop::DraftRoom(const Share& share) const {
  const LiveStream& stream = *share.stream;
  const int64_t size = static_cast<int64_t>(stream.request.tokens.size());
  if (!share.wants_logits || stream.valid != size - 1 || PriorHidden(stream, size - 1) == nullptr) return 0;
  const int64_t covered = static_cast<int64_t>(stream.pages.size()) * kPageTokens;
  // d drafts can give d + 1 tokens.
  return std::min({covered - size, stream.request.max_new_tokens - stream.request.output_size() - 1, ContextTokens() - size - 1});
}

absl::Status DecodeLoop::MakeDrafts(std::vector<Share>& shares, int64_t depth) {
  const int64_t vocab = model_.config().vocab_size;
  for (int64_t round = 0; round < depth; ++round) {
    ForwardBatch batch;
    std::vector<Share*> drafted;
    for (Share& share : shares) {
      const StreamRequest& request = share.stream->request;
      if (static_cast<int64_t>(share.drafts.size()) < round || DraftRoom(share) <= round) continue;
      if (round > 0 && EndsAnswer(request, share.drafts.back())) continue;
      const int64_t position = static_cast<int64_t>(request.tokens.size()) - 1 + round;
      const int64_t row = static_cast<int64_t>(drafted.size());
      batch.token_ids.push_back(round == 0 ? request.tokens.back() : share.drafts.back());
      batch.sequences.push_back(
          {.first_row = row, .num_rows = 1, .start_position = position, .write_from = position, .pages = share.stream->pages.data()});
      batch.prior_hidden.push_back(round == 0 ? PriorHidden(*share.stream, position) : share.state.data());
      batch.logit_rows.push_back(static_cast<int32_t>(row));
      drafted.push_back(&share);
    }
    if (drafted.empty()) break;
    const TraceSpan span(stream_->trace_track(), "draft", "round streams", round, static_cast<int64_t>(drafted.size()));
    RETURN_IF_ERROR(runner_->Draft(*stream_, kv_, batch, logits_.data()));
    StillAlive();
    for (size_t row = 0; row < drafted.size(); ++row) {
      Share& share = *drafted[row];
      share.state.resize(static_cast<size_t>(model_.config().hidden_size));
      RETURN_IF_ERROR(runner_->ReadHidden(*stream_, static_cast<int64_t>(row), share.state.data()));
      // Drawn as the token itself will be, with the drafts standing in for tokens: only so does a sampled stream's draft hold often.
      StreamRequest& request = share.stream->request;
      const int32_t logprobs = std::exchange(request.num_logprobs, -1);
      request.tokens.insert(request.tokens.end(), share.drafts.begin(), share.drafts.end());
      const absl::StatusOr<TokenEvent> drawn = sampler_.Draw(request, logits_.data() + static_cast<int64_t>(row) * vocab, vocab);
      request.tokens.resize(request.tokens.size() - share.drafts.size());
      request.num_logprobs = logprobs;
      if (drawn.ok()) share.drafts.push_back(drawn->id);  // else the stream goes without: the module is no judge of the model
    }
  }
  return absl::OkStatus();
}

std::vector<absl::Status> DecodeLoop::RunLayers(std::vector<Share>& shares) {
  ForwardBatch batch;
  batch.form = Form::kDecode;
  for (Share& share : shares) {
    const std::vector<int32_t>& tokens = share.stream->request.tokens;
    share.first_row = static_cast<int64_t>(batch.token_ids.size());
    batch.sequences.push_back({.first_row = share.first_row,
                               .num_rows = share.rows(),
                               .start_position = share.from,
                               .write_from = share.stream->valid,
                               .pages = share.stream->pages.data()});
    batch.prior_hidden.push_back(PriorHidden(*share.stream, share.from));
    batch.token_ids.insert(batch.token_ids.end(), tokens.begin() + share.from, tokens.begin() + share.to);
    batch.token_ids.insert(batch.token_ids.end(), share.drafts.begin(), share.drafts.end());
    for (int64_t i = share.logit_rows(); i > 0; --i) batch.logit_rows.push_back(static_cast<int32_t>(share.first_row + share.rows() - i));
  }
  ForwardHooks hooks;
  hooks.on_layer_done = [this](int64_t) {
    StillAlive();
    return true;
  };
  return runner_->Run(*stream_, kv_, batch, logits_.data(), &hooks);
}

bool DecodeLoop::DecodeStep() {
  std::vector<Share> shares = Gather();
  if (shares.empty()) return false;
  const int64_t streams = static_cast<int64_t>(shares.size());
  LoopStats::Step step;
  step.depth = depth_.Choose(streams);
  turns_.Busy();
  const TraceSpan span(stream_->trace_track(), "step", "streams drafts", streams, step.depth);
  const int64_t start_ns = device_.Now();
  absl::Status prepared = MakeRunner();
  if (prepared.ok()) prepared = MakeDrafts(shares, step.depth);
  const std::vector<absl::Status> statuses = prepared.ok() ? RunLayers(shares) : std::vector<absl::Status>(shares.size(), prepared);
  const float* next_logits = logits_.data();
  bool failed = false;
  bool plain = true;  // each stream took part with one row and the drafts that were asked for
  for (size_t i = 0; i < shares.size(); ++i) {
    const Share& share = shares[i];
    const float* logits = next_logits;
    next_logits += share.logit_rows() * model_.config().vocab_size;
    if (!statuses[i].ok()) {
      // Our own bug or no memory: every stream of the pass that failed gets the reason; nothing half-computed is published.
      spdlog::error("a decode step failed: {}", statuses[i].ToString());
      failed = true;
      share.stream->sink->OnError(statuses[i]);
      Remove(share.stream, /*free_pages=*/true);
      continue;
    }
    plain = plain && share.wants_logits && share.to - share.from == 1 && static_cast<int64_t>(share.drafts.size()) == step.depth;
    Publish(*share.stream, share.to);  // nothing where it was queried only
    Advance(share, logits, step);
  }
  // An error kills a device's stream; who comes next is to find one that lives.
  if (failed) stream_ = device_.MakeStream("loop");
  if (runner_ != nullptr) stats_.SetStepOrders(runner_->Look());
  const int64_t now_ns = device_.Now();
  step.duration_ns = now_ns - start_ns;
  if (plain && !failed) depth_.Observe(streams, step.depth, step.duration_ns);
  slack_.AfterStep(streams, static_cast<double>(step.tokens) / static_cast<double>(streams), step.duration_ns);
  stats_.AddStep(now_ns, step);
  return true;
}

void DecodeLoop::Advance(const Share& share, const float* logits, LoopStats::Step& step) {
  const std::shared_ptr<LiveStream>& stream = share.stream;
  step.streams += share.wants_logits ? 1 : 0;
  step.drafts += static_cast<int64_t>(share.drafts.size());
  int64_t last = share.to - 1;  // the last position computed from tokens that stand
  for (int64_t i = 0; i < share.logit_rows(); ++i) {
    const bool goes_on = SampleAndSend(stream, logits + i * model_.config().vocab_size);
    ++step.tokens;
    if (!goes_on) return;
    if (i == static_cast<int64_t>(share.drafts.size())) break;
    const bool holds = stream->request.tokens.back() == share.drafts[static_cast<size_t>(i)];
    depth_.ObserveDraft(i, holds);
    if (!holds) break;
    ++step.accepted;
    ++last;
    Publish(*stream, last + 1);
  }
  if (model_.has_mtp()) {
    if (const absl::Status read = runner_->ReadHidden(*stream_, share.first_row + last - share.from, HiddenAt(last, *stream)); !read.ok()) {
      stream->sink->OnError(read);
      Remove(stream, /*free_pages=*/true);
      return;
    }
  }
  KeepSpare(stream);
}

bool DecodeLoop::SampleAndSend(const std::shared_ptr<LiveStream>& stream, const float* logits) {
  StreamRequest& request = stream->request;
  const TraceSpan span(stream_->trace_track(), "sample", "stream", TraceId(request.id));
  absl::StatusOr<TokenEvent> drawn = sampler_.Draw(request, logits, model_.config().vocab_size);
  if (!drawn.ok()) {
    stream->sink->OnError(drawn.status());
    Remove(stream, /*free_pages=*/true);
    return false;
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
  const bool ended = EndsAnswer(request, token.id);
  if (ended || request.output_size() >= request.max_new_tokens || size >= ContextTokens()) {
    stream->sink->OnFinished(ended ? FinishReason::kEos : FinishReason::kLength);
    Remove(stream, /*free_pages=*/true);
    return false;
  }
  return true;
}

}  // namespace hearth
