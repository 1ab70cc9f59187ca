#include "services/router/grpc_options.h"

#include <algorithm>

#include "common/base/time.h"
#include "services/router/api_error.h"
#include "services/router/openai/parse_completion.h"

namespace hearth::router {
namespace {

// Both interfaces go through the same JSON checks: one set of bounds, one set of messages, the same names of fields.
absl::StatusOr<Json> OptionsJson(const v1::GenerationOptions& options) {
  Json body = Json::object();
  const v1::SamplingParams& sampling = options.sampling();
  if (sampling.has_temperature()) body["temperature"] = sampling.temperature();
  if (sampling.has_top_p()) body["top_p"] = sampling.top_p();
  if (sampling.has_top_k()) body["top_k"] = sampling.top_k();
  if (sampling.has_min_p()) body["min_p"] = sampling.min_p();
  if (sampling.has_seed()) body["seed"] = sampling.seed();
  if (sampling.presence_penalty() != 0) body["presence_penalty"] = sampling.presence_penalty();
  if (sampling.frequency_penalty() != 0) body["frequency_penalty"] = sampling.frequency_penalty();
  if (sampling.has_repetition_penalty()) body["repetition_penalty"] = sampling.repetition_penalty();
  for (const auto& [id, bias] : sampling.logit_bias()) body["logit_bias"][std::to_string(id)] = bias;
  if (options.has_max_tokens()) body["max_tokens"] = options.max_tokens();
  if (options.min_tokens() != 0) body["min_tokens"] = options.min_tokens();
  for (const std::string& stop : options.stop()) body["stop"].push_back(stop);
  if (options.ignore_eos()) body["ignore_eos"] = true;
  if (options.wait_in_queue()) body["wait_in_queue"] = true;
  if (options.n() != 0) body["n"] = options.n();
  if (options.top_logprobs() != 0 && !options.logprobs()) return FieldError("top_logprobs", "'top_logprobs' needs 'logprobs'");
  return body;
}

absl::Status SetId(const std::string& wanted, Request* request) {
  // It goes into log lines and headers as it is.
  const bool fits = wanted.size() <= 64 && std::all_of(wanted.begin(), wanted.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (!fits) return FieldError("request_id", "'request_id' may have at most 64 characters, all of them visible ASCII");
  if (!wanted.empty()) request->id = wanted;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Request>> FromGenerate(const v1::GenerateRequest& message, const ModelInfo& model, int64_t max_tokens_default) {
  ASSIGN_OR_RETURN(Json body, OptionsJson(message.options()));
  if (message.options().logprobs()) body["logprobs"] = message.options().top_logprobs();
  if (!message.model().empty()) body["model"] = message.model();
  switch (message.prompt_case()) {
    case v1::GenerateRequest::kTokenIds:
      body["prompt"] = Json::array();
      for (const int32_t id : message.token_ids().ids()) body["prompt"].push_back(id);
      break;
    case v1::GenerateRequest::kText:
      if (!message.parse_special()) {
        // Special tokens in the text are ordinary text here, unlike in a raw HTTP prompt.
        ASSIGN_OR_RETURN(body["prompt"],
                         model.tokenizer->Encode(message.text(), {.add_special_tokens = message.add_special_tokens(), .parse_special = false}));
      } else {
        body["prompt"] = message.text();
        body["add_special_tokens"] = message.add_special_tokens();
      }
      break;
    case v1::GenerateRequest::PROMPT_NOT_SET: break;
  }
  ASSIGN_OR_RETURN(ParsedRequest parsed, ParseCompletion(body, model, max_tokens_default));
  RETURN_IF_ERROR(SetId(message.request_id(), parsed.request.get()));
  return parsed.request;
}

absl::StatusOr<std::shared_ptr<Request>> FromChat(const v1::ChatRequest& message, const ModelInfo& model, int64_t max_tokens_default) {
  ASSIGN_OR_RETURN(Json body, OptionsJson(message.options()));
  if (message.options().logprobs()) {
    body["logprobs"] = true;
    body["top_logprobs"] = message.options().top_logprobs();
  }
  if (!message.model().empty()) body["model"] = message.model();
  body["messages"] = Json::array();
  for (const v1::ChatMessage& each : message.messages()) {
    Json one = {{"role", each.role()}, {"content", each.content()}};
    if (!each.name().empty()) one["name"] = each.name();
    body["messages"].push_back(std::move(one));
  }
  if (!message.template_json().empty()) {
    ASSIGN_OR_RETURN(Json variables, ParseJsonObject(message.template_json()));
    for (const char* name : {"messages", "tools"}) {
      if (variables.contains(name)) body[name] = variables[name];
      variables.erase(name);
    }
    body["chat_template_kwargs"] = std::move(variables);
  }
  ASSIGN_OR_RETURN(ParsedRequest parsed, ParseChat(body, model, max_tokens_default));
  RETURN_IF_ERROR(SetId(message.request_id(), parsed.request.get()));
  return parsed.request;
}

}  // namespace hearth::router
