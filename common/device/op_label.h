// What an op is called where people see it, and its shapes: the same in a simulated and in a real timeline.
// Room: common/device. May touch: common/base. Threads: any; pure functions of the argument struct alone, cheap enough for each op.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/device/ops.h"

namespace hearth {

struct OpLabel {
  const char* name;
  const char* keys;               // "m n k": what the values are, in their order
  std::array<int64_t, 3> values;  // those without a key are 0
};

// Rows of a batch's streams in a layer's KV, and the last position that any of them reaches.
inline OpLabel LabelOfRows(const char* name, int64_t layer, const KvSequence* sequences, int64_t count) {
  int64_t rows = 0, until = 0;
  for (int64_t i = 0; i < count; ++i) {
    rows += sequences[i].num_rows;
    until = std::max(until, sequences[i].start_position + sequences[i].num_rows);
  }
  return layer < 0 ? OpLabel{name, "rows until", {rows, until}} : OpLabel{name, "layer rows until", {layer, rows, until}};
}

inline OpLabel LabelOf(const EmbedArgs& a) { return {"embed", "m", {a.m}}; }
inline OpLabel LabelOf(const RmsNormArgs& a) { return {"norm", "m n", {a.m, a.n}}; }
inline OpLabel LabelOf(const LinearArgs& a) { return {"linear", "m n k", {a.m, a.w.rows, a.w.cols}}; }
inline OpLabel LabelOf(const ToBf16Args& a) { return {"to_bf16", "n", {a.n}}; }
inline OpLabel LabelOf(const SiluMulArgs& a) { return {"silu_mul", "m n", {a.m, a.n}}; }
inline OpLabel LabelOf(const AddArgs& a) { return {"add", "n", {a.n}}; }
inline OpLabel LabelOf(const AddGatedArgs& a) { return {"add_gated", "m n", {a.m, a.n}}; }
inline OpLabel LabelOf(const AddRowsArgs& a) { return {"add_rows", "m n", {a.m, a.n}}; }
inline OpLabel LabelOf(const GatherRowsArgs& a) { return {"gather_rows", "m n", {a.m, a.n}}; }
inline OpLabel LabelOf(const MlaWriteKvArgs& a) { return LabelOfRows("write_kv", a.layer, a.sequences, a.num_sequences); }
inline OpLabel LabelOf(const MlaRopeQueryArgs& a) { return LabelOfRows("rope", -1, a.sequences, a.num_sequences); }
inline OpLabel LabelOf(const MlaAttentionArgs& a) { return LabelOfRows("attention", a.layer, a.sequences, a.num_sequences); }
inline OpLabel LabelOf(const GqaRotateQueryArgs& a) { return LabelOfRows("rope", -1, a.sequences, a.num_sequences); }
inline OpLabel LabelOf(const GqaWriteKvArgs& a) { return LabelOfRows("write_kv", a.layer, a.sequences, a.num_sequences); }
inline OpLabel LabelOf(const GqaAttentionArgs& a) { return LabelOfRows("attention", a.layer, a.sequences, a.num_sequences); }
inline OpLabel LabelOf(const GateArgs& a) { return {"gate", "m experts", {a.m, a.params.num_experts}}; }
inline OpLabel LabelOf(const ExpertsArgs& a) { return {"experts", "layer m", {a.layer, a.m}}; }
inline OpLabel LabelOf(const ExpertRowsArgs& a) { return {"expert", "n", {a.n}}; }
inline OpLabel LabelOf(const ClearArgs& a) { return {"clear", "n", {a.n}}; }
inline OpLabel LabelOf(const ToDeviceArgs& a) { return {"to_device", "bytes", {static_cast<int64_t>(a.bytes)}}; }
inline OpLabel LabelOf(const ToHostArgs& a) { return {"to_host", "bytes", {static_cast<int64_t>(a.bytes)}}; }

}  // namespace hearth
