// The path for CPUs with AVX2, FMA and F16C: everything in F32, eight lanes.
// Room: common/kernels. Compiled with its own flags (CMakeLists.txt); isa_local.h has the rules of this folder.
#include "common/kernels/x86/attend_page.h"
#include "common/kernels/x86/block_f32_dots.h"
#include "common/kernels/x86/f32_dots.h"
#include "common/kernels/x86/gemm_f32.h"
#include "common/kernels/x86/make_table.h"
#include "common/kernels/x86/vec256.h"

namespace hearth {
namespace {

struct Avx2Path {
  static constexpr const char* kName = "avx2";
  using V = Vec256;
  using F8 = F8InF32<V>;
  using Bf16 = Bf16InF32<V>;
  using F16 = F16InF32<V>;
  using F32 = F32InF32<V>;
  template <DType kDType>
  using Block = BlockInF32<V, kDType>;
  template <class Path>
  static constexpr GemmKernel* kGemm = GemmInF32<Path>;
  template <class Path>
  using Page = F32Page<Path>;
  template <class D, int kPieces>
  static constexpr TileShapes kLinearTiles = {.one = {4, 1}, .few = {4, 2}, .many = {4, 2}};
  static constexpr int kGemmVectors = 2;  // rows and tokens whose sums are in registers, in F32
  static constexpr int kGemmTokensAtOnce = 4;
  static constexpr int kScoreHeads = 2;
  static constexpr int kValueHeads = 2;
  static constexpr int kValueVectors = 4;
  static constexpr int kQueries = 2;
};

}  // namespace

constinit const KernelTable kAvx2Table = TableOf<Avx2Path>::kTable;

}  // namespace hearth
