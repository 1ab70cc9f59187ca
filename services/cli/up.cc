// `hearth up`: a foreground supervisor of the node's processes. Starts them, restarts what dies with back-off, stops them in order on Ctrl-C.
// Each child is asked to stop when the supervisor itself is killed (PR_SET_PDEATHSIG), so that nothing is left behind without an owner.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <vector>

#include "common/base/process.h"
#include "common/base/time.h"
#include "services/cli/command.h"
#include "services/cli/node_client.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMs = 1'000'000;
// A process that ran so long is sound: the next death starts from the shortest back-off again.
constexpr int64_t kSoundNs = 30'000 * kMs;
constexpr int64_t kBackoffMinNs = 100 * kMs;
constexpr int64_t kBackoffMaxNs = 5'000 * kMs;

struct Child {
  std::string name;  // "decode.0"
  std::vector<std::string> argv;
  pid_t pid = 0;  // 0: not running
  int64_t started_ns = 0;
  int64_t restart_at_ns = 0;
  int64_t backoff_ns = kBackoffMinNs;
};

std::vector<Child> Children(const NodeConfig& config, bool quiet) {
  const std::string bin = fs::read_symlink("/proc/self/exe").parent_path().string();
  std::vector<Child> children;
  const auto add = [&](const std::string& name, const std::string& program, const std::vector<std::string>& more) {
    Child child{.name = name, .argv = {bin + "/" + program, "--config", config.source_path}};
    child.argv.insert(child.argv.end(), more.begin(), more.end());
    if (quiet) child.argv.insert(child.argv.end(), {"--log-level", "warn"});
    children.push_back(std::move(child));
  };
  add("weightstore", "hearth-weightstore", {});
  for (int64_t i = 0; i < config.prefill_instances; ++i) add(absl::StrCat("prefill.", i), "hearth-prefill", {"--index", absl::StrCat(i)});
  for (int64_t i = 0; i < config.decode_instances; ++i) add(absl::StrCat("decode.", i), "hearth-decode", {"--index", absl::StrCat(i)});
  add("router", "hearth-router", {});
  return children;
}

absl::Status Start(Child& child) {
  std::vector<char*> argv;
  for (std::string& arg : child.argv) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError(absl::StrCat("fork: ", strerror(errno)));
  if (pid == 0) {
    setpgid(0, 0);  // Ctrl-C reaches the supervisor alone, which stops the others in order
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(kExitFailure);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    execv(argv[0], argv.data());
    fprintf(stderr, "hearth up: %s: %s\n", argv[0], strerror(errno));
    _exit(kExitConfig);
  }
  child.pid = pid;
  child.started_ns = MonotonicNowNs();
  return absl::OkStatus();
}

std::string HowItEnded(int status) {
  if (WIFSIGNALED(status)) return absl::StrCat("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return absl::StrCat("ended with exit code ", WEXITSTATUS(status));
}

// systemd-logind deletes an ordinary user's files in /dev/shm at his last logout, unless RemoveIPC=no (logind.conf(5)).
void WarnOfRemoveIpc(const NodeConfig& config) {
  if (getuid() < 1000 || config.shm_dir.rfind("/dev/shm", 0) != 0 || !fs::exists("/run/systemd/sessions")) return;
  std::ifstream conf("/etc/systemd/logind.conf");
  for (std::string line; std::getline(conf, line);) {
    if (line.rfind("RemoveIPC=no", 0) == 0) return;
  }
  std::cerr << "hearth up: note: systemd-logind removes this user's shared memory at logout, the weight image with it. Remedies: RemoveIPC=no in "
               "/etc/systemd/logind.conf, `loginctl enable-linger`, or the systemd services.\n";
}

sigset_t SupervisorSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (int sig : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&set, sig);
  return set;
}

class Supervisor {
 public:
  Supervisor(NodeConfig config, bool quiet) : config_(std::move(config)), children_(Children(config_, quiet)) {}

  int Run() {
    const sigset_t set = SupervisorSignals();
    signal(SIGHUP, SIG_IGN);
    const int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    for (Child& child : children_) {
      if (absl::Status s = Start(child); !s.ok()) return Fail("up", s);
    }
    while (true) {
      pollfd fd{signals, POLLIN, 0};
      poll(&fd, 1, PollMs());
      signalfd_siginfo info;
      while (read(signals, &info, sizeof(info)) == sizeof(info)) {
        if (info.ssi_signo == SIGCHLD) continue;
        if (stopping_) KillAll();
        stopping_ = true;
      }
      Reap();
      if (stopping_ && !StopNext()) break;
      if (!stopping_) RestartDue();
    }
    close(signals);
    return exit_code_;
  }

