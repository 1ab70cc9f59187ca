// What this server cannot keep is refused by name, on both completion paths: never accepted and ignored (README.md, "What clients may rely on").
#include <cmath>
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "services/router/api_error.h"
#include "services/router/openai/parse_options.h"

namespace hearth::router {
namespace {

// Tool calls in the history are rendered; calls in the answer are not made out of the model's text, so asking for tools is refused.
// A choice of "none" asks for nothing.
absl::Status RefuseTools(Fields& fields) {
  const Json* choice = fields.Get("tool_choice");
  const bool none = choice != nullptr && IsText(*choice, "none");
  if (choice != nullptr && !none && !IsText(*choice, "auto")) {
    return Unsupported("tool_choice", "'tool_choice' may be \"none\" or \"auto\" here: a tool call can't be forced");
  }
  const Json* tools = fields.Get("tools");
  if (tools != nullptr && !tools->is_array()) return FieldError("tools", absl::StrCat("'tools' must be a list, not ", Describe(*tools)));
  if (tools != nullptr && !tools->empty() && !none) {
    return Unsupported("tools", "'tools' are not supported here yet: leave them out or send \"tool_choice\": \"none\"");
  }
  const Json* functions = fields.Get("functions");
  if (functions != nullptr && !functions->empty()) return Unsupported("functions", "'functions' are not supported here");
  const Json* function_call = fields.Get("function_call");
  if (function_call != nullptr && !IsText(*function_call, "none") && !IsText(*function_call, "auto")) {
    return Unsupported("function_call", "'function_call' may be \"none\" or \"auto\" here: a call can't be forced");
  }
  // Without tools there are no calls that could run in parallel, whatever is asked.
  bool parallel = true;
  return fields.Bool("parallel_tool_calls", &parallel);
}

absl::Status RefuseOtherOutputs(Fields& fields) {
  if (fields.Get("audio") != nullptr) return Unsupported("audio", "'audio' is not supported here: this model writes text");
  if (const Json* modalities = fields.Get("modalities")) {
    if (!modalities->is_array()) return FieldError("modalities", absl::StrCat("'modalities' must be a list, not ", Describe(*modalities)));
    for (const Json& modality : *modalities) {
      if (!IsText(modality, "text")) return Unsupported("modalities", "'modalities' may hold \"text\" only: this model writes text");
    }
  }
  if (fields.Get("chat_template") != nullptr) return Unsupported("chat_template", "'chat_template' is not supported here: the model's own is used");
  return absl::OkStatus();
}

// Options of other servers that change which tokens may come. A value that changes nothing is fine: clients send their defaults along.
absl::Status RefuseOtherSampling(Fields& fields) {
  for (const char* name : {"allowed_token_ids", "bad_words"}) {
    const Json* list = fields.Get(name);
    if (list != nullptr && !(list->is_array() && list->empty())) return Unsupported(name, absl::StrCat("'", name, "' is not supported here"));
  }
  struct Neutral {
    const char* name;
    double value;
  };
  for (const Neutral& n : {Neutral{"typical_p", 1}, Neutral{"tfs_z", 1}, Neutral{"mirostat", 0}, Neutral{"dry_multiplier", 0},
                           Neutral{"xtc_probability", 0}, Neutral{"dynatemp_range", 0}, Neutral{"length_penalty", 1}}) {
    std::optional<double> value;
    RETURN_IF_ERROR(fields.Number(n.name, -1e9, 1e9, &value));
    if (value && *value != n.value) return Unsupported(n.name, absl::StrCat("'", n.name, "' is not supported here"));
  }
  if (fields.Get("n_predict") != nullptr) return Unsupported("n_predict", "'n_predict' is called 'max_tokens' here");
  return absl::OkStatus();
}

}  // namespace

absl::Status RefuseUnsupported(Fields& fields) {
  RETURN_IF_ERROR(RefuseTools(fields));
  RETURN_IF_ERROR(RefuseOtherOutputs(fields));
  RETURN_IF_ERROR(RefuseOtherSampling(fields));
  if (const Json* format = fields.Get("response_format")) {
    const Json type = format->is_object() ? format->value("type", Json()) : Json();
    if (!type.is_string()) return FieldError("response_format", "'response_format' must be an object with a \"type\"");
    if (!IsText(type, "text")) {
      return Unsupported("response_format", absl::StrCat("'response_format' of type ", type.dump(),
                                                         " is not supported here: output can't be constrained; use \"text\""));
    }
  }
  for (const char* name : {"grammar", "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
                           "structured_outputs", "ebnf", "regex"}) {
    if (fields.Get(name) != nullptr) return Unsupported(name, absl::StrCat("'", name, "' is not supported here: output can't be constrained"));
  }
  for (const char* name : {"use_beam_search", "include_stop_str_in_output"}) {
    bool wanted = false;
    RETURN_IF_ERROR(fields.Bool(name, &wanted));
    if (wanted) return Unsupported(name, absl::StrCat("'", name, "' is not supported here"));
  }
  if (fields.Get("prompt_logprobs") != nullptr)
    return Unsupported("prompt_logprobs", "'prompt_logprobs' is not supported here: only the output's tokens have logprobs");
  return absl::OkStatus();
}

}  // namespace hearth::router
