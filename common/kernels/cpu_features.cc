#include "common/kernels/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace hearth {
namespace {

bool Bit(uint32_t word, int bit) { return (word >> bit) & 1u; }

// XCR0, the mask of register states that the OS enables. Valid only if CPUID says OSXSAVE; written as bytes of inline
// assembly because the intrinsic needs -mxsave, which this file must not have.
uint64_t ReadXcr0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

}  // namespace

CpuFeatures DetectCpuFeatures() {
  CpuFeatures f;
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return f;
  f.fma = Bit(ecx, 12);
  f.f16c = Bit(ecx, 29);
  if (Bit(ecx, 27)) {  // OSXSAVE
    constexpr uint64_t kYmm = 0x06;
    constexpr uint64_t kZmm = 0xe6;
    constexpr uint64_t kTiles = 0x60000;  // XTILECFG, XTILEDATA
    const uint64_t xcr0 = ReadXcr0();
    f.os_saves_ymm = (xcr0 & kYmm) == kYmm;
    f.os_saves_zmm = (xcr0 & kZmm) == kZmm;
    f.os_saves_tiles = (xcr0 & kTiles) == kTiles;
  }
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return f;
  const uint32_t subleaves = eax;
  f.avx2 = Bit(ebx, 5);
  f.avx512f = Bit(ebx, 16);
  f.avx512dq = Bit(ebx, 17);
  f.avx512bw = Bit(ebx, 30);
  f.avx512vl = Bit(ebx, 31);
  f.avx512vbmi = Bit(ecx, 1);
  f.amx_bf16 = Bit(edx, 22);
  f.amx_tile = Bit(edx, 24);
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) f.avx512bf16 = Bit(eax, 5);
  return f;
}

bool OsGrantsTiles() {
  constexpr int kArchReqXcompPerm = 0x1023;  // asm/prctl.h, which older headers lack
  constexpr int kXtileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
  return granted;
}

std::vector<Isa> IsasFor(const CpuFeatures& f, Numerics numerics) {
  std::vector<Isa> isas = {Isa::kScalar};
  if (!(f.avx2 && f.fma && f.f16c && f.os_saves_ymm)) return isas;
  isas.push_back(Isa::kAvx2);
  if (!(f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq && f.os_saves_zmm)) return isas;
  isas.push_back(Isa::kAvx512);
  if (!(f.avx512bf16 && f.avx512vbmi)) return isas;
  isas.push_back(Isa::kAvx512Bf16);
  if (numerics == Numerics::kFast && f.amx_tile && f.amx_bf16 && f.os_saves_tiles) isas.push_back(Isa::kAmx);
  return isas;
}

}  // namespace hearth
