// Files that an operator names on the command line.
// Room: services/cli. May touch: common/{formats,base}. Threads: any.
#pragma once

#include <string>

#include "common/base/status.h"

namespace hearth {

// Whole; regular files of at most 16 MB alone. InvalidArgument says what is in the way.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);
// In place of what is there. Unavailable with the reason.
absl::Status WriteTextFile(const std::string& path, const std::string& text);

}  // namespace hearth
