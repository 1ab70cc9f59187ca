#include "common/base/dtype.h"

#include <array>
#include <cmath>

namespace hearth {

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "F32";
    case DType::kF16: return "F16";
    case DType::kBF16: return "BF16";
    case DType::kF8E4M3: return "F8_E4M3";
    case DType::kQ8_0: return "Q8_0";
    case DType::kQ6_K: return "Q6_K";
    case DType::kQ4_K: return "Q4_K";
    case DType::kI4G32: return "I4_G32";
    case DType::kQ5_K: return "Q5_K";
    case DType::kQ3_K: return "Q3_K";
    case DType::kInvalid: break;
  }
  return "invalid";
}

std::optional<DType> DTypeFromName(std::string_view name) {
  for (DType d : kAllDTypes) {
    if (name == DTypeName(d)) return d;
  }
  return std::nullopt;
}

float F8E4M3ToFloat(uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  float magnitude;
  if (exponent == 15 && mantissa == 7) {
    magnitude = std::nanf("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -9);
  } else {
    magnitude = std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7);
  }
  return (code & 0x80) ? -magnitude : magnitude;
}

uint8_t FloatToF8E4M3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float a = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7f;
  if (a >= 448.0f) return sign | 0x7e;
  int exponent;
  std::frexp(a, &exponent);                                     // a = f * 2^exponent, f in [0.5, 1)
  const int scale = exponent - 1 < -6 ? -9 : exponent - 1 - 3;  // the step between neighbours is 2^scale
  const float steps = std::nearbyint(std::ldexp(a, -scale));    // nearest even in the default rounding mode
  const float rounded = std::ldexp(steps, scale);
  if (rounded == 0.0f) return sign;
  if (rounded >= 448.0f) return sign | 0x7e;
  std::frexp(rounded, &exponent);
  if (exponent - 1 < -6) return sign | static_cast<uint8_t>(std::ldexp(rounded, 9));
  const int mantissa = static_cast<int>(std::ldexp(rounded, 3 - (exponent - 1))) - 8;
  return sign | static_cast<uint8_t>(((exponent - 1 + 7) << 3) | mantissa);
}

float F16ToFloat(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? std::nanf("") : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return (bits & 0x8000) ? -magnitude : magnitude;
}

uint16_t FloatToF16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (a == 0.0f) return sign;
  if (a >= 65520.0f) return sign | 0x7c00;
  int exponent;
  std::frexp(a, &exponent);
  const int scale = exponent - 1 < -14 ? -24 : exponent - 1 - 10;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(a, -scale)));
  if (scale == -24) return sign | static_cast<uint16_t>(steps);  // subnormal, or just the first normal
  return sign | static_cast<uint16_t>(((scale + 25) << 10) + (steps - 1024));
}

}  // namespace hearth
