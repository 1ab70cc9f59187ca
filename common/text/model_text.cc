// See model_text.h.
#include "common/text/model_text.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/formats/gguf_tokenizer.h"
#include "common/formats/model_config.h"

namespace hearth {

absl::StatusOr<ModelText> ReadModelText(const ModelFiles& files) {
  ASSIGN_OR_RETURN(const std::optional<TokenizerTexts> of_gguf, ReadGgufTokenizer(files));
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      of_gguf.has_value()
          ? Tokenizer::Parse(of_gguf->tokenizer_json, of_gguf->tokenizer_config_json, absl::StrCat(files.path, ": the tokenizer of its metadata"))
          : Tokenizer::Load(ModelFilesDir(files.path));
  if (!tokenizer.ok()) return tokenizer.status();
  ModelText text;
  text.tokenizer = *std::move(tokenizer);
  const std::string_view source = text.tokenizer->chat_template();
  if (source.empty()) return text;
  absl::StatusOr<std::unique_ptr<ChatTemplate>> parsed = ChatTemplate::Parse(source);
  if (!parsed.ok() && of_gguf.has_value())
    return RefuseGgufTokenizer(*files.gguf, kGgufChatTemplate, absl::StrCat("does not parse: ", parsed.status().message()));
  if (!parsed.ok()) return Annotate(parsed.status(), absl::StrCat(files.path, ": chat template"));
  text.chat_template = *std::move(parsed);
  return text;
}

}  // namespace hearth
