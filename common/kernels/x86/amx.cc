// The prefill form's product with AMX tiles, for CPUs with AMX-TILE and AMX-BF16 beside all that the avx512bf16 path needs. That path's table with
// this product in it is kAmxTable (avx512bf16.cc). Compiled with its own flags (CMakeLists.txt); isa_local.h has the rules of this folder.
#include "common/kernels/tables.h"
#include "common/kernels/x86/gemm_bf16.h"
#include "common/kernels/x86/gemm_tiles.h"
#include "common/kernels/x86/vec512.h"

namespace hearth {
namespace {

// Written as assembly: GCC 12's intrinsics take the register's number as text, which a template has not, and don't say that they read memory, so that
// the stores of a tile could move behind its load.
struct AmxUnit {
  using V = Vec512;
  using Tile = DotForm::Tile;
  static constexpr int64_t kPairsStride = sizeof(Tile::pairs[0]);

  template <class P>
  static HEARTH_INLINE void Fill(Tile& tile, int64_t v, const uint8_t* data, int64_t stride, int64_t rows, int64_t begin, int64_t cols) {
    DotForm::Fill<P>(tile, v, data, stride, rows, begin, cols);
  }
  static HEARTH_INLINE void Configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
  static HEARTH_INLINE void Release() { __asm__ volatile("tilerelease" : : : "memory"); }
  template <int T>
  static HEARTH_INLINE void Zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  static HEARTH_INLINE void Load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static HEARTH_INLINE void Store(float* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
  }
  // In AT&T's order, the second operand of the product comes first.
  template <int C, int A, int B>
  static HEARTH_INLINE void Dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

}  // namespace

void GemmInAmxTiles(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  switch (w.dtype) {
    case DType::kF8E4M3: return GemmInTiles<AmxUnit, F8Pairs>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    case DType::kBF16: return GemmInTiles<AmxUnit, Bf16Pairs>(w, x, ldx, m_count, y, ldy, row_begin, row_end);
    default: return kAvx512Bf16Table.gemm(w, x, ldx, m_count, y, ldy, row_begin, row_end);
  }
}

}  // namespace hearth
