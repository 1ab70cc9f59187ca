#include "common/device/op_cost.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace hearth {
namespace {

constexpr double kF32 = 4;
constexpr double kBf16 = 2;

double Blocks(int64_t n) { return static_cast<double>(ScaleBlocks(n)); }

int64_t TotalRows(const KvSequence* sequences, int64_t num_sequences) {
  int64_t rows = 0;
  for (int64_t i = 0; i < num_sequences; ++i) rows += sequences[i].num_rows;
  return rows;
}

// Positions that the rows of a sequence see, summed: start+1, start+2, ..., start+rows.
double SeenPositions(const KvSequence& s, int64_t skip) {
  const double rows = static_cast<double>(s.num_rows);
  return rows * (s.start_position - skip) + rows * (rows + 1) / 2;
}

// Rows whose KV is written.
double WrittenRows(const KvSequence* sequences, int64_t num_sequences) {
  double written = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const KvSequence& s = sequences[i];
    written += static_cast<double>(s.num_rows - std::clamp<int64_t>(s.write_from - s.start_position, 0, s.num_rows));
  }
  return written;
}

// Bytes that a token's cached numbers have in a layer (docs/kv-pool.md).
double LatentRowBytes(DType dtype, int64_t rank, int64_t rope, int terms) {
  return static_cast<double>(dtype == DType::kF8E4M3 ? rank + 2 * rope + 4 : 2 * terms * (rank + rope));
}
double HeadRowsBytes(DType dtype, int64_t kv_heads, int64_t head_dim, int terms) {
  return 2.0 * static_cast<double>(kv_heads * (dtype == DType::kF8E4M3 ? head_dim + 4 : 2 * terms * head_dim));
}

// Weights of a whole expert, with their scales.
double RecordBytes(const ExpertDTypes& dtypes, int64_t hidden, int64_t intermediate) {
  double record = 0;
  for (const DType dtype : {dtypes.gate, dtypes.up, dtypes.down}) {
    record += static_cast<double>(DTypeBytes(dtype, static_cast<uint64_t>(hidden) * static_cast<uint64_t>(intermediate)));
  }
  if (dtypes.gate == DType::kF8E4M3) record += 3 * Blocks(hidden) * Blocks(intermediate) * kF32;
  return record;
}

}  // namespace

OpCost& OpCost::operator+=(const OpCost& o) {
  flops += o.flops;
  weight_bytes += o.weight_bytes;
  activation_bytes += o.activation_bytes;
  kv_bytes += o.kv_bytes;
  return *this;
}

std::string OpCost::ToString() const {
  return absl::StrFormat("flops=%.15g weights=%.15g activations=%.15g kv=%.15g", flops, weight_bytes, activation_bytes, kv_bytes);
}

double WeightViewBytes(const WeightView& w) {
  double bytes = static_cast<double>(w.rows) * static_cast<double>(DTypeBytes(w.dtype, static_cast<uint64_t>(w.cols)));
  if (w.dtype == DType::kF8E4M3) {
    const int64_t first = w.scale_row0 / kScaleBlock;
    const int64_t last = w.rows == 0 ? first : ScaleBlocks(w.scale_row0 + w.rows);
    bytes += static_cast<double>(last - first) * Blocks(w.cols) * kF32;
  }
  return bytes;
}

double ExpectedDistinctExperts(int64_t num_experts, int64_t top_k, int64_t m) {
  if (num_experts <= 0) return 0;
  const double asleep = 1.0 - static_cast<double>(top_k) / static_cast<double>(num_experts);
  return static_cast<double>(num_experts) * (1.0 - std::pow(asleep, static_cast<double>(m)));
}

OpCost CostOf(const EmbedArgs& a) {
  const double row = static_cast<double>(a.m) * a.table.cols;
  return {.flops = 0,
          .weight_bytes = static_cast<double>(a.m) * static_cast<double>(DTypeBytes(a.table.dtype, static_cast<uint64_t>(a.table.cols))),
          .activation_bytes = row * kF32,
          .kv_bytes = 0};
}

