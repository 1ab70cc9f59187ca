#include "common/sim/fair_share.h"

#include <algorithm>
#include <cstddef>

namespace hearth {
namespace {

// Above this a resource counts as overloaded: sums of rates are rounded.
constexpr double kFull = 1.0 + 1e-12;

double SecondsOf(const Claim& claim, int resource) {
  for (const auto& [r, seconds] : claim) {
    if (r == resource) return seconds;
  }
  return 0;
}

class Sharing {
 public:
  Sharing(std::span<const Claim* const> claims, std::span<const Division> divisions)
      : claims_(claims), divisions_(divisions), use_(divisions.size(), 0) {
    for (const Claim* claim : claims) {
      double longest = 0, asked = 0;
      for (const auto& [resource, seconds] : *claim) {
        longest = std::max(longest, seconds);
        if (divisions[static_cast<size_t>(resource)] == Division::kEvenly) asked = std::max(asked, seconds);
      }
      alone_.push_back(1.0 / longest);
      rates_.push_back(1.0 / (asked > 0 ? asked : longest));
    }
    CountUse();
  }

  std::vector<double> Run() {
    DivideAll(Division::kEvenly);
    DivideAll(Division::kByDemand);
    // Who was held back by one resource may have left some of another to the rest.
    for (size_t i = 0; i < claims_.size(); ++i) Raise(i);
    return std::move(rates_);
  }

 private:
  // Rates only fall here, so a resource that was divided once stays within what it has.
  void DivideAll(Division division) {
    while (true) {
      int busiest = -1;
      for (size_t r = 0; r < use_.size(); ++r) {
        if (divisions_[r] == division && use_[r] > (busiest < 0 ? kFull : use_[static_cast<size_t>(busiest)])) busiest = static_cast<int>(r);
      }
      if (busiest < 0) return;
      division == Division::kEvenly ? Level(busiest) : Scale(busiest);
      CountUse();
    }
  }

  void CountUse() {
    std::fill(use_.begin(), use_.end(), 0.0);
    for (size_t i = 0; i < claims_.size(); ++i) {
      for (const auto& [resource, seconds] : *claims_[i]) use_[static_cast<size_t>(resource)] += seconds * rates_[i];
    }
  }

  // Water-filling: everybody's use of the resource is cut at one level, at which it is just full.
  void Level(int resource) {
    std::vector<double> uses;
    for (size_t i = 0; i < claims_.size(); ++i) {
      if (const double seconds = SecondsOf(*claims_[i], resource); seconds > 0) uses.push_back(seconds * rates_[i]);
    }
    std::sort(uses.begin(), uses.end());
    double left = 1.0, level = 0;
    for (size_t i = 0; i < uses.size(); ++i) {
      level = left / static_cast<double>(uses.size() - i);
      if (uses[i] > level) break;
      left -= uses[i];
    }
    for (size_t i = 0; i < claims_.size(); ++i) {
      if (const double seconds = SecondsOf(*claims_[i], resource); seconds > 0) rates_[i] = std::min(rates_[i], level / seconds);
    }
  }

  void Scale(int resource) {
    const double use = use_[static_cast<size_t>(resource)];
    for (size_t i = 0; i < claims_.size(); ++i) {
      if (SecondsOf(*claims_[i], resource) > 0) rates_[i] /= use;
    }
  }

  void Raise(size_t i) {
    double rise = alone_[i] - rates_[i];
    for (const auto& [resource, seconds] : *claims_[i]) {
      if (seconds > 0) rise = std::min(rise, (1.0 - use_[static_cast<size_t>(resource)]) / seconds);
    }
    if (rise <= 0) return;
    rates_[i] += rise;
    for (const auto& [resource, seconds] : *claims_[i]) use_[static_cast<size_t>(resource)] += seconds * rise;
  }

  const std::span<const Claim* const> claims_;
  const std::span<const Division> divisions_;
  std::vector<double> alone_, rates_;
  std::vector<double> use_;  // by resource; 1 is all of it
};

}  // namespace

std::vector<double> FairRates(std::span<const Claim* const> claims, std::span<const Division> divisions) { return Sharing(claims, divisions).Run(); }

}  // namespace hearth
