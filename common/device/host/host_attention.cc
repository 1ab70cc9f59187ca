// MLA on the host in its two forms (DeepSeek-V2 section 2.1.2): expanded for prefill, absorbed for decode. Both walk the pages by position.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: tasks over (sequence, head) or (row, heads), nothing shared between them.
#include <algorithm>

#include "common/base/ceil_div.h"
#include "common/device/host/host_ops.h"
#include "common/device/host/kv_rows.h"
#include "common/device/host/row_to_float.h"
#include "common/device/host/terms.h"

namespace hearth {
namespace {

// Rows of one sequence that share an expansion of keys and values, which costs as much as the attention of some 400 rows to a page: as many as leave
// each thread some tasks, within these. The most bounds a task's queries and sums to 4096 * (key_dim + 2 * v_dim) BF16 numbers.
constexpr int64_t kQueryBlockMin = 256;
constexpr int64_t kQueryBlockMax = 4096;
// Heads that share a read of the cached latent in decode: as many as leave each thread some tasks, within these. A head's sums do not depend on its
// neighbours.
constexpr int64_t kHeadGroupMin = 4;
constexpr int64_t kHeadGroupMax = 32;
constexpr int64_t kTasksPerThread = 3;

void Normalise(const SoftmaxState& state, float* sums, int64_t n) {
  const float scale = 1.0f / state.sum;
  for (int64_t i = 0; i < n; ++i) sums[i] *= scale;
}

// One head's values of one row, into the terms of the result.
void StoreResult(const MlaAttentionArgs& a, const float* values, int64_t row, int64_t head) {
  bf16* high = a.out + (row * a.terms * a.heads + head) * a.v_dim;
  bf16* low = high + a.heads * a.v_dim;
  for (int64_t i = 0; i < a.v_dim; ++i) {
    high[i] = hearth::ToBf16(values[i]);
    if (a.terms > 1) low[i] = hearth::ToBf16(values[i] - ToFloat(high[i]));
  }
}

// Elements of a key and a query in the expanded form, made even.
int64_t KeyDim(const MlaAttentionArgs& a) {
  const int64_t dim = a.terms == 1 ? a.nope + a.rope_dim : 3 * (a.nope + a.rope_dim);
  return dim + dim % 2;
}

// out [KeyDim], which is zero
void WriteQuery(const bf16* high, const bf16* low, const MlaAttentionArgs& a, bf16* out) {
  const int64_t head_dim = a.nope + a.rope_dim;
  out = std::copy_n(high, head_dim, out);
  if (a.terms == 1) return;
  out = std::copy_n(low, head_dim, out);
  std::copy_n(high, head_dim, out);
}

// expanded [nope + v]; rope, rope_low: terms of the cached rotary key; out [KeyDim + terms * v], which is zero where nothing is written
void WriteKeyValue(const KernelTable& kernels, const float* expanded, const bf16* rope, const bf16* rope_low, const MlaAttentionArgs& a, bf16* out) {
  const int64_t head_dim = a.nope + a.rope_dim;
  kernels.to_bf16(expanded, out, a.nope);
  std::copy_n(rope, a.rope_dim, out + a.nope);
  if (a.terms > 1) {
    std::copy_n(out, head_dim, out + head_dim);
    bf16* low = out + 2 * head_dim;
    for (int64_t i = 0; i < a.nope; ++i) low[i] = hearth::ToBf16(expanded[i] - ToFloat(out[i]));
    std::copy_n(rope_low, a.rope_dim, low + a.nope);
  }
  SplitTerms(kernels, expanded + a.nope, a.v_dim, a.terms, out + KeyDim(a));
}

// A head's half of kv_b that gives values.
WeightView ValueRows(const MlaAttentionArgs& a, int64_t head) {
  return a.k_b.data == nullptr ? a.kv_b.Rows(head * (a.nope + a.v_dim) + a.nope, a.v_dim) : a.v_b.Rows(head * a.v_dim, a.v_dim);
}

// A head's half that gives keys, [nope, rank]: rows of kv_b, or where those lie transposed, floats written to `transposed` [nope, rank].
int64_t TransposedKeyFloats(const MlaAttentionArgs& a) { return a.k_b.data == nullptr ? 0 : a.nope * a.rank; }
WeightView KeyRows(const MlaAttentionArgs& a, int64_t head, float* transposed, float* row) {
  if (a.k_b.data == nullptr) return a.kv_b.Rows(head * (a.nope + a.v_dim), a.nope);
  const WeightView keys = a.k_b.Rows(head * a.rank, a.rank);
  for (int64_t c = 0; c < a.rank; ++c) {
    RowToFloat(keys, c, row);
    for (int64_t i = 0; i < a.nope; ++i) transposed[i * a.rank + c] = row[i];
  }
  return {.data = transposed, .dtype = DType::kF32, .rows = a.nope, .cols = a.rank, .row_stride = a.rank};
}

}  // namespace

void HostOps::MlaAttention(Stream& stream, const MlaAttentionArgs& args) {
  if (!static_cast<HostStream&>(stream).alive()) return;
  if (args.form == Form::kPrefill) {
    AttendExpanded(args);
  } else {
    AttendAbsorbed(args);
  }
}

// Two terms go through the same kernel as longer vectors, q . k = q_high . k_high + q_low . k_high + q_high . k_low (the fourth product is 2^-18 of the sum):
//   query [high | low | high], key [high | high | low]; values the kernel takes in terms.
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
  int64_t rows = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) rows += a.sequences[s].num_rows;
  const int64_t query_block = std::clamp(rows * a.heads / (kTasksPerThread * pool_.num_threads()), kQueryBlockMin, kQueryBlockMax);
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const KvSequence& sequence = a.sequences[s];
    for (int64_t begin = 0; begin < sequence.num_rows; begin += query_block) {
      const int64_t count = std::min(query_block, sequence.num_rows - begin);
      blocks.push_back({&sequence, begin, count});
      work += (sequence.start_position + begin + count) * (a.rank + count);
    }
  }
  const int64_t head_dim = a.nope + a.rope_dim;
  const int64_t kv_dim = a.nope + a.v_dim;
  const int64_t width = a.rank + a.rope_dim;  // a cached row is [cached_terms, rank + rope]
  const LatentRows pages(*a.kv, a.layer, a.rank, a.rope_dim, a.terms);
  // What FP8 holds, a code times a power of two, is a BF16 number: one term.
  const int cached_terms = pages.f8() ? 1 : a.terms;
  const int64_t row_elements = cached_terms * width;
  const std::vector<bf16> no_low(static_cast<size_t>(a.rope_dim));
  const int64_t key_dim = KeyDim(a);
  const int64_t row_dim = key_dim + a.terms * a.v_dim;  // a key and its value
  const int64_t sums_dim = CeilDiv(a.v_dim, 16) * 16;
  const int64_t block_rows = std::min(query_block, rows);

  pool_.ParallelFor(Parallel(work * a.heads * kv_dim), static_cast<int64_t>(blocks.size()) * a.heads, [&](int64_t task, int worker) {
    const Block& block = blocks[static_cast<size_t>(task / a.heads)];
    const int64_t head = task % a.heads;
    const KvSequence& sequence = *block.sequence;
    const int64_t first_position = sequence.start_position + block.begin;
    const int64_t end_position = first_position + block.count;
    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(Scratch::Bytes<float>(kPageTokens * kv_dim) + Scratch::Bytes<bf16>(kPageTokens * row_dim) +
                    Scratch::Bytes<float>(AttendPageScratch(key_dim, a.v_dim)) + Scratch::Bytes<SoftmaxState>(block_rows) +
                    Scratch::Bytes<float>(block_rows * sums_dim) + Scratch::Bytes<bf16>(block_rows * key_dim) +
                    Scratch::Bytes<float>(LinearTermsScratch(kPageTokens, kv_dim, cached_terms)) + Scratch::Bytes<float>(TransposedKeyFloats(a)) +
                    Scratch::Bytes<float>(a.nope) +
                    (pages.f8() ? Scratch::Bytes<float>(kPageTokens * width) + Scratch::Bytes<bf16>(kPageTokens * width) : 0));
    float* transposed = scratch.Take<float>(TransposedKeyFloats(a));
    float* key_row = scratch.Take<float>(a.nope);
    float* expanded = scratch.Take<float>(kPageTokens * kv_dim);
    bf16* keys_values = scratch.Take<bf16>(kPageTokens * row_dim);
    float* tiles = scratch.Take<float>(AttendPageScratch(key_dim, a.v_dim));
    SoftmaxState* states = scratch.Take<SoftmaxState>(block_rows);
    float* sums = scratch.Take<float>(block_rows * sums_dim);
    bf16* queries = scratch.Take<bf16>(block_rows * key_dim);
    float* products = scratch.Take<float>(LinearTermsScratch(kPageTokens, kv_dim, cached_terms));
    float* widened = pages.f8() ? scratch.Take<float>(kPageTokens * width) : nullptr;
    bf16* narrowed = pages.f8() ? scratch.Take<bf16>(kPageTokens * width) : nullptr;
    std::fill_n(states, block.count, SoftmaxState{});
    std::fill_n(sums, block.count * sums_dim, 0.0f);
    std::fill_n(queries, block.count * key_dim, bf16{});
    std::fill_n(keys_values, kPageTokens * row_dim, bf16{});
    for (int64_t i = 0; i < block.count; ++i) {
      const bf16* high = a.q + ((sequence.first_row + block.begin + i) * a.terms * a.heads + head) * head_dim;
      WriteQuery(high, high + a.heads * head_dim, a, queries + i * key_dim);
    }

    const WeightView keys = KeyRows(a, head, transposed, key_row);
    const WeightView values = ValueRows(a, head);
    for (int64_t page_begin = 0; page_begin < end_position; page_begin += kPageTokens) {
      const int64_t filled = std::min(kPageTokens, end_position - page_begin);
      const int32_t page = sequence.pages[page_begin / kPageTokens];
      const bf16* cached = narrowed;
      if (pages.f8()) {
        pages.Widen(kernels_, page, filled, widened);
        kernels_.to_bf16(widened, narrowed, filled * width);
      } else {
        cached = pages.rows(page);
      }
      LinearTerms(kernels_.gemm, keys, cached, width, filled, cached_terms, expanded, kv_dim, 0, a.nope, products);
      LinearTerms(kernels_.gemm, values, cached, width, filled, cached_terms, expanded + a.nope, kv_dim, 0, a.v_dim, products);
      for (int64_t j = 0; j < filled; ++j) {
        const bf16* rope = cached + j * row_elements + a.rank;
        WriteKeyValue(kernels_, expanded + j * kv_dim, rope, cached_terms > 1 ? rope + width : no_low.data(), a, keys_values + j * row_dim);
      }
      const int64_t first = std::max<int64_t>(0, page_begin - first_position);  // query that sees of the page
      kernels_.attend_page({.keys = keys_values,
                            .values = keys_values + key_dim,
                            .ld = row_dim,
                            .count = filled,
                            .skip = std::clamp<int64_t>(a.skip - page_begin, 0, filled),
                            .key_dim = key_dim,
                            .value_dim = a.v_dim,
                            .terms = a.terms,
                            .scale = a.softmax_scale},
                           queries + first * key_dim, block.count - first, first_position + first - page_begin + 1, states + first,
                           sums + first * sums_dim, sums_dim, tiles);
    }
    for (int64_t i = 0; i < block.count; ++i) {
      float* of_row = sums + i * sums_dim;
      Normalise(states[i], of_row, a.v_dim);
      StoreResult(a, of_row, sequence.first_row + block.begin + i, head);
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
  const int64_t group = std::clamp(a.heads * num_rows / (kTasksPerThread * pool_.num_threads()), kHeadGroupMin, kHeadGroupMax);
  const int64_t groups = CeilDiv(a.heads, group);
  const int64_t head_dim = a.nope + a.rope_dim;
  const int64_t kv_dim = a.nope + a.v_dim;
  const int64_t width = a.rank + a.rope_dim;
  const LatentRows pages(*a.kv, a.layer, a.rank, a.rope_dim, a.terms);
  // Plain BF16 queries meet plain BF16 rows as they lie there; else both are widened to F32, a page's rows once for the heads of a task.
  const bool plain = a.terms == 1 && !pages.f8();

  // Rows innermost: the rows of a batch meet a head's part of kv_b while it is in cache.
  pool_.ParallelFor(Parallel(work * a.heads * a.rank), groups * num_rows, [&](int64_t task, int worker) {
    const Row& row = rows[static_cast<size_t>(task % num_rows)];
    const int64_t first_head = task / num_rows * group;
    const int64_t heads = std::min(group, a.heads - first_head);

    Scratch& scratch = worker_scratch_[static_cast<size_t>(worker)];
    scratch.Reserve(Scratch::Bytes<float>(a.rank) + Scratch::Bytes<float>(heads * width) + Scratch::Bytes<SoftmaxState>(heads) +
                    Scratch::Bytes<float>(heads * a.rank) + Scratch::Bytes<float>(heads * kPageTokens) + Scratch::Bytes<float>(a.v_dim) +
                    Scratch::Bytes<bf16>(kTermsMax * a.rank) + Scratch::Bytes<float>(kTermsMax * a.v_dim) +
                    (plain ? Scratch::Bytes<bf16>(heads * width) : Scratch::Bytes<float>(kPageTokens * width)));
    float* absorbed_low = scratch.Take<float>(a.rank);
    float* queries = scratch.Take<float>(heads * width);  // [heads, rank + rope]
    SoftmaxState* states = scratch.Take<SoftmaxState>(heads);
    float* sums = scratch.Take<float>(heads * a.rank);
    float* scores = scratch.Take<float>(heads * kPageTokens);
    float* value = scratch.Take<float>(a.v_dim);
    bf16* latent = scratch.Take<bf16>(kTermsMax * a.rank);
    float* products = scratch.Take<float>(kTermsMax * a.v_dim);
    bf16* plain_queries = plain ? scratch.Take<bf16>(heads * width) : nullptr;  // all latent parts, then all rotary ones
    float* widened = plain ? nullptr : scratch.Take<float>(kPageTokens * width);

    for (int64_t h = 0; h < heads; ++h) {
      const bf16* q = a.q + (row.row * a.terms * a.heads + first_head + h) * head_dim;
      const bf16* q_low = q + a.heads * head_dim;
      const auto absorb = [&](const bf16* query, float* out_row) {
        if (a.k_b.data == nullptr) {
          kernels_.linear_transposed(a.kv_b.Rows((first_head + h) * kv_dim, a.nope), query, out_row, 0, a.rank);
        } else {
          kernels_.linear(a.k_b.Rows((first_head + h) * a.rank, a.rank), query, a.nope, 1, out_row, a.rank, 0, a.rank);
        }
      };
      float* absorbed = queries + h * width;
      absorb(q, absorbed);
      if (plain) {
        kernels_.to_bf16(absorbed, plain_queries + h * a.rank, a.rank);
        std::copy_n(q + a.nope, a.rope_dim, plain_queries + heads * a.rank + h * a.rope_dim);
        continue;
      }
      if (a.terms > 1) {
        absorb(q_low, absorbed_low);
        for (int64_t i = 0; i < a.rank; ++i) absorbed[i] += absorbed_low[i];
      }
      kernels_.widen_bf16(q + a.nope, 0, a.terms > 1 ? a.heads * head_dim : 0, 1, a.rope_dim, absorbed + a.rank, 0);
    }
    std::fill_n(states, heads, SoftmaxState{});
    std::fill_n(sums, heads * a.rank, 0.0f);
    for (int64_t page_begin = 0; page_begin <= row.position; page_begin += kPageTokens) {
      const int32_t page = row.sequence->pages[page_begin / kPageTokens];
      const int64_t skip = std::max<int64_t>(0, a.skip - page_begin);
      const int64_t end = std::min(kPageTokens, row.position - page_begin + 1);
      if (plain) {
        kernels_.mla_absorbed(plain_queries, plain_queries + heads * a.rank, pages.rows(page) + skip * width, end - skip, heads, a.rank, a.rope_dim,
                              a.softmax_scale, states, sums, scores);
      } else {
        pages.Widen(kernels_, page, end, widened);
        const float* rows_seen = widened + skip * width;
        kernels_.attend(queries, heads, rows_seen, width, rows_seen, width, end - skip, width, a.rank, a.softmax_scale, states, sums, scores);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* sum = sums + h * a.rank;
      Normalise(states[h], sum, a.rank);
      SplitTerms(kernels_, sum, a.rank, a.terms, latent);
      LinearTerms(kernels_.linear, ValueRows(a, first_head + h), latent, a.rank, 1, a.terms, value, a.v_dim, 0, a.v_dim, products);
      StoreResult(a, value, row.row, first_head + h);
    }
  });
}

}  // namespace hearth
