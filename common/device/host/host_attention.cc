// MLA on the host (DeepSeek-V2 section 2.1.2) in the prefill form: keys and values are expanded. host_absorbed.cc has the other form.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: tasks over (block of rows, head), nothing shared between them.
#include <algorithm>

#include "common/base/ceil_div.h"
#include "common/device/host/attention_spans.h"
#include "common/device/host/host_ops.h"
#include "common/device/host/kv_rows.h"
#include "common/device/host/mla_heads.h"
#include "common/device/host/row_to_float.h"
#include "common/device/host/terms.h"

namespace hearth {
namespace {

// Rows of one sequence that share an expansion of keys and values, which costs as much as the attention of some 400 rows to a page: as many as leave
// each thread some tasks, within these. The most bounds a task's queries and sums to 4096 * (key_dim + 2 * v_dim) BF16 numbers.
constexpr int64_t kQueryBlockMin = 256;
constexpr int64_t kQueryBlockMax = 4096;

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
    AttendAbsorbed(static_cast<HostStream&>(stream), args);
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
                    Scratch::Bytes<float>(LinearTermsScratch(Form::kPrefill, kPageTokens, kv_dim, cached_terms)) +
                    Scratch::Bytes<float>(TransposedKeyFloats(a)) + Scratch::Bytes<float>(a.nope) +
                    (pages.f8() ? Scratch::Bytes<float>(kPageTokens * width) + Scratch::Bytes<bf16>(kPageTokens * width) : 0));
    float* transposed = scratch.Take<float>(TransposedKeyFloats(a));
    float* key_row = scratch.Take<float>(a.nope);
    float* expanded = scratch.Take<float>(kPageTokens * kv_dim);
    bf16* keys_values = scratch.Take<bf16>(kPageTokens * row_dim);
    float* tiles = scratch.Take<float>(AttendPageScratch(key_dim, a.v_dim));
    SoftmaxState* states = scratch.Take<SoftmaxState>(block_rows);
    float* sums = scratch.Take<float>(block_rows * sums_dim);
    bf16* queries = scratch.Take<bf16>(block_rows * key_dim);
    float* products = scratch.Take<float>(LinearTermsScratch(Form::kPrefill, kPageTokens, kv_dim, cached_terms));
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
      LinearTerms(kernels_, Form::kPrefill, keys, cached, width, filled, cached_terms, expanded, kv_dim, 0, a.nope, products);
      LinearTerms(kernels_, Form::kPrefill, values, cached, width, filled, cached_terms, expanded + a.nope, kv_dim, 0, a.v_dim, products);
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
      Normalise({&states[i], of_row}, 1, a.v_dim);
      StoreResult(a, of_row, sequence.first_row + block.begin + i, head);
    }
  });
}

}  // namespace hearth
