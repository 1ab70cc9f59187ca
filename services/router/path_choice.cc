#include "services/router/path_choice.h"

#include <algorithm>

#include "common/base/ceil_div.h"

namespace hearth::router {
namespace {

double ByChunks(const PassCost& cost, int64_t tokens_at_once, const PromptWork& prompt) {
  return cost.Seconds(WorkOf(prompt.before, prompt.tokens), static_cast<double>(CeilDiv(prompt.tokens, std::max<int64_t>(tokens_at_once, 1))));
}

double ByChunks(const PassCost& cost, int64_t tokens_at_once, const std::vector<PromptWork>& prompts) {
  double seconds = 0;
  for (const PromptWork& prompt : prompts) seconds += ByChunks(cost, tokens_at_once, prompt);
  return seconds;
}

double Shared(const PassCost& cost, int64_t tokens_at_once, const std::vector<PromptWork>& prompts) {
  PassWork work;
  int64_t tokens = 0;
  for (const PromptWork& prompt : prompts) {
    work += WorkOf(prompt.before, prompt.tokens);
    tokens += prompt.tokens;
  }
  return cost.Seconds(work, static_cast<double>(CeilDiv(tokens, std::max<int64_t>(tokens_at_once, 1))));
}

}  // namespace

double SecondsByDecode(const DecodeWay& way, const PromptWork& prompt) {
  const int64_t chunk_tokens = std::max<int64_t>(way.streams > 0 ? way.busy_chunk_tokens : way.chunk_tokens, 1);
  const auto seconds_of = [&](const PromptWork& each) {
    if (way.streams > 0 && way.share > 0) return ByChunks(way.chunk, chunk_tokens, each) / way.share;
    const double steps = way.streams > 0 ? static_cast<double>(CeilDiv(each.tokens, chunk_tokens)) : 0;  // one behind each chunk
    return ByChunks(way.chunk, chunk_tokens, each) + steps * way.step_s;
  };
  double ahead_s = 0;
  for (const PromptWork& each : way.ahead) ahead_s += seconds_of(each);
  return way.place_s + std::max(0.0, ahead_s - way.ahead_for_s) + seconds_of(prompt) + way.step_s + way.extra_s;
}

double SecondsByPrefill(const PrefillWay& way, const PromptWork& prompt) {
  std::vector<PromptWork> behind = way.waiting;
  behind.push_back(prompt);
  const auto seconds_of = [&](const std::vector<PromptWork>& prompts) {
    return (way.shares_passes ? Shared(way.pass, way.tokens_at_once, prompts) : ByChunks(way.pass, way.tokens_at_once, prompts)) / way.share;
  };
  const double left_s = way.in_pass.empty() ? 0 : std::max(0.0, seconds_of(way.in_pass) - way.in_pass_for_s);
  return left_s + seconds_of(behind) + way.extra_s + way.place_s + way.step_s;
}

bool ToPrefill(double by_decode_s, double by_prefill_s, int64_t tokens, int64_t long_from) {
  constexpr double kClearlySooner = 0.75;
  return tokens > long_from ? by_decode_s > kClearlySooner * by_prefill_s : by_decode_s > by_prefill_s;
}

std::optional<int64_t> Crossover(const DecodeWay& decode, const PrefillWay& prefill, int64_t long_from, int64_t longest) {
  const auto to_prefill = [&](int64_t tokens) {
    const PromptWork prompt{.tokens = tokens};
    return ToPrefill(SecondsByDecode(decode, prompt), SecondsByPrefill(prefill, prompt), tokens, long_from);
  };
  int64_t high = 1;
  while (high < longest && !to_prefill(high)) high *= 2;
  high = std::min(high, longest);
  if (high < 1 || !to_prefill(high)) return std::nullopt;
  int64_t low = high / 2;  // 0, or goes to decode
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (to_prefill(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace hearth::router