OpCost CostOf(const RmsNormArgs& a) {
  const double n = static_cast<double>(a.m) * a.n;
  return {.flops = 4 * n, .weight_bytes = kF32 * a.n, .activation_bytes = n * (kF32 + (a.f32 != nullptr ? kF32 : a.terms * kBf16)), .kv_bytes = 0};
}

OpCost CostOf(const LinearArgs& a) {
  const double m = static_cast<double>(a.m);
  return {.flops = 2 * m * a.terms * a.w.rows * a.w.cols,
          .weight_bytes = WeightViewBytes(a.w),
          .activation_bytes = m * (a.terms * a.w.cols * kBf16 + a.w.rows * kF32),
          .kv_bytes = 0};
}

OpCost CostOf(const ToBf16Args& a) { return {.flops = 0, .weight_bytes = 0, .activation_bytes = a.n * (kF32 + kBf16), .kv_bytes = 0}; }

OpCost CostOf(const SiluMulArgs& a) {
  const double n = static_cast<double>(a.m) * a.n;
  return {.flops = 5 * n, .weight_bytes = 0, .activation_bytes = n * (2 * kF32 + a.terms * kBf16), .kv_bytes = 0};
}

OpCost CostOf(const AddArgs& a) { return {.flops = static_cast<double>(a.n), .weight_bytes = 0, .activation_bytes = 3 * kF32 * a.n, .kv_bytes = 0}; }

OpCost CostOf(const AddGatedArgs& a) {
  const double n = static_cast<double>(a.m) * a.n;
  return {.flops = 2 * n, .weight_bytes = 0, .activation_bytes = 3 * kF32 * n + kF32 * a.m, .kv_bytes = 0};
}

OpCost CostOf(const AddRowsArgs& a) {
  return {.flops = 2.0 * a.m * a.n, .weight_bytes = 0, .activation_bytes = a.m * (3 * kF32 * a.n + 8), .kv_bytes = 0};
}

OpCost CostOf(const GatherRowsArgs& a) { return {.flops = 0, .weight_bytes = 0, .activation_bytes = 2 * kF32 * a.m * a.n, .kv_bytes = 0}; }

OpCost CostOf(const MlaWriteKvArgs& a) {
  const double written = WrittenRows(a.sequences, a.num_sequences);
  const double n = static_cast<double>(a.rank + 2 * a.rope.half) * written;
  return {.flops = 4 * n,
          .weight_bytes = kF32 * a.rank,
          .activation_bytes = kF32 * n,
          .kv_bytes = written * LatentRowBytes(a.kv_dtype, a.rank, 2 * a.rope.half, a.terms)};
}

OpCost CostOf(const MlaRopeQueryArgs& a) {
  const double rows = static_cast<double>(TotalRows(a.sequences, a.num_sequences)) * a.heads;
  return {
      .flops = rows * 3 * a.rope_dim, .weight_bytes = 0, .activation_bytes = rows * (a.nope + a.rope_dim) * (kF32 + a.terms * kBf16), .kv_bytes = 0};
}

OpCost CostOf(const MlaAttentionArgs& a) {
  OpCost cost;
  cost.weight_bytes = WeightViewBytes(a.kv_b) + WeightViewBytes(a.k_b) + WeightViewBytes(a.v_b);
  const double heads = static_cast<double>(a.heads);
  const double kv_row = LatentRowBytes(a.kv_dtype, a.rank, a.rope_dim, a.terms);
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const KvSequence& s = a.sequences[i];
    const double rows = static_cast<double>(s.num_rows);
    const double seen = SeenPositions(s, a.skip);
    const double end = static_cast<double>(s.start_position + s.num_rows);
    cost.activation_bytes += rows * heads * (a.nope + a.rope_dim + a.v_dim) * a.terms * kBf16;
    if (a.form == Form::kDecode) {
      cost.flops += 2 * heads * (rows * a.rank * (a.nope + a.v_dim) + seen * (2 * a.rank + a.rope_dim));
      cost.kv_bytes += seen * kv_row;
    } else {
      cost.flops += 2 * heads * (end * a.rank * (a.nope + a.v_dim) + seen * (a.nope + a.rope_dim + a.v_dim));
      cost.kv_bytes += end * kv_row;
    }
  }
  return cost;
}

