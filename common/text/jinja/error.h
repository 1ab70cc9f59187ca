// The one way an error travels inside the template engine: thrown as Error, caught in common/text/chat_template.cc,
// which turns it into a Status. An evaluator that recurses through every node would otherwise spend half its lines on
// passing Status along. Room: common/text/jinja; nothing outside this folder and chat_template.cc may see these
// exceptions.
#pragma once

#include <string>
#include <utility>

#include "common/text/jinja/cat.h"

namespace hearth::jinja {

struct Error {
  std::string message;
  int line = 0;                     // 1-based; 0: the catcher knows better
  int column = 0;                   // 1-based, in characters; only parse errors have one
  bool raised_by_template = false;  // raise_exception: the sentence is the template's own and is passed on untouched
};

template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  throw Error{Cat(parts...)};
}

}  // namespace hearth::jinja
