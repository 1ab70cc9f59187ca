// How long a prompt will wait for its first token by each way through the node, and which way it therefore takes.
// Room: services/router. May touch: common/roofline. Threads: any; pure functions of values.
//
// A prompt is computed by a decode worker, in chunks between its steps, or by a prefill worker, whose pages go to decode. What each way costs was measured
// (path_costs.h); what a worker has to do before is what the scheduler has given it. A way is a worker as its status describes it: one whose passes
// several prefill ranks share comes with its own cost like any other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/roofline/pass_cost.h"

namespace hearth::router {

// Tokens that the prefill form has still to compute, behind those whose pages are there.
struct PromptWork {
  int64_t before = 0;
  int64_t tokens = 0;
};

struct DecodeWay {
  std::string name;  // of its kind, as its predictions are judged by
  PassCost chunk;
  int64_t chunk_tokens = 1;       // of a chunk while nothing is decoded here
  int64_t busy_chunk_tokens = 1;  // between two steps
  int streams = 0;                // that are decoded here
  double step_s = 0;              // of a step
  double share = 0;               // of the time that prompts get while streams are decoded; 0: a chunk behind each step
  double extra_s = 0;             // what a prompt waits for beside passes and steps
  double place_s = 0;             // until it has a place in the batch
  std::vector<PromptWork> ahead;  // prompts that are computed before it
  double ahead_for_s = 0;         // since when they are being computed
};

struct PrefillWay {
  std::string name;
  PassCost pass;
  int64_t tokens_at_once = 1;
  bool shares_passes = false;       // prompts that wait share the next pass; else they are computed one after the other
  std::vector<PromptWork> in_pass;  // what it computes now
  double in_pass_for_s = 0;         // since when
  std::vector<PromptWork> waiting;  // behind that, before this prompt
  double extra_s = 0;               // hand-over, beside passes and the step behind them
  double step_s = 0;                // of a decode step
  double share = 1;                 // of the time that it gets: less than all where streams are decoded on the same cores
  double place_s = 0;               // until it has a place in a batch
};

double SecondsByDecode(const DecodeWay& way, const PromptWork& prompt);
double SecondsByPrefill(const PrefillWay& way, const PromptWork& prompt);

// Whether a prompt of so many tokens goes to prefill. A long one does also where decode would be a little sooner: there it holds up prompts that come
// behind it, and steps.
bool ToPrefill(double by_decode_s, double by_prefill_s, int64_t tokens, int64_t long_from);

// The shortest prompt that goes to prefill, both ways as they are; none: decode takes all up to `longest`.
std::optional<int64_t> Crossover(const DecodeWay& decode, const PrefillWay& prefill, int64_t long_from, int64_t longest);

}  // namespace hearth::router
