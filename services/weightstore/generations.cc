// Start, load, switch, retire. What a crash at any point leaves is in docs/shared-memory.md, "Publishing an image".
#include "services/weightstore/generations.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/formats/model_config.h"
#include "common/numa/topology.h"
#include "common/shm/generations.h"
#include "common/trace/trace.h"

namespace hearth {
namespace {

constexpr int64_t kPoolTokensMin = 32'768;   // one long conversation
constexpr int64_t kPoolTokensMax = 262'144;  // by default; a configured size may be larger
constexpr uint64_t kRowsPerPage = 4;         // a published page is shared by some streams; rows are 64 bytes, pages some 10 KB to MB
constexpr uint64_t kRowsMin = 4096;
constexpr int64_t kAllocationStepUs = 30'000'000;  // one step of a pool's allocation takes tenths of a second; a loaded machine, seconds

std::string Canonical(const std::string& path) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::weakly_canonical(path, error);
  return error ? path : real.string();
}

// Names, sizes and times of a checkpoint's files: whether it is still what was loaded. 0 when the directory can't be read now.
uint64_t SourceStamp(const std::string& model_path) {
  const std::string model_dir = ModelFilesDir(model_path);
  DIR* dir = opendir(model_dir.c_str());
  if (dir == nullptr) return 0;
  std::vector<std::string> lines;
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    const bool counts = name == "config.json" || name == "generation_config.json" || name.ends_with(".safetensors") ||
                        name.ends_with(".safetensors.index.json") || name.ends_with(".gguf");
    struct stat st;
    if (!counts || stat((model_dir + "/" + name).c_str(), &st) != 0) continue;
    lines.push_back(absl::StrCat(name, " ", st.st_size, " ", st.st_mtim.tv_sec, ".", st.st_mtim.tv_nsec, "\n"));
  }
  closedir(dir);
  if (lines.empty()) return 0;
  std::sort(lines.begin(), lines.end());
  std::string text;
  for (const std::string& line : lines) text += line;
  return Xxh3_64(text.data(), text.size());
}

bool HasLivingLease(StoreTable& table) { return !LivingLeases(table).empty(); }

bool HasLivingLease(const PageTable& pages) {
  for (const PageTable::Lease& lease : pages.Leases()) {
    if (lease.state == LeaseState::kLive) return true;
  }
  return false;
}

}  // namespace

Generations::Generations(const NodeConfig& config, Events events)
    : config_(config), events_(std::move(events)), place_{config.shm_dir, config.node_name, config.disk_dir} {}

// ---- Sizes ----

absl::StatusOr<Generations::Sizes> Generations::SizesFor(const std::string& config_json, const std::string& generation_config_json) const {
  ASSIGN_OR_RETURN(const ModelConfig model, ParseModelConfig(config_json, generation_config_json));
  Sizes sizes;
  sizes.geometry.layers = static_cast<uint32_t>(model.kv_layers());
  sizes.geometry.dtype = config_.kv_type();
  sizes.geometry.row_elements = static_cast<uint32_t>(model.KvRow(config_.kv_type(), config_.activation_terms));
  const uint64_t page_bytes = sizes.geometry.page_bytes();
  if (config_.kv_pool_bytes > 0) {
    sizes.geometry.num_pages = static_cast<uint64_t>(config_.kv_pool_bytes) / page_bytes;
    if (sizes.geometry.num_pages == 0) {
      return absl::InvalidArgumentError(absl::StrCat("weightstore.kv_pool_bytes = ", config_.kv_pool_bytes, " holds no page: one page of ",
                                                     kPageTokens, " tokens of this model has ", page_bytes, " bytes"));
    }
  } else {
    const int64_t tokens = config_.kv_pool_tokens > 0 ? config_.kv_pool_tokens
                                                      : std::clamp(config_.max_batch * model.max_position_embeddings, kPoolTokensMin, kPoolTokensMax);
    sizes.geometry.num_pages = static_cast<uint64_t>((tokens + kPageTokens - 1) / kPageTokens);
  }
  sizes.table.num_pages = sizes.geometry.num_pages;
  sizes.table.num_rows = std::max(kRowsMin, kRowsPerPage * sizes.geometry.num_pages);
  sizes.bytes = 2 * kRegionHeaderBytes + kKvPagesOffset + sizes.geometry.num_pages * page_bytes + sizeof(StoreTableHeader) +
                kLeasesMax * sizeof(LeaseEntry) + sizes.table.num_pages * sizeof(PageEntry) + sizes.table.num_rows * sizeof(RowEntry);
  return sizes;
}

