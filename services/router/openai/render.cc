#include "services/router/openai/render.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "services/router/utf8.h"

namespace hearth::router {
namespace {

// JSON has no infinity; OpenAI's own stand-in for a token that can't be chosen.
double Finite(float logprob) { return std::isfinite(logprob) ? std::min(0.0, static_cast<double>(logprob)) : -9999.0; }

std::string TokenName(const AnswerMeta& meta, int32_t id, bool is_end) {
  if (meta.options.return_tokens_as_token_ids) return absl::StrCat("token_id:", id);
  if (is_end) return "";
  const std::string_view bytes = meta.tokenizer->TokenBytes(id);
  if (meta.options.chat || IsValidUtf8(bytes)) return ReplaceInvalidUtf8(bytes);
  std::string name = "bytes:";
  for (const char byte : bytes) absl::StrAppendFormat(&name, "\\x%02x", static_cast<unsigned char>(byte));
  return name;
}

Json Bytes(const AnswerMeta& meta, int32_t id, bool is_end) {
  Json bytes = Json::array();
  if (!is_end) {
    for (const char byte : meta.tokenizer->TokenBytes(id)) bytes.push_back(static_cast<unsigned char>(byte));
  }
  return bytes;
}

// The k best, and for completions the chosen one if it is not among them.
std::vector<ScoredToken> Best(const AnswerMeta& meta, const OutputToken& token) {
  std::vector<ScoredToken> best = token.top;
  if (best.size() > static_cast<size_t>(meta.num_logprobs)) best.resize(static_cast<size_t>(meta.num_logprobs));
  const bool has_chosen = std::any_of(best.begin(), best.end(), [&](const ScoredToken& other) { return other.id == token.id; });
  if (!meta.options.chat && !has_chosen) best.push_back({token.id, token.logprob});
  return best;
}

Json ChatLogprobs(const AnswerMeta& meta, const ChoicePart& part) {
  Json content = Json::array();
  for (const OutputToken& token : part.tokens) {
    Json entry;
    entry["token"] = TokenName(meta, token.id, token.is_end);
    entry["logprob"] = Finite(token.logprob);
    entry["bytes"] = Bytes(meta, token.id, token.is_end);
    Json top = Json::array();
    for (const ScoredToken& other : Best(meta, token)) {
      const bool is_end = token.is_end && other.id == token.id;
      top.push_back({{"token", TokenName(meta, other.id, is_end)}, {"logprob", Finite(other.logprob)}, {"bytes", Bytes(meta, other.id, is_end)}});
    }
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json CompletionLogprobs(const AnswerMeta& meta, const ChoicePart& part) {
  Json tokens = Json::array(), scores = Json::array(), top = Json::array(), offsets = Json::array();
  for (size_t i = 0; i < part.tokens.size(); ++i) {
    const OutputToken& token = part.tokens[i];
    tokens.push_back(TokenName(meta, token.id, token.is_end));
    scores.push_back(Finite(token.logprob));
    Json entry = Json::object();
    for (const ScoredToken& other : Best(meta, token)) entry[TokenName(meta, other.id, token.is_end && other.id == token.id)] = Finite(other.logprob);
    top.push_back(std::move(entry));
    offsets.push_back(part.text_offsets[i]);
  }
  return {
      {"text_offset", std::move(offsets)}, {"token_logprobs", std::move(scores)}, {"tokens", std::move(tokens)}, {"top_logprobs", std::move(top)}};
}

Json Logprobs(const AnswerMeta& meta, const ChoicePart& part) {
  if (meta.num_logprobs < 0) return nullptr;
  return meta.options.chat ? ChatLogprobs(meta, part) : CompletionLogprobs(meta, part);
}

Json FinishOf(const ChoicePart& part) { return part.finish ? Json(FinishReasonName(*part.finish)) : Json(); }

Json UsageOf(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

Json Head(const AnswerMeta& meta, const char* chat_object) {
  Json head;
  head["id"] = meta.id;
  head["object"] = meta.options.chat ? chat_object : "text_completion";
  head["created"] = meta.created_seconds;
  head["model"] = meta.model;
  return head;
}

void AddTokenIds(const AnswerMeta& meta, const ChoicePart& part, Json* choice) {
  if (!meta.options.return_token_ids) return;
  Json ids = Json::array();
  for (const OutputToken& token : part.tokens) ids.push_back(token.id);
  (*choice)["token_ids"] = std::move(ids);
  // A choice of chat belongs to the answer's one prompt, which stands at the top.
  if (part.prompt_ids != nullptr && !meta.options.chat) (*choice)["prompt_token_ids"] = *part.prompt_ids;
}

void AddPromptIds(const AnswerMeta& meta, const ChoicePart& part, Json* answer) {
  if (meta.options.return_token_ids && meta.options.chat && part.prompt_ids != nullptr) (*answer)["prompt_token_ids"] = *part.prompt_ids;
}

}  // namespace

std::string RenderChunk(const AnswerMeta& meta, const ChoicePart& part) {
  Json chunk = Head(meta, "chat.completion.chunk");
  Json choice;
  choice["index"] = part.index;
  if (meta.options.chat) {
    Json delta = Json::object();
    if (part.first) delta["role"] = "assistant";
    if (!part.reasoning.empty()) delta["reasoning_content"] = part.reasoning;
    if (!part.text.empty() || part.first) delta["content"] = part.text;
    choice["delta"] = std::move(delta);
  } else {
    choice["text"] = part.text;
  }
  choice["logprobs"] = part.tokens.empty() ? Json() : Logprobs(meta, part);
  choice["finish_reason"] = FinishOf(part);
  AddTokenIds(meta, part, &choice);
  AddPromptIds(meta, part, &chunk);
  chunk["choices"] = Json::array({std::move(choice)});
  if (meta.options.include_usage) chunk["usage"] = nullptr;
  return chunk.dump();
}

std::string RenderUsageChunk(const AnswerMeta& meta, const Usage& usage) {
  Json chunk = Head(meta, "chat.completion.chunk");
  chunk["choices"] = Json::array();
  chunk["usage"] = UsageOf(usage);
  return chunk.dump();
}

std::string RenderAnswer(const AnswerMeta& meta, const std::vector<ChoicePart>& choices, const Usage& usage) {
  Json answer = Head(meta, "chat.completion");
  Json list = Json::array();
  for (const ChoicePart& part : choices) {
    Json choice;
    choice["index"] = part.index;
    if (meta.options.chat) {
      Json message;
      message["role"] = "assistant";
      message["content"] = part.text;
      if (!part.reasoning.empty()) message["reasoning_content"] = part.reasoning;
      choice["message"] = std::move(message);
    } else {
      choice["text"] = part.text;
    }
    choice["logprobs"] = Logprobs(meta, part);
    choice["finish_reason"] = FinishOf(part);
    AddTokenIds(meta, part, &choice);
    AddPromptIds(meta, part, &answer);
    list.push_back(std::move(choice));
  }
  answer["choices"] = std::move(list);
  answer["usage"] = UsageOf(usage);
  return answer.dump();
}

}  // namespace hearth::router
