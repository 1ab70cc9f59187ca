// Real hearth-weightstore processes in temporary directories, real clients, and what happens when one of them is killed, stopped or replaced.
// Clients that are to die run as processes of their own: this binary with --client, which takes commands on standard input.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "common/rpc/store_client.h"
#include "common/shm/expert_ring.h"
#include "common/shm/kv_pool.h"
#include "common/shm/weight_image.h"
#include "hearth/v1/store.grpc.pb.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;

constexpr Hash128 kR1{1, 1}, kR2{2, 2}, kR3{3, 3};

std::string EnvOr(const char* name, const std::string& otherwise) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}
std::string BinDir() { return EnvOr("HEARTH_BIN_DIR", fs::read_symlink("/proc/self/exe").parent_path().parent_path().string() + "/bin"); }
std::string ModelDir() {
  const std::string source = fs::absolute(EnvOr("HEARTH_SOURCE_DIR", "."));
  const std::string own = source + "/deploy/models/fable-moe";
  return fs::exists(own + "/config.json") ? own : EnvOr("HEARTH_SHARED_DIR", source + "/../shared") + "/models/fable-moe";
}

// What a store keeps in shared memory: all of a generation and nothing else.
auto AreOfOneGeneration() {
  return UnorderedElementsAre(HasSubstr(".manifest."), HasSubstr(".segment0."), HasSubstr(".kv."), HasSubstr(".table."), HasSubstr(".turns."));
}

double SecondsSince(int64_t start_ns) { return static_cast<double>(MonotonicNowNs() - start_ns) * 1e-9; }

template <typename Condition>
bool Eventually(double seconds, const Condition& condition) {
  const int64_t start = MonotonicNowNs();
  while (true) {
    if (condition()) return true;
    if (SecondsSince(start) > seconds) return false;
    std::this_thread::sleep_for(milliseconds(20));
  }
}

