// Chat templates: Jinja2 as Transformers sets it up (trim_blocks, lstrip_blocks, loop controls, generation blocks),
// rendered over JSON-like values. Parsed once at load; what can't be parsed is refused there with line and column. The
// engine is in common/text/jinja/; how messages are fitted to a template is in message_shape.h. Room: common/text. May
// touch: common/base. Threads: any; const after Parse. Bounded, whatever the template and the request: 64 MiB of
// output, work worth some seconds of one core, nesting, recursion.
#pragma once

#include <ctime>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

// A piece of rendered text. `trusted`: written by the template (its special tokens count); untrusted: it came, whole or
// in part, from the caller's messages (special tokens in it are ordinary text). Cutting and joining keep this exactly;
// a filter that rewrites characters (tojson, upper) gives text that is untrusted if any of its input was. A message's
// `role` counts as trusted when it is one of the usual ones, since many templates build a special token around it.
struct RenderedSpan {
  std::string text;
  bool trusted = true;
};

struct RenderOptions {
  // What strftime_now writes; without it, this moment in local time. (A template that prints seconds at its start
  // defeats the prefix cache: that is the template's choice.)
  std::optional<std::tm> local_time;
  // Top-level names besides messages, tools and documents whose strings come from the caller, such as
  // chat_template_kwargs of a request.
  std::vector<std::string> untrusted_names;
};

class ChatTemplate {
 public:
  // Errors: InvalidArgument "line 3, column 14: ...".
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source);
  ~ChatTemplate();

  // Messages as a client sends them -> messages as this template reads them; what the template takes was found out at
  // Parse, by rendering small conversations (see message_shape.h). Content given as parts: the texts joined by "" for
  // templates that print the content, parts of type text for templates that walk over them. Arguments of tool calls:
  // JSON text or object, as the template needs; text that is no JSON object stays text. Content of a message that only
  // calls tools: null or "", whichever the template bears. Errors: InvalidArgument that names the place:
  // "messages[2].content[0]: ...", also for an empty conversation and for images.
  absl::StatusOr<nlohmann::ordered_json> PrepareMessages(const nlohmann::ordered_json& messages) const;

  // `context` is an object: messages, tools, add_generation_prompt, bos_token, eos_token and whatever else the caller
  // passes. Keys keep their order (ordered_json). Strings under `messages`, `tools` and `documents` are untrusted,
  // everything else trusted. Errors: InvalidArgument with the template's own sentence for raise_exception, or "line N:
  // what went wrong".
  absl::StatusOr<std::vector<RenderedSpan>> Render(const nlohmann::ordered_json& context, const RenderOptions& options = {}) const;
  absl::StatusOr<std::string> RenderText(const nlohmann::ordered_json& context, const RenderOptions& options = {}) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hearth
