#include "common/roofline/pass_cost.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace hearth {
namespace {

constexpr size_t kPassesOfASize = 4;  // the newest
constexpr int kRounds = 4;            // of weighing badly fitting passes down
constexpr double kTrusted = 0.2;      // a pass this far off (in the logarithm of its time) still counts in full
constexpr double kStartWeight = 0.05;
constexpr double kEvenly = 1e-4;  // pull towards equal shares where passes say nothing

using Vector3 = std::array<double, 3>;

// x . coefficients = 1: a pass's terms over its time.
struct Row {
  Vector3 x;
  double weight = 1;
};

Row RowOf(const TimedPass& pass, double weight) {
  return {{pass.passes / pass.seconds, pass.work.tokens / pass.seconds, pass.work.positions / pass.seconds}, weight};
}

double Dot(const Vector3& a, const Vector3& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

// The minimum of sum weight (x . c - 1)^2 + evenly sum (mean_k c_k - 1/3)^2 over c >= 0: the best of the minima in which some coefficients are zero.
Vector3 Solve(const std::vector<Row>& rows) {
  Vector3 mean{};
  double total = 0;
  for (const Row& row : rows) {
    for (size_t k = 0; k < 3; ++k) mean[k] += row.weight * row.x[k];
    total += row.weight;
  }
  for (double& m : mean) m /= total;
  std::array<Vector3, 3> a{};
  Vector3 b{};
  for (const Row& row : rows) {
    for (size_t i = 0; i < 3; ++i) {
      for (size_t j = 0; j < 3; ++j) a[i][j] += row.weight * row.x[i] * row.x[j];
      b[i] += row.weight * row.x[i];
    }
  }
  for (size_t k = 0; k < 3; ++k) {
    a[k][k] += kEvenly * total * mean[k] * mean[k];
    b[k] += kEvenly * total * mean[k] / 3;
  }
  Vector3 best{};
  double best_gain = 0;
  for (unsigned used = 1; used < 8; ++used) {
    // In units of the means, so that coefficients of seconds and of nanoseconds are alike to the elimination.
    std::array<std::array<double, 4>, 3> m{};
    for (size_t i = 0; i < 3; ++i) {
      const bool in = (used >> i & 1) != 0 && mean[i] > 0;
      for (size_t j = 0; j < 3; ++j) m[i][j] = in && (used >> j & 1) != 0 && mean[j] > 0 ? a[i][j] / (mean[i] * mean[j]) : 0;
      m[i][3] = in ? b[i] / mean[i] : 0;
      if (!in) m[i][i] = 1;
    }
    for (size_t i = 0; i < 3; ++i) {  // positive definite: no pivoting
      for (size_t r = 0; r < 3; ++r) {
        if (r == i) continue;
        const double f = m[r][i] / m[i][i];
        for (size_t k = i; k < 4; ++k) m[r][k] -= f * m[i][k];
      }
    }
    Vector3 c{};
    for (size_t i = 0; i < 3; ++i) c[i] = mean[i] > 0 ? m[i][3] / m[i][i] / mean[i] : 0;
    if (*std::min_element(c.begin(), c.end()) < 0) continue;
    const double gain = Dot(b, c);  // at a minimum over these coefficients the sum is that of c = 0 less b . c
    if (gain > best_gain) {
      best = c;
      best_gain = gain;
    }
  }
  return best;
}

}  // namespace

PassWork WorkOf(int64_t before, int64_t tokens) {
  const double n = static_cast<double>(std::max<int64_t>(tokens, 0));
  return {.tokens = n, .positions = n * static_cast<double>(before) + n * (n + 1) / 2};
}

void PassFit::StartFrom(const PassCost& start, bool shape_only) {
  start_ = start;
  shape_only_ = shape_only;
  fitted_.reset();
}

void PassFit::Add(const TimedPass& pass) {
  if (!(pass.seconds > 0) || !(pass.work.tokens >= 1)) return;
  const auto octave = [](double v) { return static_cast<int>(std::floor(std::log2(v + 1))); };
  std::deque<TimedPass>& alike = by_size_[{octave(pass.work.tokens), octave(pass.work.positions / pass.work.tokens)}];
  alike.push_back(pass);
  if (alike.size() > kPassesOfASize) alike.pop_front();
  ++passes_seen_;
  fitted_.reset();
}

std::optional<PassCost> PassFit::cost() const {
  if (passes_seen_ == 0) return shape_only_ ? std::nullopt : start_;
  if (fitted_.has_value()) return fitted_;
  std::vector<Row> rows;
  for (const auto& [size, passes] : by_size_) {
    for (const TimedPass& pass : passes) rows.push_back(RowOf(pass, 1));
  }
  const size_t measured = rows.size();
  if (start_.has_value()) {
    std::vector<double> slower;  // than it was started from
    for (const auto& [size, passes] : by_size_) {
      for (const TimedPass& pass : passes) slower.push_back(pass.seconds / std::max(start_->Seconds(pass.work, pass.passes), 1e-12));
    }
    const auto middle = slower.begin() + static_cast<std::ptrdiff_t>(slower.size() / 2);
    std::nth_element(slower.begin(), middle, slower.end());
    for (const PassWork& work : {WorkOf(0, 1), WorkOf(0, 1024), WorkOf(0, 32768), WorkOf(32768, 64), WorkOf(32768, 1024)}) {
      if (const double seconds = start_->Seconds(work) * *middle; seconds > 0) rows.push_back(RowOf({work, seconds}, kStartWeight));
    }
  }
  Vector3 c = Solve(rows);
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < measured; ++i) {
      const double off = std::abs(std::log(std::max(Dot(rows[i].x, c), 1e-9)));
      rows[i].weight = off <= kTrusted ? 1 : kTrusted / off;
    }
    c = Solve(rows);
  }
  fitted_ = PassCost{.fixed_s = c[0], .per_token_s = c[1], .per_position_s = c[2]};
  return fitted_;
}

}  // namespace hearth
