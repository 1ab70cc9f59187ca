#include "services/router/choice_text.h"

#include <algorithm>
#include <utility>

#include "services/router/utf8.h"

namespace hearth::router {
namespace {

std::string UnfinishedTail(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string tail;
  // A character has at most four bytes, each at worst a token of its own.
  for (size_t i = ids.size() - std::min<size_t>(ids.size(), 4); i < ids.size(); ++i) tail += tokenizer.TokenBytes(ids[i]);
  return tail.substr(tail.size() - UnfinishedBytes(tail));
}

}  // namespace

ChoiceText::ChoiceText(const Tokenizer* tokenizer, const std::vector<int32_t>& prompt_ids, const std::vector<std::string>& stops,
                       bool skip_special_tokens)
    : tokenizer_(tokenizer),
      skip_special_tokens_(skip_special_tokens),
      prompt_tail_(UnfinishedTail(*tokenizer, prompt_ids)),
      text_(stops, tokenizer->decode_style()),
      counter_({}, tokenizer->decode_style()) {}

ChoiceDelta ChoiceText::Push(OutputToken token) {
  ChoiceDelta delta;
  delta.text_offset = characters_;
  const bool silent = token.is_end || (skip_special_tokens_ && tokenizer_->IsSpecial(token.id));
  if (!silent) {
    const std::string_view bytes = tokenizer_->TokenBytes(token.id);
    if (const std::string tail = std::exchange(prompt_tail_, {}); !tail.empty() && !bytes.empty() && IsContinuation(bytes[0])) {
      delta.text = text_.Push(tail);
      characters_ += CountCharacters(counter_.Push(tail));
    }
    delta.text += text_.Push(bytes);
    characters_ += CountCharacters(counter_.Push(bytes));
  }
  delta.token = std::move(token);
  return delta;
}

ChoiceDelta ChoiceText::Finish() {
  ChoiceDelta delta;
  delta.text_offset = characters_;
  delta.text = text_.Finish();
  return delta;
}

}  // namespace hearth::router
