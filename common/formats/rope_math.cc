// YaRN (arXiv 2309.00071) as the DeepSeek models use it. Everything in double: the tables are made once.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "common/base/check.h"
#include "common/formats/model_config.h"

namespace hearth {
namespace {

// Section 3.4 of the paper: attention sharpened with the logarithm of the stretch, weighted by `mscale`.
double YarnMagnitude(double factor, double mscale) { return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

// The (fractional) frequency index whose wave makes `rotations` turns within the original context.
double DimensionOfRotations(double rotations, double dim, double theta, double context) {
  return dim * std::log(context / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
}

}  // namespace

double ModelConfig::SoftmaxScale() const {
  const double scale = 1.0 / std::sqrt(static_cast<double>(qk_head_dim()));
  if (!rope_scaling || rope_scaling->mscale_all_dim == 0.0) return scale;
  const double magnitude = YarnMagnitude(rope_scaling->factor, rope_scaling->mscale_all_dim);
  return scale * magnitude * magnitude;
}

double ModelConfig::RopeAttentionFactor() const {
  if (!rope_scaling) return 1.0;
  if (rope_scaling->attention_factor) return *rope_scaling->attention_factor;
  return YarnMagnitude(rope_scaling->factor, rope_scaling->mscale) / YarnMagnitude(rope_scaling->factor, rope_scaling->mscale_all_dim);
}

std::vector<double> ModelConfig::RopeInverseFrequencies() const {
  HEARTH_CHECK(qk_rope_head_dim > 0 && qk_rope_head_dim % 2 == 0);
  const int64_t half = qk_rope_head_dim / 2;
  const double dim = static_cast<double>(qk_rope_head_dim);
  std::vector<double> frequencies(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    frequencies[static_cast<size_t>(i)] = std::pow(rope_theta, -2.0 * static_cast<double>(i) / dim);
  }
  if (!rope_scaling) return frequencies;

  // Fast waves (below `low`) stay as trained, slow ones (above `high`) are stretched by the factor, a linear ramp lies
  // between.
  const double context = static_cast<double>(rope_scaling->original_max_position_embeddings);
  const double low = std::max(std::floor(DimensionOfRotations(rope_scaling->beta_fast, dim, rope_theta, context)), 0.0);
  double high = std::min(std::ceil(DimensionOfRotations(rope_scaling->beta_slow, dim, rope_theta, context)), dim - 1.0);
  if (low == high) high += 0.001;  // a ramp of no width would divide by zero
  for (int64_t i = 0; i < half; ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    double& frequency = frequencies[static_cast<size_t>(i)];
    frequency = frequency / rope_scaling->factor * ramp + frequency * (1.0 - ramp);
  }
  return frequencies;
}

}  // namespace hearth
