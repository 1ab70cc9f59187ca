#include "common/device/collectives.h"

#include <algorithm>

namespace hearth {

void Count(std::vector<Traffic>& traffic, const char* name, uint64_t bytes) {
  auto entry = std::find_if(traffic.begin(), traffic.end(), [&](const Traffic& t) { return t.name == name; });
  if (entry == traffic.end()) entry = traffic.insert(entry, {.name = name});
  ++entry->calls;
  entry->bytes += bytes;
}

}  // namespace hearth
