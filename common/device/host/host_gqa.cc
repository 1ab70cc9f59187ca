// Grouped-query attention on the host (arXiv 2305.13245): what makes queries and keys of the projections' output, the cached rows, and attention itself.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: tasks over rows, or over (block of rows, KV head); nothing shared between them.
#include <algorithm>
#include <vector>

#include "common/device/host/attention_spans.h"
#include "common/device/host/host_ops.h"
#include "common/device/host/kv_rows.h"
#include "common/device/host/row_list.h"
#include "common/device/host/terms.h"

namespace hearth {
namespace {

// Queries of a task, all of one KV head: what a page's keys and values are widened for once, bounded by their sums' place in the second-level cache.
constexpr int64_t kQueriesAtOnce = 192;

void AddBias(const float* bias, float* x, int64_t n) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
}

void ScaleBy(float factor, const float* weight, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] * factor * weight[i];
}

// Bias, norm and rotation of one row's heads.   x [heads, head_dim]
void PrepareHeads(float* x, const float* bias, const HeadNorm& norm, const RopeTable& rope, int64_t position, int64_t heads, int64_t head_dim) {
  AddBias(bias, x, heads * head_dim);
  if (norm.over == HeadNorm::Over::kAllHeads) ScaleBy(RmsScale(x, heads * head_dim, norm.eps), norm.weight, x, heads * head_dim);
  for (int64_t head = 0; head < heads; ++head) {
    float* own = x + head * head_dim;
    if (norm.over == HeadNorm::Over::kHead) ScaleBy(RmsScale(own, head_dim, norm.eps), norm.weight, own, head_dim);
    RopeHalves(own, rope.cos + position * rope.half, rope.sin + position * rope.half, rope.half);
  }
}

}  // namespace

void HostOps::GqaRotateQuery(Stream& stream, const GqaRotateQueryArgs& a) {
  HostStream& host = static_cast<HostStream&>(stream);
  if (!host.alive()) return;
  const auto [rows, count] = ListRows(host, a.sequences, a.num_sequences);
  const int64_t width = a.heads * a.head_dim;
  pool_.ParallelFor(Parallel(count * width * 4), count, [&, rows = rows](int64_t task, int) {
    PrepareHeads(a.q + rows[task].row * width, a.bias, a.norm, a.rope, rows[task].position, a.heads, a.head_dim);
  });
}

void HostOps::GqaWriteKv(Stream& stream, const GqaWriteKvArgs& a) {
  HostStream& host = static_cast<HostStream&>(stream);
  if (!host.alive()) return;
  const auto [rows, count] = ListRows(host, a.sequences, a.num_sequences);
  const int64_t width = a.kv_heads * a.head_dim;
  const HeadRows cached(*a.kv, a.layer, a.kv_heads, a.head_dim, a.terms);
  pool_.ParallelFor(Parallel(count * width * 8), count, [&, rows = rows](int64_t task, int) {
    const auto& [sequence, row, position] = rows[task];
    if (position < sequence->write_from) return;
    float* k = a.k + row * width;
    float* v = a.v + row * width;
    PrepareHeads(k, a.k_bias, a.norm, a.rope, position, a.kv_heads, a.head_dim);
    AddBias(a.v_bias, v, width);
    const int32_t page = sequence->pages[position / kPageTokens];
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      cached.Write(kernels_, page, HeadRows::Part::kKeys, head, position % kPageTokens, k + head * a.head_dim);
      cached.Write(kernels_, page, HeadRows::Part::kValues, head, position % kPageTokens, v + head * a.head_dim);
    }
  });
}

namespace {

// Rows [begin, begin + count) of a sequence.
struct Block {
  const KvSequence* sequence;
  int64_t begin;
  int64_t count;
  int64_t first_position() const { return sequence->start_position + begin; }
  int64_t end_position() const { return first_position() + count; }
};

// A block's queries of one KV head.
class GroupedHeads {
 public:
  GroupedHeads(const KernelTable& kernels, const GqaAttentionArgs& args, const Block& block, int64_t kv_head)
      : kernels_(kernels),
        a_(args),
        block_(block),
        kv_head_(kv_head),
        group_(args.heads / args.kv_heads),
        queries_(block.count * group_),
        cached_(*args.kv, args.layer, args.kv_heads, args.head_dim, args.terms) {}

