// The host's compute kernels: pure functions over views, one table of them per instruction-set path.
// Room: common/kernels. May touch: common/base. Not: threads, shared memory, gRPC, logging, allocation.
//
// Order of sums (DESIGN section 7): a row's sum has one order, fixed by K and the ISA path alone. Never by M, by the
// row range a call was given, or by what else is in the batch. So splitting rows over threads, or tokens over calls,
// leaves every output bit equal. Each path may have its own order; the scalar path is the reference that the others are
// tested against.
//
// Inputs of matrix products are BF16, sums are F32. Weights are read in the checkpoint's own precision and converted
// exactly: FP8 E4M3 subnormals count (VDPBF16PS flushes BF16 denormals, so a path that uses it must not produce them
// from FP8 codes: every E4M3 value, the least being 2^-9, is a normal BF16 number). What that path does flush are
// activations, KV and BF16 weights below 2^-126 in magnitude, and sums below it; the other paths count them. Weights
// hold no NaN code (refused at load): what a path makes of one is not defined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/quant_blocks.h"

namespace hearth {

// A matrix [rows, cols], row-major, in the checkpoint's precision.
// FP8 carries one F32 scale per 128x128 block, for element (r, c):
//   scales[((scale_row0 + r) / 128) * scale_stride + c / 128]
// A view of some rows of a bigger tensor keeps the tensor's block grid through `scale_row0` (heads of kv_b_proj begin
// inside blocks).
// A row of a block format (quant_blocks.h) is whole blocks, at most kRowColumnsMax columns: cols and row_stride are multiples of BlockOf(dtype).elements.
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kInvalid;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // in elements
  const float* scales = nullptr;
  int64_t scale_stride = 0;
  int64_t scale_row0 = 0;
  bool fetch_ahead = true;  // `linear` fetches the next rows in software while it computes; moves time, never a bit of the result

  // Rows [begin, begin + count).
  WeightView Rows(int64_t begin, int64_t count) const {
    WeightView v = *this;
    v.data = static_cast<const uint8_t*>(data) + DTypeBytes(dtype, static_cast<uint64_t>(begin * row_stride));
    v.rows = count;
    v.scale_row0 = scale_row0 + begin;
    return v;
  }
};

// A running softmax over positions, walked in order (page by page), for one query head.
// Values are accumulated unnormalised; FinishSoftmax divides. `max` starts at -inf, `sum` at 0.
struct SoftmaxState {
  float max = -__builtin_inff();
  float sum = 0.0f;
};

inline constexpr int64_t kAttendPositions = 64;  // of a page
inline constexpr int kTermsMax = 2;              // BF16 numbers whose sum an activation is

// A page's keys and values of one head, for `attend_page`. Rows are `ld` elements apart, in both.
struct ExpandedPage {
  const bf16* keys = nullptr;    // [count, key_dim]
  const bf16* values = nullptr;  // [count, terms, value_dim]: the sum over terms is the value
  int64_t ld = 0;
  int64_t count = 0;    // at most kAttendPositions
  int64_t skip = 0;     // of these, that no query sees: their rows may hold anything
  int64_t key_dim = 0;  // even
  int64_t value_dim = 0;
  int terms = 1;
  float scale = 1.0f;  // positive
};
// Room for a page's tiles, in floats, whatever the path.
inline constexpr int64_t AttendPageScratch(int64_t key_dim, int64_t value_dim) {
  return (kAttendPositions * ((key_dim + 127) / 128) + (value_dim + 63) / 64 * 64) * 128;
}

// What is attended next, for memory to bring while this run is worked on: pages lie anywhere, so hardware prefetchers start anew with each.
struct NextRuns {
  const void* first = nullptr;  // keys, or keys and values in one; null: nothing
  const void* second = nullptr;
  int64_t bytes_per_position = 0;  // in each
};

using LinearKernel = void(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, int terms, float* y, int64_t ldy, int64_t row_begin,
                          int64_t row_end);
using GemmKernel = void(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end);

struct KernelTable {
  const char* name;  // "scalar", "avx2", "avx512", "avx512bf16", "amx"

  // dst[i] = bf16(src[i]), nearest even; bit-equal on every path.
  void (*to_bf16)(const float* src, bf16* dst, int64_t n);

  // RMSNorm: out[i] = bf16(x[i] * rsqrt(mean(x^2) + eps) * weight[i]).   x [n] f32; weight [n] f32; out [n] bf16
  void (*rms_norm)(const float* x, const float* weight, float eps, bf16* out, int64_t n);

