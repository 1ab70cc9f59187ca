// MLA on the host in the decode form (DeepSeek-V2 section 2.1.2): the key half of kv_b goes into the query, the value half into the result, and attention
// itself runs over the cached latent.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: tasks over (row, heads, spans of positions), nothing shared between them.
#include <algorithm>

#include "common/base/ceil_div.h"
#include "common/device/host/attention_spans.h"
#include "common/device/host/host_ops.h"
#include "common/device/host/kv_rows.h"
#include "common/device/host/mla_heads.h"
#include "common/device/host/row_list.h"
#include "common/device/host/terms.h"

namespace hearth {
namespace {

// Heads that share a read of the cached latent: as many as leave each thread some tasks, within these. A head's sums do not depend on its neighbours.
constexpr int64_t kHeadGroupMin = 4;
constexpr int64_t kHeadGroupMax = 32;

// Some heads of one row.
class AbsorbedHeads {
 public:
  AbsorbedHeads(const KernelTable& kernels, const MlaAttentionArgs& args, const RowAt& row, int64_t first_head, int64_t heads)
      : kernels_(kernels),
        a_(args),
        row_(row),
        first_head_(first_head),
        heads_(heads),
        width_(args.rank + args.rope_dim),
        pages_(*args.kv, args.layer, args.rank, args.rope_dim, args.terms),
        plain_(args.terms == 1 && !pages_.f8()) {}

  size_t QueryBytes() const {
    return Scratch::Bytes<float>(a_.nope) + Scratch::Bytes<float>(heads_ * width_) + Scratch::Bytes<float>(heads_ * kPageTokens) +
           (plain_ ? Scratch::Bytes<bf16>(heads_ * width_) : Scratch::Bytes<float>(kPageTokens * width_));
  }
  static size_t ResultBytes(const MlaAttentionArgs& a) { return Scratch::Bytes<float>(a.v_dim) + Scratch::Bytes<bf16>(kTermsMax * a.rank); }

  // The queries of all heads, with the key half of kv_b in them.
  void Absorb(Scratch& scratch) {
    float* query = scratch.Take<float>(a_.nope);
    queries_ = scratch.Take<float>(heads_ * width_);
    scores_ = scratch.Take<float>(heads_ * kPageTokens);
    plain_queries_ = plain_ ? scratch.Take<bf16>(heads_ * width_) : nullptr;
    widened_ = plain_ ? nullptr : scratch.Take<float>(kPageTokens * width_);
    const int64_t head_dim = a_.nope + a_.rope_dim;
    for (int64_t h = 0; h < heads_; ++h) {
      const bf16* q = a_.q + (row_.row * a_.terms * a_.heads + first_head_ + h) * head_dim;
      float* absorbed = queries_ + h * width_;
      AbsorbOne(q, first_head_ + h, query, absorbed);
      if (plain_) {
        kernels_.to_bf16(absorbed, plain_queries_ + h * a_.rank, a_.rank);
        std::copy_n(q + a_.nope, a_.rope_dim, plain_queries_ + heads_ * a_.rank + h * a_.rope_dim);
        continue;
      }
      kernels_.widen_bf16(q + a_.nope, 0, LowTerm(), 1, a_.rope_dim, absorbed + a_.rank, 0);
    }
  }

  // The positions of one span that the row sees, into sums that were cleared.
  void Walk(int64_t span, const QuerySums& sums) const {
    const int64_t end_position = std::min((span + 1) * kSpanTokens, row_.position + 1);
    for (int64_t page_begin = span * kSpanTokens; page_begin < end_position; page_begin += kPageTokens) {
      const int32_t page = row_.sequence->pages[page_begin / kPageTokens];
      const int64_t skip = std::max<int64_t>(0, a_.skip - page_begin);
      const int64_t end = std::min(kPageTokens, end_position - page_begin);
      const bool more = page_begin + kPageTokens < end_position;
      if (plain_) {
        kernels_.mla_absorbed(plain_queries_, plain_queries_ + heads_ * a_.rank, pages_.rows(page) + skip * width_, end - skip, heads_, a_.rank,
                              a_.rope_dim, a_.softmax_scale, sums.states, sums.values, scores_);
      } else {
        pages_.Widen(kernels_, page, end, widened_);
        const float* rows_seen = widened_ + skip * width_;
        kernels_.attend(queries_, heads_, rows_seen, width_, rows_seen, width_, end - skip, width_, a_.rank, a_.softmax_scale, sums.states,
                        sums.values, scores_, more ? pages_.Next(row_.sequence->pages[page_begin / kPageTokens + 1]) : NextRuns{});
      }
    }
  }

  // Normalises, applies the value half of kv_b, and writes the result.
  void Finish(const QuerySums& sums, Scratch& scratch) const {
    float* value = scratch.Take<float>(a_.v_dim);
    bf16* latent = scratch.Take<bf16>(kTermsMax * a_.rank);
    Normalise(sums, heads_, a_.rank);
    for (int64_t h = 0; h < heads_; ++h) {
      SplitTerms(kernels_, sums.values + h * a_.rank, a_.rank, a_.terms, latent);
      kernels_.linear(ValueRows(a_, first_head_ + h), latent, a_.rank, 1, a_.terms, value, a_.v_dim, 0, a_.v_dim);
      StoreResult(a_, value, row_.row, first_head_ + h);
    }
  }