// A child process with pipes; killed when the test forgets it.
class Process {
 public:
  Process(const std::vector<std::string>& command, const std::string& log) {
    int to_child[2], from_child[2];
    EXPECT_EQ(pipe2(to_child, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from_child, O_CLOEXEC), 0);
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      const int err = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      dup2(to_child[0], 0);
      dup2(from_child[1], 1);
      dup2(err, 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    in_ = to_child[1];
    out_ = fdopen(from_child[0], "r");
  }
  ~Process() {
    if (!reaped_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(in_);
    fclose(out_);
  }
  pid_t pid() const { return pid_; }
  // A stop has taken hold when this returns: a thread that still ran could answer one more call.
  void Signal(int signal) const {
    kill(pid_, signal);
    if (signal != SIGSTOP) return;
    EXPECT_TRUE(WaitUntilStopped()) << "process " << pid_;
  }
  bool WaitUntilStopped() const {
    for (int i = 0; i < 500; ++i) {
      bool all = true;
      for (const auto& task : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid_, "/task"))) {
        std::stringstream text;
        text << std::ifstream(task.path() / "stat").rdbuf();
        const std::string stat = text.str();
        all = all && stat.substr(stat.rfind(')')).rfind(") T", 0) == 0;
      }
      if (all) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  // The exit code, 1000 + signal, or -1 when it still runs after `seconds`.
  int Wait(double seconds) {
    int status = 0;
    if (!reaped_ && !Eventually(seconds, [&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) return -1;
    if (!reaped_) code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    reaped_ = true;
    return code_;
  }
  std::string Ask(const std::string& line) {
    const std::string text = absl::StrCat(line, "\n");
    if (!line.empty()) {
      EXPECT_EQ(write(in_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    }
    char answer[4096] = {};
    if (fgets(answer, sizeof(answer), out_) == nullptr) return "closed";
    answer[strcspn(answer, "\n")] = 0;
    return answer;
  }

 private:
  pid_t pid_ = 0;
  int in_ = -1;
  FILE* out_ = nullptr;
  bool reaped_ = false;
  int code_ = 0;
};

class StoreTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(ModelDir() + "/config.json")) GTEST_SKIP() << ModelDir() << " is not there";
    std::string dir = "/tmp/hearth_store_XXXXXX";
    ASSERT_NE(mkdtemp(dir.data()), nullptr);
    dir_ = dir;
    std::string shm = fs::is_directory("/dev/shm") ? "/dev/shm/hearth_store_XXXXXX" : dir_ + "/shm_XXXXXX";
    ASSERT_NE(mkdtemp(shm.data()), nullptr);
    shm_ = shm;
    fs::create_directory(dir_ + "/run");
    WriteConfig(ModelDir());
  }
  void TearDown() override {
    if (HasFailure()) std::cerr << "store's log:\n" << Log();
    store_.reset();
    if (!dir_.empty()) fs::remove_all(dir_);
    if (!shm_.empty()) fs::remove_all(shm_);
  }

  void WriteConfig(const std::string& model, const std::string& more = "", int pool_tokens = 2048) {
    std::ofstream(dir_ + "/node.toml") << "[node]\nname = \"t\"\nruntime_dir = \"" << dir_ << "/run\"\nshm_dir = \"" << shm_
                                       << "\"\n[model]\npath = \"" << model << "\"\n[weightstore]\nkv_pool_tokens = " << pool_tokens
                                       << "\norphan_grace_ms = 1500\n"
                                       << more;
  }
  std::string Socket() const { return dir_ + "/run/t.weightstore.sock"; }
  std::string Log() const {
    std::stringstream text;
    text << std::ifstream(dir_ + "/log").rdbuf();
    return text.str();
  }
  std::unique_ptr<Process> Launch() const {
    return std::make_unique<Process>(std::vector<std::string>{BinDir() + "/hearth-weightstore", "--config", dir_ + "/node.toml"}, dir_ + "/log");
  }
  void StartStore() {
    store_ = Launch();
    ASSERT_TRUE(Eventually(20, [&] {
      const v1::StoreStatus status = Status();
      return status.generations_size() > 0 && status.ready_seconds() > 0 && status.pid() == store_->pid();
    })) << Log();
  }
  // Empty where no store answers. A store that lives is asked again: on a busy machine a fresh connection may fail once.
  v1::StoreStatus Status() const {
    v1::StoreStatus status;
    grpc::Status answer;
    Eventually(5, [&] {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + milliseconds(2000));
      answer = v1::Store::NewStub(UnixChannel(Socket()))->Status(&context, {}, &status);
      return answer.error_code() != grpc::StatusCode::UNAVAILABLE || store_ == nullptr || kill(store_->pid(), 0) != 0;
    });
    if (!answer.ok()) status.Clear();
    return status;
  }
  v1::StoreStatus::Lease LeaseOf(const std::string& name) const {
    v1::StoreStatus::Lease found;
    const v1::StoreStatus status = Status();
    for (const v1::StoreStatus::Lease& lease : status.leases()) {
      if (lease.name() == name && (found.name().empty() || lease.state() != "dead")) found = lease;
    }
    return found;
  }
  std::unique_ptr<StoreClient> Attach(const std::string& name, ClientKind kind = ClientKind::kDecode) {
    auto client = StoreClient::Start({.socket_path = Socket(),
                                      .kind = kind,
                                      .name = name,
                                      .numerics = 1,
                                      .on_switch =
                                          [this](const Hash128& to) {
                                            switched_to_ = to;
                                            ++switches_;
                                          },
                                      .on_lost = [this](const absl::Status&) { ++losses_; }});
    const auto generation = client->WaitForGeneration({}, MonotonicNowNs() + 10'000'000'000);
    EXPECT_TRUE(generation.ok()) << generation.status();
    return client;
  }
  std::unique_ptr<Process> ClientProcess(const std::string& name) const {
    auto client = std::make_unique<Process>(std::vector<std::string>{fs::read_symlink("/proc/self/exe"), "--client", Socket(), name}, dir_ + "/log");
    EXPECT_EQ(client->Ask(""), "attached");
    return client;
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(shm_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  // The generation that is READY at the end of a load.
  std::string Load(const std::string& model_dir) const {
    grpc::ClientContext context;
    v1::LoadRequest request;
    request.set_model_dir(model_dir);
    auto events = v1::Store::NewStub(UnixChannel(Socket()))->Load(&context, request);
    v1::LoadEvent event, last;
    while (events->Read(&event)) last = event;
    const grpc::Status status = events->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(last.phase(), "ready");
    return last.generation();
  }
  static int64_t ThreadsOf(pid_t pid) { return std::distance(fs::directory_iterator(absl::StrCat("/proc/", pid, "/task")), {}); }
  void CopyModel(const std::string& to) const {
    fs::create_directories(to);
    for (const auto& entry : fs::directory_iterator(ModelDir())) {
      if (entry.is_regular_file()) fs::copy_file(entry.path(), to + "/" + entry.path().filename().string());
    }
  }

  std::string dir_, shm_;
  std::unique_ptr<Process> store_;
  std::atomic<int> switches_{0}, losses_{0};
  Hash128 switched_to_;
};

TEST_F(StoreTest, AttachMapsTheImageAndPagesAreShared) {
  StartStore();
  auto a = Attach("prefill.0", ClientKind::kPrefill);
  auto b = Attach("decode.0");
  const StoreView view = a->View();
  ASSERT_TRUE(view.attached);
  ASSERT_TRUE(WeightImage::Attach(view.place, *view.generation).ok());
  auto pool = KvPool::Attach(view.place, *view.generation);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ((*pool)->geometry().num_pages, 32u);

  const auto rows = a->Alloc(kR1, 0, 2);
  ASSERT_TRUE(rows.ok()) << rows.status();
  std::vector<int32_t> tokens(129, 5);
  for (const PageRef& row : *rows) {
    KvPageHeader& header = (*pool)->header(row.page);
    for (int32_t& id : header.token_ids) id = 5;
    header.prefill_tokens = 64;
    header.tokens_valid = 64;
  }
  ASSERT_TRUE(a->Seal(kR1, {0, 1}).ok());
  EXPECT_EQ(*b->Peek(*view.generation, tokens), 128);
  EXPECT_THAT(*b->Match(kR2, tokens), SizeIs(2));
  EXPECT_TRUE(absl::IsFailedPrecondition(b->Take(kR1).status()));
  ASSERT_TRUE(a->Offer(kR1).ok());
  EXPECT_THAT(*b->Take(kR1), SizeIs(2));
  EXPECT_TRUE(b->Free(kR1, 0).ok());

  auto router = Attach("router", ClientKind::kRouter);
  EXPECT_TRUE(absl::IsFailedPrecondition(router->Free(kR2, 0)));  // b holds it
  ASSERT_TRUE(b->Offer(kR2).ok());
  EXPECT_TRUE(router->Free(kR2, 0).ok());
  EXPECT_EQ(Status().pool().rows(), 0u);
  EXPECT_EQ(Status().pool().pages_sealed_cached(), 2u);

  const int64_t start = MonotonicNowNs();
  b.reset();
  EXPECT_LT(SecondsSince(start), 1.0);
  EXPECT_THAT(LeaseOf("decode.0").state(), AnyOf("", "dead"));
}

TEST_F(StoreTest, TwoLivingProcessesCannotShareAName) {
  StartStore();
  auto child = ClientProcess("decode.0");
  auto mine = StoreClient::Start({.socket_path = Socket(), .name = "decode.0"});
  EXPECT_FALSE(mine->WaitForGeneration({}, MonotonicNowNs() + 700'000'000).ok());
  EXPECT_THAT(mine->View().away_reason, HasSubstr(absl::StrCat("process ", child->pid())));
  child->Signal(SIGKILL);
  child->Wait(5);
  EXPECT_TRUE(mine->WaitForGeneration({}, MonotonicNowNs() + 3'000'000'000).ok());
}

TEST_F(StoreTest, KilledWhileLoadingLeavesNoHalfImage) {
  std::vector<std::string> whole;
  for (int delay_ms = 0; delay_ms <= 120; delay_ms += 10) {
    SCOPED_TRACE(delay_ms);
    store_ = Launch();
    std::this_thread::sleep_for(milliseconds(delay_ms));
    store_->Signal(SIGKILL);
    store_->Wait(5);
    StartStore();
    if (HasFailure()) return;
    const std::vector<std::string> files = Files();
    EXPECT_THAT(files, AreOfOneGeneration());
    store_->Signal(SIGKILL);
    store_->Wait(5);
    if (delay_ms % 20 == 0) {  // begin anew, so that loading is what gets cut
      for (const std::string& file : files) fs::remove(shm_ + "/" + file);
    }
  }
}

TEST_F(StoreTest, KilledStoreIsAdoptedInLessThanASecondAndRowsStay) {
  std::ofstream(shm_ + "/hearth.other.segment0.00000000000000000000000000000001") << "another node's";
  std::ofstream(shm_ + "/unrelated") << "another program's";
  StartStore();
  auto client = Attach("decode.0");
  const auto generation = client->View().generation;
  const auto rows = client->Alloc(kR1, 0, 3);
  ASSERT_TRUE(rows.ok());
  const uint64_t lease = LeaseOf("decode.0").id();
  for (int round = 0; round < 3; ++round) {
    store_->Signal(SIGKILL);
    store_->Wait(5);
    const int64_t start = MonotonicNowNs();
    EXPECT_TRUE(absl::IsUnavailable(client->Alloc(kR2, 0, 1).status()));
    EXPECT_LT(SecondsSince(start), 1.5);
    StartStore();
    EXPECT_LT(Status().ready_seconds(), 1.0);
    EXPECT_TRUE(Status().generations(0).adopted());
    ASSERT_TRUE(Eventually(3, [&] { return client->View().attached; }));
    EXPECT_EQ(client->View().generation, generation);
    EXPECT_EQ(LeaseOf("decode.0").id(), lease);
    const auto again = client->Alloc(kR1, 0, 3);
    ASSERT_TRUE(again.ok()) << again.status();
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ((*again)[i].page, (*rows)[i].page);
    EXPECT_EQ(Status().pool().rows(), 3u);
  }
  // A free that could not be said is said by not naming it.
  store_->Signal(SIGKILL);
  store_->Wait(5);
  client->Free(kR1, 1).IgnoreError();
  StartStore();
  ASSERT_TRUE(Eventually(3, [&] { return client->View().attached; }));
  EXPECT_TRUE(Eventually(2, [&] { return Status().pool().rows() == 1; }));
  EXPECT_EQ(losses_, 0);
  EXPECT_TRUE(fs::exists(shm_ + "/hearth.other.segment0.00000000000000000000000000000001"));
  EXPECT_TRUE(fs::exists(shm_ + "/unrelated"));
}

// The process itself is killed just after the n-th store into its table, at every kind of call; the client repeats what had no answer.
TEST_F(StoreTest, KilledAfterAnyStoreIntoItsTableItGoesOn) {
  StartStore();
  auto client = Attach("decode.0");
  auto router = Attach("router", ClientKind::kRouter);
  const auto again = [&](const std::function<absl::Status()>& call) {
    absl::Status status;
    Eventually(5, [&] { return !absl::IsUnavailable(status = call()); });
    return status;
  };
  int kills = 0;
  for (int stores = 2; stores <= 62; stores += 6) {
    SCOPED_TRACE(stores);
    store_->Signal(SIGKILL);
    store_->Wait(5);
    setenv("HEARTH_PUBLISH_POINT", absl::StrCat("table_store:", stores, ":kill").c_str(), 1);
    store_ = Launch();
    unsetenv("HEARTH_PUBLISH_POINT");
    std::atomic<bool> done{false};
    std::thread manager([&] {  // what systemd does
      while (!done) {
        if (store_->Wait(0) != -1) {
          ++kills;
          store_ = Launch();
        }
        std::this_thread::sleep_for(milliseconds(10));
      }
    });
    EXPECT_TRUE(again([&] { return client->Alloc(kR1, 0, 3).status(); }).ok());
    EXPECT_TRUE(again([&] { return client->Free(kR1, 2); }).ok());
    EXPECT_TRUE(again([&] { return client->Offer(kR1); }).ok());
    EXPECT_TRUE(again([&] { return client->Take(kR1).status(); }).ok());
    EXPECT_TRUE(again([&] { return client->Offer(kR1); }).ok());
    EXPECT_TRUE(again([&] { return router->Free(kR1, 0); }).ok());
    done = true;
    manager.join();
    EXPECT_TRUE(Eventually(3, [&] {
      const v1::StoreStatus status = Status();
      return status.pool().rows() == 0 && status.pool().pages_free() == 32;
    })) << Status().pool().DebugString();
    EXPECT_EQ(losses_, 0);
    if (HasFailure()) return;
  }
  EXPECT_GT(kills, 5);
}

TEST_F(StoreTest, RingsLiveAsLongAsTheirLease) {
  WriteConfig(ModelDir(), "numa_shards = 2\n");
  StartStore();
  const auto ring_files = [&] {
    std::vector<std::string> files = Files();
    std::erase_if(files, [](const std::string& name) { return name.find(".ring") == std::string::npos; });
    return files;
  };
  const auto never = [] { return false; };
  auto a = Attach("prefill.0", ClientKind::kPrefill);
  EXPECT_EQ(a->MakeRings(1, never).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(a->MakeRings(-3, never).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(ring_files(), IsEmpty());
  const auto lease = a->MakeRings(4, never);
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(*lease, LeaseOf("prefill.0").id());
  const std::vector<std::string> files = ring_files();
  EXPECT_THAT(files, SizeIs(2));
  EXPECT_EQ(a->MakeRings(4, never).value_or(0), *lease) << "said twice is said once";
  EXPECT_EQ(a->MakeRings(5, never).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ring_files(), files);

  const RegionPlace place = a->View().place;
  const Hash128 generation = *a->View().generation;
  const auto image = WeightImage::Attach(place, generation);
  ASSERT_TRUE(image.ok());
  std::vector<std::unique_ptr<ExpertRingReader>> rings;
  for (uint32_t shard = 0; shard < 2; ++shard) rings.push_back(*ExpertRingReader::Make(*ExpertRing::Open(place, generation, *lease, shard)));
  const auto fetch = [&](int64_t layer, int64_t expert) {
    for (int64_t shard = 0; shard < 2; ++shard) {
      ExpertRingReader& ring = *rings[static_cast<size_t>(shard)];
      const uint64_t number = ring.Post(layer, expert);
      if (!ring.AwaitFilled(number, 5'000'000'000)) return false;
      const auto record = (*image)->Expert(layer, expert, shard);
      if (!record.ok()) return ring.Record(number) == nullptr;
      if (ring.Record(number) == nullptr || memcmp(ring.Record(number), record->record, record->record_bytes) != 0) return false;
    }
    return true;
  };
  for (int64_t i = 0; i < 20; ++i) EXPECT_TRUE(fetch(1 + i % 3, i)) << i;
  EXPECT_TRUE(fetch(500, 500)) << "an expert that is not there is refused";
  v1::StoreStatus status = Status();
  ASSERT_EQ(status.rings_size(), 2);
  EXPECT_EQ(status.rings(1).worker(), "prefill.0");
  EXPECT_EQ(status.rings(1).shard(), 1);
  EXPECT_EQ(status.rings(1).slots(), 4);
  EXPECT_EQ(status.rings(1).records(), 20u);
  EXPECT_GT(status.rings(1).bytes_per_second(), 0);

  // The next store goes on with them.
  store_->Signal(SIGKILL);
  store_->Wait(5);
  EXPECT_FALSE(rings[0]->StoreAlive());
  StartStore();
  EXPECT_EQ(ring_files(), files);
  for (int64_t i = 0; i < 20; ++i) EXPECT_TRUE(fetch(1 + i % 3, i)) << i;
  EXPECT_TRUE(rings[0]->StoreAlive());
  ASSERT_TRUE(Eventually(3, [&] { return a->View().attached; }));
  EXPECT_EQ(a->MakeRings(4, never).value_or(0), *lease);

  // Damaged ones are not taken over; the worker asks for new ones.
  store_->Signal(SIGKILL);
  store_->Wait(5);
  fs::resize_file(shm_ + "/" + files[1], 4096);
  StartStore();
  EXPECT_THAT(ring_files(), IsEmpty());
  ASSERT_TRUE(Eventually(3, [&] { return a->View().attached; }));
  EXPECT_EQ(a->MakeRings(3, never).value_or(0), *lease);
  EXPECT_EQ(ring_files(), files);

  // A goodbye, and a death, with and without a store.
  a.reset();
  EXPECT_TRUE(Eventually(2, [&] { return ring_files().empty(); }));
  auto child = ClientProcess("prefill.1");
  EXPECT_EQ(child->Ask("rings 4"), "ok");
  EXPECT_THAT(ring_files(), SizeIs(2));
  child->Signal(SIGKILL);
  EXPECT_TRUE(Eventually(2, [&] { return ring_files().empty(); }));
  child = ClientProcess("prefill.1");
  EXPECT_EQ(child->Ask("rings 4"), "ok");
  store_->Signal(SIGKILL);
  store_->Wait(5);
  child->Signal(SIGKILL);
  child->Wait(5);
  EXPECT_THAT(ring_files(), SizeIs(2));
  StartStore();
  EXPECT_THAT(ring_files(), IsEmpty());
  EXPECT_EQ(Status().rings_size(), 0);
}

// The store is killed at each point while it makes rings: the worker gets them from the next one, and nothing else is left.
TEST_F(StoreTest, KilledWhileItMakesRingsTheNextStoreMakesThem) {
  WriteConfig(ModelDir(), "numa_shards = 2\n");
  StartStore();
  auto client = Attach("prefill.0", ClientKind::kPrefill);
  std::vector<std::string> points;
  for (const char* name : {"region.allocated", "region.magic", "region.loading", "ring.geometry", "ring.ready"}) {
    for (const int nth : {1, 2}) points.push_back(absl::StrCat(name, ":", nth, ":kill"));
  }
  for (const std::string& point : points) {
    SCOPED_TRACE(point);
    store_->Signal(SIGKILL);
    store_->Wait(5);
    setenv("HEARTH_PUBLISH_POINT", point.c_str(), 1);
    StartStore();
    unsetenv("HEARTH_PUBLISH_POINT");
    ASSERT_TRUE(Eventually(3, [&] { return client->View().attached; }));
    std::atomic<bool> made{false};
    std::thread asker([&] {
      const auto lease = client->MakeRings(3, [] { return false; });
      EXPECT_TRUE(lease.ok()) << lease.status();
      made = true;
    });
    EXPECT_EQ(store_->Wait(10), 1000 + SIGKILL);
    StartStore();
    asker.join();
    EXPECT_EQ(Status().rings_size(), 2);
    std::vector<std::string> files = Files();
    EXPECT_EQ(std::count_if(files.begin(), files.end(), [](const std::string& name) { return name.find(".ring") != std::string::npos; }), 2);
    client = nullptr;
    EXPECT_TRUE(Eventually(2, [&] { return Status().rings_size() == 0; }));
    client = Attach("prefill.0", ClientKind::kPrefill);
    if (HasFailure()) return;
  }
}

TEST_F(StoreTest, WorkersThatDiedWithTheStoreAreOrphansAtAdoption) {
  StartStore();
  auto child = ClientProcess("decode.0");
  EXPECT_THAT(child->Ask("alloc 1 2"), HasSubstr("ok"));
  store_->Signal(SIGKILL);
  store_->Wait(5);
  child->Signal(SIGKILL);
  child->Wait(5);
  StartStore();
  EXPECT_EQ(LeaseOf("decode.0").state(), "dead");
  auto other = Attach("decode.1");
  EXPECT_THAT(*other->Take({1, 1}), SizeIs(2));
}

TEST_F(StoreTest, AStoppedClientIsSuspectAndLosesNothing) {
  StartStore();
  auto child = ClientProcess("decode.0");
  const std::string pages = child->Ask("alloc 1 2");
  auto other = Attach("decode.1");
  child->Signal(SIGSTOP);
  ASSERT_TRUE(Eventually(4, [&] { return LeaseOf("decode.0").state() == "suspect"; }));
  EXPECT_TRUE(absl::IsFailedPrecondition(other->Take({1, 1}).status()));
  std::this_thread::sleep_for(milliseconds(3000));  // longer than the grace of orphans
  EXPECT_EQ(LeaseOf("decode.0").rows(), 2);
  child->Signal(SIGCONT);
  EXPECT_EQ(child->Ask("alloc 1 2"), pages);
  EXPECT_TRUE(Eventually(3, [&] { return LeaseOf("decode.0").state() == "live"; }));
  EXPECT_TRUE(absl::IsFailedPrecondition(other->Take({1, 1}).status()));
}

TEST_F(StoreTest, AStoppedClientInSomebodysWayIsKilledAfterTheGrace) {
  StartStore();
  auto child = ClientProcess("decode.0");
  EXPECT_THAT(child->Ask("alloc 1 2"), HasSubstr("ok"));
  auto other = Attach("decode.1");
  child->Signal(SIGSTOP);
  const int64_t start = MonotonicNowNs();
  absl::StatusOr<std::vector<PageRef>> taken = absl::UnavailableError("");
  EXPECT_TRUE(Eventually(20, [&] {
    taken = other->Take({1, 1});
    return taken.ok();
  }));
  EXPECT_GT(SecondsSince(start), 10.0);
  EXPECT_THAT(*taken, SizeIs(2));
  EXPECT_EQ(child->Wait(1), 1000 + SIGKILL);
}

TEST_F(StoreTest, RowsOfAKilledClientAreOrphansThenFree) {
  StartStore();
  auto child = ClientProcess("decode.0");
  EXPECT_THAT(child->Ask("alloc 1 2"), HasSubstr("ok"));
  EXPECT_THAT(child->Ask("alloc 2 3"), HasSubstr("ok"));
  auto other = Attach("decode.1");
  child->Signal(SIGKILL);
  child->Wait(5);
  ASSERT_TRUE(Eventually(2, [&] { return LeaseOf("decode.0").state() == "dead"; }));
  EXPECT_THAT(*other->Take({1, 1}), SizeIs(2));
  EXPECT_EQ(Status().pool().rows(), 5u);
  EXPECT_TRUE(Eventually(4, [&] { return Status().pool().rows() == 2; }));
  EXPECT_THAT(*other->Take({2, 2}), IsEmpty());
}

TEST_F(StoreTest, AStoppedStoreStallsNobodyForLongAndComesBack) {
  StartStore();
  auto client = Attach("decode.0");
  const auto rows = client->Alloc(kR1, 0, 2);
  ASSERT_TRUE(rows.ok());
  const uint64_t lease = LeaseOf("decode.0").id();
  store_->Signal(SIGSTOP);
  int64_t start = MonotonicNowNs();
  EXPECT_TRUE(absl::IsUnavailable(client->Alloc(kR2, 0, 1).status()));
  EXPECT_LT(SecondsSince(start), 1.5);
  std::this_thread::sleep_for(milliseconds(5000));
  start = MonotonicNowNs();
  EXPECT_TRUE(absl::IsUnavailable(client->Alloc(kR2, 0, 1).status()));
  EXPECT_LT(SecondsSince(start), 0.1);  // away for long: said at once
  EXPECT_FALSE(client->View().attached);
  store_->Signal(SIGCONT);
  ASSERT_TRUE(Eventually(5, [&] { return client->View().attached; })) << client->View().away_reason;
  EXPECT_EQ(LeaseOf("decode.0").id(), lease);
  EXPECT_EQ((*client->Alloc(kR1, 0, 2))[1].page, (*rows)[1].page);
  // What the late calls did was settled: only named rows are left.
  EXPECT_TRUE(Eventually(3, [&] { return Status().pool().rows() == 2; })) << Status().pool().rows();
  EXPECT_EQ(losses_, 0);
  store_->Signal(SIGSTOP);
  start = MonotonicNowNs();
  client.reset();
  EXPECT_LT(SecondsSince(start), 1.0);
  store_->Signal(SIGCONT);
}

// One Attach stream on a connection of its own, said by hand: what a store client does in which order does not matter here.
class RawStream {
 public:
  RawStream(const std::string& socket, const v1::AttachRequest::Hello& hello)
      : stub_(v1::Store::NewStub(UnixChannel(socket))), stream_(stub_->Attach(&context_)) {
    v1::AttachRequest request;
    *request.mutable_hello() = hello;
    stream_->Write(request);
    v1::AttachEvent event;
    if (stream_->Read(&event)) welcome_ = event.welcome();
  }
  ~RawStream() {
    if (stream_ != nullptr) Close();
  }
  grpc::Status Close() {
    context_.TryCancel();
    v1::AttachEvent event;
    while (stream_->Read(&event)) continue;
    const grpc::Status status = stream_->Finish();
    stream_.reset();
    return status;
  }
  void Beat() {
    v1::AttachRequest request;
    request.mutable_beat();
    stream_->Write(request);
  }
  const v1::AttachEvent::Welcome& welcome() const { return welcome_; }
  template <typename Method, typename Message, typename Response>
  grpc::StatusCode Call(Method method, const Message& message, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + milliseconds(2000));
    return ((*stub_).*method)(&context, message, response).error_code();
  }
  grpc::StatusCode Alloc(const Hash128& request, int32_t first, int32_t count, v1::PagesResponse* response) {
    v1::AllocRequest message;
    message.set_lease_id(welcome_.lease_id());
    message.set_request_id(ToBytes(request));
    message.set_first_index(first);
    message.set_count(count);
    return Call(&v1::Store::Stub::Alloc, message, response);
  }
  grpc::StatusCode Take(const Hash128& request, v1::PagesResponse* response) {
    v1::StreamRef message;
    message.set_lease_id(welcome_.lease_id());
    message.set_request_id(ToBytes(request));
    return Call(&v1::Store::Stub::Take, message, response);
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::Store::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachEvent>> stream_;
  v1::AttachEvent::Welcome welcome_;
};

TEST_F(StoreTest, CallsOfTheOldConnectionAreRefusedAfterAReattachWhileItsStreamIsOpen) {
  StartStore();
  auto other = Attach("decode.1");
  ASSERT_TRUE(other->Alloc(kR2, 0, 2).ok());
  ASSERT_TRUE(other->Offer(kR2).ok());

  v1::AttachRequest::Hello hello;
  hello.set_kind(v1::WORKER_KIND_DECODE);
  hello.set_name("decode.0");
  hello.set_numerics(1);
  hello.set_attempt(1);
  RawStream before(Socket(), hello);
  ASSERT_NE(before.welcome().lease_id(), 0u);
  v1::PagesResponse rows;
  ASSERT_EQ(before.Alloc(kR1, 0, 2, &rows), grpc::StatusCode::OK);
  ASSERT_EQ(rows.rows_size(), 2);

  hello.set_lease_id(before.welcome().lease_id());
  hello.set_generation(before.welcome().generation().id());
  v1::StreamPages& held = *hello.add_holds();
  held.set_request_id(ToBytes(kR1));
  for (const v1::PageRow& row : rows.rows()) held.add_pages(row.page());
  hello.set_attempt(3);
  RawStream after(Socket(), hello);
  ASSERT_EQ(after.welcome().lease_id(), before.welcome().lease_id());

  // The old stream is still open, as that of a client which was stopped may be. None of its calls counts.
  EXPECT_EQ(before.Take(kR2, &rows), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(before.Alloc(kR1, 2, 1, &rows), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Status().pool().rows(), 4u);
  const auto taken = other->Take(kR2);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_THAT(*taken, SizeIs(2));
  // Nor does a hello that was overtaken.
  hello.set_attempt(2);
  hello.clear_holds();
  RawStream late(Socket(), hello);
  EXPECT_EQ(late.welcome().lease_id(), 0u);
  EXPECT_EQ(late.Close().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(LeaseOf("decode.0").rows(), 2);
  // And its end unbinds nothing.
  before.Close();
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(LeaseOf("decode.0").state(), "live");
  ASSERT_EQ(after.Alloc(kR1, 0, 3, &rows), grpc::StatusCode::OK);
  EXPECT_EQ(rows.rows_size(), 3);
  EXPECT_EQ(rows.rows(0).page(), held.pages(0));
}

TEST_F(StoreTest, LoadSwitchesAndTheOldGenerationGoesWithItsLastLease) {
  StartStore();
  auto old_client = Attach("decode.0");
  auto router = Attach("router", ClientKind::kRouter);
  const Hash128 old_generation = *old_client->View().generation;
  ASSERT_TRUE(old_client->Alloc(kR1, 0, 1).ok());
  CopyModel(dir_ + "/second");
  grpc::ClientContext context;
  v1::LoadRequest request;
  request.set_model_dir(dir_ + "/second");
  auto stub = v1::Store::NewStub(UnixChannel(Socket()));
  auto events = stub->Load(&context, request);
  v1::LoadEvent event, last;
  std::set<std::string> phases;
  while (events->Read(&event)) {
    last = event;
    phases.insert(event.phase());
  }
  const grpc::Status loaded = events->Finish();
  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  EXPECT_EQ(last.phase(), "ready");
  EXPECT_TRUE(phases.contains("planning"));
  const Hash128 fresh = *HashFromBytes(last.generation());
  EXPECT_TRUE(Eventually(2, [&] { return switches_ == 2; }));
  EXPECT_EQ(switched_to_, fresh);
  EXPECT_EQ(router->View().generation, fresh);
  EXPECT_EQ(old_client->View().generation, old_generation);
  EXPECT_TRUE(old_client->Alloc(kR1, 1, 1).ok());  // its streams go on
  // While the old one has streams, whoever starts belongs to it; a killed store changes nothing of that.
  store_->Signal(SIGKILL);
  store_->Wait(5);
  StartStore();
  EXPECT_EQ(Status().generations_size(), 2);
  ASSERT_TRUE(Eventually(3, [&] { return old_client->View().attached; }));
  EXPECT_TRUE(Eventually(2, [&] { return switches_ >= 3; }));  // said again
  EXPECT_EQ(Attach("decode.1")->View().generation, old_generation);
  ASSERT_TRUE(old_client->Free(kR1, 0).ok());
  EXPECT_EQ(Attach("decode.2")->View().generation, fresh);
  old_client.reset();
  EXPECT_TRUE(Eventually(6, [&] { return Status().generations_size() == 1; }));
  EXPECT_THAT(Files(), AreOfOneGeneration());
  // The configuration has not changed: what `load` brought is what a restart keeps.
  store_->Signal(SIGTERM);
  EXPECT_EQ(store_->Wait(3), 0);
  StartStore();
  ASSERT_EQ(Status().generations_size(), 1);
  EXPECT_EQ(*HashFromBytes(Status().generations(0).id()), fresh);
}

TEST_F(StoreTest, WhatIsNotedOfAModelGoesWithItsGeneration) {
  StartStore();
  CopyModel(dir_ + "/endless");
  CopyModel(dir_ + "/sound");
  for (const char* name : {"/config.json", "/generation_config.json"}) {
    nlohmann::json config = nlohmann::json::parse(std::ifstream(dir_ + "/endless" + name));
    config.erase("eos_token_id");
    std::ofstream(dir_ + "/endless" + name) << config;
  }
  const auto noted = [&] {
    const v1::StoreStatus status = Status();
    return std::any_of(status.notes().begin(), status.notes().end(), [](const std::string& note) { return note.find("eos_token_id") != note.npos; });
  };
  const auto load = [&](const char* name) {
    grpc::ClientContext context;
    v1::LoadRequest request;
    request.set_model_dir(dir_ + name);
    const auto stub = v1::Store::NewStub(UnixChannel(Socket()));
    auto events = stub->Load(&context, request);
    v1::LoadEvent event;
    while (events->Read(&event)) {
    }
    return events->Finish().ok();
  };
  EXPECT_FALSE(noted());
  ASSERT_TRUE(load("/endless"));
  EXPECT_TRUE(noted());
  ASSERT_TRUE(load("/sound"));
  EXPECT_TRUE(Eventually(6, [&] { return !noted(); }));
}

TEST_F(StoreTest, AnotherModelInTheConfigurationReplacesTheImage) {
  StartStore();
  const std::string before = Status().generations(0).id();
  store_->Signal(SIGTERM);
  EXPECT_EQ(store_->Wait(3), 0);
  CopyModel(dir_ + "/second");
  WriteConfig(dir_ + "/second");
  StartStore();
  ASSERT_EQ(Status().generations_size(), 1);
  EXPECT_NE(Status().generations(0).id(), before);
  EXPECT_THAT(Files(), AreOfOneGeneration());
  // And a file that changed under the same name.
  store_->Signal(SIGKILL);
  store_->Wait(5);
  const std::string second = Status().generations_size() == 0 ? "" : Status().generations(0).id();
  fs::last_write_time(dir_ + "/second/config.json", fs::file_time_type::clock::now());
  StartStore();
  EXPECT_NE(Status().generations(0).id(), second);
  EXPECT_THAT(Files(), AreOfOneGeneration());
}

// A changed pool size makes pool and table anew; what the old table said of the image must not get lost with it.
TEST_F(StoreTest, ANewPoolDoesNotMakeAnOldImageTheWantedOne) {
  StartStore();
  const std::string first = Status().generations(0).id();
  const auto stop = [&] {
    store_->Signal(SIGTERM);
    EXPECT_EQ(store_->Wait(3), 0);
  };
  const auto restarted = [&] {
    StartStore();
    const v1::StoreStatus status = Status();
    EXPECT_EQ(status.generations_size(), 1);
    return status.generations_size() == 1 ? status.generations(0) : v1::StoreStatus::Generation();
  };
  stop();
  WriteConfig(ModelDir(), "", 4096);  // alone: the image stays
  EXPECT_EQ(restarted().id(), first);
  EXPECT_EQ(Status().pool().pages_total(), 64u);
  stop();
  CopyModel(dir_ + "/second");
  WriteConfig(dir_ + "/second", "", 2048);
  const v1::StoreStatus::Generation second = restarted();
  EXPECT_NE(second.id(), first);
  EXPECT_EQ(second.model_dir(), dir_ + "/second");
  stop();
  fs::last_write_time(dir_ + "/second/config.json", fs::file_time_type::clock::now());
  WriteConfig(dir_ + "/second", "", 4096);
  const v1::StoreStatus::Generation third = restarted();
  EXPECT_NE(third.id(), second.id());
  stop();
  // Nobody knows any more what it was loaded from: the image is not believed to be the wanted one.
  fs::resize_file(shm_ + "/hearth.t.table." + HashFromBytes(third.id())->ToHex(), 4096);
  EXPECT_NE(restarted().id(), third.id());
  EXPECT_THAT(Log(), HasSubstr("its table was lost"));
  EXPECT_THAT(Files(), AreOfOneGeneration());
}

TEST_F(StoreTest, TheNewestGenerationStaysTheNewestWhenPoolsAreMadeAnew) {
  for (int round = 0; round < 3; ++round) {  // ids are random, and files are found in their order
    SCOPED_TRACE(round);
    WriteConfig(ModelDir());
    StartStore();
    auto child = ClientProcess("decode.0");
    EXPECT_THAT(child->Ask("alloc 1 1"), HasSubstr("ok"));
    const std::string fresh = Load(ModelDir());
    ASSERT_EQ(Status().generations_size(), 2);
    store_->Signal(SIGKILL);
    store_->Wait(5);
    child->Signal(SIGKILL);
    child->Wait(5);
    WriteConfig(ModelDir(), "", 4096);
    StartStore();
    ASSERT_EQ(Status().generations_size(), 1);
    EXPECT_EQ(Status().generations(0).id(), fresh);
    store_->Signal(SIGTERM);
    EXPECT_EQ(store_->Wait(3), 0);
    for (const std::string& file : Files()) fs::remove(shm_ + "/" + file);
  }
}

TEST_F(StoreTest, LoadsComeOneAfterTheOther) {
  StartStore();
  std::set<std::string> loaded;
  for (int i = 0; i < 3; ++i) {
    loaded.insert(Load(ModelDir()));
    EXPECT_TRUE(Eventually(6, [&] { return Status().generations_size() == 1; }));
  }
  EXPECT_THAT(loaded, SizeIs(3));
  // Loads that end leave nothing behind.
  const int64_t threads = ThreadsOf(store_->pid());
  for (int i = 0; i < 5; ++i) {
    grpc::ClientContext context;
    v1::LoadRequest request;
    request.set_model_dir(dir_ + "/nowhere");
    auto events = v1::Store::NewStub(UnixChannel(Socket()))->Load(&context, request);
    v1::LoadEvent event;
    while (events->Read(&event)) continue;
    EXPECT_EQ(events->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
  }
  EXPECT_LE(ThreadsOf(store_->pid()), threads + 2) << "gRPC's own may differ";
}

TEST_F(StoreTest, WhatDoesNotFitIsRefusedWithBothNumbers) {
  WriteConfig(ModelDir(), "kv_pool_bytes = 900000000000000\n");
  store_ = Launch();
  EXPECT_EQ(store_->Wait(10), kExitFailure);
  EXPECT_THAT(Log(), HasSubstr("needed"));
  EXPECT_THAT(Log(), HasSubstr("available"));
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(StoreTest, AnImageOfAnotherVersionIsNamedAndNotAdopted) {
  StartStore();
  const std::string before = Status().generations(0).id();
  store_->Signal(SIGTERM);
  EXPECT_EQ(store_->Wait(3), 0);
  for (const std::string& file : Files()) {
    if (file.find(".manifest.") == std::string::npos) continue;
    std::fstream stream(shm_ + "/" + file, std::ios::in | std::ios::out | std::ios::binary);
    const uint32_t version = 77;
    stream.seekp(8);
    stream.write(reinterpret_cast<const char*>(&version), 4);
  }
  StartStore();
  EXPECT_NE(Status().generations(0).id(), before);
  EXPECT_THAT(Log(), HasSubstr("version 77"));
  EXPECT_THAT(Log(), HasSubstr("version 1"));
  EXPECT_THAT(Files(), AreOfOneGeneration());
}

TEST_F(StoreTest, StoppingIsQuickWithAnOpenAttach) {
  StartStore();
  auto client = Attach("decode.0");
  const int64_t start = MonotonicNowNs();
  store_->Signal(SIGTERM);
  EXPECT_EQ(store_->Wait(3), 0);
  EXPECT_LT(SecondsSince(start), 1.5);
  EXPECT_FALSE(fs::exists(Socket()));
  StartStore();
  EXPECT_TRUE(Status().generations(0).adopted());
  EXPECT_TRUE(Eventually(3, [&] { return client->View().attached; }));
}

TEST_F(StoreTest, StoppingUnderCallsEndsCleanly) {
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    StartStore();
    std::atomic<bool> done{false};
    std::atomic<int> answered{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&, i, round] {
        v1::AttachRequest::Hello hello;
        hello.set_kind(v1::WORKER_KIND_DECODE);
        hello.set_name(absl::StrCat("decode.", i));
        hello.set_attempt(1);
        RawStream stream(Socket(), hello);
        v1::PagesResponse rows;
        while (!done)
          answered += stream.Alloc({static_cast<uint64_t>(i), static_cast<uint64_t>(round) + 1}, 0, 1, &rows) == grpc::StatusCode::OK ? 1 : 0;
      });
    }
    EXPECT_TRUE(Eventually(5, [&] { return answered > 100; }));
    const int64_t start = MonotonicNowNs();
    store_->Signal(SIGTERM);
    EXPECT_EQ(store_->Wait(3), 0);
    EXPECT_LT(SecondsSince(start), 1.5);
    done = true;
    for (std::thread& caller : callers) caller.join();
  }
}

TEST_F(StoreTest, StoppingWhileLoadingLeavesNothing) {
  for (const int delay_ms : {20, 40, 60}) {
    store_ = Launch();
    std::this_thread::sleep_for(milliseconds(delay_ms));
    store_->Signal(SIGTERM);
    const int code = store_->Wait(3);
    EXPECT_THAT(code, AnyOf(0, 1000 + SIGTERM)) << delay_ms;  // by the signal itself: before its handler was there
    EXPECT_THAT(Files(), AnyOf(IsEmpty(), AreOfOneGeneration()));
    for (const std::string& file : Files()) fs::remove(shm_ + "/" + file);
  }
}

TEST_F(StoreTest, ASecondStoreIsRefusedAndNamesTheFirst) {
  StartStore();
  auto second = Launch();
  EXPECT_EQ(second->Wait(5), kExitFailure);
  EXPECT_THAT(Log(), HasSubstr(absl::StrCat("process ", store_->pid())));
  // Also where only the shared memory is common.
  fs::create_directory(dir_ + "/run2");
  std::ofstream(dir_ + "/node.toml") << "[node]\nname = \"t\"\nruntime_dir = \"" << dir_ << "/run2\"\nshm_dir = \"" << shm_
                                     << "\"\n[model]\npath = \"" << ModelDir() << "\"\n";
  auto third = Launch();
  EXPECT_EQ(third->Wait(5), kExitFailure);
  EXPECT_THAT(Log(), HasSubstr(absl::StrCat("process ", store_->pid(), " owns")));
  EXPECT_EQ(Status().generations_size(), 1);
}

TEST_F(StoreTest, ConfigurationErrorsHaveTheirOwnExitCode) {
  WriteConfig(ModelDir(), "no_such_key = 1\n");
  store_ = Launch();
  EXPECT_EQ(store_->Wait(5), kExitConfig);
  EXPECT_THAT(Log(), HasSubstr("no_such_key"));
  WriteConfig(dir_ + "/nowhere");
  store_ = Launch();
  EXPECT_EQ(store_->Wait(5), kExitConfig);
  EXPECT_THAT(Log(), HasSubstr(dir_ + "/nowhere"));
}

// attach; then per line: "alloc R N" -> "ok p p p" or "error ..."; "rings N" -> "ok" or why not; "bye" or the end of input ends it.
int RunClient(const std::string& socket, const std::string& name) {
  auto client = StoreClient::Start({.socket_path = socket, .kind = ClientKind::kDecode, .name = name, .numerics = 1});
  const auto generation = client->WaitForGeneration({}, MonotonicNowNs() + 10'000'000'000);
  std::cout << (generation.ok() ? "attached" : generation.status().ToString()) << std::endl;
  std::string line;
  while (std::getline(std::cin, line) && line != "bye") {
    std::istringstream words(line);
    std::string verb;
    uint64_t request = 0;
    int32_t count = 0;
    words >> verb >> request >> count;
    if (verb == "rings") {
      const absl::Status made = client->MakeRings(static_cast<int64_t>(request), [] { return false; }).status();
      std::cout << (made.ok() ? "ok" : made.ToString()) << std::endl;
      continue;
    }
    absl::StatusOr<std::vector<PageRef>> rows = absl::UnavailableError("");
    for (int attempt = 0; attempt < 50 && absl::IsUnavailable(rows.status()); ++attempt) {
      rows = client->Alloc({request, request}, 0, count);
      if (!rows.ok()) std::this_thread::sleep_for(milliseconds(100));
    }
    std::string answer = rows.ok() ? "ok" : "error " + rows.status().ToString();
    if (rows.ok()) {
      for (const PageRef& row : *rows) absl::StrAppend(&answer, " ", row.page);
    }
    std::cout << answer << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  // Logs go to standard error: the client's standard output is its answers.
  if (!hearth::InitLogging("service_test", "info").ok()) return 1;
  if (argc == 4 && std::string(argv[1]) == "--client") return hearth::RunClient(argv[2], argv[3]);
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
