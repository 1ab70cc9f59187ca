// A path's table out of its description: vector type V, dot policies F8, Bf16, F16, F32, and the tiles' sizes.
// Included by the files of this folder only; see isa_local.h.
#pragma once

#include "common/kernels/tables.h"
#include "common/kernels/x86/attend.h"
#include "common/kernels/x86/attend_page.h"
#include "common/kernels/x86/attention.h"
#include "common/kernels/x86/elementwise.h"
#include "common/kernels/x86/isa_local.h"
#include "common/kernels/x86/linear.h"
#include "common/kernels/x86/linear_transposed.h"

namespace hearth {
namespace {

// Every field is a constant, so the tables need no code at start-up.
template <class Path>
struct TableOf {
  using V = typename Path::V;
  static constexpr KernelTable kTable = {
      .name = Path::kName,
      .to_bf16 = VectorToBf16<V>,
      .rms_norm = RmsNorm<V>,
      .linear = Linear<Path>,
      .gemm = Path::template kGemm<Path>,
      .linear_transposed = LinearTransposed<Path>,
      .silu_mul = SiluMul<V>,
      .axpy = Axpy<V>,
      .max_finite = MaxFinite<V>,
      .exp_sum = ExpSum<V>,
      .mla_absorbed = MlaAbsorbed<Path>,
      .attend_page = AttendPage<Path>,
      .widen_bf16 = WidenBf16<V>,
      .widen_f8 = WidenF8<V>,
      .attend = Attend<Path, float>,
      .attend_bf16 = Attend<Path, bf16>,
  };
};

}  // namespace
}  // namespace hearth