  // y[m, r] = sum_c (sum_t x[m, t, c]) * w[r, c]  for r in [row_begin, row_end), all m in [0, m_count), t in [0, terms), terms at most kTermsMax.
  //   x [m_count, terms, cols] bf16, rows `ldx` elements apart; y [m_count, rows] f32, rows `ldy` elements apart.
  //   w: F8E4M3 with scales, BF16, F16 or F32 with at most kRowColumnsMax cols, or a block format; any rows, any alignment.
  // With BF16 products all terms of a token go into one sum, step by step of the columns; where numbers are F32, terms are added up before the product.
  // FP8: each 128-column block is summed first, then the sum is multiplied by the block's scale and added to the row's
  // total. Block formats likewise, for each part of a block that has a scale of its own (32 columns, Q6_K 16): the integers
  // times x are exact products, the scale (exact in F32) multiplies their sum. Q4_K and Q5_K: the part's minimum times the sum of x over
  // the part is taken off the total. So no weight is ever rounded.
  LinearKernel* linear;

  // The prefill form of `linear`: the same product of one term in an order of its own, made for many tokens; any cols. A few rows are converted once and
  // meet all tokens of the call, so callers give it as many as they have, and terms as tokens.
  GemmKernel* gemm;

  // The absorbed query (DeepSeek-V2 section 2.1.2): y[c] = sum_r x[r] * w[r, c] for c in [col_begin, col_end), r
  // ascending.
  //   x [rows] f32, all terms of a number added up; y [cols] f32. FP8: the scale of (r, c)'s block multiplies the weight before the product. Block formats: the
  //   weight is what DequantizeRow gives.
  void (*linear_transposed)(const WeightView& w, const float* x, float* y, int64_t col_begin, int64_t col_end);

  // out[i] = bf16(silu(gate[i]) * up[i]), silu(x) = x / (1 + exp(-x)).   all [n]
  void (*silu_mul)(const float* gate, const float* up, bf16* out, int64_t n);

  // y[i] += a * x[i]
  void (*axpy)(float a, const float* x, float* y, int64_t n);

  // The largest of x [n], n >= 1; NaN if one of them is NaN or infinite.
  float (*max_finite)(const float* x, int64_t n);

  // sum over i of exp((x[i] - top) * factor), for a softmax at temperature 1 / factor; x, out [n]. `out` takes the addends and may be null.
  // The addends are the same bits whatever n and the place in x.
  float (*exp_sum)(const float* x, int64_t n, float top, float factor, float* out);

  // Absorbed MLA over a run of consecutive positions of one page, for `heads` query heads that share the cached latent:
  //   score[h, j] = scale * (q_latent[h] . kv[j, 0:rank] + q_rope[h] . kv[j, rank:rank+rope]);  running softmax;
  //   acc[h] += exp(score - max) * kv[j, 0:rank].
  //   q_latent [heads, rank] bf16; q_rope [heads, rope] bf16; kv [count, rank + rope] bf16, rows contiguous
  //   count <= 64; state [heads]; acc [heads, rank] f32 (caller zeroes it at the start); scratch [heads * 64] f32
  // The walk is per call: the max is taken over the run, the old state rescaled once, then positions are added in
  // order. Callers always pass whole pages (the last one cut at the query's position), so the order depends on the
  // position alone.
  void (*mla_absorbed)(const bf16* q_latent, const bf16* q_rope, const bf16* kv, int64_t count, int64_t heads, int64_t rank, int64_t rope,
                       float scale, SoftmaxState* state, float* acc, float* scratch);

  // Expanded MLA (DeepSeek-V2 section 2.1.2) of one head over one page, for queries of consecutive positions; the prefill form:
  //   score[i, j] = scale * (q[i] . k[j]) for j in [skip, min(count, seen + i));  running softmax, one step a call as in mla_absorbed;
  //   acc[i] += exp(score - max) * v[j], the weight in as many BF16 terms as the values, as inputs of a product are.
  //   q [queries, key_dim] bf16, rows contiguous; state [queries]; acc [queries, ldacc] f32, zero at the start, ldacc a multiple of 16 and at least
  //   value_dim: what lies behind a row's values stays zero; scratch [AttendPageScratch] f32, on 64 bytes.
  // A query's sums have an order of their own, whatever others are in the call and however much of the page is filled behind it.
  void (*attend_page)(const ExpandedPage& page, const bf16* q, int64_t queries, int64_t seen, SoftmaxState* state, float* acc, int64_t ldacc,
                      float* scratch);

  // A page's cached rows as F32, for `attend`; exact, so bit-equal on every path.
  //   dst[r, i] = src[r, i], plus src[r, low + i] where low > 0 (the second BF16 term of a row lies `low` elements behind the first)
  //   src [rows, n] bf16, rows ld apart; dst [rows, n] f32, rows ld_dst apart
  void (*widen_bf16)(const bf16* src, int64_t ld, int64_t low, int64_t rows, int64_t n, float* dst, int64_t ld_dst);

  // The same of FP8 rows with a scale each: dst[r, i] = codes[r, i] * scales[r].
  //   codes [rows, n] E4M3, rows ld apart; scales [rows] f32, powers of two as QuantizeF8 makes them (products are exact then); dst as above
  void (*widen_f8)(const uint8_t* codes, int64_t ld, const float* scales, int64_t rows, int64_t n, float* dst, int64_t ld_dst);

