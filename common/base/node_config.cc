#include "common/base/node_config.h"

#include <toml++/toml.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/listen_host.h"

namespace hearth {
namespace {

// optional: a number, or "auto" for none.
using Target = std::variant<std::string*, int64_t*, bool*, std::vector<std::string>*, std::optional<int64_t>*>;

struct Key {
  const char* table;
  const char* name;
  Target target;
  int64_t min = INT64_MIN;
  int64_t max = INT64_MAX;
  std::vector<std::string> choices = {};  // of a string; empty: any
};

// The one list of keys: parsing, range checks, "unknown key" and printing all come from it.
std::vector<Key> Keys(NodeConfig& c) {
  constexpr int64_t kDayMs = 86'400'000;
  return {
      {"node", "name", &c.node_name},
      {"node", "runtime_dir", &c.runtime_dir},
      {"node", "shm_dir", &c.shm_dir},
      {"node", "log_level", &c.log_level, 0, 0, {"trace", "debug", "info", "warn", "error", "off"}},
      {"node", "hardware", &c.hardware},
      {"node", "activation_terms", &c.activation_terms, 1, 2},
      {"node", "numerics", &c.numerics, 0, 0, {"exact", "fast"}},
      {"node", "kv_dtype", &c.kv_dtype, 0, 0, {"bf16", "fp8"}},
      {"model", "path", &c.model_path},
      {"model", "name", &c.model_name},
      {"weightstore", "numa_shards", &c.numa_shards, 0, 64},
      {"weightstore", "load_threads", &c.load_threads, 0, 256},
      {"weightstore", "image_bytes_max", &c.image_bytes_max, 0},
      {"weightstore", "disk_dir", &c.disk_dir},
      {"weightstore", "kv_pool_bytes", &c.kv_pool_bytes, 0},
      {"weightstore", "kv_pool_tokens", &c.kv_pool_tokens, 0, int64_t{1} << 32},
      {"weightstore", "orphan_grace_ms", &c.orphan_grace_ms, 0, kDayMs},
      {"weightstore", "reuse_decoded_pages", &c.reuse_decoded_pages},
      {"prefill", "instances", &c.prefill_instances, 0, 16},
      {"prefill", "threads", &c.prefill_threads, 0, 1024},
      {"prefill", "chunk_tokens", &c.prefill_chunk_tokens, 0, 65536},
      {"prefill", "path", &c.prefill_path, 0, 0, {"auto", "chunked", "slp"}},
      {"prefill", "group", &c.prefill_group, 0, 0, {"auto", "off"}},
      {"prefill", "expert_source", &c.expert_source, 0, 0, {"auto", "image", "ring"}},
      {"prefill", "ring_slots", &c.ring_slots, 2, 4096},
      {"prefill", "device_memory_bytes", &c.prefill_device_memory_bytes, 0},
      {"decode", "instances", &c.decode_instances, 1, 16},
      {"decode", "threads", &c.decode_threads, 0, 1024},
      {"decode", "max_batch", &c.max_batch, 1, 256},
      {"decode", "chunk_tokens", &c.chunk_tokens, 1, 65536},
      {"decode", "tpot_target_ms", &c.tpot_target_ms, 0, 60'000},
      {"decode", "tpot_rise_percent", &c.tpot_rise_percent, 1, 100'000},
      {"decode", "speculation", &c.speculation, 0, 3},
      {"decode", "isa", &c.isa, 0, 0, {"auto", "scalar", "avx2", "avx512", "avx512bf16", "amx"}},
      {"decode", "overlap", &c.overlap, 0, 0, {"auto", "joint", "plain", "alternate"}},
      {"router", "http_listen", &c.http_listen},
      {"router", "grpc_listen", &c.grpc_listen},
      {"router", "api_key_file", &c.api_key_file},
      {"router", "cors_origins", &c.cors_origins},
      {"router", "max_queue", &c.max_queue, 1, 1'000'000},
      {"router", "max_body_bytes", &c.max_body_bytes, 1024, int64_t{1} << 32},
      {"router", "chunked_prefill_max_tokens", &c.chunked_prefill_max_tokens, 0, int64_t{1} << 32},
      {"router", "path_choice", &c.path_choice, 0, 0, {"auto", "length"}},
      {"router", "ttft_slo_ms", &c.ttft_slo_ms, 0, kDayMs},
      {"router", "group_prefill_min_tokens", &c.group_prefill_min_tokens, 0, int64_t{1} << 32},
      {"router", "drain_ms", &c.drain_ms, 0, kDayMs},
      {"router", "keep_alive_ms", &c.keep_alive_ms, 1000, kDayMs},
      {"router", "max_tokens_default", &c.max_tokens_default, 0, int64_t{1} << 32},
  };
}

absl::Status Bad(std::string_view source, const toml::source_region& where, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Sv(source), ":", where.begin.line, ": ", Sv(what)));
}

absl::Status Assign(const Key& key, const toml::node& node, std::string_view source) {
  const std::string name = absl::StrCat(key.table, ".", key.name);
  if (auto* text = std::get_if<std::string*>(&key.target)) {
    if (!node.is_string()) return Bad(source, node.source(), name + " must be a string in quotes");
    const std::string& value = node.as_string()->get();
    if (!key.choices.empty() && std::find(key.choices.begin(), key.choices.end(), value) == key.choices.end()) {
      return Bad(source, node.source(), absl::StrCat(name, " '", value, "' is unknown: use ", absl::StrJoin(key.choices, ", ")));
    }
    **text = value;
  } else if (auto* number = std::get_if<int64_t*>(&key.target)) {
    if (!node.is_integer()) return Bad(source, node.source(), name + " must be a whole number");
    const int64_t value = node.as_integer()->get();
    if (value < key.min || value > key.max) {
      return Bad(source, node.source(), absl::StrFormat("%s = %d is outside %d to %d", name, value, key.min, key.max));
    }
    **number = value;
  } else if (auto* choice = std::get_if<std::optional<int64_t>*>(&key.target)) {
    const bool is_auto = node.is_string() && node.as_string()->get() == "auto";
    const int64_t value = node.is_integer() ? node.as_integer()->get() : key.min - 1;
    if (!is_auto && (value < key.min || value > key.max)) {
      return Bad(source, node.source(), absl::StrFormat("%s must be \"auto\" or a whole number from %d to %d", name, key.min, key.max));
    }
    **choice = is_auto ? std::nullopt : std::optional<int64_t>(value);
  } else if (auto* flag = std::get_if<bool*>(&key.target)) {
    if (!node.is_boolean()) return Bad(source, node.source(), name + " must be true or false");
    **flag = node.as_boolean()->get();
  } else {
    auto* list = std::get<std::vector<std::string>*>(key.target);
    list->clear();
    const toml::array* array = node.as_array();
    if (node.is_string()) {
      list->push_back(node.as_string()->get());
    } else if (array == nullptr) {
      return Bad(source, node.source(), name + " must be a list of strings");
    } else {
      for (const toml::node& item : *array) {
        if (!item.is_string()) return Bad(source, item.source(), name + " must be a list of strings");
        list->push_back(item.as_string()->get());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Validate(NodeConfig& c) {
  const auto bad = [&](std::string_view what) { return absl::InvalidArgumentError(absl::StrCat(c.source_path, ": ", Sv(what))); };
  if (c.node_name.empty() || c.node_name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") != std::string::npos) {
    return bad("node.name must be made of a-z, 0-9, _ and -");
  }
  if (c.model_path.empty()) return bad("model.path is missing: the Hugging Face directory of the model to serve");
  // Unix socket paths hold at most 107 bytes (sun_path).
  if (c.WorkerSocket("prefill", 15).size() > 107) return bad("node.runtime_dir is too long: its sockets' paths may have at most 107 bytes");
  if (const absl::Status s = c.AllowsIsa(c.isa); !s.ok()) return bad("decode.isa: " + std::string(s.message()));
  if (c.image_bytes_max > 0 && c.disk_dir.empty()) {
    return bad("weightstore.image_bytes_max needs weightstore.disk_dir: a directory on a fast disk, for the experts beyond it");
  }
  if (c.expert_source == "ring" && c.prefill_path != "slp") {
    return bad(absl::StrCat("prefill.expert_source = \"ring\" is for prefill.path = \"slp\", and it is \"", c.prefill_path, "\""));
  }
  if (c.http_listen.empty() && c.grpc_listen.empty()) return bad("router.http_listen and router.grpc_listen are both empty: no client could come in");
  std::set<std::pair<std::string, uint16_t>> listens;
  for (const auto* list : {&c.http_listen, &c.grpc_listen}) {
    const bool http = list == &c.http_listen;
    for (const std::string& text : *list) {
      const std::string key = http ? "router.http_listen" : "router.grpc_listen";
      const auto host = ParseListen(text, http ? kHttpPort : kGrpcPort);
      if (!host.ok()) return bad(absl::StrCat(key, ": ", host.status().message()));
      if (host->port != 0 && !listens.insert({host->host, host->port}).second) {
        return bad(absl::StrCat(key, ": '", text, "' is listened on already, by HTTP or gRPC"));
      }
    }
  }
  if (c.model_name_is_default) c.model_name = DefaultModelName(c.model_path);
  return absl::OkStatus();
}

}  // namespace

std::string DefaultModelName(const std::string& model_path) {
  std::filesystem::path path(model_path);
  if (path.filename().empty()) path = path.parent_path();
  std::string name = path.filename().string();
  if (!name.ends_with(".gguf")) return name;
  name.resize(name.size() - std::string_view(".gguf").size());
  // A split model's files are named NAME-00001-of-00009.gguf.
  constexpr std::string_view kPart = "-ddddd-of-ddddd";
  const size_t begin = name.size() - std::min(name.size(), kPart.size());
  const bool is_part = begin > 0 && std::equal(kPart.begin(), kPart.end(), name.begin() + static_cast<std::ptrdiff_t>(begin),
                                               [](char want, char c) { return want == 'd' ? c >= '0' && c <= '9' : c == want; });
  return is_part ? name.substr(0, begin) : name;
}

std::string NodeConfig::StoreSocket() const { return absl::StrCat(runtime_dir, "/", node_name, ".weightstore.sock"); }
std::string NodeConfig::WorkerSocket(std::string_view kind, int64_t index) const {
  return absl::StrCat(runtime_dir, "/", node_name, ".", Sv(kind), ".", index, ".sock");
}
std::string NodeConfig::RouterAdminSocket() const { return absl::StrCat(runtime_dir, "/", node_name, ".router.sock"); }

absl::Status NodeConfig::AllowsIsa(std::string_view isa_name) const {
  if (isa_name != "amx" || numerics == "fast") return absl::OkStatus();
  return absl::FailedPreconditionError("the path 'amx' is not exact: set node.numerics = \"fast\" for it, or use auto or avx512bf16");
}

absl::StatusOr<NodeConfig> ParseNodeConfig(std::string_view toml_text, std::string_view source_path) {
  NodeConfig config;
  config.source_path = std::string(source_path);
  toml::table root;
  try {
    root = toml::parse(toml_text);
  } catch (const toml::parse_error& e) {
    return Bad(source_path, e.source(), std::string(e.description()));
  }
  std::map<std::string, std::map<std::string, Key>> known;
  for (const Key& key : Keys(config)) known[key.table].emplace(key.name, key);
  for (const auto& [table_name, table_node] : root) {
    const std::string table_text(table_name.str());
    const auto table_keys = known.find(table_text);
    const toml::table* table = table_node.as_table();
    if (table_keys == known.end() || table == nullptr) {
      std::vector<std::string> names;
      for (const auto& [name, keys] : known) names.push_back("[" + name + "]");
      return Bad(source_path, table_node.source(), "unknown key '" + table_text + "': the tables are " + absl::StrJoin(names, " "));
    }
    for (const auto& [key_name, node] : *table) {
      const auto key = table_keys->second.find(std::string(key_name.str()));
      if (key == table_keys->second.end()) {
        std::vector<std::string> names;
        for (const auto& [name, k] : table_keys->second) names.push_back(name);
        return Bad(
            source_path, node.source(),
            absl::StrCat("unknown key '", table_text, ".", std::string(key_name.str()), "': [", table_text, "] has ", absl::StrJoin(names, ", ")));
      }
      RETURN_IF_ERROR(Assign(key->second, node, source_path));
    }
  }
  config.model_name_is_default = config.model_name.empty();
  RETURN_IF_ERROR(Validate(config));
  return config;
}

absl::StatusOr<NodeConfig> ReadNodeConfig(const std::string& path) {
  if (std::filesystem::is_directory(path))
    return absl::InvalidArgumentError(absl::StrCat(path, ": is a directory; --config wants the file node.toml"));
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read (", strerror(errno), "); give --config, or copy deploy/node.toml there"));
  std::stringstream text;
  text << in.rdbuf();
  ASSIGN_OR_RETURN(NodeConfig config, ParseNodeConfig(text.str(), path));
  // Relative paths mean: beside the file, so that a node can be moved as a folder.
  const std::filesystem::path base = std::filesystem::absolute(path).parent_path();
  for (std::string* p : {&config.model_path, &config.runtime_dir, &config.shm_dir, &config.disk_dir, &config.hardware, &config.api_key_file}) {
    if (!p->empty() && std::filesystem::path(*p).is_relative()) *p = (base / *p).lexically_normal().string();
  }
  RETURN_IF_ERROR(Validate(config));
  return config;
}

std::string FormatNodeConfig(const NodeConfig& config) {
  NodeConfig copy = config;
  std::string out, table;
  const auto quoted = [](const std::string& s) {
    std::string q = "\"";
    for (char c : s) {
      if (c == '"' || c == '\\') q += '\\';
      q += c;
    }
    return q + "\"";
  };
  for (const Key& key : Keys(copy)) {
    if (table != key.table) absl::StrAppend(&out, table.empty() ? "" : "\n", "[", table = key.table, "]\n");
    absl::StrAppend(&out, key.name, " = ");
    if (auto* text = std::get_if<std::string*>(&key.target)) {
      absl::StrAppend(&out, quoted(**text));
    } else if (auto* number = std::get_if<int64_t*>(&key.target)) {
      absl::StrAppend(&out, **number);
    } else if (auto* choice = std::get_if<std::optional<int64_t>*>(&key.target)) {
      absl::StrAppend(&out, (*choice)->has_value() ? absl::StrCat(***choice) : quoted("auto"));
    } else if (auto* flag = std::get_if<bool*>(&key.target)) {
      absl::StrAppend(&out, **flag ? "true" : "false");
    } else {
      std::vector<std::string> items;
      for (const std::string& s : *std::get<std::vector<std::string>*>(key.target)) items.push_back(quoted(s));
      absl::StrAppend(&out, "[", absl::StrJoin(items, ", "), "]");
    }
    absl::StrAppend(&out, "\n");
  }
  return out;
}

}  // namespace hearth
