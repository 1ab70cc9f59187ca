// How work that runs at the same time shares what it all uses.
// Room: common/sim. May touch: common/base. Threads: any; a pure function.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace hearth {

// What becomes of a resource that is asked for more than it has.
enum class Division : uint8_t {
  kEvenly,    // max-min: who wants little of it gets that, and the others get equal parts of the rest. Links, a GPU's units
  kByDemand,  // all get the same share of what they ask for: one queue, in which everybody waits behind everybody's requests. DRAM
};

// What a piece of work asks for: (resource, seconds that the resource would be busy with all of it). It uses all of them side by side, each in step
// with the others, so alone it lasts as long as the largest. At least one is above zero; each resource is named once.
using Claim = std::vector<std::pair<int, double>>;

// The rate of each claim, in shares of its work a second: at most 1 / (its largest seconds), no resource is used more than it has, and no rate could
// rise without lowering another one. `divisions`: by resource. What a claim asks of one that is divided by demand is what its other resources let it
// take, were that one without limit.
std::vector<double> FairRates(std::span<const Claim* const> claims, std::span<const Division> divisions);

}  // namespace hearth
