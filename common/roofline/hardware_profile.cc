#include "common/roofline/hardware_profile.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <variant>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace hearth {
namespace {

using Target = std::variant<std::string*, int64_t*, double*>;

struct Key {
  const char* table;  // "": outside of tables
  const char* name;
  Target target;
  double min = 0;  // of numbers
  double max = 0;
};

constexpr double kMost = 1e9;

// The one list of keys: parsing, range checks, "unknown key", "missing" and printing all come from it.
std::vector<Key> Keys(HardwareProfile& p) {
  return {
      {"", "name", &p.name},
      {"", "source", &p.source},
      {"cpu", "name", &p.cpu.name},
      {"cpu", "sockets", &p.cpu.sockets, 1, 64},
      {"cpu", "cores", &p.cpu.cores, 1, 4096},
      {"cpu", "channels", &p.cpu.channels, 1, 64},
      {"cpu", "channel_gb_per_s", &p.cpu.channel_gb_per_s, 1e-3, kMost},
      {"cpu", "core_gb_per_s", &p.cpu.core_gb_per_s, 1e-3, kMost},
      {"cpu", "memory_gib", &p.cpu.memory_gib, 1e-3, kMost},
      {"cpu", "cache_mib", &p.cpu.cache_mib, 0, kMost},
      {"cpu", "bf16_gflops_per_core", &p.cpu.bf16_gflops_per_core, 1e-3, kMost},
      {"cpu", "memory_efficiency", &p.cpu.memory_efficiency, 1e-3, 1},
      {"cpu", "compute_efficiency", &p.cpu.compute_efficiency, 1e-3, 1},
      {"cpu", "op_us", &p.cpu.op_us, 0, 1e6},
      {"gpu", "name", &p.gpu.name},
      {"gpu", "count", &p.num_gpus, 1, 64},
      {"gpu", "memory_gib", &p.gpu.memory_gib, 1e-3, kMost},
      {"gpu", "memory_gb_per_s", &p.gpu.memory_gb_per_s, 1e-3, kMost},
      {"gpu", "bf16_tflops", &p.gpu.bf16_tflops, 1e-3, kMost},
      {"gpu", "link_gb_per_s", &p.gpu.link_gb_per_s, 1e-3, kMost},
      {"gpu", "link_us", &p.gpu.link_us, 0, 1e6},
      {"gpu", "memory_efficiency", &p.gpu.memory_efficiency, 1e-3, 1},
      {"gpu", "compute_efficiency", &p.gpu.compute_efficiency, 1e-3, 1},
      {"gpu", "op_us", &p.gpu.op_us, 0, 1e6},
      {"gpu", "enqueue_us", &p.gpu.enqueue_us, 0, 1e6},
  };
}

std::string FullName(const Key& key) { return *key.table == '\0' ? key.name : absl::StrCat(key.table, ".", key.name); }

// What is wrong with a number; empty: nothing.
std::string OutsideOf(const Key& key, double value) {
  if (value >= key.min && value <= key.max) return "";  // NaN is not
  return absl::StrFormat("%s = %g is outside %g to %g", FullName(key), value, key.min, key.max);
}

absl::Status Bad(std::string_view source, const toml::source_region& where, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Sv(source), ":", where.begin.line, ": ", Sv(what)));
}

absl::Status Assign(const Key& key, const toml::node& node, std::string_view source) {
  const std::string name = FullName(key);
  if (auto* text = std::get_if<std::string*>(&key.target)) {
    if (!node.is_string()) return Bad(source, node.source(), name + " must be a text in quotes");
    **text = node.as_string()->get();
    return absl::OkStatus();
  }
  const bool whole = std::holds_alternative<int64_t*>(key.target);
  if (!node.is_integer() && (whole || !node.is_floating_point())) {
    return Bad(source, node.source(), absl::StrCat(name, " must be a ", whole ? "whole number" : "number"));
  }
  const double value = node.is_integer() ? static_cast<double>(node.as_integer()->get()) : node.as_floating_point()->get();
  if (const std::string wrong = OutsideOf(key, value); !wrong.empty()) return Bad(source, node.source(), wrong);
  if (whole) {
    *std::get<int64_t*>(key.target) = static_cast<int64_t>(value);
  } else {
    *std::get<double*>(key.target) = value;
  }
  return absl::OkStatus();
}

absl::Status AssignTable(const toml::table& table, const char* table_name, const std::vector<Key>& keys, std::string_view source,
                         const std::set<std::string>& other_names) {
  std::vector<std::string> names;
  for (const Key& key : keys) {
    if (std::string_view(key.table) == table_name) names.push_back(key.name);
  }
  for (const auto& [name, node] : table) {
    const std::string text(name.str());
    if (other_names.contains(text)) continue;
    const auto key = std::find_if(keys.begin(), keys.end(), [&](const Key& k) { return std::string_view(k.table) == table_name && text == k.name; });
    if (key == keys.end()) {
      return Bad(source, node.source(),
                 absl::StrCat("unknown key '", table_name, *table_name == '\0' ? "" : ".", text, "': there are ", absl::StrJoin(names, ", ")));
    }
    RETURN_IF_ERROR(Assign(*key, node, source));
  }
  for (const std::string& name : names) {
    if (!table.contains(name)) {
      const Key& key =
          *std::find_if(keys.begin(), keys.end(), [&](const Key& k) { return std::string_view(k.table) == table_name && name == k.name; });
      return Bad(source, table.source(), FullName(key) + " is missing: every key is needed, deploy/hardware has examples");
    }
  }
  return absl::OkStatus();
}

