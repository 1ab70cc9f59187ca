// One choice's text: from tokens to what the client may see, with stop strings and end tokens.
// Room: services/router. May touch: common/text. A pure function of the prompt's tail and the tokens pushed so far.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/text/text_stream.h"
#include "common/text/tokenizer.h"
#include "services/router/request.h"

namespace hearth::router {

class ChoiceText {
 public:
  // `prompt_ids`: when a prompt (of token ids) ends within a character and the output completes it, the output shows the whole character.
  ChoiceText(const Tokenizer* tokenizer, const std::vector<int32_t>& prompt_ids, const std::vector<std::string>& stops, bool skip_special_tokens);

  // `token.is_end`: its text is left out.
  ChoiceDelta Push(OutputToken token);
  // The end: withheld text is released. Empty after a stop string matched.
  ChoiceDelta Finish();

  bool stopped() const { return text_.stopped(); }
  const std::string& stop_string() const { return text_.matched(); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  std::string prompt_tail_;  // bytes of an unfinished character at the prompt's end; used by the first token only
  TextStream text_;
  TextStream counter_;  // the same without stops: where each token begins
  int32_t characters_ = 0;
};

}  // namespace hearth::router