  // Attention of some queries over one run of at most 64 consecutive positions, all of which each of them sees: grouped-query attention, whose heads
  // share a key head, and absorbed MLA, whose heads share the latent; everything in F32.
  //   score[h, j] = scale * (q[h] . k[j]);  running softmax, one step a call as in mla_absorbed;  acc[h] += exp(score - max) * v[j]
  //   q [queries, key_dim]; k [count, key_dim], rows ldk apart; v [count, value_dim], rows ldv apart; state [queries]; acc [queries, value_dim];
  //   scratch [queries * 64] f32. A query's sums have an order of their own, whatever others are in the call. `next` decides no bit.
  void (*attend)(const float* q, int64_t queries, const float* k, int64_t ldk, const float* v, int64_t ldv, int64_t count, int64_t key_dim,
                 int64_t value_dim, float scale, SoftmaxState* state, float* acc, float* scratch, const NextRuns& next);
  // The same over rows of plain BF16 as they lie in a page: the bits of widen_bf16 and then attend.
  void (*attend_bf16)(const float* q, int64_t queries, const bf16* k, int64_t ldk, const bf16* v, int64_t ldv, int64_t count, int64_t key_dim,
                      int64_t value_dim, float scale, SoftmaxState* state, float* acc, float* scratch, const NextRuns& next);
};

// The paths in ascending order of preference.
enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx };
// Which paths may be chosen (DESIGN section 7). kFast adds kAmx: kAvx512Bf16 but for the prefill form's product of FP8 and BF16 weights, whose sums
// have an order of the tile unit's (x86/gemm_tiles.h). No row's bits depend on its batch there either, as far as the processor's manual says;
// what no test of ours has seen on such a processor isn't called exact.
enum class Numerics { kExact, kFast };
std::string_view IsaName(Isa isa);
std::optional<Isa> IsaFromName(std::string_view name);  // "scalar", "avx2", "avx512", "avx512bf16", "amx"
// What this CPU (and the OS: XCR0) can run, ascending; never empty. kAvx512Bf16 needs F, BW, VL, DQ, BF16 and VBMI; kAmx those, AMX-TILE and AMX-BF16.
// Under kFast the OS is asked, once a process, to let all its threads use tiles.
std::vector<Isa> SupportedIsas(Numerics numerics = Numerics::kExact);
// The table of a supported path; the caller has checked.
const KernelTable& Kernels(Isa isa);

// Path-independent pieces: tiny, in F32, the same bits everywhere.

// Rotary embedding of interleaved pairs (2i, 2i+1), in place: x[2i], x[2i+1] rotated by cos[i], sin[i].
//   x [2 * half] f32
void RopeInterleaved(float* x, const float* cos, const float* sin, int64_t half);

// The same with the halves as pairs (i, i + half), as most families but DeepSeek's have it.
void RopeHalves(float* x, const float* cos, const float* sin, int64_t half);

// A row of the KV cache in FP8 E4M3 with one scale, the least power of two that lets the largest magnitude fit: x[i] is about codes[i] * scale, to 4
// significant bits, or to 2^-10 of the scale where it is smaller than 2^-6 of it. A power of two, because then the product is exact in BF16 and F32.
//   x [n] f32; codes [n], nearest even, never a NaN code. Returns the scale; NaN if some x is not finite, or beyond 2^120.
float QuantizeF8(const float* x, int64_t n, uint8_t* codes);

// acc[i] * (1 / sum) -> bf16
void FinishSoftmax(const SoftmaxState& state, const float* acc, bf16* out, int64_t n);

struct GateParams {
  int64_t num_experts = 0;
  int64_t top_k = 0;       // at most num_experts
  bool sigmoid = true;     // else softmax over all experts
  int64_t num_groups = 1;  // n_group; 1 = no groups; divides num_experts
  int64_t top_groups = 1;  // topk_group
  // A group's score. noaux_tc: the sum of its two best; false (group_limited_greedy): its best.
  bool group_score_top2 = true;
  bool normalize = true;  // norm_topk_prob; the sum gets + 1e-20
  float scaling = 1.0f;   // routed_scaling_factor
};
// The MoE gate's choice for one token (DeepSeek-V3 section 2.1.2, eq. 15-16; V2 section 2.1.1).
//   logits [num_experts] f32; bias [num_experts] f32 or null: added for the choice only, never to the weight
//   ids [top_k] i32, out, ascending by id; weights [top_k] f32, out, in the order of ids. Ties go to the lower id.
//   A NaN score loses against every number; if it is chosen all the same, its weight is NaN and the ids are still
//   valid. scratch [2 * num_experts + num_groups] f32
void GateSelect(const GateParams& params, const float* logits, const float* bias, int32_t* ids, float* weights, float* scratch);

}  // namespace hearth
