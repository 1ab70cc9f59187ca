// Splits a choice's text into the thought and the answer at the model's <think> tags.
// Room: services/router. A pure function of the text pushed so far. The same for streams and whole answers.
// After a prompt that opened a thought the text is thought until </think>. Otherwise, too, only a <think> that begins the text opens one.
// Blank lines right behind a tag belong to neither part.
#pragma once

#include <string>
#include <string_view>

namespace hearth::router {

// What the assistant's turn so far leaves to the text that follows it.
enum class Thought {
  kNone,    // the text may open one
  kOpened,  // the turn is no more than <think>
  kMidway,  // its thought is under way: blank lines belong to it
};
// Only a <think> that begins the turn opens a thought.
Thought ThoughtAtEndOf(std::string_view turn);

struct ReasoningPart {
  std::string thought;
  std::string answer;
};

class ReasoningSplitter {
 public:
  explicit ReasoningSplitter(Thought before)
      : state_(before == Thought::kNone ? State::kStart : State::kThought), skip_blank_(before == Thought::kOpened) {}
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
