// hearth: the operator's command. Each subcommand has a file of its own and a --help that teaches.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <vector>

#include "common/base/process.h"
#include "services/cli/command.h"

int main(int argc, char** argv) {
  CLI::App app(
      "Hearth serves huge Mixture-of-Experts models from one workstation.\n\n"
      "A node is four processes on one configuration (node.toml): weightstore, prefill, decode, router. Start them by hand with `hearth up`,\n"
      "or as systemd services (hearth.target). Then ask: `hearth run \"...\"`, `hearth chat`, curl, or any OpenAI client.\n",
      "hearth");
  app.require_subcommand(1);
  app.set_version_flag("--version", "hearth 0.1.0");
  app.footer("`hearth COMMAND --help` explains each command with examples.");
  int exit_code = 0;
  hearth::AddUp(app, exit_code);
  hearth::AddWait(app, exit_code);
  hearth::AddStatus(app, exit_code);
  hearth::AddTrace(app, exit_code);
  hearth::AddRun(app, exit_code);
  hearth::AddChat(app, exit_code);
  hearth::AddLoad(app, exit_code);
  hearth::AddVerify(app, exit_code);
  hearth::AddDrop(app, exit_code);
  hearth::AddSynth(app, exit_code);
  hearth::AddConfig(app, exit_code);
  hearth::AddPlan(app, exit_code);
  hearth::AddProbe(app, exit_code);
  const std::vector<CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  if (argc > 1 && argv[1][0] != '-' && std::none_of(commands.begin(), commands.end(), [&](const CLI::App* c) { return c->check_name(argv[1]); })) {
    std::cerr << "hearth: there is no command '" << argv[1] << "'; `hearth --help` lists them\n";
    return hearth::kExitFailure;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error);  // --help and --version come this way, too
  }
  std::cout.flush();
  if (!std::cout && exit_code == hearth::kExitOk) {
    std::cerr << "hearth: standard output can't be written: " << strerror(errno) << "\n";
    exit_code = hearth::kExitFailure;
  }
  return exit_code;
}
