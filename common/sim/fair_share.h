// How work that runs at the same time shares what it all uses: each resource is divided max-min fairly, so that who wants little of it gets that, and
// the others get equal parts of the rest.
// Room: common/sim. May touch: common/base. Threads: any; a pure function.
#pragma once

#include <span>
#include <utility>
#include <vector>

namespace hearth {

// What a piece of work asks for: (resource, seconds that the resource would be busy with all of it). It uses all of them side by side, each in step
// with the others, so alone it lasts as long as the largest. At least one is above zero; each resource is named once.
using Claim = std::vector<std::pair<int, double>>;

// The rate of each claim, in shares of its work a second: at most 1 / (its largest seconds), no resource is used more than it has, and no rate could
// rise without lowering another one.
std::vector<double> FairRates(std::span<const Claim* const> claims, int num_resources);

}  // namespace hearth