int Generations::NumShards() const {
  if (config_.numa_shards > 0) return static_cast<int>(config_.numa_shards);
  int with_memory = 0;
  for (const NumaNode& node : DiscoverTopology().nodes) with_memory += node.memory_bytes > 0 ? 1 : 0;
  return std::max(1, with_memory);
}

uint64_t Generations::ConfigStamp() const {
  std::string text = absl::StrCat(Canonical(config_.model_path), "\n", NumShards());
  if (config_.image_bytes_max > 0) absl::StrAppend(&text, "\n", config_.image_bytes_max, "\n", config_.disk_dir);
  return Xxh3_64(text.data(), text.size());
}

// ---- Start ----

absl::Status Generations::CheckAlone() const {
  const std::vector<RegionOwner> owners = LivingOwners(place_);
  if (owners.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("node '", place_.node, "' has a weight store already: process ", owners[0].process.pid, " owns ",
                                                    owners[0].path, "; stop it, or choose another node.name"));
}

absl::Status Generations::MakePoolAndTable(const Hash128& generation, const Sizes& sizes, const Origin& origin,
                                           const AllocationHook& on_allocated) const {
  StoreTableSpec spec = sizes.table;
  spec.sequence = origin.sequence;
  spec.source_stamp = origin.source_stamp;
  spec.config_stamp = origin.config_stamp;
  // The pool, which takes long, while the old table is still there: a crash meanwhile loses nothing that only the table knows.
  unlink(place_.Path(kKvPoolWhat, generation).c_str());
  RETURN_IF_ERROR(KvPool::Create(place_, generation, sizes.geometry, on_allocated).status());
  unlink(place_.Path(kStoreTableWhat, generation).c_str());
  return StoreTable::Create(place_, generation, spec).status();
}

absl::StatusOr<std::shared_ptr<TurnBoard>> Generations::OpenTurns(const Hash128& generation) const {
  absl::StatusOr<std::shared_ptr<TurnBoard>> turns = TurnBoard::Attach(place_, generation);
  if (turns.ok() || !TellsOfTheFile(turns.status())) return turns;
  // A worker that maps an old one goes on with it until it is restarted: it is a courtesy between workers, no more.
  unlink(place_.Path(kTurnBoardWhat, generation).c_str());
  return TurnBoard::Create(place_, generation);
}

