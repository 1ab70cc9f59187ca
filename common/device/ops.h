// Ops: the whole vocabulary of a forward pass. Each call takes a stream and an argument struct; what a call costs is a function of that
// struct alone (op_cost.h). Pointers are device addresses; on the host device they are plain memory.
// Room: common/device. May touch: common/{kernels,shm,base}. Threads: a stream is used by one thread at a time.
// Shapes are row-major and dense unless a stride is given. M = rows (tokens) of the batch, H = hidden_size.
// T = terms: a matrix input is the sum of T BF16 numbers (DeviceCaps::activation_terms; 1 = plain BF16), a row's terms beside each other: [M, T, n].
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "common/device/device.h"
#include "common/kernels/kernels.h"
#include "common/shm/expert_record.h"
#include "common/shm/kv_pool.h"

namespace hearth {

// Prefill kernels (expanded MLA) and decode kernels (absorbed MLA) differ by rounding; within a form nothing does (DESIGN section 7).
enum class Form { kPrefill, kDecode };

// Consecutive rows of one stream in a batch.
struct KvSequence {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t start_position = 0;      // of its first row
  int64_t write_from = 0;          // KV is written for positions >= this; lower ones are valid already: queried, never rewritten
  const int32_t* pages = nullptr;  // page i of the stream holds positions [64 i, 64 i + 64); covers start_position + num_rows
};

struct EmbedArgs {
  WeightView table;                    // [vocab, H]
  const int32_t* token_ids = nullptr;  // [M]
  int64_t m = 0;
  float* out = nullptr;  // [M, H]
};

struct RmsNormArgs {
  const float* x = nullptr;  // [M, n], rows ldx apart
  int64_t ldx = 0;
  const float* weight = nullptr;  // [n]
  float eps = 0;
  int64_t m = 0, n = 0;
  int terms = 1;
  bf16* out = nullptr;   // [M, T, n], terms ldo apart
  int64_t ldo = 0;       // 0: n
  float* f32 = nullptr;  // [M, n]: where given, the result goes here unrounded, and `out` is not written
};

struct LinearArgs {
  Form form = Form::kDecode;
  WeightView w;  // [N, K]
  int terms = 1;
  const bf16* x = nullptr;  // [M, T, K], terms ldx apart
  int64_t ldx = 0;
  int64_t m = 0;
  float* y = nullptr;  // [M, N], rows ldy apart
  int64_t ldy = 0;
};

struct ToBf16Args {
  const float* x = nullptr;  // [n]
  int64_t n = 0;
  bf16* out = nullptr;
};

struct SiluMulArgs {
  const float* gate = nullptr;  // [M, n], rows ld apart
  const float* up = nullptr;    // [M, n], rows ld apart
  int64_t ld = 0;
  int64_t m = 0, n = 0;
  int terms = 1;
  bf16* out = nullptr;  // [M, T, n]
};

struct AddArgs {
  const float* x = nullptr;  // [n]
  float* y = nullptr;        // [n]; y += x
  int64_t n = 0;
};

// y[m] += sigmoid(gate[m]) * x[m]: a shared expert behind a gate of its own (Qwen2-MoE).
struct AddGatedArgs {
  const float* x = nullptr;     // [M, n]
  const float* gate = nullptr;  // [M]
  int64_t m = 0, n = 0;
  float* y = nullptr;  // [M, n]
};

// sum[rows[i]] += weights[i] * x[i], in the order of i: outputs of experts that came back each for itself, to where the ExpertRows op would have added them,
// with the same arithmetic.
struct AddRowsArgs {
  const float* x = nullptr;        // [m, n]
  const int32_t* rows = nullptr;   // [m]
  const float* weights = nullptr;  // [m]
  int64_t m = 0, n = 0;
  float* sum = nullptr;  // [*, n]
};

struct GatherRowsArgs {
  const float* x = nullptr;       // [*, n]
  const int32_t* rows = nullptr;  // [M]
  int64_t m = 0, n = 0;
  float* out = nullptr;  // [M, n]
};

// cos and sin [max_positions, rope/2], with YaRN's attention factor already in them.
struct RopeTable {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half = 0;
  int64_t max_positions = 0;
};

// Normalises the latent, rotates the shared key, writes both as BF16 into the pages (DeepSeek-V2 section 2.1.2-2.1.3).
struct MlaWriteKvArgs {
  const float* kv_a = nullptr;         // [M, rank + rope], the output of kv_a_proj_with_mqa
  const float* norm_weight = nullptr;  // [rank]
  float eps = 0;
  RopeTable rope;
  int64_t rank = 0;
  int terms = 1;      // a cached row is [T, rank + rope], or FP8 as the pool's dtype says
  int64_t layer = 0;  // KV layer index
  const KvPool* kv = nullptr;
  DType kv_dtype = DType::kBF16;  // the pool's
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
};

// Rotates the rotary part of each head's query and rounds to BF16.
struct MlaRopeQueryArgs {
  const float* q = nullptr;  // [M, heads, nope + rope]
  RopeTable rope;
  int64_t heads = 0, nope = 0, rope_dim = 0;
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  int terms = 1;
  bf16* out = nullptr;  // [M, T, heads, nope + rope]
};

// Causal attention of each row over positions skip..its own. kPrefill: keys and values are expanded through kv_b; kDecode: kv_b is absorbed into the
// query and the output. A row's result depends on its position, the pages and the form, not on the batch or the chunk.
struct MlaAttentionArgs {
  Form form = Form::kDecode;
  const bf16* q = nullptr;  // [M, T, heads, nope + rope]
  WeightView kv_b;          // [heads * (nope + v), rank]; head h: nope rows of keys, then v rows of values
  // Instead of kv_b (which has no data then), as some checkpoints keep them: keys transposed, and values.
  WeightView k_b;  // [heads * rank, nope]
  WeightView v_b;  // [heads * v, rank]
  int64_t heads = 0, nope = 0, rope_dim = 0, v_dim = 0, rank = 0;
  float softmax_scale = 0;
  int64_t layer = 0;
  int64_t skip = 0;  // positions below are not attended, and have no rows: 1 for an MTP layer, whose slot 0 is empty (docs/kv-pool.md)
  const KvPool* kv = nullptr;
  DType kv_dtype = DType::kBF16;  // the pool's
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  int terms = 1;        // of queries, BF16 rows and result
  bf16* out = nullptr;  // [M, T, heads, v]
};

// How queries and keys of grouped-query attention are normalised before they are rotated: each head for itself (Qwen3), or all heads as one vector
// (MiniMax-M2). RMSNorm in F32.
struct HeadNorm {
  enum class Over { kNone, kHead, kAllHeads };
  Over over = Over::kNone;
  const float* weight = nullptr;  // [head_dim], or [heads * head_dim]
  float eps = 0;
};

// In place: bias, norm, rotation of the first 2 * rope.half elements of each head (pairs i, i + half; the rest passes).
struct GqaRotateQueryArgs {
  float* q = nullptr;           // [M, heads, head_dim], the output of q_proj
  const float* bias = nullptr;  // [heads * head_dim] or null
  HeadNorm norm;
  RopeTable rope;
  int64_t heads = 0, head_dim = 0;
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
};

// Keys as queries above, values with their bias alone; both as BF16 terms into the pages, a KV head's positions beside each other.
struct GqaWriteKvArgs {
  float* k = nullptr;             // [M, kv_heads, head_dim]; normalised and rotated in place
  float* v = nullptr;             // [M, kv_heads, head_dim]; its bias is added in place
  const float* k_bias = nullptr;  // [kv_heads * head_dim] or null; v_bias alike
  const float* v_bias = nullptr;
  HeadNorm norm;
  RopeTable rope;
  int64_t kv_heads = 0, head_dim = 0;
  int terms = 1;      // of a BF16 vector in the cache: [T, head_dim]
  int64_t layer = 0;  // KV layer index; a page's layer is [2 (keys, values), kv_heads, 64, T, head_dim]
  const KvPool* kv = nullptr;
  DType kv_dtype = DType::kBF16;  // the pool's
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
};

// Causal attention of each row over positions 0..its own, heads / kv_heads query heads to a KV head (arXiv 2305.13245). In F32 and in one form: a row's
// result depends on its position and the pages alone.
struct GqaAttentionArgs {
  const float* q = nullptr;  // [M, heads, head_dim], rotated
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float softmax_scale = 0;
  int64_t layer = 0;
  int64_t skip = 0;  // as in MlaAttentionArgs
  const KvPool* kv = nullptr;
  DType kv_dtype = DType::kBF16;  // the pool's
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  int terms = 1;        // of BF16 vectors in the cache and of the result
  bf16* out = nullptr;  // [M, T, heads, head_dim]
};

// The MoE gate works in F32 on the F32 residual (it normalises for itself): BF16 activations would move more expert choices than all else together.
struct GateArgs {
  const float* x = nullptr;            // [M, H] residual, before the norm
  const float* norm_weight = nullptr;  // [H]
  float eps = 0;
  WeightView w;                 // [experts, H], BF16 or F32
  const float* bias = nullptr;  // [experts] or null
  GateParams params;
  int64_t m = 0, hidden = 0;
  int32_t* ids = nullptr;    // [M, top_k], ascending
  float* weights = nullptr;  // [M, top_k]
};

class ExpertSource;  // common/experts/expert_source.h: where the bytes of (layer, expert, shard) come from

// out[m] = sum over the chosen experts of weight * down(silu(gate(x)) * up(x)), in the order that DESIGN section 7 fixes for the form.
struct ExpertsArgs {
  Form form = Form::kDecode;
  ExpertSource* source = nullptr;
  int64_t layer = 0;
  int64_t num_experts = 0, top_k = 0;
  int64_t hidden = 0, intermediate = 0;
  int64_t num_shards = 1;
  ExpertDTypes weight_dtypes = DType::kF8E4M3;
  int terms = 1;
  const bf16* x = nullptr;         // [M, T, H], normalised
  const int32_t* ids = nullptr;    // [M, top_k], ascending
  const float* weights = nullptr;  // [M, top_k]
  int64_t m = 0;
  float* out = nullptr;  // [M, H], overwritten
};

struct ExpertView;  // common/experts/expert_source.h: one shard of one expert as matrices

// sum[rows[i]] += weights[i] * down(silu(gate(x)) * up(x)) of one expert for the rows that chose it, its shards added first, ascending.
// Called for an id-quarter's experts in ascending order on a sum that was cleared, then (q0 + q1) + (q2 + q3): the bits of the Experts op in the prefill form.
struct ExpertRowsArgs {
  Form form = Form::kPrefill;
  const ExpertView* shards = nullptr;  // [S] on the host; the weights that they name are device addresses
  int64_t num_shards = 1;
  int64_t hidden = 0, intermediate = 0;
  ExpertDTypes weight_dtypes = DType::kF8E4M3;
  int terms = 1;
  const bf16* x = nullptr;         // [M, T, H], normalised
  const int32_t* rows = nullptr;   // [n] of x and sum, ascending
  const float* weights = nullptr;  // [n]
  int64_t n = 0;
  float* sum = nullptr;  // [M, H]
  // Room for the work, ExpertRowsWorkspaceBytes: rows beyond what it holds go through it in several parts, which moves no bit.
  void* workspace = nullptr;
  uint64_t workspace_bytes = 0;
};

// Inputs gathered, activations, and a down output a shard, of so many rows.
inline uint64_t ExpertRowsWorkspaceBytes(int64_t rows, int64_t hidden, int64_t intermediate, int64_t num_shards, int terms) {
  const int64_t row =
      terms * (hidden + intermediate) * static_cast<int64_t>(sizeof(bf16)) + num_shards * hidden * static_cast<int64_t>(sizeof(float));
  return static_cast<uint64_t>(rows * row + (1 + 2 * num_shards) * 64);  // each part begins on 64 bytes
}

struct ClearArgs {
  float* x = nullptr;  // [n], zeros afterwards
  int64_t n = 0;
};

// A loader's copy over the link between host memory and the device.
struct ToDeviceArgs {
  const void* host = nullptr;
  void* device = nullptr;
  uint64_t bytes = 0;
  const StopToken* stop = nullptr;  // once it is set nobody reads what was copied: the device may cut the copy short
  bool steers = false;              // what is copied decides what the engine does next: a device that computes nothing copies it all the same
};

struct ToHostArgs {
  const void* device = nullptr;
  void* host = nullptr;
  uint64_t bytes = 0;
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual void Embed(Stream&, const EmbedArgs&) = 0;
  virtual void RmsNorm(Stream&, const RmsNormArgs&) = 0;
  virtual void Linear(Stream&, const LinearArgs&) = 0;
  virtual void ToBf16(Stream&, const ToBf16Args&) = 0;
  virtual void SiluMul(Stream&, const SiluMulArgs&) = 0;
  virtual void Add(Stream&, const AddArgs&) = 0;
  virtual void AddGated(Stream&, const AddGatedArgs&) = 0;
  virtual void AddRows(Stream&, const AddRowsArgs&) = 0;
  virtual void GatherRows(Stream&, const GatherRowsArgs&) = 0;
  virtual void MlaWriteKv(Stream&, const MlaWriteKvArgs&) = 0;
  virtual void MlaRopeQuery(Stream&, const MlaRopeQueryArgs&) = 0;
  virtual void MlaAttention(Stream&, const MlaAttentionArgs&) = 0;
  virtual void GqaRotateQuery(Stream&, const GqaRotateQueryArgs&) = 0;
  virtual void GqaWriteKv(Stream&, const GqaWriteKvArgs&) = 0;
  virtual void GqaAttention(Stream&, const GqaAttentionArgs&) = 0;
  virtual void Gate(Stream&, const GateArgs&) = 0;
  virtual void Experts(Stream&, const ExpertsArgs&) = 0;
  virtual void ExpertRows(Stream&, const ExpertRowsArgs&) = 0;
  virtual void Clear(Stream&, const ClearArgs&) = 0;
  virtual void ToDevice(Stream&, const ToDeviceArgs&) = 0;
  virtual void ToHost(Stream&, const ToHostArgs&) = 0;
};

}  // namespace hearth
