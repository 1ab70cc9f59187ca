// What shape of messages a chat template reads, and how to give it that shape. OpenAI's clients send tool-call
// arguments as JSON text and content as a string, null or a list of parts; published templates expect any mix of these,
// and many drop or garble the rest silently. So each template is asked once, at load: small conversations with marked
// words are rendered, and the words are looked for. Room: common/text. May touch: common/base, common/text/jinja (JSON
// text). Pure functions.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "common/base/status.h"

namespace hearth {

struct MessageShape {
  enum class Arguments : uint8_t {
    kAsSent,  // the template prints both forms rightly, or none
    kText,    // it concatenates them: an object would raise, or be printed as Python does
    kObject,  // it writes them as JSON or walks over them: text would be escaped twice, or raise
  };
  Arguments arguments = Arguments::kAsSent;

  // Content of an assistant message that only calls tools: DeepSeek-V3 looks for null there, Qwen3 fails on it.
  enum class EmptyContent : uint8_t { kAsSent, kNull, kEmptyText };
  EmptyContent calling_content = EmptyContent::kAsSent;

  struct Content {
    bool takes_text = true;
    bool takes_parts = false;
  };
  std::map<std::string, Content, std::less<>> content_by_role;
};

using RenderFunction = std::function<absl::StatusOr<std::string>(const nlohmann::ordered_json& context)>;
MessageShape ProbeMessageShape(const RenderFunction& render);

// See ChatTemplate::PrepareMessages.
absl::StatusOr<nlohmann::ordered_json> FitMessages(const nlohmann::ordered_json& messages, const MessageShape& shape);

}  // namespace hearth
