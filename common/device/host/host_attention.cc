// MLA on the host in its two forms (DeepSeek-V2 section 2.1.2): expanded for prefill, absorbed for decode. Both walk the pages by position.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: tasks over (sequence, head) or (row, heads), nothing shared between them.
#include <algorithm>

#include "common/device/host/host_ops.h"

namespace hearth {
namespace {

// Rows of one sequence that share an expansion of keys and values: bounds the accumulators to 256 * v_dim floats a thread.
constexpr int64_t kQueryBlock = 256;
// Heads that share a read of the cached latent in decode. A constant, so that a head's neighbours are the same for any thread count.
constexpr int64_t kHeadGroup = 4;

}  // namespace

void HostOps::MlaAttention(Stream& stream, const MlaAttentionArgs& args) {
  if (!static_cast<HostStream&>(stream).alive()) return;
  if (args.form == Form::kPrefill) {
    AttendExpanded(args);
  } else {
    AttendAbsorbed(args);
  }
}

// A task expands one head's keys and values page by page, and walks each with all queries of its block. Nothing depends on where a block or a
// chunk begins: a query sees whole pages in order, the last one cut at its own position.
void HostOps::AttendExpanded(const MlaAttentionArgs& a) {
  struct Block {
    const KvSequence* sequence;
    int64_t begin;  // row inside the sequence
    int64_t count;
  };
  std::vector<Block> blocks;
  int64_t work = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const KvSequence& sequence = a.sequences[s];
    for (int64_t begin = 0; begin < sequence.num_rows; begin += kQueryBlock) {
      const int64_t count = std::min(kQueryBlock, sequence.num_rows - begin);
      blocks.push_back({&sequence, begin, count});
      work += (sequence.start_position + begin + count) * (a.rank + count);
    }
  }
  const int64_t head_dim = a.nope + a.rope_dim;
  const int64_t kv_dim = a.nope + a.v_dim;
  const int64_t row_elements = a.rank + a.rope_dim;

  pool_.ParallelFor(Parallel(work * a.heads * kv_dim), static_cast<int64_t>(blocks.size()) * a.heads, [&](int64_t task, int worker) {
    const Block& block = blocks[static_cast<size_t>(task / a.heads)];
    const int64_t head = task % a.heads;
    const KvSequence& sequence = *block.sequence;
    const int64_t first_position = sequence.start_position + block.begin;
    const int64_t end_position = first_position + block.count;
    const bf16* queries = a.q + ((sequence.first_row + block.begin) * a.heads + head) * head_dim;

    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(Scratch::Bytes<float>(kPageTokens * kv_dim) + Scratch::Bytes<bf16>(kPageTokens * kv_dim) +
                    Scratch::Bytes<SoftmaxState>(kQueryBlock) + Scratch::Bytes<float>(kQueryBlock * a.v_dim) + Scratch::Bytes<float>(kPageTokens));
    float* expanded = scratch.Take<float>(kPageTokens * kv_dim);
    bf16* keys_values = scratch.Take<bf16>(kPageTokens * kv_dim);
    SoftmaxState* states = scratch.Take<SoftmaxState>(kQueryBlock);
    float* sums = scratch.Take<float>(kQueryBlock * a.v_dim);
    float* scores = scratch.Take<float>(kPageTokens);
    std::fill_n(states, block.count, SoftmaxState{});
    std::fill_n(sums, block.count * a.v_dim, 0.0f);

    const WeightView kv_b = a.kv_b.Rows(head * kv_dim, kv_dim);
    for (int64_t page_begin = 0; page_begin < end_position; page_begin += kPageTokens) {
      const int64_t filled = std::min(kPageTokens, end_position - page_begin);
      const bf16* cached = a.kv->rows(sequence.pages[page_begin / kPageTokens], a.layer);
      kernels_.linear(kv_b, cached, row_elements, filled, expanded, kv_dim, 0, kv_dim);
      kernels_.to_bf16(expanded, keys_values, filled * kv_dim);
      for (int64_t i = std::max<int64_t>(0, page_begin - first_position); i < block.count; ++i) {
        const int64_t seen = std::min(kPageTokens, first_position + i - page_begin + 1);
        kernels_.attention_expanded(queries + i * a.heads * head_dim, keys_values, kv_dim, cached + a.rank, row_elements, keys_values + a.nope,
                                    kv_dim, seen, a.nope, a.rope_dim, a.v_dim, a.softmax_scale, &states[i], sums + i * a.v_dim, scores);
      }
    }
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t row = sequence.first_row + block.begin + i;
      FinishSoftmax(states[i], sums + i * a.v_dim, a.out + (row * a.heads + head) * a.v_dim, a.v_dim);
    }
  });
}

