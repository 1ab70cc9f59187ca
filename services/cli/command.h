// What every `hearth` subcommand is: a name on the command line and a function to run. One file a subcommand.
// Room: services/cli. May touch: all of common, proto. Owns nothing: the operator's tool.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "common/base/node_config.h"
#include "common/base/status.h"

namespace hearth {

// Adds the subcommand to `app`; its callback stores the exit code in `exit_code`.
void AddUp(CLI::App& app, int& exit_code);
void AddWait(CLI::App& app, int& exit_code);
void AddStatus(CLI::App& app, int& exit_code);
void AddChat(CLI::App& app, int& exit_code);
void AddRun(CLI::App& app, int& exit_code);
void AddLoad(CLI::App& app, int& exit_code);
void AddVerify(CLI::App& app, int& exit_code);
void AddDrop(CLI::App& app, int& exit_code);
void AddSynth(CLI::App& app, int& exit_code);
void AddConfig(CLI::App& app, int& exit_code);
void AddPlan(CLI::App& app, int& exit_code);
void AddProbe(CLI::App& app, int& exit_code);
void AddTrace(CLI::App& app, int& exit_code);

// --config, with HEARTH_CONFIG and /etc/hearth/node.toml behind it.
std::shared_ptr<std::string> AddConfigOption(CLI::App& command);

// Prints "hearth <what>: <message>" and gives the exit code that fits the status.
int Fail(std::string_view what, const absl::Status& status);

}  // namespace hearth
