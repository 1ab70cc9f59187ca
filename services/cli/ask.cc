#include "services/cli/ask.h"

#include <signal.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <thread>

#include "absl/strings/str_format.h"
#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "common/text/utf8.h"
#include "services/cli/node_client.h"

namespace hearth {
namespace {

// Ctrl-C while an answer streams: TryCancel takes locks and so has no place in a signal handler; the handler raises a flag, a watcher sees it.
std::atomic<bool> g_interrupted{false};

class Interruptible {
 public:
  explicit Interruptible(grpc::ClientContext& context) : context_(context) {
    g_interrupted.store(false);
    struct sigaction action {};
    action.sa_handler = [](int) { g_interrupted.store(true); };
    sigaction(SIGINT, &action, &old_);
    watcher_ = std::thread([this] {
      while (!done_.load()) {
        if (g_interrupted.load()) {
          context_.TryCancel();
          return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    });
  }
  ~Interruptible() {
    done_.store(true);
    watcher_.join();
    sigaction(SIGINT, &old_, nullptr);
  }

 private:
  grpc::ClientContext& context_;
  struct sigaction old_ {};
  std::atomic<bool> done_{false};
  std::thread watcher_;
};

void Fill(const AskOptions& options, v1::GenerationOptions& out) {
  if (options.max_tokens) out.set_max_tokens(*options.max_tokens);
  if (options.temperature) out.mutable_sampling()->set_temperature(*options.temperature);
  if (options.top_p) out.mutable_sampling()->set_top_p(*options.top_p);
  if (options.seed) out.mutable_sampling()->set_seed(*options.seed);
  for (const std::string& stop : options.stop) out.add_stop(stop);
}

absl::Status CheckText(const std::string& text) {
  const std::optional<size_t> bad = FirstInvalidUtf8(text);
  if (!bad) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the text is not valid UTF-8 at byte ", *bad, ": convert it first, for instance with iconv"));
}

template <typename Start>
absl::StatusOr<std::string> Stream(const NodeConfig& config, const AskOptions& options, Start start) {
  const std::unique_ptr<v1::Inference::Stub> stub = InferenceStub(config);
  grpc::ClientContext context;
  Authorize(config, context);
  const Interruptible interruptible(context);
  const int64_t asked_ns = MonotonicNowNs();
  int64_t first_ns = 0;
  std::string answer;
  v1::Usage usage;
  const std::unique_ptr<grpc::ClientReader<v1::GenerateEvent>> reader = start(*stub, &context);
  v1::GenerateEvent event;
  while (reader->Read(&event)) {
    if (event.has_delta()) {
      if (first_ns == 0) first_ns = MonotonicNowNs();
      answer += event.delta().text();
      std::cout << event.delta().text() << std::flush;
    }
    if (event.has_finished()) usage = event.finished().usage();
  }
  const grpc::Status status = reader->Finish();
  if (!answer.empty()) std::cout << std::endl;
  if (!std::cout) return absl::DataLossError(absl::StrCat("the answer can't be written to standard output: ", strerror(errno)));
  if (g_interrupted.load()) return absl::CancelledError("interrupted");
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(absl::StrCat(status.error_message(), " (is the node running? `hearth up`, `hearth status`)"));
  }
  RETURN_IF_ERROR(FromGrpc(status));
  if (options.usage && first_ns != 0) {
    const double rest = static_cast<double>(MonotonicNowNs() - first_ns) / 1e9;
    std::cerr << absl::StrFormat("[%d prompt tokens (%d cached), %d output tokens, first after %s, then %.1f tokens/s]\n", usage.prompt_tokens(),
                                 usage.cached_tokens(), usage.completion_tokens(), HumanDuration(static_cast<double>(first_ns - asked_ns) / 1e9),
                                 rest > 0 ? (usage.completion_tokens() - 1) / rest : 0.0);
  }
  return answer;
}

}  // namespace

std::shared_ptr<AskOptions> AddAskOptions(CLI::App& command) {
  auto options = std::make_shared<AskOptions>();
  command.add_option("--max-tokens", options->max_tokens, "tokens of output at most (default: up to the context)");
  command.add_option("--temperature", options->temperature, "0 = always the likeliest token (default: 1)");
  command.add_option("--top-p", options->top_p, "draw from the smallest set of tokens that has this probability (default: 1)");
  command.add_option("--seed", options->seed, "the same seed gives the same answer (default: drawn)");
  command.add_option("--stop", options->stop, "end before this text; may be given several times");
  command.add_flag("--usage", options->usage, "tokens and times behind the answer");
  return options;
}

absl::StatusOr<std::string> AskChat(const NodeConfig& config, const std::vector<v1::ChatMessage>& messages, const AskOptions& options) {
  v1::ChatRequest request;
  for (const v1::ChatMessage& message : messages) {
    RETURN_IF_ERROR(CheckText(message.content()));
    *request.add_messages() = message;
  }
  Fill(options, *request.mutable_options());
  return Stream(config, options, [&](v1::Inference::Stub& stub, grpc::ClientContext* context) { return stub.Chat(context, request); });
}

absl::StatusOr<std::string> AskRaw(const NodeConfig& config, const std::string& prompt, const AskOptions& options) {
  RETURN_IF_ERROR(CheckText(prompt));
  v1::GenerateRequest request;
  request.set_text(prompt);
  request.set_add_special_tokens(true);
  request.set_parse_special(true);
  Fill(options, *request.mutable_options());
  return Stream(config, options, [&](v1::Inference::Stub& stub, grpc::ClientContext* context) { return stub.Generate(context, request); });
}

}  // namespace hearth