absl::StatusOr<GenerationPtr> Generations::Open(const Hash128& id, bool adopted) {
  auto generation = std::make_shared<Generation>();
  generation->id = id;
  generation->adopted = adopted;
  ASSIGN_OR_RETURN(generation->lock, RegionLock::Acquire(place_.Path(kManifestWhat, id)));
  ASSIGN_OR_RETURN(generation->image, WeightImage::Attach(place_, id));
  ASSIGN_OR_RETURN(const Sizes sizes, SizesFor(generation->image->config_json(), generation->image->generation_config_json()));
  for (int attempt = 0;; ++attempt) {
    absl::StatusOr<std::shared_ptr<KvPool>> pool = KvPool::Attach(place_, id);
    absl::StatusOr<std::shared_ptr<StoreTable>> table = StoreTable::Open(place_, id, MapMode::kReadWrite);
    std::string why;
    for (const absl::Status& status : {pool.status(), table.status()}) {
      if (!status.ok() && !TellsOfTheFile(status)) return status;
    }
    if (!pool.ok()) {
      why = pool.status().ToString();
    } else if (!table.ok()) {
      why = table.status().ToString();
    } else if ((*pool)->geometry().num_pages != static_cast<uint64_t>((*table)->num_pages())) {
      why = absl::StrCat("the pool has ", (*pool)->geometry().num_pages, " pages, the table ", (*table)->num_pages());
    } else if (const absl::Status fits = CheckFits((*pool)->geometry(), sizes.geometry); !fits.ok()) {
      why = std::string(fits.message());
    } else if ((*pool)->geometry().num_pages != sizes.geometry.num_pages && !HasLivingLease(**table)) {
      why = absl::StrCat("the configuration asks for ", sizes.geometry.num_pages, " pages, the pool has ", (*pool)->geometry().num_pages);
    } else {
      generation->pool = *std::move(pool);
      generation->table = *std::move(table);
      break;
    }
    if (attempt > 0) return absl::InternalError(absl::StrCat("generation ", id.ToHex(), ": ", why));
    // The image is whole; pages are only a cache. Workers that still map the old pool lose their lease and start anew.
    spdlog::warn("generation {}: the KV pool is made anew ({})", id.ToHex(), why);
    Origin origin;
    if (table.ok()) {
      const StoreTableHeader& old = (*table)->header();
      origin = {old.sequence, old.source_stamp, old.config_stamp};
    }
    pool = absl::UnknownError("");  // the new one need not fit beside it
    RETURN_IF_ERROR(MakePoolAndTable(id, sizes, origin, [](uint64_t) -> absl::Status {
      NotifyExtendTimeout(kAllocationStepUs);
      if (StopRequested()) return absl::CancelledError("stopped while the KV pool was made anew");
      return absl::OkStatus();
    }));
  }
  if (generation->pool->geometry().num_pages != sizes.geometry.num_pages) {
    Note(absl::StrCat("the KV pool of ", generation->pool->geometry().num_pages, " pages is in use and was kept; the configuration asks for ",
                      sizes.geometry.num_pages, " pages, which a restart of the store without workers will make"),
         id);
  }
  generation->sequence = generation->table->header().sequence;
  ASSIGN_OR_RETURN(generation->turns, OpenTurns(id));
  if (adopted) {
    // Who looks at the files must see that they have an owner again.
    ASSIGN_OR_RETURN(ShmRegion manifest,
                     ShmRegion::Open(place_.Path(kManifestWhat, id), RegionKind::kManifest, kManifestVersion, MapMode::kReadWrite));
    manifest.SetOwner(SelfProcess());
    generation->pool->region()->SetOwner(SelfProcess());
    generation->table->region().SetOwner(SelfProcess());
    generation->turns->region()->SetOwner(SelfProcess());
  }
  PageTableOptions options;
  options.fingerprint = generation->image->fingerprint();
  options.reuse_decoded_pages = config_.reuse_decoded_pages;
  options.orphan_grace_ns = config_.orphan_grace_ms * 1'000'000;
  generation->pages =
      std::make_unique<PageTable>(generation->table, generation->pool, options, [&](const ProcessId& process) { return events_.lives(id, process); });
  for (const std::string& note : generation->pages->TakeNotes()) {
    spdlog::warn("generation {}: {}", id.ToHex(), note);
    Note(note, id);
  }
  return generation;
}

bool Generations::IsWanted(const Generation& generation, std::string* why_not) const {
  const WeightImage& image = *generation.image;
  const StoreTableHeader& table = generation.table->header();
  // Under an unchanged configuration the newest generation is what the operator had last, be it by `hearth load`.
  if (table.config_stamp != ConfigStamp()) {
    if (Canonical(image.model_dir()) != Canonical(config_.model_path)) {
      *why_not = absl::StrCat("it holds ", image.model_dir(), ", the configuration asks for ", config_.model_path);
      return false;
    }
    if (image.num_shards() != NumShards()) {
      *why_not = absl::StrCat("it has ", image.num_shards(), " NUMA shards, the configuration asks for ", NumShards());
      return false;
    }
    // What fits under both limits lies in the same places.
    const uint64_t limit = static_cast<uint64_t>(config_.image_bytes_max);
    const bool fits_both = image.disk_bytes() == 0 && (limit == 0 || image.total_bytes() <= limit);
    if (image.image_bytes_max() != limit && !fits_both) {
      *why_not = absl::StrCat("it was laid out for image_bytes_max = ", image.image_bytes_max(), ", the configuration asks for ", limit);
      return false;
    }
    if (image.disk_bytes() > 0 && image.disk_dir() != config_.disk_dir) {
      *why_not = absl::StrCat("its disk part is in ", image.disk_dir(), ", the configuration asks for ", config_.disk_dir);
      return false;
    }
  }
  const uint64_t stamp = SourceStamp(image.model_dir());
  if (stamp == 0) {
    spdlog::warn("{} can't be read now; the image in memory is whole and is used", image.model_dir());
    return true;
  }
  if (table.source_stamp == 0) {
    *why_not = absl::StrCat("its table was lost, and with it which files of ", image.model_dir(), " it was loaded from");
    return false;
  }
  if (stamp != table.source_stamp) {
    *why_not = absl::StrCat("the files in ", image.model_dir(), " have changed since it was loaded");
    return false;
  }
  return true;
}

