// `hearth plan`: what a model will need and how fast it will be on a machine that need not be there.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "absl/strings/str_join.h"
#include "common/base/process.h"
#include "services/cli/command.h"
#include "services/cli/plan_report.h"
#include "services/cli/shipped.h"

namespace hearth {
namespace {

struct PlanFlags {
  std::string model;
  std::string hardware;
  std::vector<std::string> what_if;
  std::vector<int64_t> contexts = {1024, 4096, 8192, 16384, 32768, 65536, 131072};
  std::vector<int64_t> batches = {1, 2, 4, 6};
  int shards = 0;
  std::string kv = "bf16";
  SimOptions sim;
  bool json = false;
  std::string timeline_path;
  std::string svg_path;
};

std::string Names(std::span<const ShippedFile> files) {
  std::vector<std::string> names;
  for (const ShippedFile& file : files) names.emplace_back(file.name);
  return absl::StrJoin(names, ", ");
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream in(path);
  if (!in || std::filesystem::is_directory(path)) return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read: ", strerror(errno)));
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// A shipped name, a config.json, or a model as node.toml names one.
absl::StatusOr<ModelTexts> FindModel(const std::string& name) {
  for (const ShippedFile& file : ShippedModels()) {
    if (name == file.name) return ModelTexts{std::string(file.text), ""};
  }
  if (!std::filesystem::exists(name)) {
    return absl::InvalidArgumentError(absl::StrCat("--model ", name, ": no such file, and none of ", Names(ShippedModels())));
  }
  if (!name.ends_with(".json")) return ReadModelTexts(name);
  ASSIGN_OR_RETURN(std::string text, ReadText(name));
  return ModelTexts{std::move(text), ""};
}

absl::StatusOr<HardwareProfile> FindHardware(const std::string& name) {
  for (const ShippedFile& file : ShippedHardware()) {
    if (name == file.name) return ParseHardwareProfile(file.text, name);
  }
  if (!std::filesystem::exists(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--hardware ", name, ": no such file, and none of ", Names(ShippedHardware()), "; `hearth probe` writes this machine's"));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadText(name));
  return ParseHardwareProfile(text, name);
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  return out ? absl::OkStatus() : absl::UnavailableError(absl::StrCat(path, ": cannot be written: ", strerror(errno)));
}

// When the layer's attention begins; the run's end where it has no such layer.
int64_t LayerBegin(const Timeline& timeline, int64_t layer) {
  const std::string text = absl::StrCat("layer=", layer, " ");
  int64_t end_ns = 0;
  for (const TimelineSpan& span : timeline.spans()) {
    if (span.name == "attention" && span.detail.starts_with(text)) return span.begin_ns;
    end_ns = std::max(end_ns, span.end_ns);
  }
  return end_ns;
}

// Of one more decode step, in a world of its own so that nothing else is in it.
absl::Status WriteTimeline(const PlanFlags& flags, const PlanReport& report) {
  const int64_t batch = flags.batches.front(), context = flags.contexts.front();
  SimOptions sim = flags.sim;
  sim.record = true;
  ASSIGN_OR_RETURN(const std::unique_ptr<DecodePlan> plan, DecodePlan::Make(report.planned, report.profile, sim, batch, context));
  RETURN_IF_ERROR(plan->Run(batch, context, batch > 1 ? StepOrder::kAlternate : StepOrder::kJoint).status());
  const Timeline& timeline = plan->world().timeline();
  if (!flags.timeline_path.empty()) RETURN_IF_ERROR(WriteText(flags.timeline_path, timeline.ToPerfettoJson()));
  if (flags.svg_path.empty()) return absl::OkStatus();
  constexpr int64_t kLayersShown = 3;
  const int64_t first = report.planned.config.first_k_dense_replace;
  const std::string title = absl::StrCat(report.model, " on ", report.hardware, ": layers ", first, " to ", first + kLayersShown - 1,
                                         " of a decode step, ", batch, batch > 1 ? " streams, alternating" : " stream", ", context ", context);
  return WriteText(flags.svg_path, timeline.ToSvg(title, LayerBegin(timeline, first), LayerBegin(timeline, first + kLayersShown)));
}

absl::StatusOr<PlanReport> MakeReport(const PlanFlags& flags) {
  PlanReport report{.model = flags.model};
  ASSIGN_OR_RETURN(report.profile, FindHardware(flags.hardware));
  report.hardware = report.profile.name;
  for (const std::string& change : flags.what_if) {
    RETURN_IF_ERROR(ApplyWhatIf(change, report.profile));
    report.hardware += ", " + change;
  }
  ASSIGN_OR_RETURN(const ModelTexts texts, FindModel(flags.model));
  const int shards = flags.shards > 0 ? flags.shards : static_cast<int>(report.profile.cpu.sockets);
  absl::StatusOr<PlannedModel> planned = PlanModel(texts, shards);
  if (!planned.ok()) return Annotate(planned.status(), flags.model);
  report.planned = *std::move(planned);

  const int64_t longest = report.planned.config.max_position_embeddings - 1;
  const int64_t max_context = std::min(*std::max_element(flags.contexts.begin(), flags.contexts.end()), longest);
  ASSIGN_OR_RETURN(
      const std::unique_ptr<DecodePlan> plan,
      DecodePlan::Make(report.planned, report.profile, flags.sim, *std::max_element(flags.batches.begin(), flags.batches.end()), max_context));
  report.workspace_bytes = plan->workspace_bytes();
  report.kv_bytes_per_token = plan->kv_bytes_per_token();
  for (const int64_t context : flags.contexts) {
    if (context > longest) continue;  // the model ends before
    for (const int64_t batch : flags.batches) {
      for (const StepOrder order : {StepOrder::kJoint, StepOrder::kAlternate}) {
        if (batch == 1 && order == StepOrder::kAlternate) continue;
        ASSIGN_OR_RETURN(DecodePoint point, plan->Run(batch, context, order));
        report.decode.push_back(std::move(point));
      }
    }
  }
  return report;
}

int Plan(PlanFlags flags) {
  flags.sim.kv_dtype = flags.kv == "fp8" ? DType::kF8E4M3 : DType::kBF16;
  const absl::StatusOr<PlanReport> report = MakeReport(flags);
  if (!report.ok()) return Fail("plan", report.status());
  if (!flags.timeline_path.empty() || !flags.svg_path.empty()) {
    if (const absl::Status written = WriteTimeline(flags, *report); !written.ok()) return Fail("plan", written);
  }
  if (flags.json) {
    std::cout << ReportJson(*report);
  } else {
    PrintReport(*report, std::cout);
  }
  return kExitOk;
}

}  // namespace

void AddPlan(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("plan", "predict memory and speed of a model on a machine, without either");
  command->footer(
      "Runs the decode step's own code in virtual time, with costs from the hardware profile. Needs config.json and no weights.\n"
      "docs/simulation.md says how far the predictions are from published measurements.\n\n"
      "models:   " +
      Names(ShippedModels()) + ", or a path\nhardware: " + Names(ShippedHardware()) +
      ", or a file (`hearth probe` writes one)\n\n"
      "  hearth plan --model deepseek-r1 --hardware epyc-9355-2x5090\n"
      "  hearth plan --model kimi-k2 --hardware epyc-9355-2x5090 --what-if gpus=1 sockets=1 channels=12\n"
      "  hearth plan --model deepseek-r1 --hardware epyc-9355-2x5090 --batch 2 --context 4096 --svg step.svg --timeline step.json");
  auto flags = std::make_shared<PlanFlags>();
  command->add_option("--model", flags->model, "a shipped configuration, a config.json, or a model's path")->required();
  command->add_option("--hardware", flags->hardware, "a shipped machine, or a profile file")->required();
  command->add_option("--what-if", flags->what_if, "changes: gpus=N pcie=3|4|5 vram=N (GiB) sockets=N channels=N cores=N");
  command->add_option("--context", flags->contexts, "tokens behind each stream; longer ones than the model takes are left out")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--batch", flags->batches, "streams that decode together")->check(CLI::Range(1, 256))->capture_default_str();
  command->add_option("--shards", flags->shards, "parts of each expert (default: one a socket)")->check(CLI::Range(1, 64));
  command->add_option("--kv", flags->kv, "KV cache in bf16 or fp8")->check(CLI::IsMember({"bf16", "fp8"}))->capture_default_str();
  command->add_option("--skew", flags->sim.routing_skew, "experts are chosen by 1 / rank^skew; 0: evenly")
      ->check(CLI::Range(0.0, 4.0))
      ->capture_default_str();
  command->add_option("--seed", flags->sim.seed, "of the experts' choice")->capture_default_str();
  command->add_flag("--json", flags->json, "for programs");
  command->add_option("--timeline", flags->timeline_path, "write a trace of a decode step (first --batch, first --context) for ui.perfetto.dev");
  command->add_option("--svg", flags->svg_path, "write a picture of that step's first MoE layers");
  command->callback([=, &exit_code] { exit_code = Plan(*flags); });
}

}  // namespace hearth
