// Names of the paths and the way from a path to its table.
#include "common/kernels/cpu_features.h"
#include "common/kernels/kernels.h"
#include "common/kernels/tables.h"

namespace hearth {

const KernelTable& Kernels(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return kScalarTable;
    case Isa::kAvx2: return kAvx2Table;
    case Isa::kAvx512: return kAvx512Table;
    case Isa::kAvx512Bf16: return kAvx512Bf16Table;
    case Isa::kAmx: return kAmxTable;
  }
  return kScalarTable;
}

std::string_view IsaName(Isa isa) { return Kernels(isa).name; }

std::optional<Isa> IsaFromName(std::string_view name) {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx}) {
    if (name == IsaName(isa)) return isa;
  }
  return std::nullopt;
}

std::vector<Isa> SupportedIsas(Numerics numerics) {
  CpuFeatures features = DetectCpuFeatures();
  if (numerics == Numerics::kFast && features.os_saves_tiles) features.os_saves_tiles = OsGrantsTiles();
  return IsasFor(features, numerics);
}

}  // namespace hearth