  int64_t queries() const { return queries_; }
  size_t QueryBytes() const {
    return 2 * Scratch::Bytes<float>(kPageTokens * a_.head_dim) + Scratch::Bytes<float>(queries_ * a_.head_dim) +
           Scratch::Bytes<float>(queries_ * kPageTokens);
  }

  void CopyQueries(Scratch& scratch) {
    const int64_t dim = a_.head_dim;
    keys_ = scratch.Take<float>(kPageTokens * dim);
    values_ = scratch.Take<float>(kPageTokens * dim);
    copied_ = scratch.Take<float>(queries_ * dim);
    scores_ = scratch.Take<float>(queries_ * kPageTokens);
    for (int64_t i = 0; i < block_.count; ++i) {
      std::copy_n(a_.q + (RowOf(i) * a_.heads + kv_head_ * group_) * dim, group_ * dim, copied_ + i * group_ * dim);
    }
  }

  // The positions of one span that the rows see, into sums that were cleared.
  void Walk(int64_t span, const QuerySums& sums) const {
    const int64_t dim = a_.head_dim;
    const int64_t end_position = std::min((span + 1) * kSpanTokens, block_.end_position());
    for (int64_t page_begin = span * kSpanTokens; page_begin < end_position; page_begin += kPageTokens) {
      const int64_t skip = std::max<int64_t>(0, a_.skip - page_begin);
      const int64_t filled = std::min(kPageTokens, end_position - page_begin);
      const int32_t page = block_.sequence->pages[page_begin / kPageTokens];
      const bf16 *plain_keys = nullptr, *plain_values = nullptr;
      if (cached_.plain()) {
        plain_keys = cached_.rows(page, HeadRows::Part::kKeys, kv_head_);
        plain_values = cached_.rows(page, HeadRows::Part::kValues, kv_head_);
      } else {
        cached_.Widen(kernels_, page, HeadRows::Part::kKeys, kv_head_, filled, keys_);
        cached_.Widen(kernels_, page, HeadRows::Part::kValues, kv_head_, filled, values_);
      }
      // Rows [row, row + rows) of the block against the first `seen` positions of the page, without those that are skipped.
      const auto attend = [&](int64_t row, int64_t rows, int64_t seen, const NextRuns& next) {
        const int64_t q = row * group_, at = skip * dim;
        if (cached_.plain()) {
          kernels_.attend_bf16(copied_ + q * dim, rows * group_, plain_keys + at, dim, plain_values + at, dim, seen - skip, dim, dim,
                               a_.softmax_scale, sums.states + q, sums.values + q * dim, scores_, next);
        } else {
          kernels_.attend(copied_ + q * dim, rows * group_, keys_ + at, dim, values_ + at, dim, seen - skip, dim, dim, a_.softmax_scale,
                          sums.states + q, sums.values + q * dim, scores_, next);
        }
      };
      // Rows within this page see a part of it each, rows behind it all of it.
      int64_t i = std::max<int64_t>(0, page_begin - block_.first_position());
      for (; i < block_.count && block_.first_position() + i + 1 < page_begin + kPageTokens; ++i)
        attend(i, 1, block_.first_position() + i - page_begin + 1, {});
      const bool more = page_begin + kPageTokens < end_position;
      const NextRuns next = more ? cached_.Next(block_.sequence->pages[page_begin / kPageTokens + 1], kv_head_) : NextRuns{};
      if (i < block_.count) attend(i, block_.count - i, kPageTokens, next);
    }
  }

  // Normalises and writes the result.
  void Finish(const QuerySums& sums) const {
    const int64_t dim = a_.head_dim;
    Normalise(sums, queries_, dim);
    // Heads of a group lie beside each other in the result, a row's terms `heads * dim` apart.
    for (int64_t i = 0; i < block_.count; ++i) {
      const float* from = sums.values + i * group_ * dim;
      bf16* high = a_.out + (RowOf(i) * a_.terms * a_.heads + kv_head_ * group_) * dim;
      bf16* low_out = high + a_.heads * dim;
      for (int64_t c = 0; c < group_ * dim; ++c) {
        high[c] = hearth::ToBf16(from[c]);
        if (a_.terms > 1) low_out[c] = hearth::ToBf16(from[c] - ToFloat(high[c]));
      }
    }
  }

