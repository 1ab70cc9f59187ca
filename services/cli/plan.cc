// `hearth plan`: what a model will need and how fast it will be on a machine that need not be there.
#include <algorithm>
#include <filesystem>
#include <iostream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "common/base/process.h"
#include "services/cli/command.h"
#include "services/cli/plan_report.h"
#include "services/cli/shipped.h"
#include "services/cli/text_file.h"

namespace hearth {
namespace {

struct PlanFlags {
  std::string model;
  std::string hardware;
  std::vector<std::string> what_if;
  std::vector<int64_t> contexts = {1024, 4096, 8192, 16384, 32768, 65536, 131072};
  std::vector<int64_t> batches = {1, 2, 4, 6};
  std::vector<int64_t> prompts = {1024, 4096, 8192, 16384, 32768, 65536};
  int64_t chunk_rows = 0;
  int shards = 0;
  std::string kv = "bf16";
  SimOptions sim;
  bool json = false;
  std::string picture_of = "decode";
  std::string timeline_path;
  std::string svg_path;
};

std::string Names(std::span<const ShippedFile> files) {
  std::vector<std::string> names;
  for (const ShippedFile& file : files) names.emplace_back(file.name);
  return absl::StrJoin(names, ", ");
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
  ASSIGN_OR_RETURN(std::string text, ReadTextFile(name));
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
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(name));
  return ParseHardwareProfile(text, name);
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

// Runs one more decode step or streamed prompt, in a world of its own so that nothing else is in the picture. What was run, for its title.
absl::StatusOr<std::string> RunForPicture(const PlanFlags& flags, const PlanReport& report, const std::shared_ptr<SimWorld>& world) {
  if (flags.picture_of == "prompt") {
    const int64_t prompt = flags.prompts.front();
    ASSIGN_OR_RETURN(const std::unique_ptr<PrefillPlan> plan,
                     PrefillPlan::Make(report.planned, world, PrefillPath::kStreamed, {.chunk_rows = flags.chunk_rows, .max_prompt = prompt}));
    RETURN_IF_ERROR(plan->Run(prompt).status());
    return absl::StrCat("a prompt of ", prompt, " tokens, weights streamed");
  }
  const int64_t batch = flags.batches.front(), context = flags.contexts.front();
  ASSIGN_OR_RETURN(const std::unique_ptr<DecodePlan> plan, DecodePlan::Make(report.planned, world, batch, context));
  RETURN_IF_ERROR(plan->Run(batch, context, batch > 1 ? StepOrder::kAlternate : StepOrder::kJoint).status());
  return absl::StrCat("a decode step, ", batch, batch > 1 ? " streams, alternating" : " stream", ", context ", context);
}

absl::Status WritePictures(const PlanFlags& flags, const PlanReport& report) {
  SimOptions sim = flags.sim;
  sim.record = true;
  const std::shared_ptr<SimWorld> world = SimWorld::Make(report.profile, sim);
  ASSIGN_OR_RETURN(const std::string what, RunForPicture(flags, report, world));
  const Timeline& timeline = world->timeline();
  if (!flags.timeline_path.empty()) RETURN_IF_ERROR(WriteTextFile(flags.timeline_path, timeline.ToPerfettoJson()));
  if (flags.svg_path.empty()) return absl::OkStatus();
  constexpr int64_t kLayersShown = 3;
  const int64_t first = report.planned.config.first_k_dense_replace;
  const std::string title = absl::StrCat(report.model, " on ", report.hardware, ": layers ", first, " to ", first + kLayersShown - 1, " of ", what);
  return WriteTextFile(flags.svg_path, timeline.ToSvg(title, LayerBegin(timeline, first), LayerBegin(timeline, first + kLayersShown)));
}

absl::Status PlanDecode(const PlanFlags& flags, PlanReport& report) {
  const int64_t max_context = *std::max_element(flags.contexts.begin(), flags.contexts.end());
  ASSIGN_OR_RETURN(const std::unique_ptr<DecodePlan> plan,
                   DecodePlan::Make(report.planned, SimWorld::Make(report.profile, flags.sim),
                                    *std::max_element(flags.batches.begin(), flags.batches.end()), max_context));
  report.workspace_bytes = plan->workspace_bytes();
  report.kv_bytes_per_token = plan->kv_bytes_per_token();
  for (const int64_t context : flags.contexts) {
    for (const int64_t batch : flags.batches) {
      for (const StepOrder order : {StepOrder::kJoint, StepOrder::kAlternate}) {
        if (batch == 1 && order == StepOrder::kAlternate) continue;
        ASSIGN_OR_RETURN(DecodePoint point, plan->Run(batch, context, order));
        report.decode.push_back(std::move(point));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PlanPrompts(const PlanFlags& flags, PlanReport& report) {
  const int64_t max_prompt = *std::max_element(flags.prompts.begin(), flags.prompts.end());
  std::unique_ptr<PrefillPlan> streamed;
  if (report.profile.num_gpus == 0) {
    report.not_streamed = "there is no GPU";
  } else if (absl::StatusOr<std::unique_ptr<PrefillPlan>> plan =
                 PrefillPlan::Make(report.planned, SimWorld::Make(report.profile, flags.sim), PrefillPath::kStreamed,
                                   {.chunk_rows = flags.chunk_rows, .max_prompt = max_prompt});
             plan.ok()) {
    streamed = *std::move(plan);
    report.pass_rows = streamed->max_rows();
    report.chunk_rows = streamed->chunk_rows();
  } else {
    report.not_streamed = std::string(plan.status().message());
  }
  std::unique_ptr<PrefillPlan> shared;
  if (streamed != nullptr && report.profile.num_gpus > 1) {
    ASSIGN_OR_RETURN(shared, PrefillPlan::Make(report.planned, SimWorld::Make(report.profile, flags.sim), PrefillPath::kShared,
                                               {.chunk_rows = flags.chunk_rows, .max_prompt = max_prompt}));
    report.sharing_gpus = shared->ranks();
    report.exchange = shared->exchange();
    report.exchange_shape = shared->exchange_shape();
  }
  constexpr int64_t kChunkBetweenSteps = 512;  // what a decode worker computes of a prompt between two steps
  ASSIGN_OR_RETURN(const std::unique_ptr<PrefillPlan> chunked,
                   PrefillPlan::Make(report.planned, SimWorld::Make(report.profile, flags.sim), PrefillPath::kChunked,
                                     {.chunk_rows = kChunkBetweenSteps, .max_prompt = max_prompt}));
  ASSIGN_OR_RETURN(const std::unique_ptr<DecodePlan> decode,
                   DecodePlan::Make(report.planned, SimWorld::Make(report.profile, flags.sim), 1, max_prompt));
  for (const int64_t prompt : flags.prompts) {
    ASSIGN_OR_RETURN(const DecodePoint last_token, decode->Run(1, prompt, StepOrder::kJoint));
    for (PrefillPlan* plan : {chunked.get(), streamed.get(), shared.get()}) {
      if (plan == nullptr) continue;
      ASSIGN_OR_RETURN(PrefillPoint point, plan->Run(prompt));
      report.prompts.push_back({point, point.seconds + last_token.step_ms * 1e-3});
    }
  }
  return absl::OkStatus();
}

// Prompts beside decoding streams: one that waits for the link, one that waits for the GPU's arithmetic.
absl::Status PlanBesides(const PlanFlags& flags, int64_t longest, PlanReport& report) {
  constexpr int64_t kPrompts[] = {16384, 32768}, kStreams[] = {1, 2}, kContext = 4096;
  if (report.profile.num_gpus < 2 || report.pass_rows == 0 || kPrompts[1] > longest) return absl::OkStatus();
  ASSIGN_OR_RETURN(
      const std::unique_ptr<TogetherPlan> plan,
      TogetherPlan::Make(report.planned, SimWorld::Make(report.profile, flags.sim),
                         {.chunk_rows = flags.chunk_rows, .max_prompt = kPrompts[1], .max_streams = kStreams[1], .max_context = kContext}));
  for (const int64_t prompt : kPrompts) {
    for (const int64_t streams : kStreams) {
      ASSIGN_OR_RETURN(const TogetherPoint point, plan->Run(prompt, streams, kContext));
      report.together.push_back(point);
    }
  }
  return absl::OkStatus();
}

// Lengths that the model takes; instead of longer ones, once, the longest of them.
void CutTo(int64_t longest, std::string_view option, std::vector<int64_t>& lengths, std::vector<std::string>& notes) {
  std::vector<int64_t> fitting, longer;
  for (const int64_t length : lengths) (length <= longest ? fitting : longer).push_back(length);
  if (longer.empty()) return;
  notes.push_back(absl::StrCat(Sv(option), " ", absl::StrJoin(longer, ", "), ": the model takes ", longest + 1,
                               " tokens, an answer's first included: ", longest, " instead"));
  if (std::find(fitting.begin(), fitting.end(), longest) == fitting.end()) fitting.push_back(longest);
  lengths = std::move(fitting);
}

// Of the machine, but for one that is of the engine.
absl::Status ApplyChange(std::string_view change, SimOptions& sim, HardwareProfile& profile) {
  if (change == "expert_sharing=on" || change == "expert_sharing=off") {
    sim.experts_shared = change.ends_with("on");
    return absl::OkStatus();
  }
  const absl::Status changed = ApplyWhatIf(change, profile);
  return changed.ok() ? changed : absl::Status(changed.code(), absl::StrCat(changed.message(), "; of the engine: expert_sharing=on|off"));
}

absl::StatusOr<PlanReport> MakeReport(PlanFlags& flags) {
  PlanReport report{.model = flags.model};
  ASSIGN_OR_RETURN(report.profile, FindHardware(flags.hardware));
  report.hardware = report.profile.name;
  for (const std::string& change : flags.what_if) {
    RETURN_IF_ERROR(ApplyChange(change, flags.sim, report.profile));
    report.hardware += ", " + change;
  }
  ASSIGN_OR_RETURN(const ModelTexts texts, FindModel(flags.model));
  const int shards = flags.shards > 0 ? flags.shards : static_cast<int>(report.profile.cpu.sockets);
  absl::StatusOr<PlannedModel> planned = PlanModel(texts, shards);
  if (!planned.ok()) return Annotate(planned.status(), flags.model);
  report.planned = *std::move(planned);
  const int64_t longest = report.planned.config.max_position_embeddings - 1;
  if (longest < 1) {
    return absl::InvalidArgumentError(absl::StrCat(flags.model, ": max_position_embeddings is ", longest + 1,
                                                   ": a prompt of one token leaves no room for an answer; is the number right?"));
  }
  CutTo(longest, "--context", flags.contexts, report.notes);
  CutTo(longest, "--prompt", flags.prompts, report.notes);
  if (flags.picture_of == "prompt" && report.profile.num_gpus == 0 && !(flags.svg_path.empty() && flags.timeline_path.empty())) {
    return absl::InvalidArgumentError(absl::StrCat("--picture-of prompt shows weights as they are streamed to a GPU, and ", report.hardware,
                                                   " has none: take --picture-of decode, or a machine with GPUs"));
  }
  RETURN_IF_ERROR(PlanDecode(flags, report));
  RETURN_IF_ERROR(PlanPrompts(flags, report));
  RETURN_IF_ERROR(PlanBesides(flags, longest, report));
  return report;
}

bool SamePath(const std::string& a, const std::string& b) {
  std::error_code error;
  return std::filesystem::weakly_canonical(a, error) == std::filesystem::weakly_canonical(b, error);
}

int Plan(PlanFlags flags) {
  flags.sim.kv_dtype = flags.kv == "fp8" ? DType::kF8E4M3 : DType::kBF16;
  if (!flags.svg_path.empty() && SamePath(flags.svg_path, flags.timeline_path)) {
    return Fail("plan", absl::InvalidArgumentError(absl::StrCat("--svg and --timeline both name ", flags.svg_path, ": give each a file of its own")));
  }
  const absl::StatusOr<PlanReport> report = MakeReport(flags);
  if (!report.ok()) return Fail("plan", report.status());
  if (!flags.timeline_path.empty() || !flags.svg_path.empty()) {
    if (const absl::Status written = WritePictures(flags, *report); !written.ok()) return Fail("plan", written);
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
      "Runs the code of the decode step and of prefill in virtual time, with costs from the hardware profile. Needs config.json and no weights.\n"
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
  command->add_option(
      "--what-if", flags->what_if,
      "changes: gpus=N pcie=3|4|5 vram=N (GiB) sockets=N channels=N cores=N expert_sharing=off (each row of a decode step reads its own experts)");
  command->add_option("--context", flags->contexts, "tokens behind each stream; instead of longer ones than the model takes, the most that it takes")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--batch", flags->batches, "streams that decode together")->check(CLI::Range(1, 256))->capture_default_str();
  command->add_option("--prompt", flags->prompts, "tokens of prompts; instead of longer ones than the model takes, the most that it takes")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--chunk", flags->chunk_rows, "rows that streaming works on at once; 0: as many as are good for the device and fit")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--shards", flags->shards, "parts of each expert (default: one a socket)")->check(CLI::Range(1, 64));
  command->add_option("--kv", flags->kv, "KV cache in bf16 or fp8")->check(CLI::IsMember({"bf16", "fp8"}))->capture_default_str();
  command->add_option("--skew", flags->sim.routing_skew, "experts are chosen by 1 / rank^skew; 0: evenly")
      ->check([](const std::string& text) -> std::string {  // CLI::Range lets NaN through
        double skew = 0;
        return absl::SimpleAtod(text, &skew) && skew >= 0 && skew <= 4 ? "" : "'" + text + "' is no number from 0 to 4";
      })
      ->capture_default_str();
  command->add_option("--seed", flags->sim.seed, "of the experts' choice")->capture_default_str();
  command->add_flag("--json", flags->json, "for programs");
  command->add_option("--timeline", flags->timeline_path, "write a trace for ui.perfetto.dev");
  command->add_option("--svg", flags->svg_path, "write a picture of the first MoE layers");
  command
      ->add_option("--picture-of", flags->picture_of,
                   "what --timeline and --svg show: a decode step (first --batch and --context), or a streamed prompt (first --prompt)")
      ->check(CLI::IsMember({"decode", "prompt"}))
      ->capture_default_str();
  command->callback([=, &exit_code] {
    SimWorld::StayOnOneCpu();
    exit_code = Plan(*flags);
  });
}

}  // namespace hearth
