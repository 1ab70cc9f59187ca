// `hearth run` and `hearth chat`: one question, or a conversation, on the terminal.
#include <unistd.h>

#include <iostream>

#include "common/base/process.h"
#include "services/cli/ask.h"
#include "services/cli/command.h"

namespace hearth {
namespace {

v1::ChatMessage Message(const std::string& role, const std::string& content) {
  v1::ChatMessage message;
  message.set_role(role);
  message.set_content(content);
  return message;
}

int Run(const std::string& config_path, const std::string& prompt, const std::string& system, bool raw, const AskOptions& options) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("run", absl::InvalidArgumentError(config.status().message()));
  std::string text = prompt;
  if (text == "-") text.assign(std::istreambuf_iterator<char>(std::cin), {});
  std::vector<v1::ChatMessage> messages;
  if (!system.empty()) messages.push_back(Message("system", system));
  messages.push_back(Message("user", text));
  const absl::StatusOr<std::string> answer = raw ? AskRaw(*config, text, options) : AskChat(*config, messages, options);
  return answer.ok() ? kExitOk : Fail("run", answer.status());
}

int Chat(const std::string& config_path, const std::string& system, const AskOptions& options) {
  const absl::StatusOr<NodeConfig> config = ReadNodeConfig(config_path);
  if (!config.ok()) return Fail("chat", absl::InvalidArgumentError(config.status().message()));
  const bool terminal = isatty(STDIN_FILENO);
  if (terminal) std::cerr << "Chat with " << config->model_name << ". Ctrl-C stops an answer, /new starts over, Ctrl-D ends.\n";
  std::vector<v1::ChatMessage> messages;
  const auto start_over = [&] {
    messages.clear();
    if (!system.empty()) messages.push_back(Message("system", system));
  };
  start_over();
  for (std::string line;;) {
    if (terminal) std::cerr << "\n> " << std::flush;
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    if (line == "/new") {
      start_over();
      continue;
    }
    messages.push_back(Message("user", line));
    const absl::StatusOr<std::string> answer = AskChat(*config, messages, options);
    if (answer.ok()) {
      messages.push_back(Message("assistant", *answer));
    } else {
      messages.pop_back();  // the question may be asked again
      if (!absl::IsCancelled(answer.status())) {
        const int code = Fail("chat", answer.status());
        if (!terminal) return code;
      }
    }
  }
  return kExitOk;
}

}  // namespace

void AddRun(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("run", "ask one question and stream the answer");
  command->footer(
      "The text goes through the model's chat template; --raw continues it as it stands.\n\n"
      "  hearth run \"Tell me the story of The Golden Apple.\"\n"
      "  hearth run --raw --temperature 0 --max-tokens 50 \"Once upon a time\"\n"
      "  cat question.txt | hearth run -");
  auto config = AddConfigOption(*command);
  auto prompt = std::make_shared<std::string>();
  auto system = std::make_shared<std::string>();
  auto raw = std::make_shared<bool>(false);
  command->add_option("prompt", *prompt, "the text; - reads it from standard input")->required();
  command->add_option("--system", *system, "a system message before it");
  command->add_flag("--raw", *raw, "no chat template: continue the text");
  auto options = AddAskOptions(*command);
  command->callback([=, &exit_code] { exit_code = Run(*config, *prompt, *system, *raw, *options); });
}

void AddChat(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("chat", "a conversation on the terminal, streaming");
  command->footer("Ctrl-C stops the answer that is being written, /new starts a new conversation, Ctrl-D ends.\n\n  hearth chat --temperature 0.7");
  auto config = AddConfigOption(*command);
  auto system = std::make_shared<std::string>();
  command->add_option("--system", *system, "a system message before the conversation");
  auto options = AddAskOptions(*command);
  command->callback([=, &exit_code] { exit_code = Chat(*config, *system, *options); });
}

}  // namespace hearth
