// node.toml: the one configuration of a node, read by every process of it. deploy/node.toml documents each key with its default.
// Room: common/base. Parsed once, validated once, then const. Unknown keys, wrong types and unreadable values are errors that name the key and the line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/status.h"

namespace hearth {

struct NodeConfig {
  // [node]
  std::string node_name = "main";           // names the regions and sockets; [a-z0-9_-]
  std::string runtime_dir = "/run/hearth";  // Unix sockets
  std::string shm_dir = "/dev/shm";         // a tmpfs or hugetlbfs for weights and KV
  std::string log_level = "info";
  std::string hardware;  // this machine's profile, as `hearth probe` writes it: what first-token times are predicted from before any was measured
  // BF16 terms of matrix inputs and KV: 2 keeps 16 bits of mantissa and all expert choices of an F32 run, 1 is plain BF16: faster, half the KV (ADR 0006).
  int64_t activation_terms = 2;
  std::string numerics = "exact";  // "fast" allows kernels whose sums have an order of the hardware's: AMX tiles for prompts (docs/numerics.md)
  std::string kv_dtype = "bf16";   // what the KV pool holds: "bf16" (as many terms as above), or "fp8": a quarter of it by default, for some accuracy

  // [model]
  std::string model_path;             // Hugging Face directory; required
  std::string model_name;             // as clients call it; default: of its path, DefaultModelName
  bool model_name_is_default = true;  // not a key: after `hearth load` a default name follows the new directory

  // [weightstore]
  int64_t numa_shards = 0;           // 0: one per NUMA node with memory; more pretends a topology
  int64_t load_threads = 0;          // 0: as many as cores, but 8 to 16
  int64_t image_bytes_max = 0;       // what the weights may take of shm_dir: routed experts beyond it stay on disk. 0: no limit
  std::string disk_dir;              // where those lie (docs/operations.md: A model larger than memory)
  int64_t kv_pool_bytes = 0;         // 0: kv_pool_tokens decides
  int64_t kv_pool_tokens = 0;        // 0: batch x context, at least 32768 tokens
  int64_t orphan_grace_ms = 60'000;  // pages of a stream whose worker died wait so long for the next one
  bool reuse_decoded_pages = true;   // false: prefix hits only on pages that the prefill form wrote throughout (tests that compare texts)

  // [prefill]
  int64_t prefill_instances = 1;
  int64_t prefill_threads = 0;         // 0: as many as cores
  int64_t prefill_chunk_tokens = 0;    // 0: what suits the device
  std::string prefill_path = "auto";   // auto, chunked, slp: how a prompt is computed (ADR 0009). Never changes a token
  std::string prefill_group = "auto";  // auto, off: whether slp workers share long prompts, two or four of them (ADR 0014). Never changes a token
  std::string expert_source = "auto";  // auto, image, ring: where slp's loader gets experts from (docs/shared-memory.md). Never changes a token
  int64_t ring_slots = 8;              // of each expert ring of a prefill worker
  int64_t prefill_device_memory_bytes = 0;  // budget of the worker's device; 0: what the device has

  // [decode]
  int64_t decode_instances = 1;
  int64_t decode_threads = 0;
  int64_t max_batch = 6;               // streams in a step
  int64_t chunk_tokens = 64;           // of a chunked prefill between two steps, at most
  int64_t tpot_target_ms = 0;          // time per output token that prompts may not push streams beyond; 0: measured
  int64_t tpot_rise_percent = 20;      // measured: what prompts may add to a step's own time
  std::optional<int64_t> speculation;  // drafts of the MTP module that a step verifies for a stream, 0 to 3; none: "auto", as many as pay
  std::string isa = "auto";            // scalar, avx2, avx512, avx512bf16, amx (needs fast numerics): forced for both kinds of worker
  std::string overlap = "auto";        // auto, joint, plain, alternate: the order of a step's work; auto measures (ADR 0008). Never changes a token

  // [router]
  std::vector<std::string> http_listen = {"localhost:8080"};  // host:port, [v6]:port; "localhost" means both families
  std::vector<std::string> grpc_listen = {"localhost:8081"};
  std::string api_key_file;                                                                          // one key a line; empty: no key is asked for
  std::vector<std::string> cors_origins = {"http://localhost", "http://127.0.0.1", "http://[::1]"};  // any port of these; "*" = all
  int64_t max_queue = 256;                                                                           // requests waiting; more are refused with 429
  int64_t max_body_bytes = 8 * 1024 * 1024;
  int64_t chunked_prefill_max_tokens = 2048;  // uncached prompts up to this go to decode as chunked prefill, longer ones to prefill
  std::string path_choice = "auto";           // auto: by predicted time to the first token; length: the number above always decides
  int64_t ttft_slo_ms = 0;                    // requests whose first token is expected later get 429, unless they say that they wait; 0: none
  int64_t group_prefill_min_tokens =
      8192;                         // uncached prompts longer than this take all ranks of an idle prefill group, until both ways have been measured
  int64_t drain_ms = 20'000;        // on stop: running streams may finish for so long
  int64_t keep_alive_ms = 120'000;  // idle HTTP connections
  int64_t max_tokens_default = 0;   // requests without max_tokens: 0 = up to the context

  std::string source_path;  // where it was read from

  // Whether these numerics allow a path by that name: "amx" only under "fast". FailedPrecondition with the remedy. For decode.isa and for who overrides it.
  absl::Status AllowsIsa(std::string_view isa_name) const;
  // Ranks of the prefill group: the first two or four workers; 1: there is none.
  int64_t prefill_group_ranks() const {
    if (prefill_group == "off" || prefill_path != "slp" || prefill_instances < 2) return 1;
    return prefill_instances < 4 ? 2 : 4;
  }
  DType kv_type() const { return kv_dtype == "fp8" ? DType::kF8E4M3 : DType::kBF16; }
  std::string StoreSocket() const;                                       // unix path
  std::string WorkerSocket(std::string_view kind, int64_t index) const;  // kind: "prefill", "decode"
  std::string RouterAdminSocket() const;
};

// What a model without a name of its own is called: the path's last part, of a GGUF file without extension and part number.
std::string DefaultModelName(const std::string& model_path);

absl::StatusOr<NodeConfig> ParseNodeConfig(std::string_view toml_text, std::string_view source_path);
absl::StatusOr<NodeConfig> ReadNodeConfig(const std::string& path);
// The effective configuration as TOML, every key with its value: printed at start and by `hearth config`.
std::string FormatNodeConfig(const NodeConfig& config);

}  // namespace hearth
