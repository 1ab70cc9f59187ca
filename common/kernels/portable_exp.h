// exp() in F32 from basic operations only: the same bits on every machine and C library, which the library's is not
// (it picks a version by CPU). For the scalar path and the gate; the SIMD paths have x86/vector_exp.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace hearth {

// Computed in F64 and rounded once, so within 0.51 ulp. exp(-inf) = 0, exp(inf) = inf, NaN stays NaN.
inline float PortableExp(float x) {
  if (std::isnan(x)) return x;
  if (x > 89.0f) return __builtin_inff();  // e^88.73 exceeds the largest float
  if (x < -104.0f) return 0.0f;            // e^-103.98 is half of the least float
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  const double n = std::floor(x * kLog2E + 0.5);
  const double r = x - n * kLn2;  // |r| <= 0.35; n has 8 bits, so the product's error is about 2^-46
  double sum = 1.0;               // the Taylor series up to r^11 / 11!, whose next term is below 2^-46
  for (int k = 11; k >= 1; --k) sum = 1.0 + sum * r / k;
  const double power = std::bit_cast<double>(static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
  return static_cast<float>(sum * power);
}

}  // namespace hearth
