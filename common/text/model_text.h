// A model's tokenizer and chat template, whichever of its files hold them: what the router serves with, and what `hearth config` checks.
// Room: common/text. May touch: common/{formats,base}. Threads: any; const once read.
#pragma once

#include <memory>

#include "common/base/status.h"
#include "common/formats/model_files.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

namespace hearth {

struct ModelText {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const ChatTemplate> chat_template;  // null: the model has none
};

// From tokenizer.json and its neighbours where there is one, else from a GGUF's metadata. `files`: opened with GgufArrays::kValues.
// Errors name the file, and in it the key, as that file spells it.
absl::StatusOr<ModelText> ReadModelText(const ModelFiles& files);

}  // namespace hearth