absl::Status Generations::Adopt(bool* needs_load) {
  *needs_load = true;
  RETURN_IF_ERROR(ShmAvailableBytes(place_.dir).status());
  RETURN_IF_ERROR(CheckAlone());
  std::vector<std::string> left_alone;
  ListRegionFiles(place_, &left_alone);
  for (const std::string& note : left_alone) {
    spdlog::warn("{}", note);
    Note(note);
  }
  std::vector<GenerationPtr> found;
  for (const GenerationInfo& info : ListGenerations(place_)) {
    if (info.state == RegionState::kReady && info.complete) {
      absl::StatusOr<GenerationPtr> generation = Open(info.generation, true);
      if (generation.ok()) {
        std::lock_guard lock(mutex_);
        last_sequence_ = std::max(last_sequence_, (*generation)->sequence);
        found.push_back(*std::move(generation));
        continue;
      }
      spdlog::error("generation {} can't be adopted: {}", info.generation.ToHex(), generation.status().ToString());
      // What says nothing of the files themselves, be it a passing shortage or a wrong configuration, costs no image.
      if (!TellsOfTheFile(generation.status())) return generation.status();
    } else if (info.state == RegionState::kRetired) {
      absl::StatusOr<std::shared_ptr<StoreTable>> table = StoreTable::Open(place_, info.generation, MapMode::kReadOnly);
      if (!table.ok() && !TellsOfTheFile(table.status())) return table.status();
      if (table.ok() && HasLivingLease(**table)) {
        std::lock_guard lock(mutex_);
        leftovers_.push_back(info.generation);
        continue;
      }
    } else {
      if (!TellsOfTheFile(info.problem)) return info.problem;
      spdlog::log(info.state == RegionState::kReady ? spdlog::level::err : spdlog::level::warn, "generation {} is not whole: {}: not adopted",
                  info.generation.ToHex(), std::string(info.problem.message()));
    }
    spdlog::warn("removing what is left of generation {} ({})", info.generation.ToHex(), HumanBytes(static_cast<double>(info.bytes)));
    if (const absl::Status removed = RemoveGeneration(place_, info.generation); !removed.ok()) return removed;
  }
  std::sort(found.begin(), found.end(), [](const GenerationPtr& a, const GenerationPtr& b) { return a->sequence < b->sequence; });
  for (size_t i = 0; i < found.size(); ++i) {
    std::string why_not = "a newer one is READY";
    const bool newest = i + 1 == found.size();
    const bool wanted = newest && IsWanted(*found[i], &why_not);
    if (wanted) *needs_load = false;
    found[i]->superseded = !wanted;
    if (!wanted && !HasLivingLease(*found[i]->pages) && !found[i]->pages->HasStreams()) {
      spdlog::info("generation {} is not kept: {}", found[i]->id.ToHex(), why_not);
      Retire(found[i]);
      continue;
    }
    spdlog::info("adopted generation {} of {} ({}){}", found[i]->id.ToHex(), found[i]->image->model_dir(),
                 HumanBytes(static_cast<double>(found[i]->image->total_bytes())), wanted ? "" : ", until its workers are gone: " + why_not);
    std::lock_guard lock(mutex_);
    generations_.push_back(found[i]);
  }
  return absl::OkStatus();
}

// ---- Load and switch ----