// GB/s that large copies reach over 16 lanes, each way.
struct PcieRate {
  int64_t generation;
  double gb_per_s;
};
constexpr std::array kPcieRates = {PcieRate{3, 12}, PcieRate{4, 25}, PcieRate{5, 55}};

// What all sockets have together, spread over them.
absl::Status Spread(const char* what, int64_t total, int64_t sockets, int64_t& each) {
  if (total < sockets || total % sockets != 0) {
    return absl::InvalidArgumentError(absl::StrFormat("what-if %s=%d can't be spread evenly over %d sockets", what, total, sockets));
  }
  each = total / sockets;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HardwareProfile> ParseHardwareProfile(std::string_view toml_text, std::string_view source_path) {
  HardwareProfile profile;
  toml::table root;
  try {
    root = toml::parse(toml_text);
  } catch (const toml::parse_error& e) {
    return Bad(source_path, e.source(), std::string(e.description()));
  }
  const std::vector<Key> keys = Keys(profile);
  RETURN_IF_ERROR(AssignTable(root, "", keys, source_path, {"cpu", "gpu"}));
  for (const char* name : {"cpu", "gpu"}) {
    const toml::node* node = root.get(name);
    if (node == nullptr && std::string_view(name) == "gpu") continue;  // a machine without one
    if (node == nullptr || !node->is_table()) {
      return Bad(source_path, node == nullptr ? root.source() : node->source(), absl::StrCat("there must be a table [", name, "]"));
    }
    RETURN_IF_ERROR(AssignTable(*node->as_table(), name, keys, source_path, {}));
  }
  return profile;
}

std::string FormatHardwareProfile(const HardwareProfile& profile) {
  HardwareProfile copy = profile;
  std::string out, table;
  for (const Key& key : Keys(copy)) {
    if (std::string_view(key.table) == "gpu" && profile.num_gpus == 0) break;
    if (table != key.table) absl::StrAppend(&out, "\n[", table = key.table, "]\n");
    absl::StrAppend(&out, key.name, " = ");
    if (auto* text = std::get_if<std::string*>(&key.target)) {
      std::string quoted = "\"";
      for (const char c : **text) {
        if (c == '"' || c == '\\') quoted += '\\';
        quoted += c;
      }
      absl::StrAppend(&out, quoted, "\"\n");
    } else if (auto* number = std::get_if<int64_t*>(&key.target)) {
      absl::StrAppend(&out, **number, "\n");
    } else {
      absl::StrAppend(&out, absl::StrFormat("%.6g\n", *std::get<double*>(key.target)));
    }
  }
  return out;
}

namespace {

absl::Status Change(std::string_view change, HardwareProfile& profile) {
  const size_t equals = change.find('=');
  const std::string key(change.substr(0, equals));
  std::string value(equals == std::string_view::npos ? "" : change.substr(equals + 1));
  for (const char* unit : {"GiB", "GB", "G"}) {
    if (key == "vram" && value.ends_with(unit)) {
      value.resize(value.size() - std::string_view(unit).size());
      break;
    }
  }
  int64_t number = 0;
  if (!absl::SimpleAtoi(value, &number) || number < 0 || (number == 0 && key != "gpus")) {
    return absl::InvalidArgumentError(
        absl::StrCat("what-if '", Sv(change), "': wanted is gpus=N, pcie=3|4|5, vram=N (GiB), sockets=N, channels=N or cores=N (of all sockets)"));
  }
  if (profile.num_gpus == 0 && (key == "gpus" || key == "pcie" || key == "vram")) {
    return absl::InvalidArgumentError(absl::StrCat("what-if '", Sv(change), "': ", profile.name, " has no GPU to change"));
  }
  if (key == "gpus") {
    profile.num_gpus = number;
  } else if (key == "pcie") {
    const auto rate = std::find_if(kPcieRates.begin(), kPcieRates.end(), [&](const PcieRate& r) { return r.generation == number; });
    if (rate == kPcieRates.end()) return absl::InvalidArgumentError(absl::StrCat("what-if '", Sv(change), "': known are pcie=3, 4 and 5"));
    profile.gpu.link_gb_per_s = rate->gb_per_s;
  } else if (key == "vram") {
    profile.gpu.memory_gib = static_cast<double>(number);
  } else if (key == "sockets") {
    // The weights need their memory however many sockets there are: what goes is channels and cores.
    profile.cpu.memory_gib *= static_cast<double>(profile.cpu.sockets) / static_cast<double>(number);
    profile.cpu.sockets = number;
  } else if (key == "channels") {
    RETURN_IF_ERROR(Spread("channels", number, profile.cpu.sockets, profile.cpu.channels));
  } else if (key == "cores") {
    RETURN_IF_ERROR(Spread("cores", number, profile.cpu.sockets, profile.cpu.cores));
  } else {
    return absl::InvalidArgumentError(absl::StrCat("what-if '", Sv(change), "': known are gpus, pcie, vram, sockets, channels, cores"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyWhatIf(std::string_view change, HardwareProfile& profile) {
  HardwareProfile changed = profile;
  RETURN_IF_ERROR(Change(change, changed));
  // What a file may not say a change may not either.
  for (const Key& key : Keys(changed)) {
    if (std::string_view(key.table) == "gpu" && changed.num_gpus == 0) continue;
    double value = key.min;
    if (const auto* whole = std::get_if<int64_t*>(&key.target)) value = static_cast<double>(**whole);
    if (const auto* number = std::get_if<double*>(&key.target)) value = **number;
    if (const std::string wrong = OutsideOf(key, value); !wrong.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("what-if '", Sv(change), "': ", wrong));
    }
  }
  profile = std::move(changed);
  return absl::OkStatus();
}

}  // namespace hearth
