// `hearth status`: the whole node on one screen, asked of each process itself, so that it tells the truth when one of them is away.
#include <google/protobuf/util/json_util.h>

#include <iostream>
#include <sstream>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "services/cli/command.h"
#include "services/cli/node_client.h"
#include "services/cli/table.h"

namespace hearth {
namespace {

std::string ShortId(const std::string& bytes) {
  const absl::StatusOr<Hash128> id = HashFromBytes(bytes);
  return id.ok() && !id->IsZero() ? id->ToHex().substr(0, 8) : "-";
}
std::string Seconds(double s) { return HumanDuration(s); }
std::string Bytes(uint64_t b) { return HumanBytes(static_cast<double>(b)); }

struct Node {
  NodeConfig config;
  absl::StatusOr<v1::StoreStatus> store = absl::UnavailableError("");
  absl::StatusOr<v1::RouterStatus> router = absl::UnavailableError("");
  std::vector<std::pair<std::string, absl::StatusOr<v1::WorkerStatus>>> workers;
};

Node Ask(const NodeConfig& config) {
  Node node{.config = config};
  node.store = StoreStatusOf(config);
  node.router = RouterStatusOf(config);
  for (int64_t i = 0; i < config.prefill_instances; ++i) node.workers.emplace_back(absl::StrCat("prefill.", i), WorkerStatusOf(config, "prefill", i));
  for (int64_t i = 0; i < config.decode_instances; ++i) node.workers.emplace_back(absl::StrCat("decode.", i), WorkerStatusOf(config, "decode", i));
  return node;
}

void PrintProcesses(const Node& node, std::ostream& out) {
  Table table({"process", "pid", "up", "generation", "state"});
  const auto away = [&](const std::string& name) { table.Add({name, "-", "-", "-", "does not answer"}); };
  if (node.store.ok()) {
    const v1::StoreStatus& s = *node.store;
    const bool loading = s.generations().empty() || (!s.loading().phase().empty() && s.loading().phase() != "ready");
    std::string state = loading && s.loading().total_bytes() > 0
                            ? absl::StrFormat("%s %.0f%%", s.loading().phase(),
                                              100.0 * static_cast<double>(s.loading().done_bytes()) / static_cast<double>(s.loading().total_bytes()))
                        : loading ? "starting"
                                  : absl::StrCat("ready ", Seconds(s.ready_seconds()), " after start");
    table.Add({"weightstore", absl::StrCat(s.pid()), Seconds(s.uptime_seconds()),
               s.generations().empty() ? "-" : ShortId(s.generations(s.generations_size() - 1).id()), state});
  } else {
    away("weightstore");
  }
  for (const auto& [name, status] : node.workers) {
    if (!status.ok()) {
      away(name);
      continue;
    }
    table.Add({name, absl::StrCat(status->pid()), Seconds(status->uptime_seconds()), ShortId(status->generation()),
               status->state() == "ready" ? absl::StrCat("ready ", Seconds(status->ready_seconds()), " after start") : status->state()});
  }
  if (node.router.ok()) {
    const v1::RouterStatus& r = *node.router;
    table.Add({"router", absl::StrCat(r.pid()), Seconds(r.uptime_seconds()), "-", r.ready() ? "ready" : "not ready: " + r.not_ready_reason()});
  } else {
    away("router");
  }
  out << "Processes\n";
  table.Print(out);
}

void PrintStore(const v1::StoreStatus& s, std::ostream& out) {
  out << "\nWeights\n";
  Table images({"generation", "state", "bytes", "in memory, by shard", "on disk", "on NUMA nodes", "leases", "from"});
  for (const auto& g : s.generations()) {
    std::string shards, nodes;
    for (uint64_t b : g.segment_bytes()) absl::StrAppend(&shards, shards.empty() ? "" : " + ", Bytes(b));
    for (int i = 0; i < g.bytes_per_node_size(); ++i) {
      if (g.bytes_per_node(i) > 0) absl::StrAppend(&nodes, nodes.empty() ? "" : ", ", i, ": ", Bytes(g.bytes_per_node(i)));
    }
    images.Add({ShortId(g.id()), g.state() + (g.adopted() ? " (adopted)" : ""), Bytes(g.bytes()), shards,
                g.disk_bytes() == 0 ? "-" : absl::StrCat(Bytes(g.disk_bytes()), " in ", g.disk_dir()), nodes.empty() ? "-" : "node " + nodes,
                absl::StrCat(g.leases()), g.model_dir()});
  }
  images.Print(out);
  if (s.leases_size() > 0) {
    out << "\nLeases\n";
    Table leases({"name", "pid", "generation", "state", "pages", "last beat"});
    for (const auto& l : s.leases()) {
      leases.Add({l.name(), l.pid() == 0 ? "-" : absl::StrCat(l.pid()), ShortId(l.generation()), l.state(), absl::StrCat(l.rows()),
                  absl::StrFormat("%.1f s ago", l.seconds_since_beat())});
    }
    leases.Print(out);
  }
  if (s.rings_size() > 0) {
    out << "\nExpert rings\n";
    Table rings({"worker", "shard", "slots", "bytes", "records filled", "while filling"});
    for (const auto& r : s.rings()) {
      rings.Add({r.worker(), absl::StrCat(r.shard()), absl::StrCat(r.slots()), Bytes(r.bytes()),
                 r.broken() ? "broken: restart the worker" : absl::StrCat(r.records(), ", ", Bytes(r.record_bytes())),
                 r.records() == 0 ? "-" : absl::StrFormat("%s/s", Bytes(static_cast<uint64_t>(r.bytes_per_second())))});
    }
    rings.Print(out);
  }
  for (const auto& group : s.groups()) {
    std::string ranks;
    for (int rank = 0; rank < group.workers_size(); ++rank) {
      absl::StrAppend(&ranks, rank == 0 ? "" : ", ", rank, " ", group.workers(rank).empty() ? "(not there)" : group.workers(rank));
    }
    const char* state = group.state() == "whole"     ? "all there"
                        : group.state() == "waiting" ? "waiting for the others"
                                                     : "a rank is gone; another is leaving its pass";
    out << "\nPrefill group: ranks " << ranks << ": " << state;
    if (group.bytes() > 0) out << ", " << Bytes(group.bytes()) << " to exchange through";
    out << "\n";
  }
  const v1::StoreStatus::Pool& p = s.pool();
  if (p.pages_total() > 0) {
    out << absl::StrFormat("\nKV pool: %d pages of 64 tokens, %s: %d in use, %d published and in use, %d cached, %d free\n", p.pages_total(),
                           Bytes(p.bytes()), p.pages_open(), p.pages_sealed_referenced(), p.pages_sealed_cached(), p.pages_free());
  }
  for (const std::string& note : s.notes()) out << "note: " << note << "\n";
}

// "io_uring, 512 records, 11.3 GB, 5.9 GB/s, 24.0 MB under way", and what is not as it should be.
std::string ReadsText(const v1::DiskReads& r) {
  std::string text = absl::StrCat(r.kind(), ", ", r.records(), " records, ", Bytes(r.bytes()));
  if (r.bytes_per_second() > 0) absl::StrAppend(&text, ", ", Bytes(static_cast<uint64_t>(r.bytes_per_second())), "/s");
  absl::StrAppend(&text, ", ", Bytes(static_cast<uint64_t>(r.under_way_bytes())), " under way");
  if (r.through_mapping() > 0) absl::StrAppend(&text, ", ", r.through_mapping(), " more through the page cache");
  if (r.errors() > 0) absl::StrAppend(&text, ", ", r.errors(), " ERRORS");
  if (!r.note().empty()) absl::StrAppend(&text, " (", r.note(), ")");
  return text;
}

void PrintDisk(const Node& node, std::ostream& out) {
  Table table({"reader", "experts from disk"});
  bool any = false;
  const auto add = [&](const std::string& who, const v1::DiskReads& reads) {
    table.Add({who, ReadsText(reads)});
    any = true;
  };
  for (const auto& [name, w] : node.workers) {
    if (w.ok() && w->has_disk()) add(name, w->disk());
  }
  for (int i = 0; node.store.ok() && i < node.store->rings_size(); ++i) {
    const v1::StoreStatus::Ring& ring = node.store->rings(i);
    if (ring.has_disk()) add(absl::StrCat("weightstore, ring ", ring.shard(), " of ", ring.worker()), ring.disk());
  }
  if (!any) return;
  out << "\nDisk\n";
  table.Print(out);
}

void PrintWork(const Node& node, std::ostream& out) {
  out << "\nWork\n";
  Table table({"worker", "running", "waiting", "tokens/s", "step p50", "step p99", "tokens", "prompt tokens", "private memory", "device"});
  for (const auto& [name, w] : node.workers) {
    if (!w.ok()) continue;
    const bool decode = w->kind() == "decode";
    table.Add({name, absl::StrCat(w->running(), "/", w->max_batch()), absl::StrCat(w->waiting()),
               decode ? absl::StrFormat("%.1f", w->tokens_per_second()) : "-", decode ? absl::StrFormat("%.2f ms", w->step_ms_p50()) : "-",
               decode ? absl::StrFormat("%.2f ms", w->step_ms_p99()) : "-", absl::StrCat(w->tokens_total()), absl::StrCat(w->prefill_tokens_total()),
               Bytes(w->resident_private_bytes()), w->device()});
  }
  table.Print(out);
  for (const auto& [name, w] : node.workers) {
    if (!w.ok()) continue;
    for (const std::string& note : w->notes()) out << "note: " << name << ": " << note << "\n";
  }
}

// "decode.0 step order, 2 streams: joint (joint 41.2 ms, plain 60.1 ms, alternate 58.9 ms)", a line for each number of streams.
void PrintStepOrders(const Node& node, std::ostream& out) {
  for (const auto& [name, w] : node.workers) {
    if (!w.ok()) continue;
    for (const v1::WorkerStatus::StepOrder& order : w->step_orders()) {
      std::string times;
      const auto add = [&](const char* of, double ms) {
        if (ms > 0) absl::StrAppend(&times, times.empty() ? "" : ", ", of, absl::StrFormat(" %.2f ms", ms));
      };
      add("joint", order.joint_ms());
      add("plain", order.plain_ms());
      add("alternate", order.alternate_ms());
      out << absl::StrFormat("%s step order, %d streams: %s (%s)\n", name, order.streams(),
                             order.measuring()        ? "measuring"
                             : w->step_order_pinned() ? order.chosen() + ", pinned by decode.overlap"
                                                      : order.chosen(),
                             times);
    }
  }
}

void PrintMemory(const Node& node, std::ostream& out) {
  for (const auto& [name, w] : node.workers) {
    if (!w.ok() || !w->has_memory()) continue;
    const v1::WorkerStatus::Memory& memory = w->memory();
    if (!memory.prefetch().empty()) out << name << " prefetch: " << memory.prefetch() << "\n";
    out << name << " image pages: " << memory.page_sizes() << "\n";
    out << name << " pages on the wrong node: " << memory.wrong_node() << "\n";
  }
}

// "decode.0 speculation: auto, 2 drafts in the last step; 412 of 530 drafts accepted, 2.31 tokens a step".
void PrintSpeculation(const Node& node, std::ostream& out) {
  for (const auto& [name, w] : node.workers) {
    if (!w.ok() || w->speculation().empty() || w->stream_steps_total() == 0) continue;
    out << absl::StrFormat("%s speculation: %s, %d drafts in the last step; %d of %d drafts accepted, %.2f tokens a step\n", name,
                           w->speculation() == "auto" ? "auto" : "pinned to " + w->speculation(), w->draft_depth(), w->drafts_accepted_total(),
                           w->drafts_total(), static_cast<double>(w->tokens_total()) / static_cast<double>(w->stream_steps_total()));
  }
}

// "prefill.1 rank 1 of 2: 14 shared passes (1 failed); sent kv 3.1 MB, rows 8.4 MB, ...", or why it computes alone.
void PrintGroups(const Node& node, std::ostream& out) {
  for (const auto& [name, w] : node.workers) {
    if (!w.ok() || !w->has_group()) continue;
    const v1::WorkerStatus::Group& group = w->group();
    out << absl::StrFormat("%s rank %d of %d: %d shared passes (%d failed)", name, group.rank(), group.size(), group.passes_total(),
                           group.passes_failed_total());
    const char* comma = "; sent ";
    for (const v1::WorkerStatus::Traffic& sent : group.sent()) out << std::exchange(comma, ", ") << sent.name() << " " << Bytes(sent.bytes());
    if (group.id() == 0) out << "; alone now: " << (group.waits_for().empty() ? "not asked yet" : group.waits_for());
    out << "\n";
  }
}

// Three lines a worker that streams weights: what its passes did, what they waited for, and, with rings, what those brought.
void PrintStreamed(const Node& node, std::ostream& out) {
  for (const auto& [name, w] : node.workers) {
    if (!w.ok() || !w->has_streamed()) continue;
    const v1::WorkerStatus::Streamed& s = w->streamed();
    out << absl::StrFormat("%s streamed: %d passes, %d tokens, %.0f tokens/s in the last; %s copied, %d experts (%d skipped)\n", name, s.passes(),
                           s.tokens(), s.last_tokens_per_second(), Bytes(s.bytes_copied()), s.experts_copied(), s.experts_skipped());
    out << absl::StrFormat("%s waited: of %s passes %s for copies (the link is the limit), the loader %s for slots (arithmetic is)\n", name,
                           Seconds(s.seconds()), Seconds(s.waited_for_copies_seconds()), Seconds(s.waited_for_slots_seconds()));
    if (s.records_from_rings() + s.records_from_image() == 0) continue;
    out << absl::StrFormat("%s rings: %d records, %d more from the image instead, %s waited for the store to fill\n", name, s.records_from_rings(),
                           s.records_from_image(), Seconds(s.waited_for_rings_seconds()));
  }
}

// "decode.0 leaves prompts 17% of the time while it decodes; stood aside 41 times for 0.31 s", "prefill.0 has held back 3012 ops ... for decode".
void PrintTurns(const Node& node, std::ostream& out) {
  for (const auto& [name, w] : node.workers) {
    if (!w.ok()) continue;
    const v1::WorkerStatus::Prompts& p = w->prompts();
    if (p.share() > 0) {
      out << absl::StrFormat("%s turns: prompts get %.0f%% of the time while it decodes; it stood aside %d times, %s in all\n", name, 100 * p.share(),
                             p.windows(), Seconds(p.given_seconds()));
    }
    if (p.ops_held_back() > 0) {
      out << absl::StrFormat("%s turns: %d ops waited for decode, %s in all; %d of them began before their turn\n", name, p.ops_held_back(),
                             Seconds(p.waited_seconds()), p.ops_forced());
    }
  }
}

// What workers found out about this machine and their own work.
void PrintMeasured(const Node& node, std::ostream& out) {
  std::ostringstream lines;
  PrintMemory(node, lines);
  PrintStepOrders(node, lines);
  PrintSpeculation(node, lines);
  PrintGroups(node, lines);
  PrintStreamed(node, lines);
  PrintTurns(node, lines);
  if (!lines.str().empty()) out << "\nMeasured by the workers\n" << lines.str();
}

// Who computes a prompt, from how many tokens on, why, and how far the router's predictions can be trusted.
void PrintPaths(const v1::RouterStatus::Paths& paths, std::ostream& out) {
  out << "\nPrompts: ";
  if (paths.decode_takes_all()) {
    out << "decode computes all of them, by predicted time on an idle node\n";
  } else {
    out << absl::StrFormat("decode computes those of less than %d uncached tokens, prefill longer ones: by %s\n", paths.prefill_from_tokens(),
                           paths.by_time()  ? "predicted time on an idle node"
                           : paths.pinned() ? "length (router.path_choice)"
                                            : "length, until both ways have been measured");
  }
  if (paths.ttft_slo_ms() > 0) out << absl::StrFormat("Promise: a first token within %.0f ms (router.ttft_slo_ms)\n", paths.ttft_slo_ms());
  if (paths.costs_size() > 0) {
    Table costs({"worker", "way", "a pass", "a token", "a token and 1000 before it", "from"});
    for (const v1::RouterStatus::PathCost& cost : paths.costs()) {
      costs.Add({cost.worker(), cost.way(), absl::StrFormat("%.2f ms", cost.fixed_ms()), absl::StrFormat("%.1f us", cost.token_us()),
                 absl::StrFormat("%.2f us", cost.position_ns()), cost.passes() > 0 ? absl::StrCat(cost.passes(), " passes") : "roofline"});
    }
    costs.Print(out);
  }
  if (paths.predictions_size() > 0) {
    Table trust({"first tokens", "count", "real / predicted p50", "off by p50", "off by p90"});
    for (const v1::RouterStatus::Prediction& p : paths.predictions()) {
      trust.Add({p.way(), absl::StrCat(p.count()), absl::StrFormat("%.2f", p.ratio_p50()), absl::StrFormat("%.0f%%", 100 * p.error_p50()),
                 absl::StrFormat("%.0f%%", 100 * p.error_p90())});
    }
    trust.Print(out);
  }
}

void PrintRouter(const v1::RouterStatus& r, std::ostream& out) {
  out << absl::StrFormat("\nRequests: %d queued, %d in prefill, %d in decode; %d in all, %d failed, %d cancelled, %d resumed\n", r.queued(),
                         r.prefilling(), r.decoding(), r.requests_total(), r.requests_failed(), r.requests_cancelled(), r.resumes_total());
  out << absl::StrFormat("Tokens: %d prompt (%d cached), %d output, %.1f tokens/s\n", r.prompt_tokens_total(), r.cached_tokens_total(),
                         r.completion_tokens_total(), r.tokens_per_second());
  if (r.ttft().count() > 0) {
    Table table({"latency", "p50", "p90", "p99", "count"});
    const auto add = [&](const char* name, const v1::RouterStatus::Latency& l) {
      table.Add({name, absl::StrFormat("%.1f ms", l.p50_ms()), absl::StrFormat("%.1f ms", l.p90_ms()), absl::StrFormat("%.1f ms", l.p99_ms()),
                 absl::StrCat(l.count())});
    };
    add("TTFT (arrival to first token)", r.ttft());
    add("TPOT (a token after the first)", r.tpot());
    table.Print(out);
  }
  PrintPaths(r.paths(), out);
  for (const auto& w : r.workers()) {
    if (w.state() != "ready") out << "note: router sees " << w.name() << " " << w.state() << "\n";
  }
  if (r.listening_size() > 0) {
    out << "Listening:";
    for (const std::string& address : r.listening()) out << " " << address;
    out << "\n";
  }
}

void PrintJson(const Node& node) {
  const auto json = [](const auto& status) -> std::string {
    if (!status.ok()) return "null";
    std::string text;
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    if (!google::protobuf::util::MessageToJsonString(*status, &text, options).ok()) return "null";
    return text;
  };
  std::cout << "{\"weightstore\":" << json(node.store) << ",\"router\":" << json(node.router) << ",\"workers\":{";
  const char* comma = "";
  for (const auto& [name, w] : node.workers) {
    std::cout << comma << "\"" << name << "\":" << json(w);
    comma = ",";
  }
  std::cout << "}}\n";
}

int Status(const std::string& config_path, bool as_json) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("status", absl::InvalidArgumentError(config.status().message()));
  const Node node = Ask(*config);
  if (as_json) {
    PrintJson(node);
  } else {
    PrintProcesses(node, std::cout);
    if (node.store.ok()) PrintStore(*node.store, std::cout);
    PrintDisk(node, std::cout);
    PrintWork(node, std::cout);
    PrintMeasured(node, std::cout);
    if (node.router.ok()) PrintRouter(*node.router, std::cout);
  }
  bool all = node.store.ok() && node.router.ok() && node.router->ready();
  for (const auto& [name, w] : node.workers) all = all && w.ok();
  return all ? kExitOk : kExitFailure;
}

}  // namespace

void AddStatus(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("status", "processes, weights, leases, KV pages, batch, tokens/s, TTFT and TPOT");
  command->footer(
      "Each process is asked itself. Exit code 0 when all of them answer and the node takes requests, else 1.\n\n  watch -n1 hearth status");
  auto config = AddConfigOption(*command);
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "as one JSON object");
  command->callback([=, &exit_code] { exit_code = Status(*config, *json); });
}

}  // namespace hearth