absl::StatusOr<Hash128> Generations::Build(const LoadRequestOptions& options,
                                           const std::function<void(std::string_view, const LoadProgress&)>& report) {
  report("planning", {});
  // The stamp is taken before the bytes are read: a file that changes meanwhile makes the next start load anew.
  const uint64_t stamp = SourceStamp(options.model_dir);
  Sizes sizes;
  BuildOptions build;
  build.model_dir = options.model_dir;
  build.place = place_;
  build.image_bytes_max = static_cast<uint64_t>(config_.image_bytes_max);
  build.num_shards = NumShards();
  build.num_threads = static_cast<int>(config_.load_threads);
  build.reserve = [&](const Manifest& planned) -> absl::StatusOr<uint64_t> {
    ASSIGN_OR_RETURN(sizes, SizesFor(planned.config_json, planned.generation_config_json));
    return sizes.bytes;
  };
  build.cancelled = options.cancelled;
  build.allocating = [&](const LoadProgress& progress) { report("allocating", progress); };
  build.progress = [&](const LoadProgress& progress) { report("loading", progress); };
  build.flushing = [&](const LoadProgress& progress) { report("flushing", progress); };
  build.before_ready = [&](const Hash128& generation) -> absl::Status {
    report("publishing", {});
    Origin origin{.source_stamp = stamp, .config_stamp = ConfigStamp()};
    {
      std::lock_guard lock(mutex_);
      origin.sequence = last_sequence_ + 1;
    }
    return MakePoolAndTable(generation, sizes, origin, [&](uint64_t) -> absl::Status {
      report("publishing", {});
      if (options.cancelled && options.cancelled()) return absl::CancelledError("loading was cancelled");
      return absl::OkStatus();
    });
  };
  ASSIGN_OR_RETURN(const BuildResult result, BuildImage(build));
  for (const std::string& note : result.notes) Note(note, result.generation);
  spdlog::info("loaded {} from {} in {} ({}/s){}", HumanBytes(static_cast<double>(result.bytes)), options.model_dir, HumanDuration(result.seconds),
               HumanBytes(static_cast<double>(result.bytes) / std::max(result.seconds, 1e-9)),
               result.disk_bytes == 0 ? "" : absl::StrCat(", ", HumanBytes(static_cast<double>(result.disk_bytes)), " of it to ", config_.disk_dir));
  return result.generation;
}

