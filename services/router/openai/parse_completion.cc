#include "services/router/openai/parse_completion.h"

#include "absl/strings/str_format.h"
#include "common/base/logging.h"
#include "common/base/time.h"
#include "services/router/api_error.h"

namespace hearth::router {
namespace {

using Ids = std::vector<int32_t>;

absl::Status AddIds(const Json& array, const ModelInfo& model, std::vector<Ids>* prompts) {
  ASSIGN_OR_RETURN(Ids ids, ReadTokenIds(array, "prompt", model.vocab_size));
  prompts->push_back(std::move(ids));
  return absl::OkStatus();
}

// A raw prompt is the caller's own: texts of special tokens in it count. BOS is added where the tokenizer asks for it and the text lacks it.
absl::Status AddText(const Json& text, const ModelInfo& model, bool add_special_tokens, std::vector<Ids>* prompts) {
  auto ids = model.tokenizer->Encode(text.get_ref<const std::string&>(), {.add_special_tokens = add_special_tokens, .parse_special = true});
  if (!ids.ok()) return WithParam(ids.status(), "prompt");
  for (const int32_t id : *ids) {
    if (id >= model.vocab_size)
      return FieldError("prompt", absl::StrFormat("the prompt has the token %d, which this model's %d embeddings lack", id, model.vocab_size));
  }
  prompts->push_back(*std::move(ids));
  return absl::OkStatus();
}

absl::Status ParsePrompts(Fields& fields, const ModelInfo& model, std::vector<Ids>* prompts) {
  bool add_special_tokens = true;
  RETURN_IF_ERROR(fields.Bool("add_special_tokens", &add_special_tokens));
  const Json* prompt = fields.Get("prompt");
  if (prompt == nullptr) return FieldError("prompt", "'prompt' is missing");
  const char* shape = "'prompt' must be a string, a list of strings, a list of token ids or a list of such lists";
  if (prompt->is_string()) {
    RETURN_IF_ERROR(AddText(*prompt, model, add_special_tokens, prompts));
  } else if (!prompt->is_array()) {
    return FieldError("prompt", absl::StrCat(shape, ", not ", Describe(*prompt)));
  } else if (prompt->empty()) {
    return FieldError("prompt", "'prompt' is an empty list: there is nothing to continue");
  } else if (prompt->front().is_number()) {
    RETURN_IF_ERROR(AddIds(*prompt, model, prompts));
  } else {
    for (const Json& item : *prompt) {
      if (item.is_string() && prompt->front().is_string()) {
        RETURN_IF_ERROR(AddText(item, model, add_special_tokens, prompts));
      } else if (item.is_array() && prompt->front().is_array()) {
        RETURN_IF_ERROR(AddIds(item, model, prompts));
      } else {
        return FieldError("prompt", absl::StrCat(shape, "; it holds ", Describe(item)));
      }
    }
  }
  for (const Ids& ids : *prompts) {
    if (ids.empty()) return FieldError("prompt", "a prompt is empty: at least one token is needed");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ParsedRequest> ParseCompletion(const Json& body, const ModelInfo& model, int64_t max_tokens_default) {
  ParsedRequest parsed;
  parsed.request = std::make_shared<Request>();
  Request& request = *parsed.request;
  request.arrived_ns = MonotonicNowNs();
  request.id = "cmpl-" + RandomHash128().ToHex();
  Fields fields(body);
  RETURN_IF_ERROR(CheckModel(fields, model));
  RETURN_IF_ERROR(RefuseUnsupported(fields));
  RETURN_IF_ERROR(ParseOptions(fields, model, max_tokens_default, &request.options, &parsed.answer));
  std::optional<int64_t> logprobs, best_of;
  RETURN_IF_ERROR(fields.Integer("logprobs", 0, kTopLogprobsMax, &logprobs));
  if (logprobs) request.options.num_logprobs = static_cast<int32_t>(*logprobs);
  RETURN_IF_ERROR(fields.Integer("best_of", 1, INT32_MAX, &best_of));
  if (best_of && *best_of != request.options.n)
    return Unsupported("best_of", "'best_of' above n is not supported here: ask for n choices and choose");
  if (const Json* suffix = fields.Get("suffix"); suffix != nullptr && !IsText(*suffix, ""))
    return Unsupported("suffix", "'suffix' is not supported here");
  bool echo = false;
  RETURN_IF_ERROR(fields.Bool("echo", &echo));
  if (echo && logprobs) return Unsupported("echo", "'echo' with 'logprobs' is not supported here: the prompt's tokens have no logprobs");

  std::vector<Ids> prompts;
  RETURN_IF_ERROR(ParsePrompts(fields, model, &prompts));
  if (static_cast<int64_t>(prompts.size()) * request.options.n > kStreamsMax) {
    return FieldError("prompt", absl::StrFormat("%d prompts with n = %d make %d choices: at most %d are taken in one request", prompts.size(),
                                                request.options.n, static_cast<int64_t>(prompts.size()) * request.options.n, kStreamsMax));
  }
  for (Ids& ids : prompts) {
    if (echo) parsed.answer.echo_texts.push_back(model.tokenizer->Decode(ids, true));
    request.prompts.push_back(std::make_shared<const Ids>(std::move(ids)));
  }
  for (const std::string& name : fields.Unread()) spdlog::debug("completions: the field '{}' is not known here and was ignored", name);
  return parsed;
}

}  // namespace hearth::router
