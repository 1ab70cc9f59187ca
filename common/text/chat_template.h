// Chat templates: Jinja2 as Transformers sets it up (trim_blocks, lstrip_blocks, loop controls, generation blocks), rendered
// over JSON-like values. Parsed once at load; what can't be parsed is refused there with line and column.
// Room: common/text. May touch: common/base. Threads: any; const after Parse.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

// A piece of rendered text. `trusted`: written by the template (its special tokens count); untrusted: it came, whole or in part, from the
// caller's messages (special tokens in it are ordinary text).
struct RenderedSpan {
  std::string text;
  bool trusted = true;
};

class ChatTemplate {
 public:
  // Errors: InvalidArgument "line 3, column 14: ...".
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source);
  ~ChatTemplate();

  // `context` is an object: messages, tools, add_generation_prompt, bos_token, eos_token and whatever else the caller passes.
  // Keys keep their order (ordered_json). Strings under `messages`, `tools` and `documents` are untrusted, everything else trusted.
  // Errors: InvalidArgument with the template's own sentence for raise_exception, or "line N: what went wrong".
  absl::StatusOr<std::vector<RenderedSpan>> Render(const nlohmann::ordered_json& context) const;
  absl::StatusOr<std::string> RenderText(const nlohmann::ordered_json& context) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hearth
