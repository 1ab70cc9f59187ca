#include "services/router/openai/parse_options.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "services/router/api_error.h"

namespace hearth::router {
namespace {

absl::Status ParseSampling(Fields& fields, const ModelInfo& model, RequestOptions* options) {
  v1::SamplingParams& sampling = options->sampling;
  std::optional<double> number;
  RETURN_IF_ERROR(fields.Number("temperature", 0, 100, &number));
  sampling.set_temperature(static_cast<float>(number.value_or(1.0)));
  number.reset();
  RETURN_IF_ERROR(fields.Number("top_p", 0, 1, &number));
  // top_p 0 asks for the smallest set of tokens that there is: the best one.
  const bool only_best = number && *number == 0;
  sampling.set_top_p(only_best ? 1.0F : static_cast<float>(number.value_or(1.0)));
  std::optional<int64_t> top_k;
  RETURN_IF_ERROR(fields.Integer("top_k", -1, INT32_MAX, &top_k));  // -1 and 0: all
  sampling.set_top_k(only_best ? 1 : static_cast<int32_t>(std::max<int64_t>(0, top_k.value_or(0))));
  number.reset();
  RETURN_IF_ERROR(fields.Number("min_p", 0, 1, &number));
  sampling.set_min_p(static_cast<float>(number.value_or(0)));
  RETURN_IF_ERROR(fields.Integer("seed", INT64_MIN, INT64_MAX, &options->seed));
  number.reset();
  RETURN_IF_ERROR(fields.Number("presence_penalty", -2, 2, &number));
  sampling.set_presence_penalty(static_cast<float>(number.value_or(0)));
  number.reset();
  RETURN_IF_ERROR(fields.Number("frequency_penalty", -2, 2, &number));
  sampling.set_frequency_penalty(static_cast<float>(number.value_or(0)));
  for (const char* name : {"repetition_penalty", "repeat_penalty"}) {  // vLLM's and llama.cpp's spelling
    number.reset();
    RETURN_IF_ERROR(fields.Number(name, 0.01, 100, &number));
    if (number) sampling.set_repetition_penalty(static_cast<float>(*number));
  }
  if (!sampling.has_repetition_penalty()) sampling.set_repetition_penalty(1.0F);

  if (const Json* bias = fields.Get("logit_bias")) {
    if (!bias->is_object())
      return FieldError("logit_bias", absl::StrCat("'logit_bias' must be an object from token ids to numbers, not ", Describe(*bias)));
    for (const auto& [key, value] : bias->items()) {
      int32_t id = 0;
      if (!absl::SimpleAtoi(key, &id) || id < 0 || id >= model.vocab_size) {
        return FieldError("logit_bias",
                          absl::StrFormat("'logit_bias' holds the key \"%s\": this model's token ids are 0 to %d", key, model.vocab_size - 1));
      }
      if (!value.is_number() || !(std::abs(value.get<double>()) <= 100)) {
        return FieldError("logit_bias", absl::StrFormat("'logit_bias' of token %d must be a number from -100 to 100, not %s", id, Describe(value)));
      }
      (*sampling.mutable_logit_bias())[id] = value.get<float>();
    }
  }
  return absl::OkStatus();
}

absl::Status ParseStop(Fields& fields, const ModelInfo& model, RequestOptions* options) {
  if (const Json* stop = fields.Get("stop")) {
    std::vector<const Json*> entries;
    if (stop->is_string()) {
      entries.push_back(stop);
    } else if (stop->is_array()) {
      for (const Json& entry : *stop) entries.push_back(&entry);
    } else {
      return FieldError("stop", absl::StrCat("'stop' must be a string or a list of strings, not ", Describe(*stop)));
    }
    for (const Json* entry : entries) {
      if (!entry->is_string()) return FieldError("stop", absl::StrCat("'stop' must hold strings only, not ", Describe(*entry)));
      // An empty text is found everywhere and so says nothing: ignored.
      if (const auto& text = entry->get_ref<const std::string&>(); !text.empty()) options->stop.push_back(text);
    }
    if (options->stop.size() > kStopsMax) {
      return FieldError("stop", absl::StrFormat("'stop' may hold at most %d strings, not %d", kStopsMax, options->stop.size()));
    }
    for (const std::string& text : options->stop) {
      if (text.size() > kStopBytesMax)
        return FieldError("stop", absl::StrFormat("a 'stop' string may have at most %d bytes, not %d", kStopBytesMax, text.size()));
    }
  }
  if (const Json* ids = fields.Get("stop_token_ids")) {
    ASSIGN_OR_RETURN(options->stop_token_ids, ReadTokenIds(*ids, "stop_token_ids", model.vocab_size));
  }
  return fields.Bool("ignore_eos", &options->ignore_eos);
}

absl::Status ParseStreaming(Fields& fields, AnswerOptions* answer) {
  RETURN_IF_ERROR(fields.Bool("stream", &answer->stream));
  if (const Json* stream_options = fields.Get("stream_options")) {
    if (!stream_options->is_object())
      return FieldError("stream_options", absl::StrCat("'stream_options' must be an object, not ", Describe(*stream_options)));
    // Without "stream" it has nothing to act on, and is read for its types only.
    Fields inner(*stream_options, "stream_options.");
    RETURN_IF_ERROR(inner.Bool("include_usage", &answer->include_usage));
  }
  RETURN_IF_ERROR(fields.Bool("return_token_ids", &answer->return_token_ids));
  return fields.Bool("return_tokens_as_token_ids", &answer->return_tokens_as_token_ids);
}

}  // namespace

absl::Status CheckModel(Fields& fields, const ModelInfo& model) {
  std::optional<std::string> name;
  RETURN_IF_ERROR(fields.String("model", &name));
  if (!name || name->empty() || *name == model.name) return absl::OkStatus();
  return WithCode(
      WithParam(absl::NotFoundError(absl::StrCat("the model '", *name, "' is not served here; this node has '", model.name, "'")), "model"),
      "model_not_found");
}

absl::Status ParseOptions(Fields& fields, const ModelInfo& model, int64_t max_tokens_default, RequestOptions* options, AnswerOptions* answer) {
  RETURN_IF_ERROR(ParseSampling(fields, model, options));
  RETURN_IF_ERROR(ParseStop(fields, model, options));
  RETURN_IF_ERROR(ParseStreaming(fields, answer));
  // The newer name wins where both are given.
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    std::optional<int64_t> tokens;
    RETURN_IF_ERROR(fields.Integer(name, 1, INT64_MAX, &tokens));
    if (tokens) options->max_tokens = static_cast<int32_t>(std::min<int64_t>(*tokens, INT32_MAX));
  }
  std::optional<int64_t> min_tokens, n;
  RETURN_IF_ERROR(fields.Integer("min_tokens", 0, INT32_MAX, &min_tokens));
  options->min_tokens = static_cast<int32_t>(min_tokens.value_or(0));
  if (options->max_tokens && options->min_tokens > *options->max_tokens) {
    return FieldError("min_tokens", absl::StrFormat("'min_tokens' (%d) is above max_tokens (%d)", options->min_tokens, *options->max_tokens));
  }
  if (!options->max_tokens && max_tokens_default > 0) {
    options->max_tokens = static_cast<int32_t>(std::clamp<int64_t>(max_tokens_default, options->min_tokens, INT32_MAX));
  }
  RETURN_IF_ERROR(fields.Integer("n", 1, kChoicesMax, &n));
  options->n = static_cast<int32_t>(n.value_or(1));
  std::optional<std::string> user;  // who asks, in the client's words: checked, and not used
  RETURN_IF_ERROR(fields.String("user", &user));
  RETURN_IF_ERROR(fields.Bool("wait_in_queue", &options->wait_in_queue));
  return fields.Bool("skip_special_tokens", &options->skip_special_tokens);
}

}  // namespace hearth::router
