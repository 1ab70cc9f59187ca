#include "services/cli/command.h"

#include <iostream>

#include "common/base/process.h"

namespace hearth {

std::shared_ptr<std::string> AddConfigOption(CLI::App& command) {
  auto path = std::make_shared<std::string>("/etc/hearth/node.toml");
  command.add_option("--config,-c", *path, "the node's configuration")->envname("HEARTH_CONFIG")->capture_default_str();
  return path;
}

int Fail(std::string_view what, const absl::Status& status) {
  std::cerr << "hearth " << what << ": " << StdSv(status.message()) << "\n";
  return absl::IsInvalidArgument(status) ? kExitConfig : kExitFailure;
}

}  // namespace hearth