OpCost CostOf(const GqaRotateQueryArgs& a) {
  const double n = static_cast<double>(TotalRows(a.sequences, a.num_sequences)) * a.heads * a.head_dim;
  return {.flops = 4 * n, .weight_bytes = 0, .activation_bytes = 2 * kF32 * n, .kv_bytes = 0};
}

OpCost CostOf(const GqaWriteKvArgs& a) {
  const double written = WrittenRows(a.sequences, a.num_sequences);
  const double n = 2.0 * static_cast<double>(a.kv_heads * a.head_dim) * written;
  return {.flops = 2 * n,
          .weight_bytes = 0,
          .activation_bytes = kF32 * n,
          .kv_bytes = written * HeadRowsBytes(a.kv_dtype, a.kv_heads, a.head_dim, a.terms)};
}

OpCost CostOf(const GqaAttentionArgs& a) {
  OpCost cost;
  const double query = static_cast<double>(a.heads) * a.head_dim;
  const double cached = HeadRowsBytes(a.kv_dtype, a.kv_heads, a.head_dim, a.terms);
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const KvSequence& s = a.sequences[i];
    cost.flops += 4 * query * SeenPositions(s, a.skip);
    cost.activation_bytes += static_cast<double>(s.num_rows) * query * (kF32 + a.terms * kBf16);
    cost.kv_bytes += static_cast<double>(s.start_position + s.num_rows) * cached;
  }
  return cost;
}

OpCost CostOf(const GateArgs& a) {
  const double m = static_cast<double>(a.m);
  // Two products a token: the F32 activations go through as the sum of two BF16 terms.
  return {.flops = m * (4 * a.hidden + 4 * a.hidden * static_cast<double>(a.params.num_experts)),
          .weight_bytes = WeightViewBytes(a.w) + kF32 * a.hidden + (a.bias != nullptr ? kF32 * a.params.num_experts : 0),
          .activation_bytes = m * (kF32 * a.hidden + 8 * a.params.top_k),
          .kv_bytes = 0};
}

OpCost CostOf(const ExpertsArgs& a) { return CostOfExperts(a, ExpectedDistinctExperts(a.num_experts, a.top_k, a.m)); }

OpCost CostOfExperts(const ExpertsArgs& a, double distinct_experts) {
  const double elements = 3.0 * static_cast<double>(a.hidden) * a.intermediate;
  const double record = RecordBytes(a.weight_dtypes, a.hidden, a.intermediate);
  const double pairs = static_cast<double>(a.m) * a.top_k;
  return {.flops = 2 * pairs * a.terms * elements,
          .weight_bytes = distinct_experts * record,
          .activation_bytes = static_cast<double>(a.m) * a.hidden * (a.terms * kBf16 + kF32) + 8 * pairs,
          .kv_bytes = 0};
}

OpCost CostOf(const ExpertRowsArgs& a) {
  const double n = static_cast<double>(a.n);
  return {.flops = 2 * n * a.terms * 3.0 * a.hidden * a.intermediate,
          .weight_bytes = n > 0 ? RecordBytes(a.weight_dtypes, a.hidden, a.intermediate) : 0,
          .activation_bytes = n * (a.hidden * (a.terms * kBf16 + 2 * kF32) + 8),
          .kv_bytes = 0};
}

OpCost CostOf(const ClearArgs& a) { return {.flops = 0, .weight_bytes = 0, .activation_bytes = kF32 * a.n, .kv_bytes = 0}; }

OpCost CostOf(const ToDeviceArgs& a) { return {.flops = 0, .weight_bytes = static_cast<double>(a.bytes), .activation_bytes = 0, .kv_bytes = 0}; }

OpCost CostOf(const ToHostArgs& a) { return {.flops = 0, .weight_bytes = 0, .activation_bytes = static_cast<double>(a.bytes), .kv_bytes = 0}; }

}  // namespace hearth
