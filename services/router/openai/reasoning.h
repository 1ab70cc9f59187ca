// Splits a choice's text into the thought and the answer at the model's <think> tags.
// Room: services/router. A pure function of the text pushed so far. The same for streams and whole answers.
// A prompt that opened the thought (it ends in <think>): the text is thought until </think>. Otherwise only a <think> that begins the text
// opens one. Blank lines right behind a tag belong to neither part.
#pragma once

#include <string>
#include <string_view>

namespace hearth::router {

struct ReasoningPart {
  std::string thought;
  std::string answer;
};

class ReasoningSplitter {
 public:
  explicit ReasoningSplitter(bool thought_open) : state_(thought_open ? State::kThought : State::kStart), skip_blank_(thought_open) {}
  ReasoningPart Push(std::string_view text);
  ReasoningPart Finish();  // releases what might have become a tag

 private:
  enum class State { kStart, kThought, kAnswer };
  void Run(bool at_end, ReasoningPart* part);
  State state_;
  bool skip_blank_;
  std::string pending_;
  std::string blanks_;  // in a thought: may stand before </think>, and then belong to neither
};

}  // namespace hearth::router
