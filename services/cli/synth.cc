// `hearth synth`: a random checkpoint of any given shape, for measurements without a download.
#include <fstream>
#include <iostream>
#include <sstream>

#include "common/base/process.h"
#include "common/formats/synth.h"
#include "services/cli/command.h"
#include "services/cli/progress.h"

namespace hearth {
namespace {

int Synth(const std::string& config_json_path, const SynthOptions& options) {
  std::ifstream in(config_json_path);
  if (!in) return Fail("synth", absl::NotFoundError(config_json_path + ": cannot be read"));
  std::stringstream text;
  text << in.rdbuf();
  SynthOptions with_bar = options;
  ProgressBar bar("writing");
  with_bar.progress = [&](uint64_t done, uint64_t total) { bar.Update(done, total); };
  const absl::Status status = WriteSynthCheckpoint(text.str(), with_bar);
  return status.ok() ? kExitOk : Fail("synth", status);
}

}  // namespace

void AddSynth(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("synth", "write a random checkpoint of any given config.json");
  command->footer(
      "The checkpoint has the layout of a published one (safetensors with index; FP8 blocks or packed INT4 experts where the config says so) and "
      "random weights that keep\n"
      "activations in range: it loads, runs at full speed and writes nonsense. Memory stays flat, so 20 GB are no problem.\n\n"
      "  hearth synth --config-json my/config.json --out /data/synth --tokenizer deploy/models/fable-moe");
  auto config_json = std::make_shared<std::string>();
  auto options = std::make_shared<SynthOptions>();
  command->add_option("--config-json", *config_json, "config.json of a supported architecture")->required();
  command->add_option("--out", options->out_dir, "folder to write to; must be empty or absent")->required();
  command->add_option("--tokenizer", options->tokenizer_dir, "folder whose tokenizer files are copied (default: a byte-level one is written)");
  command->add_option("--seed", options->seed, "the same seed gives the same bytes")->capture_default_str();
  command->add_option("--shard-bytes", options->shard_bytes, "a new file past this size")->capture_default_str();
  command->callback([=, &exit_code] { exit_code = Synth(*config_json, *options); });
}

}  // namespace hearth