 private:
  int64_t RowOf(int64_t i) const { return block_.sequence->first_row + block_.begin + i; }
  const KernelTable& kernels_;
  const GqaAttentionArgs& a_;
  const Block& block_;
  const int64_t kv_head_, group_, queries_;
  const HeadRows cached_;
  float* keys_ = nullptr;    // [64, head_dim]: a page's
  float* values_ = nullptr;  // [64, head_dim]
  float* copied_ = nullptr;  // [queries, head_dim]
  float* scores_ = nullptr;
};

}  // namespace

// A task takes some rows of one sequence and the query heads of one KV head through the pages in order. Nothing depends on where its rows begin: a query
// sees whole pages, the last one cut at its own position, and the sums of the queries that walk together are their own.
void HostOps::GqaAttention(Stream& stream, const GqaAttentionArgs& a) {
  HostStream& host = static_cast<HostStream&>(stream);
  if (!host.alive()) return;
  const int64_t group = a.heads / a.kv_heads, dim = a.head_dim;
  const int64_t block_rows = std::max<int64_t>(1, kQueriesAtOnce / group);
  std::vector<Block> blocks;
  int64_t most_positions = 0, work = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const KvSequence& sequence = a.sequences[s];
    most_positions = std::max(most_positions, sequence.start_position + sequence.num_rows);
    // The last rows see most: they go first, so that no thread begins the longest task when others end.
    for (int64_t end = sequence.num_rows; end > 0; end -= block_rows) {
      const int64_t begin = std::max<int64_t>(0, end - block_rows);
      blocks.push_back({&sequence, begin, end - begin});
      work += (sequence.start_position + end) * (end - begin);
    }
  }
  const int64_t tasks = static_cast<int64_t>(blocks.size()) * a.kv_heads;
  const int64_t parts = SpanParts(most_positions, tasks, kTasksPerThread * pool_.num_threads());

  // With several parts each span's sums are kept: of [tasks, spans, queries].
  const int64_t spans = parts > 1 ? NumSpans(most_positions) : 0;
  const int64_t kept_queries = tasks * spans * block_rows * group;
  host.scratch.Reserve(QuerySums::Bytes(kept_queries, dim));
  const QuerySums kept = QuerySums::Take(kept_queries, dim, host.scratch);
  const auto kept_of = [&](int64_t task, int64_t span) {
    const int64_t first = (task * spans + span) * block_rows * group;
    return QuerySums{kept.states + first, kept.values + first * dim};
  };
  const bool parallel = Parallel(2 * work * a.heads * dim);

  pool_.ParallelFor(parallel, tasks * parts, [&](int64_t task_part, int worker) {
    const int64_t task = task_part / parts;
    const Block& block = blocks[static_cast<size_t>(task / a.kv_heads)];
    GroupedHeads own(kernels_, a, block, task % a.kv_heads);
    const Spans own_spans = SpansOf(block.end_position(), task_part % parts, parts);
    if (own_spans.begin == own_spans.end) return;
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(own.QueryBytes() + 2 * QuerySums::Bytes(own.queries(), dim));
    own.CopyQueries(scratch);
    if (parts > 1) {
      for (int64_t span = own_spans.begin; span < own_spans.end; ++span) {
        kept_of(task, span).Clear(own.queries(), dim);
        own.Walk(span, kept_of(task, span));
      }
      return;
    }
    own.Finish(WalkSpans(own_spans.end, own.queries(), dim, scratch, [&](int64_t span, const QuerySums& sums) { own.Walk(span, sums); }));
  });
  if (parts == 1) return;

  pool_.ParallelFor(parallel, tasks, [&](int64_t task, int) {
    const Block& block = blocks[static_cast<size_t>(task / a.kv_heads)];
    const GroupedHeads own(kernels_, a, block, task % a.kv_heads);
    for (int64_t span = 1; span < NumSpans(block.end_position()); ++span) FoldSpan(kept_of(task, span), own.queries(), dim, kept_of(task, 0));
    own.Finish(kept_of(task, 0));
  });
}

}  // namespace hearth
