// `hearth trace`: what ran when in all processes of a running node, as one timeline.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iostream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "hearth/v1/trace.grpc.pb.h"
#include "services/cli/command.h"
#include "services/cli/text_file.h"
#include "services/cli/trace_report.h"

namespace hearth {
namespace {

struct TraceFlags {
  double seconds = 0;  // 0: not by time
  std::string request_id;
  bool until_interrupt = false;
  bool ops = false;
  std::string json_path;
  std::string svg_path;
};

constexpr double kSecondsMax = 3600;

absl::Status CheckFlags(const TraceFlags& flags) {
  const int ways = (flags.seconds > 0 ? 1 : 0) + (flags.request_id.empty() ? 0 : 1) + (flags.until_interrupt ? 1 : 0);
  if (ways != 1) return absl::InvalidArgumentError("say how long: one of --seconds N, --request ID, --until-interrupt");
  // Said now, not when the trace is over. What is there stays until then.
  for (const std::string& path : {flags.json_path, flags.svg_path}) {
    if (path.empty()) continue;
    const bool was_there = access(path.c_str(), F_OK) == 0;
    if (std::ofstream out(path, std::ios::app); !out) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be written: ", strerror(errno)));
    }
    if (!was_there) unlink(path.c_str());
  }
  return absl::OkStatus();
}

absl::StatusOr<TraceReport> Record(const NodeConfig& config, const TraceFlags& flags) {
  static std::atomic<bool> interrupted{false};  // the signals' thread outlives this function
  HoldStopSignals();
  InstallStopSignals([] { interrupted.store(true); });
  const std::unique_ptr<v1::Trace::Stub> stub = v1::Trace::NewStub(UnixChannel(config.RouterAdminSocket()));
  grpc::ClientContext context;
  const auto call = stub->Record(&context);
  v1::TraceRequest request;
  request.set_ops(flags.ops);
  request.set_request_id(flags.request_id);
  call->Write(request);

  std::vector<v1::TraceChunk> chunks;  // understood when nothing is traced any more: the node has the machine until then
  std::atomic<bool> ended{false}, over{false};
  std::thread reader([&] {
    for (v1::TraceChunk chunk; call->Read(&chunk); chunks.push_back(std::move(chunk))) {
      if (chunk.ended()) ended.store(true);
    }
    over.store(true);
  });
  const int64_t end_ns = flags.seconds > 0 ? MonotonicNowNs() + static_cast<int64_t>(flags.seconds * 1e9) : INT64_MAX;
  while (!over.load() && !ended.load() && !interrupted.load() && MonotonicNowNs() < end_ns)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  call->WritesDone();
  reader.join();
  TraceReport report;
  for (const v1::TraceChunk& chunk : chunks) RETURN_IF_ERROR(report.Add(chunk));
  if (const absl::Status status = FromGrpc(call->Finish()); !status.ok()) {
    if (report.empty()) return status;
    report.AddNote(absl::StrCat("the router went away (", status.ToString(), "): the trace ends there"));
  }
  return report;
}

int Trace(const std::string& config_path, const TraceFlags& flags) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("trace", absl::InvalidArgumentError(config.status().message()));
  if (const absl::Status sound = CheckFlags(flags); !sound.ok()) return Fail("trace", sound);
  const absl::StatusOr<TraceReport> report = Record(*config, flags);
  if (absl::IsUnavailable(report.status())) {
    return Fail("trace", absl::UnavailableError(
                             absl::StrCat("the router does not answer: ", report.status().message(), ": is the node up? (`hearth status`)")));
  }
  if (!report.ok()) return Fail("trace", report.status());
  for (const std::string& note : report->Notes()) std::cerr << "note: " << note << "\n";
  const Timeline timeline = report->ToTimeline();
  if (const absl::Status written = WriteTextFile(flags.json_path, timeline.ToPerfettoJson()); !written.ok()) return Fail("trace", written);
  std::cerr << timeline.spans().size() << " spans written to " << flags.json_path << ": open it in ui.perfetto.dev\n";
  if (flags.svg_path.empty()) return kExitOk;
  const auto [begin_ns, end_ns] = report->RequestsWindow();
  const std::string title = absl::StrCat("node ", config->node_name, ", ", HumanDuration(static_cast<double>(end_ns - begin_ns) * 1e-9));
  if (const absl::Status written = WriteTextFile(flags.svg_path, timeline.ToSvg(title, begin_ns, end_ns)); !written.ok())
    return Fail("trace", written);
  return kExitOk;
}

}  // namespace

void AddTrace(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("trace", "record what ran when in all processes of the node");
  command->footer(
      "Each process records while this runs, and the router gathers: queue, prefilling, hand-off and decoding of each request; layers, copies and "
      "experts of\n"
      "prefill; steps of decode; the store's rings. The file opens in ui.perfetto.dev, beside one of `hearth plan --timeline`: names are the same.\n"
      "Ctrl-C ends it early and writes what there is. docs/operations.md shows how to read one.\n\n"
      "  hearth trace --seconds 5 --out node.json\n"
      "  hearth trace --request chatcmpl-1f0c... --out request.json --svg request.svg\n"
      "  hearth trace --until-interrupt --ops --out node.json");
  auto config = AddConfigOption(*command);
  auto flags = std::make_shared<TraceFlags>();
  command->add_option("--seconds", flags->seconds, "for so long")->check([](const std::string& text) -> std::string {  // CLI::Range lets NaN through
    double seconds = 0;
    return absl::SimpleAtod(text, &seconds) && seconds > 0 && seconds <= kSecondsMax
               ? ""
               : "'" + text + "' is no number of seconds from 0 (not itself) to 3600";
  });
  command->add_option("--request", flags->request_id, "until this request ends; its answer's `id`");
  command->add_flag("--until-interrupt", flags->until_interrupt, "until Ctrl-C");
  command->add_flag("--ops", flags->ops, "each op as well, as the simulator shows them; costs a few percent of small models' speed");
  command->add_option("--out", flags->json_path, "the trace, in Chrome's Trace Event Format")->required();
  command->add_option("--svg", flags->svg_path, "a picture of the time in which requests ran");
  command->callback([=, &exit_code] { exit_code = Trace(*config, *flags); });
}

}  // namespace hearth
