// `hearth config`: the configuration in force, every key with its value.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <optional>

#include "common/base/process.h"
#include "common/formats/gguf_tokenizer.h"
#include "common/formats/model_config.h"
#include "services/cli/command.h"

namespace hearth {

void AddConfig(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("config", "check node.toml and print every key with the value in force");
  auto path = AddConfigOption(*command);
  command->callback([=, &exit_code] {
    const absl::StatusOr<NodeConfig> config = ReadNodeConfig(*path);
    if (!config.ok()) {
      exit_code = Fail("config", absl::InvalidArgumentError(config.status().message()));
      return;
    }
    if (const absl::StatusOr<ModelTexts> texts = ReadModelTexts(config->model_path); !texts.ok()) {
      exit_code = Fail("config", absl::InvalidArgumentError(absl::StrCat("model.path: ", texts.status().message())));
      return;
    }
    const absl::StatusOr<std::optional<TokenizerTexts>> tokenizer = ReadGgufTokenizer(config->model_path);
    if (!tokenizer.ok()) {
      exit_code = Fail("config", absl::InvalidArgumentError(absl::StrCat("model.path: ", tokenizer.status().message())));
      return;
    }
    if (const std::string file = ModelFilesDir(config->model_path) + "/tokenizer.json"; !tokenizer->has_value() && access(file.c_str(), R_OK) != 0) {
      exit_code = Fail("config", absl::InvalidArgumentError(absl::StrCat("model.path: ", file, ": ", strerror(errno),
                                                                         "; it comes with the model's Hugging Face repository")));
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
