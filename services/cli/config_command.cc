// `hearth config`: the configuration in force, every key with its value.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>

#include "common/base/process.h"
#include "common/formats/model_config.h"
#include "common/text/model_text.h"
#include "services/cli/command.h"

namespace hearth {
namespace {

// What the store and the router read of a model before its weights.
absl::Status CheckModel(const std::string& path) {
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(path, GgufArrays::kValues));
  RETURN_IF_ERROR(ReadModelConfig(files).status());
  return ReadModelText(files).status();
}

}  // namespace

void AddConfig(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("config", "check node.toml and print every key with the value in force");
  auto path = AddConfigOption(*command);
  command->callback([=, &exit_code] {
    const absl::StatusOr<NodeConfig> config = ReadNodeConfig(*path);
    if (!config.ok()) {
      exit_code = Fail("config", absl::InvalidArgumentError(config.status().message()));
      return;
    }
    if (const absl::Status model = CheckModel(config->model_path); !model.ok()) {
      exit_code = Fail("config", absl::InvalidArgumentError(absl::StrCat("model.path: ", model.message())));
      return;
    }
    if (access(config->shm_dir.c_str(), X_OK) != 0) {
      exit_code = Fail("config", absl::InvalidArgumentError(absl::StrCat("node.shm_dir ", config->shm_dir, ": ", strerror(errno))));
      return;
    }
    if (!config->api_key_file.empty() && access(config->api_key_file.c_str(), R_OK) != 0) {
      exit_code = Fail("config", absl::InvalidArgumentError(absl::StrCat("router.api_key_file ", config->api_key_file, ": ", strerror(errno))));
      return;
    }
    std::cout << "# " << config->source_path << "\n" << FormatNodeConfig(*config);
    exit_code = kExitOk;
  });
}

}  // namespace hearth
