// The path for CPUs with AVX-512 F, BW, VL, DQ, VBMI and BF16: FP8 and BF16 weights by VDPBF16PS, the rest as in
// avx512.cc. Room: common/kernels. Compiled with its own flags (CMakeLists.txt); isa_local.h has the rules of this
// folder.
#include "common/kernels/x86/attend_page_bf16.h"
#include "common/kernels/x86/bf16_dots.h"
#include "common/kernels/x86/block_bf16_dots.h"
#include "common/kernels/x86/f32_dots.h"
#include "common/kernels/x86/gemm_blocks.h"
#include "common/kernels/x86/make_table.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

struct Avx512Bf16Path {
  static constexpr const char* kName = "avx512bf16";
  using V = Vec512;
  using F8 = F8InBf16;
  using Bf16 = Bf16InBf16;
  using F16 = F16InF32<V>;
  using F32 = F32InF32<V>;
  template <DType kDType>
  using Block = BlockInBf16<kDType>;
  template <class Path>
  static constexpr GemmKernel* kGemm = GemmWithBlocks<Path>;
  template <class Path>
  using Page = DotPage;
  // Few tokens (or one in two terms) wait for memory, and read theirs less often for more rows; many wait for the core: 4 x 6 sums and a step's weights are all registers.
  // Block formats cost more to widen than tokens cost to read anew, and their sums need not all be in registers: each row of a span is added up by
  // itself.
  template <class D, int kPieces>
  static constexpr TileShapes kLinearTiles = {
      .one = {kPieces > 1 ? 8 : 4, 1}, .few = {8, 2}, .many = {BlockPolicy<D> ? 8 : 4, BlockPolicy<D> ? 4 : 6}};
  static constexpr int kGemmVectors = 4;  // rows and tokens whose sums are in registers, in F32
  static constexpr int kGemmTokensAtOnce = 6;
  static constexpr int kScoreHeads = 4;
  static constexpr int kValueHeads = 4;
  static constexpr int kValueVectors = 4;
  static constexpr int kQueries = 4;
};

}  // namespace

constinit const KernelTable kAvx512Bf16Table = TableOf<Avx512Bf16Path>::kTable;

constinit const KernelTable kAmxTable = [] {
  KernelTable table = TableOf<Avx512Bf16Path>::kTable;
  table.name = "amx";
  table.gemm = GemmInAmxTiles;
  return table;
}();

}  // namespace hearth
