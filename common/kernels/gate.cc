// The MoE gate's choice for one token: scores, groups, top-k, weights.
// Room: common/kernels. A few hundred scores, in F32, in one order: the same bits everywhere.
#include "common/kernels/kernels.h"
#include "common/kernels/portable_exp.h"

namespace hearth {
namespace {

constexpr float kInfinity = __builtin_inff();
// A score that is NaN loses against every number, yet stays ahead of an excluded expert (-inf).
constexpr float kWorst = -3.402823466e+38f;
// Marks an entry that was taken already; no entry is NaN before.
constexpr float kTaken = __builtin_nanf("");

float Comparable(float x) { return std::isnan(x) ? kWorst : x; }

// Takes the largest entry that is left, the lowest index among equals. There must be one.
int64_t TakeBest(float* values, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(values[i])) continue;
    if (best < 0 || values[i] > values[best]) best = i;
  }
  values[best] = kTaken;
  return best;
}

void Scores(const GateParams& p, const float* logits, float* scores) {
  if (p.sigmoid) {
    for (int64_t e = 0; e < p.num_experts; ++e) scores[e] = 1.0f / (1.0f + PortableExp(-logits[e]));
    return;
  }
  float max = -kInfinity;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    if (logits[e] > max) max = logits[e];
  }
  float sum = 0.0f;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    scores[e] = PortableExp(logits[e] - max);
    sum += scores[e];
  }
  for (int64_t e = 0; e < p.num_experts; ++e) scores[e] /= sum;
}

// A group's score: its best entry, or the sum of its two best.
float GroupScore(const float* choice, int64_t n, bool top2) {
  float first = -kInfinity;
  float second = -kInfinity;
  for (int64_t i = 0; i < n; ++i) {
    if (choice[i] > first) {
      second = first;
      first = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return top2 && n > 1 ? first + second : first;
}

// Sets the entries of all but the best groups to -inf.
void ExcludeGroups(const GateParams& p, float* choice, float* group_scores) {
  const int64_t group_size = p.num_experts / p.num_groups;
  for (int64_t g = 0; g < p.num_groups; ++g) {
    group_scores[g] = GroupScore(choice + g * group_size, group_size, p.group_score_top2);
  }
  for (int64_t i = 0; i < p.top_groups && i < p.num_groups; ++i) TakeBest(group_scores, p.num_groups);
  for (int64_t g = 0; g < p.num_groups; ++g) {
    if (std::isnan(group_scores[g])) continue;  // taken
    for (int64_t i = 0; i < group_size; ++i) choice[g * group_size + i] = -kInfinity;
  }
}

}  // namespace

void GateSelect(const GateParams& params, const float* logits, const float* bias, int32_t* ids, float* weights, float* scratch) {
  float* scores = scratch;
  float* choice = scores + params.num_experts;
  float* group_scores = choice + params.num_experts;

  Scores(params, logits, scores);
  for (int64_t e = 0; e < params.num_experts; ++e) choice[e] = Comparable(bias ? scores[e] + bias[e] : scores[e]);
  if (params.num_groups > 1) ExcludeGroups(params, choice, group_scores);

  for (int64_t k = 0; k < params.top_k; ++k) TakeBest(choice, params.num_experts);
  int64_t found = 0;
  for (int64_t e = 0; e < params.num_experts; ++e) {
    if (!std::isnan(choice[e])) continue;
    ids[found] = static_cast<int32_t>(e);
    weights[found++] = scores[e];
  }

  if (params.normalize) {
    float sum = 0.0f;
    for (int64_t k = 0; k < params.top_k; ++k) sum += weights[k];
    sum += 1e-20f;
    for (int64_t k = 0; k < params.top_k; ++k) weights[k] /= sum;
  }
  for (int64_t k = 0; k < params.top_k; ++k) weights[k] *= params.scaling;
}

}  // namespace hearth
