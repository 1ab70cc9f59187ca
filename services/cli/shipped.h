// Files that come inside the program: the configurations and machines that `hearth plan` knows by name (deploy/models/configs, deploy/hardware).
// Room: services/cli. Written at configure time (CMakeLists.txt).
#pragma once

#include <span>
#include <string_view>

namespace hearth {

struct ShippedFile {
  std::string_view name;  // without its ending
  std::string_view text;
};

std::span<const ShippedFile> ShippedModels();
std::span<const ShippedFile> ShippedHardware();

}  // namespace hearth
