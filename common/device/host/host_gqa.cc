// Grouped-query attention on the host (arXiv 2305.13245): what makes queries and keys of the projections' output, the cached rows, and attention itself.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: tasks over rows, or over (block of rows, KV head); nothing shared between them.
#include <algorithm>
#include <vector>

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

// A task takes some rows of one sequence and the query heads of one KV head through the pages in order. Nothing depends on where its rows begin: a query
// sees whole pages, the last one cut at its own position, and the sums of the queries that walk together are their own.
void HostOps::GqaAttention(Stream& stream, const GqaAttentionArgs& a) {
  if (!static_cast<HostStream&>(stream).alive()) return;
  struct Block {
    const KvSequence* sequence;
    int64_t begin;  // row inside the sequence
    int64_t count;
  };
  const int64_t group = a.heads / a.kv_heads;
  const int64_t block_rows = std::max<int64_t>(1, kQueriesAtOnce / group);
  std::vector<Block> blocks;
  int64_t work = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const KvSequence& sequence = a.sequences[s];
    // The last rows see most: they go first, so that no thread begins the longest task when others end.
    for (int64_t end = sequence.num_rows; end > 0; end -= block_rows) {
      const int64_t begin = std::max<int64_t>(0, end - block_rows);
      blocks.push_back({&sequence, begin, end - begin});
      work += (sequence.start_position + end) * (end - begin);
    }
  }
  const int64_t dim = a.head_dim;
  const HeadRows cached(*a.kv, a.layer, a.kv_heads, dim, a.terms);

  pool_.ParallelFor(Parallel(2 * work * a.heads * dim), static_cast<int64_t>(blocks.size()) * a.kv_heads, [&](int64_t task, int worker) {
    const Block& block = blocks[static_cast<size_t>(task / a.kv_heads)];
    const int64_t kv_head = task % a.kv_heads;
    const KvSequence& sequence = *block.sequence;
    const int64_t first_position = sequence.start_position + block.begin;
    const int64_t end_position = first_position + block.count;
    const int64_t queries_count = block.count * group;

    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(2 * Scratch::Bytes<float>(kPageTokens * dim) + 2 * Scratch::Bytes<float>(queries_count * dim) +
                    Scratch::Bytes<SoftmaxState>(queries_count) + Scratch::Bytes<float>(queries_count * kPageTokens));
    float* keys = scratch.Take<float>(kPageTokens * dim);
    float* values = scratch.Take<float>(kPageTokens * dim);
    float* queries = scratch.Take<float>(queries_count * dim);
    float* sums = scratch.Take<float>(queries_count * dim);
    SoftmaxState* states = scratch.Take<SoftmaxState>(queries_count);
    float* scores = scratch.Take<float>(queries_count * kPageTokens);
    const auto row_of = [&](int64_t i) { return sequence.first_row + block.begin + i; };
    for (int64_t i = 0; i < block.count; ++i) {
      std::copy_n(a.q + (row_of(i) * a.heads + kv_head * group) * dim, group * dim, queries + i * group * dim);
    }
    std::fill_n(states, queries_count, SoftmaxState{});
    std::fill_n(sums, queries_count * dim, 0.0f);

    // Rows [row, row + rows) of the block against the first `seen` positions of the widened page, without those that are skipped.
    int64_t skip = 0;
    const auto attend = [&](int64_t row, int64_t rows, int64_t seen) {
      const int64_t q = row * group;
      kernels_.attend(queries + q * dim, rows * group, keys + skip * dim, dim, values + skip * dim, dim, seen - skip, dim, dim, a.softmax_scale,
                      states + q, sums + q * dim, scores);
    };
    for (int64_t page_begin = 0; page_begin < end_position; page_begin += kPageTokens) {
      skip = std::max<int64_t>(0, a.skip - page_begin);
      const int64_t filled = std::min(kPageTokens, end_position - page_begin);
      const int32_t page = sequence.pages[page_begin / kPageTokens];
      cached.Widen(kernels_, page, HeadRows::Part::kKeys, kv_head, filled, keys);
      cached.Widen(kernels_, page, HeadRows::Part::kValues, kv_head, filled, values);
      // Rows within this page see a part of it each, rows behind it all of it.
      int64_t i = std::max<int64_t>(0, page_begin - first_position);
      for (; i < block.count && first_position + i + 1 < page_begin + kPageTokens; ++i) attend(i, 1, first_position + i - page_begin + 1);
      if (i < block.count) attend(i, block.count - i, kPageTokens);
    }
    for (int64_t q = 0; q < queries_count; ++q) {
      float* sum = sums + q * dim;
      const float factor = 1.0f / states[q].sum;
      for (int64_t c = 0; c < dim; ++c) sum[c] *= factor;
    }
    // Heads of a group lie beside each other in the result, a row's terms `heads * dim` apart.
    for (int64_t i = 0; i < block.count; ++i) {
      const float* from = sums + i * group * dim;
      bf16* high = a.out + (row_of(i) * a.terms * a.heads + kv_head * group) * dim;
      bf16* low_out = high + a.heads * dim;
      for (int64_t c = 0; c < group * dim; ++c) {
        high[c] = hearth::ToBf16(from[c]);
        if (a.terms > 1) low_out[c] = hearth::ToBf16(from[c] - ToFloat(high[c]));
      }
    }
  });
}

}  // namespace hearth
