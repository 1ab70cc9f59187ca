#include "services/cli/plan_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "common/base/time.h"
#include "services/cli/table.h"

namespace hearth {
namespace {

using nlohmann::json;

// What a GPU's driver and libraries take for themselves.
constexpr double kDriverBytes = 1e9;

// "dram 84%": of the resources, the one that had least rest.
std::string Busiest(const DecodePoint& point) {
  const auto busiest = std::max_element(point.busy.begin(), point.busy.end(),
                                        [](const ResourceUse& a, const ResourceUse& b) { return a.busy_seconds < b.busy_seconds; });
  return absl::StrFormat("%s %.0f%%", busiest->name, busiest->busy_seconds * 1e5 / point.step_ms);
}

void PrintMemory(const PlanReport& r, std::ostream& out) {
  const PlannedModel& m = r.planned;
  const bool on_gpu = r.profile.num_gpus > 0;
  const double dram = r.profile.cpu.MemoryBytes();
  out << "memory\n";
  Table table({"what", "bytes", ""});
  table.Add({"weight image", HumanBytes(static_cast<double>(m.image_bytes)),
             absl::StrFormat(static_cast<double>(m.image_bytes) < dram ? "of %s of DRAM" : "does NOT fit into %s of DRAM", HumanBytes(dram))});
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

double PlanReport::KvTokens() const {
  const double left =
      profile.num_gpus > 0
          ? profile.gpu.MemoryBytes() - kDriverBytes - static_cast<double>(planned.dense_bytes()) - static_cast<double>(workspace_bytes)
          : profile.cpu.MemoryBytes() - static_cast<double>(planned.image_bytes) - static_cast<double>(workspace_bytes);
  return left / kv_bytes_per_token;
}

void PrintReport(const PlanReport& r, std::ostream& out) {
  out << r.model << " on " << r.hardware << "\n\n";
  PrintMemory(r, out);
  out << "\ndecode\n";
  Table table({"context", "streams", "order", "ms/token", "tokens/s", "busiest"});
  for (const DecodePoint& p : r.decode) {
    table.Add({absl::StrCat(p.context), absl::StrCat(p.batch), StepOrderName(p.order), absl::StrFormat("%.1f", p.step_ms),
               absl::StrFormat("%.1f", p.tokens_per_s()), Busiest(p)});
  }
  table.Print(out);
}

std::string ReportJson(const PlanReport& r) {
  json memory = {{"image_bytes", r.planned.image_bytes},           {"expert_bytes", r.planned.record_bytes},
                 {"layer_bytes", r.planned.layer_bytes},           {"dense_bytes", r.planned.dense_bytes()},
                 {"workspace_bytes", r.workspace_bytes},           {"kv_bytes_per_token", r.kv_bytes_per_token},
                 {"kv_tokens", static_cast<int64_t>(r.KvTokens())}};
  json decode = json::array();
  for (const DecodePoint& p : r.decode) {
    json busy = json::object();
    for (const ResourceUse& use : p.busy) busy[use.name] = use.busy_seconds * 1e3 / p.step_ms;
    decode.push_back({{"context", p.context},
                      {"streams", p.batch},
                      {"order", StepOrderName(p.order)},
                      {"ms_per_token", p.step_ms},
                      {"tokens_per_s", p.tokens_per_s()},
                      {"busy", busy}});
  }
  return json{{"model", r.model}, {"hardware", r.hardware}, {"memory", memory}, {"decode", decode}}.dump(2) + "\n";
}

}  // namespace hearth