// The key half of kv_b goes into the query, the value half into the result: attention itself runs over the cached latent.
void HostOps::AttendAbsorbed(const MlaAttentionArgs& a) {
  struct Row {
    const KvSequence* sequence;
    int64_t row;
    int64_t position;
  };
  std::vector<Row> rows;
  int64_t work = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    for (int64_t i = 0; i < a.sequences[s].num_rows; ++i) {
      rows.push_back({&a.sequences[s], a.sequences[s].first_row + i, a.sequences[s].start_position + i});
      work += a.nope + a.v_dim + 2 * (rows.back().position + 1);
    }
  }
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  const int64_t groups = (a.heads + kHeadGroup - 1) / kHeadGroup;
  const int64_t head_dim = a.nope + a.rope_dim;
  const int64_t kv_dim = a.nope + a.v_dim;

  // Rows innermost: the rows of a batch meet a head's part of kv_b while it is in cache.
  pool_.ParallelFor(Parallel(work * a.heads * a.rank), groups * num_rows, [&](int64_t task, int worker) {
    const Row& row = rows[static_cast<size_t>(task % num_rows)];
    const int64_t first_head = task / num_rows * kHeadGroup;
    const int64_t heads = std::min(kHeadGroup, a.heads - first_head);

    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(Scratch::Bytes<float>(a.rank) + Scratch::Bytes<bf16>(heads * a.rank) + Scratch::Bytes<bf16>(heads * a.rope_dim) +
                    Scratch::Bytes<SoftmaxState>(heads) + Scratch::Bytes<float>(heads * a.rank) + Scratch::Bytes<float>(heads * kPageTokens) +
                    Scratch::Bytes<float>(a.v_dim));
    float* absorbed = scratch.Take<float>(a.rank);
    bf16* q_latent = scratch.Take<bf16>(heads * a.rank);
    bf16* q_rope = scratch.Take<bf16>(heads * a.rope_dim);
    SoftmaxState* states = scratch.Take<SoftmaxState>(heads);
    float* sums = scratch.Take<float>(heads * a.rank);
    float* scores = scratch.Take<float>(heads * kPageTokens);
    float* value = scratch.Take<float>(a.v_dim);

    for (int64_t h = 0; h < heads; ++h) {
      const bf16* q = a.q + (row.row * a.heads + first_head + h) * head_dim;
      kernels_.linear_transposed(a.kv_b.Rows((first_head + h) * kv_dim, a.nope), q, absorbed, 0, a.rank);
      kernels_.to_bf16(absorbed, q_latent + h * a.rank, a.rank);
      std::copy_n(q + a.nope, a.rope_dim, q_rope + h * a.rope_dim);
    }
    std::fill_n(states, heads, SoftmaxState{});
    std::fill_n(sums, heads * a.rank, 0.0f);
    for (int64_t page_begin = 0; page_begin <= row.position; page_begin += kPageTokens) {
      const bf16* cached = a.kv->rows(row.sequence->pages[page_begin / kPageTokens], a.layer);
      kernels_.mla_absorbed(q_latent, q_rope, cached, std::min(kPageTokens, row.position - page_begin + 1), heads, a.rank, a.rope_dim,
                            a.softmax_scale, states, sums, scores);
    }
    for (int64_t h = 0; h < heads; ++h) {
      bf16* latent = q_latent + h * a.rank;  // the query is no longer needed
      FinishSoftmax(states[h], sums + h * a.rank, latent, a.rank);
      kernels_.linear(a.kv_b.Rows((first_head + h) * kv_dim + a.nope, a.v_dim), latent, a.rank, 1, value, a.v_dim, 0, a.v_dim);
      kernels_.to_bf16(value, a.out + (row.row * a.heads + first_head + h) * a.v_dim, a.v_dim);
    }
  });
}

}  // namespace hearth
