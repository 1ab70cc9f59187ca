#include "services/cli/plan_report.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "common/base/time.h"
#include "services/cli/table.h"

namespace hearth {
namespace {

using nlohmann::json;

// What a GPU's driver and libraries take for themselves.
constexpr double kDriverBytes = 1e9;

// "dram 84%": of the resources, the one that had least rest in so many seconds.
std::string Busiest(const std::vector<ResourceUse>& busy, double seconds) {
  const auto busiest =
      std::max_element(busy.begin(), busy.end(), [](const ResourceUse& a, const ResourceUse& b) { return a.busy_seconds < b.busy_seconds; });
  return absl::StrFormat("%s %.0f%%", busiest->name, busiest->busy_seconds * 100 / seconds);
}

json BusyJson(const std::vector<ResourceUse>& busy, double seconds) {
  json shares = json::object();
  for (const ResourceUse& use : busy) shares[use.name] = use.busy_seconds / seconds;
  return shares;
}

// SmallEP sends so much of what dispatch does.
double SmallEpShare(const ExchangeShape& shape) { return SmallEpBytes(shape) / DispatchBytes(shape); }

// With fewer experts a row than this, dispatch sends less.
int64_t SmallEpFromTopK(ExchangeShape shape) {
  shape.top_k = 1;
  while (SmallEpShare(shape) >= 1) ++shape.top_k;
  return shape.top_k;
}

void PrintPrompts(const PlanReport& r, std::ostream& out) {
  out << "\nprompts\n";
  Table table({"tokens", "path", "first token", "tokens/s", "passes", "loaded", "ring slots", "busiest"});
  for (const PlanReport::Prompt& prompt : r.prompts) {
    const PrefillPoint& p = prompt.prefill;
    const bool streamed = p.path != PrefillPath::kChunked;
    table.Add({absl::StrCat(p.prompt), PrefillPathName(p.path), absl::StrFormat("%.2f s", prompt.first_token_s),
               absl::StrFormat("%.0f", static_cast<double>(p.prompt) / prompt.first_token_s), streamed ? absl::StrCat(p.passes) : "",
               streamed ? HumanBytes(static_cast<double>(p.bytes_loaded)) : "", streamed ? absl::StrCat(p.expert_slots) : "",
               Busiest(p.busy, p.seconds)});
  }
  table.Print(out);
  if (r.pass_rows > 0) {
    out << absl::StrFormat("  streamed (slp): %d tokens a pass at most, in chunks of %d\n", r.pass_rows, r.chunk_rows);
    if (r.sharing_gpus > 0) {
      out << absl::StrFormat("  shared (dslp): %d GPUs, for whom nobody decodes meanwhile; experts by %s\n", r.sharing_gpus,
                             ExchangeName(r.exchange));
      if (const ExchangeShape& shape = r.exchange_shape; shape.experts > 0) {
        out << absl::StrFormat("    SmallEP sends %.0f%% of dispatch's bytes at %d experts a row, and less than all of them from %d on\n",
                               100 * SmallEpShare(shape), shape.top_k, SmallEpFromTopK(shape));
      }
    }
  } else if (!r.not_streamed.empty()) {
    out << "  weights are not streamed: " << r.not_streamed << "\n";
  }
  if (const std::optional<double> crossover = r.CrossoverTokens(); crossover.has_value()) {
    out << absl::StrFormat("  streaming is the faster path from about %.0f tokens on\n", *crossover);
  }
}

void PrintTogether(const std::vector<TogetherPoint>& points, std::ostream& out) {
  out << absl::StrFormat("\na prompt on one GPU while streams decode on another, context %d: at worst, copies waiting behind experts for DRAM\n",
                         points.front().context);
  const auto more = [](double share) { return absl::StrFormat("+%.0f%%", std::max(share * 100, 0.0)); };
  Table table({"prompt", "streams", "prefill alone", "beside", "more", "decode step alone", "beside", "more", "slowest"});
  for (const TogetherPoint& t : points) {
    table.Add({absl::StrCat(t.prompt), absl::StrCat(t.streams), absl::StrFormat("%.2f s", t.prefill_alone_s),
               absl::StrFormat("%.2f s", t.prefill_beside_s), more(t.prefill_more()), absl::StrFormat("%.1f ms", t.step_alone_ms),
               absl::StrFormat("%.1f ms", t.step_beside_ms), more(t.step_more()), more(t.slowest_step_more())});
  }
  table.Print(out);
}

void PrintMemory(const PlanReport& r, std::ostream& out) {
  const PlannedModel& m = r.planned;
  const bool on_gpu = r.profile.num_gpus > 0;
  const double dram = r.profile.cpu.MemoryBytes();
  out << "memory\n";
  Table table({"what", "bytes", ""});
  table.Add({"weight image", HumanBytes(static_cast<double>(m.image_bytes)),
             absl::StrFormat(static_cast<double>(m.image_bytes) < dram ? "of %s of DRAM" : "does NOT fit into %s of DRAM", HumanBytes(dram))});
  if (const double share = r.OnDiskShare(); share > 1) {
    table.Add({"on disk", "", "not even what is no routed expert fits"});
  } else if (share > 0) {
    const double bytes = share * static_cast<double>(m.image_bytes - m.dense_bytes());
    table.Add({"on disk", HumanBytes(bytes),
               absl::StrFormat("at least %.0f%% of the routed experts (weightstore.image_bytes_max); a streamed pass reads them once", 100 * share)});
  }
  if (m.record_bytes > 0) {
    table.Add({"a routed expert", HumanBytes(static_cast<double>(m.record_bytes)), "a slot of an expert ring"});
    table.Add({"a layer of them", HumanBytes(static_cast<double>(m.layer_bytes)), absl::StrFormat("%d slots", m.config.n_routed_experts)});
  }
  table.Add({"all other weights", HumanBytes(static_cast<double>(m.dense_bytes())), on_gpu ? "on each GPU that decodes" : ""});
  table.Add({"decode buffers", HumanBytes(static_cast<double>(r.workspace_bytes)), ""});
  const double tokens = r.KvTokens();
  table.Add({"KV of a token", HumanBytes(r.kv_bytes_per_token),
             tokens < 0 ? "none fits" : absl::StrFormat("%.0fK tokens fit into the %s", tokens / 1024, on_gpu ? "GPU" : "DRAM that is left")});
  table.Print(out);
  if (tokens < 0) {
    out << "\nThis does NOT fit into " << (on_gpu ? absl::StrFormat("a GPU of %s", HumanBytes(r.profile.gpu.MemoryBytes())) : "DRAM")
        << ": the figures below are as if it did.\n";
  }
}

}  // namespace

double PlanReport::OnDiskShare() const {
  const double too_much = static_cast<double>(planned.image_bytes) - profile.cpu.MemoryBytes();
  const double experts = static_cast<double>(planned.image_bytes - planned.dense_bytes());
  if (too_much <= 0) return 0;
  return too_much <= experts ? too_much / experts : 2;
}

std::optional<double> PlanReport::CrossoverTokens() const {
  // Seconds that streaming gains, by tokens.
  std::map<int64_t, double> gains;
  std::map<int64_t, int> paths;
  for (const Prompt& prompt : prompts) {
    if (prompt.prefill.path == PrefillPath::kShared) continue;
    gains[prompt.prefill.prompt] += prompt.prefill.path == PrefillPath::kStreamed ? -prompt.first_token_s : prompt.first_token_s;
    ++paths[prompt.prefill.prompt];
  }
  std::optional<std::pair<int64_t, double>> before;
  for (const auto& [tokens, gain] : gains) {
    if (paths[tokens] != 2) continue;
    const double now = static_cast<double>(tokens);
    if (gain >= 0) {
      if (!before.has_value()) return now;
      const double then = static_cast<double>(before->first);
      return then + (now - then) * -before->second / (gain - before->second);
    }
    before = {tokens, gain};
  }
  return std::nullopt;
}

double PlanReport::KvTokens() const {
  const double left =
      profile.num_gpus > 0
          ? profile.gpu.MemoryBytes() - kDriverBytes - static_cast<double>(planned.dense_bytes()) - static_cast<double>(workspace_bytes)
          : profile.cpu.MemoryBytes() - static_cast<double>(planned.image_bytes) - static_cast<double>(workspace_bytes);
  return left / kv_bytes_per_token;
}

void PrintReport(const PlanReport& r, std::ostream& out) {
  out << r.model << " on " << r.hardware << "\n\n";
  for (const std::string& note : r.notes) out << "note: " << note << "\n";
  if (!r.notes.empty()) out << "\n";
  PrintMemory(r, out);
  PrintPrompts(r, out);
  out << "\ndecode\n";
  Table table({"context", "streams", "order", "ms/token", "tokens/s", "busiest"});
  for (const DecodePoint& p : r.decode) {
    table.Add({absl::StrCat(p.context), absl::StrCat(p.batch), StepOrderName(p.order), absl::StrFormat("%.1f", p.step_ms),
               absl::StrFormat("%.1f", p.tokens_per_s()), Busiest(p.busy, p.step_ms * 1e-3)});
  }
  table.Print(out);
  if (!r.together.empty()) PrintTogether(r.together, out);
}

std::string ReportJson(const PlanReport& r) {
  json memory = {{"image_bytes", r.planned.image_bytes},       {"on_disk_share", r.OnDiskShare()},
                 {"expert_bytes", r.planned.record_bytes},     {"layer_bytes", r.planned.layer_bytes},
                 {"dense_bytes", r.planned.dense_bytes()},     {"workspace_bytes", r.workspace_bytes},
                 {"kv_bytes_per_token", r.kv_bytes_per_token}, {"kv_tokens", static_cast<int64_t>(r.KvTokens())}};
  json decode = json::array();
  for (const DecodePoint& p : r.decode) {
    decode.push_back({{"context", p.context},
                      {"streams", p.batch},
                      {"order", StepOrderName(p.order)},
                      {"ms_per_token", p.step_ms},
                      {"tokens_per_s", p.tokens_per_s()},
                      {"busy", BusyJson(p.busy, p.step_ms * 1e-3)}});
  }
  json prompts = json::array();
  for (const PlanReport::Prompt& prompt : r.prompts) {
    const PrefillPoint& p = prompt.prefill;
    prompts.push_back({{"tokens", p.prompt},
                       {"path", PrefillPathName(p.path)},
                       {"first_token_s", prompt.first_token_s},
                       {"passes", p.passes},
                       {"bytes_loaded", p.bytes_loaded},
                       {"bytes_sent", p.bytes_sent},
                       {"expert_slots", p.expert_slots},
                       {"busy", BusyJson(p.busy, p.seconds)}});
  }
  json out = {{"model", r.model}, {"hardware", r.hardware}, {"memory", memory}, {"decode", decode}, {"prompts", prompts}, {"notes", r.notes}};
  if (r.sharing_gpus > 0) out["sharing"] = {{"gpus", r.sharing_gpus}, {"experts", ExchangeName(r.exchange)}};
  if (r.sharing_gpus > 0 && r.exchange_shape.experts > 0) {
    out["sharing"]["small_ep_share_of_dispatch_bytes"] = SmallEpShare(r.exchange_shape);
    out["sharing"]["small_ep_from_top_k"] = SmallEpFromTopK(r.exchange_shape);
  }
  if (r.pass_rows > 0) out["streaming"] = {{"pass_tokens", r.pass_rows}, {"chunk_tokens", r.chunk_rows}};
  if (const std::optional<double> crossover = r.CrossoverTokens(); crossover.has_value()) out["crossover_tokens"] = *crossover;
  json together = json::array();
  for (const TogetherPoint& t : r.together) {
    together.push_back({{"prompt_tokens", t.prompt},
                        {"streams", t.streams},
                        {"context", t.context},
                        {"prefill_alone_s", t.prefill_alone_s},
                        {"prefill_beside_s", t.prefill_beside_s},
                        {"step_alone_ms", t.step_alone_ms},
                        {"step_beside_ms", t.step_beside_ms},
                        {"step_beside_max_ms", t.step_beside_max_ms}});
  }
  if (!together.empty()) out["together"] = together;
  return out.dump(2) + "\n";
}

}  // namespace hearth