 private:
  // Where a query's second term lies behind its first; 0: there is none.
  int64_t LowTerm() const { return a_.terms > 1 ? a_.heads * (a_.nope + a_.rope_dim) : 0; }

  // out [rank]: one head's query, all terms, through the key half of kv_b.   query [nope], scratch
  void AbsorbOne(const bf16* q, int64_t head, float* query, float* out) const {
    if (a_.k_b.data == nullptr) {
      kernels_.widen_bf16(q, 0, LowTerm(), 1, a_.nope, query, 0);
      kernels_.linear_transposed(a_.kv_b.Rows(head * (a_.nope + a_.v_dim), a_.nope), query, out, 0, a_.rank);
    } else {
      kernels_.linear(a_.k_b.Rows(head * a_.rank, a_.rank), q, LowTerm(), 1, a_.terms, out, a_.rank, 0, a_.rank);
    }
  }

  const KernelTable& kernels_;
  const MlaAttentionArgs& a_;
  const RowAt& row_;
  const int64_t first_head_, heads_;
  const int64_t width_;
  const LatentRows pages_;
  // Plain BF16 queries meet plain BF16 rows as they lie there; else both are widened to F32, a page's rows once for the heads of a task.
  const bool plain_;
  float* queries_ = nullptr;       // [heads, rank + rope]
  bf16* plain_queries_ = nullptr;  // all latent parts, then all rotary ones
  float* scores_ = nullptr;
  float* widened_ = nullptr;
};

}  // namespace

void HostOps::AttendAbsorbed(HostStream& stream, const MlaAttentionArgs& a) {
  int64_t num_rows = 0, most_positions = 0, work = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const KvSequence& sequence = a.sequences[s];
    const int64_t end = sequence.start_position + sequence.num_rows;
    num_rows += sequence.num_rows;
    most_positions = std::max(most_positions, end);
    work += sequence.num_rows * (a.nope + a.v_dim + 2 * end);
  }
  const int64_t wanted = kTasksPerThread * pool_.num_threads();
  const int64_t group = std::clamp(a.heads * num_rows * NumSpans(most_positions) / wanted, kHeadGroupMin, kHeadGroupMax);
  const int64_t groups = CeilDiv(a.heads, group);
  const int64_t parts = SpanParts(most_positions, groups * num_rows, wanted);

  // With several parts each span's sums are kept: of [rows, spans, heads].
  const int64_t spans = parts > 1 ? NumSpans(most_positions) : 0;
  const int64_t kept_heads = num_rows * spans * a.heads;
  const RowAt* rows = ListRows(stream, a.sequences, a.num_sequences, QuerySums::Bytes(kept_heads, a.rank)).first;
  const QuerySums kept = QuerySums::Take(kept_heads, a.rank, stream.scratch);
  const auto kept_of = [&](int64_t row, int64_t span, int64_t head) { return kept.From((row * spans + span) * a.heads + head, a.rank); };
  const bool parallel = Parallel(work * a.heads * a.rank);
  // Rows innermost: the rows of a batch meet a head's part of kv_b while it is in cache.
  pool_.ParallelFor(parallel, groups * num_rows * parts, [&](int64_t task, int worker) {
    const int64_t part = task / (groups * num_rows);
    task %= groups * num_rows;
    const int64_t first_head = task / num_rows * group, heads = std::min(group, a.heads - first_head);
    const RowAt& row = rows[task % num_rows];
    AbsorbedHeads own(kernels_, a, row, first_head, heads);
    const Spans own_spans = SpansOf(row.position + 1, part, parts);
    if (own_spans.begin == own_spans.end) return;
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(own.QueryBytes() + AbsorbedHeads::ResultBytes(a) + 2 * QuerySums::Bytes(heads, a.rank));
    own.Absorb(scratch);
    if (parts > 1) {
      for (int64_t span = own_spans.begin; span < own_spans.end; ++span) {
        const QuerySums sums = kept_of(task % num_rows, span, first_head);
        sums.Clear(heads, a.rank);
        own.Walk(span, sums);
      }
      return;
    }
    own.Finish(WalkSpans(own_spans.end, heads, a.rank, scratch, [&](int64_t span, const QuerySums& sums) { own.Walk(span, sums); }), scratch);
  });
  if (parts == 1) return;

  pool_.ParallelFor(parallel, groups * num_rows, [&](int64_t task, int worker) {
    const int64_t first_head = task / num_rows * group, heads = std::min(group, a.heads - first_head);
    const RowAt& row = rows[task % num_rows];
    const QuerySums total = kept_of(task % num_rows, 0, first_head);
    for (int64_t span = 1; span < NumSpans(row.position + 1); ++span) FoldSpan(kept_of(task % num_rows, span, first_head), heads, a.rank, total);
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(AbsorbedHeads::ResultBytes(a));
    AbsorbedHeads(kernels_, a, row, first_head, heads).Finish(total, scratch);
  });
}

}  // namespace hearth
