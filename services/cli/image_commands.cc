// `hearth load`, `hearth verify`, `hearth drop`: the weight image as the operator handles it.
#include <filesystem>
#include <iostream>
#include <optional>

#include "absl/strings/str_join.h"
#include "common/base/process.h"
#include "common/image/image_builder.h"
#include "common/rpc/rpc.h"
#include "common/shm/generations.h"
#include "common/shm/weight_image.h"
#include "services/cli/command.h"
#include "services/cli/node_client.h"
#include "services/cli/progress.h"

namespace hearth {
namespace {

RegionPlace PlaceOf(const NodeConfig& config) { return {config.shm_dir, config.node_name, config.disk_dir}; }

int Load(const std::string& config_path, const std::string& model_dir, bool replace) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("load", absl::InvalidArgumentError(config.status().message()));
  auto stub = v1::Store::NewStub(UnixChannel(config->StoreSocket()));
  grpc::ClientContext context;
  v1::LoadRequest request;
  request.set_model_dir(std::filesystem::absolute(model_dir).lexically_normal().string());
  request.set_replace(replace);
  const auto reader = stub->Load(&context, request);
  v1::LoadEvent event;
  std::string generation;
  {
    std::optional<ProgressBar> bar;  // one for each phase that has bytes: allocating, loading, flushing
    std::string phase;
    while (reader->Read(&event)) {
      if (event.total_bytes() > 0 && event.phase() != phase) bar.emplace(phase = event.phase());
      if (event.total_bytes() > 0) bar->Update(event.done_bytes(), event.total_bytes());
      if (event.phase() == "ready") generation = event.generation();
    }
  }
  if (const grpc::Status status = reader->Finish(); !status.ok()) {
    const absl::Status why = FromGrpc(status);
    return Fail("load",
                absl::IsUnavailable(why) ? Annotate(why, "the weight store went away; `hearth status` shows what it serves when it is back") : why);
  }
  if (const absl::StatusOr<Hash128> id = HashFromBytes(generation); id.ok()) {
    std::cout << "generation " << id->ToHex().substr(0, 8) << " is ready; workers move to it as their streams end (`hearth status`)\n";
  }
  return kExitOk;
}

int Verify(const std::string& config_path, bool against_checkpoint) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("verify", absl::InvalidArgumentError(config.status().message()));
  int verified = 0;
  for (const GenerationInfo& info : ListGenerations(PlaceOf(*config))) {
    if (info.state != RegionState::kReady) continue;
    const absl::StatusOr<std::shared_ptr<const WeightImage>> image = WeightImage::Attach(PlaceOf(*config), info.generation);
    if (!image.ok()) return Fail("verify", image.status());
    const std::string id = info.generation.ToHex().substr(0, 8);
    absl::Status status;
    {
      ProgressBar bar("verifying " + id);
      status = VerifyImage(PlaceOf(*config), info.generation, against_checkpoint ? (*image)->model_dir() : "",
                           [&](const LoadProgress& p) { bar.Update(p.done_bytes, p.total_bytes); });
    }
    if (!status.ok()) return Fail("verify", Annotate(status, "generation " + id));
    std::cout << "generation " << id << ": " << HumanBytes(static_cast<double>((*image)->total_bytes())) << " agree with the manifest"
              << (against_checkpoint ? " and with " + (*image)->model_dir() : "") << "\n";
    ++verified;
  }
  if (verified == 0)
    return Fail("verify", absl::NotFoundError(absl::StrCat("no READY image of node '", config->node_name, "' in ", config->shm_dir)));
  return kExitOk;
}

int Drop(const std::string& config_path) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("drop", absl::InvalidArgumentError(config.status().message()));
  if (const auto store = StoreStatusOf(*config); store.ok()) {
    return Fail("drop", absl::FailedPreconditionError(absl::StrCat("the node is running (weightstore pid ", store->pid(), "): stop it first")));
  }
  // The store may be down while the others live on its memory.
  std::vector<std::string> living;
  const auto note = [&](std::string name, const auto& status) {
    if (status.ok()) living.push_back(absl::StrCat(name, " (pid ", status->pid(), ")"));
  };
  for (int64_t i = 0; i < config->prefill_instances; ++i) note(absl::StrCat("prefill.", i), WorkerStatusOf(*config, "prefill", i));
  for (int64_t i = 0; i < config->decode_instances; ++i) note(absl::StrCat("decode.", i), WorkerStatusOf(*config, "decode", i));
  note("router", RouterStatusOf(*config));
  if (!living.empty()) {
    return Fail("drop",
                absl::FailedPreconditionError(absl::StrCat("processes of the node are running: ", absl::StrJoin(living, ", "), ": stop them first")));
  }
  const RegionPlace place = PlaceOf(*config);
  // They may have been started with another configuration, or be stopped and answer nobody.
  const absl::StatusOr<std::vector<std::string>> users = UsersOfRegions(place);
  if (!users.ok()) return Fail("drop", Annotate(users.status(), "whether somebody uses the memory can't be seen"));
  if (!users->empty()) {
    return Fail("drop", absl::FailedPreconditionError(absl::StrCat("the memory is in use: ", absl::StrJoin(*users, ", "), ": stop them first")));
  }
  uint64_t bytes = 0;
  int files = 0;
  std::vector<std::string> left_alone;
  for (const RegionFile& file : ListRegionFiles(place, &left_alone)) {
    std::error_code error;
    const uint64_t size = std::filesystem::file_size(file.path, error);
    if (!std::filesystem::remove(file.path, error)) {
      if (!error) continue;  // somebody else was quicker
      return Fail("drop", absl::PermissionDeniedError(absl::StrCat(file.path, ": ", error.message())));
    }
    bytes += size;
    ++files;
  }
  for (const std::string& note : left_alone) std::cerr << "hearth drop: " << note << "\n";
  std::cout << "removed " << files << " regions, " << HumanBytes(static_cast<double>(bytes)) << "\n";
  return kExitOk;
}

}  // namespace

void AddLoad(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("load", "load another model beside the present one and switch to it");
  command->footer(
      "The new weights become a second generation (Ctrl-C before that gives the load up); when it is ready, workers finish their streams and restart "
      "onto it, the router queues what is\n"
      "new meanwhile. Where both don't fit the load is refused with both numbers; --replace drains and drops the old one first.\n\n"
      "  hearth load /models/DeepSeek-R1");
  auto config = AddConfigOption(*command);
  auto dir = std::make_shared<std::string>();
  auto replace = std::make_shared<bool>(false);
  command->add_option("model", *dir, "Hugging Face directory, or GGUF file (of a split model: any part)")->required();
  command->add_flag("--replace", *replace, "where both don't fit: drop the old one first (the node answers nothing meanwhile)");
  command->callback([=, &exit_code] { exit_code = Load(*config, *dir, *replace); });
}

void AddVerify(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("verify", "hash the image in memory against its manifest and the checkpoint on disk");
  command->footer("Reads every byte; the node may go on serving. Exit code 0 when all agree; else the first tensor that differs is named.");
  auto config = AddConfigOption(*command);
  auto memory_only = std::make_shared<bool>(false);
  command->add_flag("--memory-only", *memory_only, "against the manifest only");
  command->callback([=, &exit_code] { exit_code = Verify(*config, !*memory_only); });
}

void AddDrop(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("drop", "remove a stopped node's image and KV pool from shared memory and disk");
  auto config = AddConfigOption(*command);
  command->callback([=, &exit_code] { exit_code = Drop(*config); });
}

}  // namespace hearth