 private:
  int PollMs() const {
    if (stopping_) return 50;
    int64_t next = INT64_MAX;
    for (const Child& child : children_) {
      if (child.pid == 0) next = std::min(next, child.restart_at_ns);
    }
    if (next == INT64_MAX) return -1;
    return static_cast<int>(std::max<int64_t>(1, (next - MonotonicNowNs()) / kMs + 1));
  }

  void Reap() {
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto child = std::find_if(children_.begin(), children_.end(), [&](const Child& c) { return c.pid == pid; });
      if (child == children_.end()) continue;
      child->pid = 0;
      if (stopping_) continue;
      if (WIFEXITED(status) && WEXITSTATUS(status) == kExitConfig) {
        std::cerr << "hearth up: " << child->name << " refuses its configuration (see above): stopping the node\n";
        exit_code_ = kExitConfig;
        stopping_ = true;
        continue;
      }
      const int64_t now = MonotonicNowNs();
      // Exit code 0 unasked: it makes room for the next model, and is wanted back at once.
      const bool failed = !WIFEXITED(status) || WEXITSTATUS(status) != kExitOk;
      if (!failed || now - child->started_ns > kSoundNs) child->backoff_ns = kBackoffMinNs;
      child->restart_at_ns = now + child->backoff_ns;
      std::cerr << "hearth up: " << child->name << " " << HowItEnded(status) << " after "
                << HumanDuration(static_cast<double>(now - child->started_ns) / 1e9) << "; starting it again in "
                << HumanDuration(static_cast<double>(child->backoff_ns) / 1e9) << "\n";
      if (failed) child->backoff_ns = std::min(child->backoff_ns * 2, kBackoffMaxNs);
    }
  }

  void RestartDue() {
    const int64_t now = MonotonicNowNs();
    for (Child& child : children_) {
      if (child.pid != 0 || child.restart_at_ns > now) continue;
      if (absl::Status s = Start(child); !s.ok()) {
        std::cerr << "hearth up: " << child.name << ": " << StdSv(s.message()) << "\n";
        child.restart_at_ns = now + child.backoff_ns;
      }
    }
  }

  // The router first (it lets streams finish), the store last; each waits for those above it. False: all have ended.
  bool StopNext() {
    for (auto child = children_.rbegin(); child != children_.rend(); ++child) {
      if (child->pid == 0) continue;
      if (asked_to_stop_ != child->name) {
        asked_to_stop_ = child->name;
        kill(child->pid, SIGTERM);
      }
      return true;
    }
    return false;
  }

  void KillAll() {
    for (const Child& child : children_) {
      if (child.pid != 0) kill(child.pid, SIGKILL);
    }
  }

  NodeConfig config_;
  std::vector<Child> children_;
  std::string asked_to_stop_;
  bool stopping_ = false;
  int exit_code_ = kExitOk;
};

int Up(const std::string& config_path, bool quiet) {
  // Before gRPC makes its threads: a signal that one of them takes would end the supervisor and leave the others behind.
  sigset_t set = SupervisorSignals();
  sigprocmask(SIG_BLOCK, &set, nullptr);
  absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("up", absl::InvalidArgumentError(config.status().message()));
  std::error_code error;
  fs::create_directories(config->runtime_dir, error);
  if (error || access(config->runtime_dir.c_str(), W_OK | X_OK) != 0) {
    return Fail("up", absl::InvalidArgumentError(absl::StrCat("node.runtime_dir ", config->runtime_dir, " cannot be written (",
                                                              error ? error.message() : strerror(errno), ")")));
  }
  if (absl::StatusOr<v1::RouterStatus> other = RouterStatusOf(*config); other.ok()) {
    return Fail("up", absl::FailedPreconditionError(
                          absl::StrCat("a node named '", config->node_name, "' is already running (router pid ", other->pid(), ")")));
  }
  WarnOfRemoveIpc(*config);
  if (!quiet) std::cerr << FormatNodeConfig(*config) << "\n";
  return Supervisor(*std::move(config), quiet).Run();
}

}  // namespace

void AddUp(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("up", "start all processes of the node and keep them running (Ctrl-C stops them)");
  command->footer(
      "Starts weightstore, prefill, decode and router, restarts what dies (after 0.1 s, doubling to 5 s), and stops them in order on Ctrl-C:\n"
      "running answers may finish for router.drain_ms. A second Ctrl-C ends everything at once.\n"
      "The weight image stays in shared memory, so that the next start takes no time; `hearth drop` removes it.\n\n"
      "  hearth up --config node.toml");
  auto config = AddConfigOption(*command);
  auto quiet = std::make_shared<bool>(false);
  command->add_flag("--quiet", *quiet, "warnings only");
  command->callback([=, &exit_code] { exit_code = Up(*config, *quiet); });
}

}  // namespace hearth