absl::StatusOr<GenerationPtr> Generations::Load(const LoadRequestOptions& options) {
  const TraceSpan span(TraceTrackNamed("weights"), "load model");
  {
    std::lock_guard lock(mutex_);
    if (loading_.active) return absl::FailedPreconditionError(absl::StrCat("a load of ", loading_.model_dir, " is under way: wait for it"));
    loading_ = LoadState{true, options.model_dir, "planning", {}};
  }
  const auto report = [&](std::string_view phase, const LoadProgress& progress) {
    LoadState state;
    {
      std::lock_guard lock(mutex_);
      loading_.phase = std::string(phase);
      if (progress.total_bytes > 0) loading_.progress = progress;
      state = loading_;
    }
    if (events_.on_progress) events_.on_progress(state);
    if (options.progress) options.progress(state);
  };
  const auto finish = [&] {
    draining_ = false;
    std::lock_guard lock(mutex_);
    loading_.active = false;
  };

  absl::StatusOr<Hash128> id = Build(options, report);
  if (!id.ok() && absl::IsResourceExhausted(id.status()) && !All().empty()) {
    if (!options.replace) {
      finish();
      return absl::ResourceExhaustedError(absl::StrCat(id.status().message(),
                                                       "; this is beside the generation that is served now: `hearth load --replace`"
                                                       " lets its streams end and drops it first"));
    }
    spdlog::info("both generations don't fit ({}): draining the present one", std::string(id.status().message()));
    draining_ = true;
    for (const GenerationPtr& generation : All()) generation->superseded = true;
    if (events_.on_drain) events_.on_drain();
    while (!All().empty()) {
      report("draining", {});
      if (options.cancelled && options.cancelled()) {
        // Nothing was dropped that is still here: the newest goes on.
        finish();
        std::lock_guard lock(mutex_);
        if (!generations_.empty()) generations_.back()->superseded = false;
        return absl::CancelledError("cancelled while the present generation was draining");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      RetireIdle();
    }
    id = Build(options, report);
  }
  absl::StatusOr<GenerationPtr> generation = id.ok() ? Open(*id, false) : absl::StatusOr<GenerationPtr>(id.status());
  if (!generation.ok()) {
    if (id.ok()) RemoveGeneration(place_, *id).IgnoreError();
    finish();
    return generation;
  }
  {
    std::lock_guard lock(mutex_);
    for (const GenerationPtr& old : generations_) old->superseded = true;
    generations_.push_back(*generation);
    last_sequence_ = std::max(last_sequence_, (*generation)->sequence);
  }
  report("ready", {});
  finish();
  if (events_.on_ready) events_.on_ready(*generation);
  return generation;
}

// ---- Which one, and until when ----

GenerationPtr Generations::Find(const Hash128& id) const {
  std::lock_guard lock(mutex_);
  for (const GenerationPtr& generation : generations_) {
    if (generation->id == id) return generation;
  }
  return nullptr;
}

GenerationPtr Generations::Newest() const {
  std::lock_guard lock(mutex_);
  return generations_.empty() ? nullptr : generations_.back();
}

GenerationPtr Generations::ForNewWorker(LeaseKind kind) const {
  const std::vector<GenerationPtr> all = All();
  for (const GenerationPtr& generation : all) {
    if (kind == LeaseKind::kDecode && generation->pages->HasStreams()) return generation;
  }
  // What only waits for its last worker to leave takes no new one.
  return all.empty() || all.back()->superseded ? nullptr : all.back();
}

std::vector<GenerationPtr> Generations::All() const {
  std::lock_guard lock(mutex_);
  return generations_;
}

LoadState Generations::loading() const {
  std::lock_guard lock(mutex_);
  return loading_;
}

void Generations::RetireIdle() {
  std::vector<GenerationPtr> idle;
  {
    // Asked and taken out in one step: who makes a lease and then still finds its generation here has kept it.
    std::lock_guard lock(mutex_);
    std::erase_if(generations_, [&](const GenerationPtr& generation) {
      if (!generation->superseded || HasLivingLease(*generation->pages) || generation->pages->HasStreams()) return false;
      idle.push_back(generation);
      return true;
    });
  }
  for (const GenerationPtr& generation : idle) Retire(generation);
  std::vector<Hash128> gone;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(leftovers_, [&](const Hash128& id) {
      const absl::StatusOr<std::shared_ptr<StoreTable>> table = StoreTable::Open(place_, id, MapMode::kReadOnly);
      if (table.ok() && HasLivingLease(**table)) return false;
      gone.push_back(id);
      return true;
    });
  }
  for (const Hash128& id : gone) RemoveGeneration(place_, id).IgnoreError();
}

void Generations::Retire(const GenerationPtr& generation) {
  absl::StatusOr<ShmRegion> manifest =
      ShmRegion::Open(place_.Path(kManifestWhat, generation->id), RegionKind::kManifest, kManifestVersion, MapMode::kReadWrite);
  if (manifest.ok()) manifest->SetState(RegionState::kRetired);
  {
    std::lock_guard lock(mutex_);
    std::erase_if(notes_, [&](const NoteOf& note) { return note.generation == generation->id; });
  }
  if (const absl::Status removed = RemoveGeneration(place_, generation->id); !removed.ok()) {
    spdlog::error("generation {} is RETIRED, but not all of it could be removed: {}", generation->id.ToHex(), removed.ToString());
    return;
  }
  spdlog::info("generation {} of {} is retired and removed", generation->id.ToHex(), generation->image->model_dir());
}

std::vector<std::string> Generations::notes() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const NoteOf& note : notes_) texts.push_back(note.text);
  return texts;
}

void Generations::Note(const std::string& text, const std::optional<Hash128>& generation) {
  std::lock_guard lock(mutex_);
  NoteOf note{text, generation};
  if (std::find(notes_.begin(), notes_.end(), note) == notes_.end()) notes_.push_back(std::move(note));
}

}  // namespace hearth
