#include "common/text/message_shape.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/json_io.h"

namespace hearth {
namespace {

using Json = nlohmann::ordered_json;

// Words that no template contains.
constexpr std::string_view kFirstWord = "Zq7first", kSecondWord = "Zq7second";

bool Has(const std::optional<std::string>& text, std::string_view word) { return text.has_value() && text->find(word) != std::string::npos; }

class Prober {
 public:
  explicit Prober(const RenderFunction& render) : render_(render) {}

  MessageShape Run() {
    MessageShape shape;
    AskAboutToolCalls(shape);
    for (const char* role : {"system", "user", "assistant", "tool"}) shape.content_by_role[role] = AskAboutContent(role);
    shape.content_by_role["developer"] = shape.content_by_role["system"];
    return shape;
  }

 private:
  std::optional<std::string> Render(Json messages) const {
    Json context = {{"messages", std::move(messages)}, {"add_generation_prompt", true}, {"bos_token", ""}, {"eos_token", ""}, {"tools", nullptr}};
    absl::StatusOr<std::string> text = render_(context);
    return text.ok() ? std::optional<std::string>(*std::move(text)) : std::nullopt;
  }

  // The id has the nine characters that Mistral insists on.
  static Json Call(const Json& arguments) {
    return {{"id", "abcdefghi"}, {"type", "function"}, {"function", {{"name", "probe"}, {"arguments", arguments}}}};
  }
  static Json Calling(const Json& content, const Json& arguments) {
    return {{"role", "assistant"}, {"content", content}, {"tool_calls", Json::array({Call(arguments)})}};
  }
  static Json Message(std::string_view role, const Json& content) { return {{"role", role}, {"content", content}}; }
  static Json Result(const Json& content) { return {{"role", "tool"}, {"tool_call_id", "abcdefghi"}, {"name", "probe"}, {"content", content}}; }

  // Both words, not as Python writes a dict and not inside a JSON string.
  static bool PrintsObject(const std::optional<std::string>& text) {
    return Has(text, kFirstWord) && Has(text, kSecondWord) && !Has(text, jinja::Cat("'", kFirstWord, "': '", kSecondWord));
  }
  static bool PrintsText(const std::optional<std::string>& text) { return Has(text, jinja::Cat("{\"", kFirstWord, "\": \"", kSecondWord, "\"}")); }

  void AskAboutToolCalls(MessageShape& shape) {
    const Json object = {{std::string(kFirstWord), std::string(kSecondWord)}};
    const Json text = jinja::Cat("{\"", kFirstWord, "\": \"", kSecondWord, "\"}");
    bool reads[2] = {false, false};  // null content, empty content
    for (const bool with_result : {true, false}) {
      bool as_object = false, as_text = false;
      for (int i = 0; i < 2; ++i) {
        const Json content = i == 0 ? Json(nullptr) : Json("");
        const auto ask = [&](const Json& arguments) {
          Json messages = Json::array({Message("user", "hi"), Calling(content, arguments)});
          if (with_result) messages.push_back(Result("ok"));
          return Render(std::move(messages));
        };
        const bool object_read = PrintsObject(ask(object)), text_read = PrintsText(ask(text));
        reads[i] = object_read || text_read;
        as_object = as_object || object_read;
        as_text = as_text || text_read;
      }
      if (!as_object && !as_text) continue;
      if (as_object != as_text) shape.arguments = as_object ? MessageShape::Arguments::kObject : MessageShape::Arguments::kText;
      break;
    }
    if (reads[0] != reads[1]) {
      shape.calling_content = reads[0] ? MessageShape::EmptyContent::kNull : MessageShape::EmptyContent::kEmptyText;
    }
    calling_ = Calling(shape.calling_content == MessageShape::EmptyContent::kNull ? Json(nullptr) : Json(""),
                       shape.arguments == MessageShape::Arguments::kText ? text : object);
  }

  MessageShape::Content AskAboutContent(std::string_view role) const {
    const auto ask = [&](const Json& content) {
      Json messages = Json::array();
      if (role == "system") {
        messages = Json::array({Message(role, content), Message("user", "hi")});
      } else if (role == "user") {
        messages = Json::array({Message(role, content)});
      } else if (role == "assistant") {
        messages = Json::array({Message("user", "hi"), Message(role, content), Message("user", "go on")});
      } else {
        messages = Json::array({Message("user", "hi"), calling_, Result(content)});
      }
      return Render(std::move(messages));
    };
    const auto part = [](std::string_view text) { return Json{{"type", "text"}, {"text", text}}; };
    const std::optional<std::string> from_text = ask(std::string(kFirstWord));
    const std::optional<std::string> from_parts = ask(Json::array({part(kFirstWord), part(kSecondWord)}));
    MessageShape::Content content;
    // A list printed as Python or JSON writes it is no reading of its parts.
    content.takes_parts = Has(from_parts, kFirstWord) && Has(from_parts, kSecondWord) && !Has(from_parts, jinja::Cat("'text': '", kFirstWord)) &&
                          !Has(from_parts, jinja::Cat("\"text\": \"", kFirstWord));
    content.takes_text = Has(from_text, kFirstWord) || !content.takes_parts;
    return content;
  }

  const RenderFunction& render_;
  Json calling_;
};

// The text of one part, or an error that names what the part is.
absl::StatusOr<std::string> PartText(const Json& part, std::string_view place) {
  if (part.is_string()) return part.get<std::string>();
  if (!part.is_object()) return absl::InvalidArgumentError(jinja::Cat(place, ": a content part must be an object"));
  const auto type = part.find("type");
  const std::string name = type != part.end() && type->is_string() ? type->get<std::string>() : "";
  const bool refusal = name == "refusal";
  if (name != "text" && name != "input_text" && name != "output_text" && !refusal) {
    if (name.empty()) return absl::InvalidArgumentError(jinja::Cat(place, ".type: a content part needs a type, for instance \"text\""));
    return absl::InvalidArgumentError(jinja::Cat(place, ": content parts of type \"", name, "\" are not supported: this model reads text only"));
  }
  const char* key = refusal ? "refusal" : "text";
  const auto text = part.find(key);
  if (text == part.end() || !text->is_string()) {
    return absl::InvalidArgumentError(jinja::Cat(place, ".", key, ": expected a string"));
  }
  return text->get<std::string>();
}

absl::StatusOr<Json> FitContent(const Json& content, const MessageShape::Content& taken, std::string_view place) {
  if (content.is_string()) {
    if (taken.takes_text) return content;
    return Json::array({{{"type", "text"}, {"text", content}}});
  }
  if (!content.is_array()) {
    return absl::InvalidArgumentError(jinja::Cat(place, ": expected a string, null or a list of content parts"));
  }
  Json parts = Json::array();
  std::string joined;
  for (size_t i = 0; i < content.size(); ++i) {
    ASSIGN_OR_RETURN(const std::string text, PartText(content[i], jinja::Cat(place, "[", i, "]")));
    joined += text;
    parts.push_back({{"type", "text"}, {"text", text}});
  }
  if (taken.takes_parts && !(parts.empty() && taken.takes_text)) return parts;
  return Json(std::move(joined));
}

absl::StatusOr<Json> FitArguments(const Json& arguments, MessageShape::Arguments wanted) {
  if (arguments.is_string() && wanted == MessageShape::Arguments::kObject) {
    const std::string& text = arguments.get_ref<const std::string&>();
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) return Json::object();
    Json parsed = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    return parsed.is_object() ? parsed : arguments;
  }
  if (!arguments.is_string() && wanted == MessageShape::Arguments::kText) {
    try {
      return Json(std::string(jinja::ToJson(jinja::FromJson(arguments, false), jinja::JsonStyle()).view()));
    } catch (const jinja::Error& error) {
      return absl::InvalidArgumentError(error.message);
    }
  }
  return arguments;
}

absl::Status FitToolCalls(Json& calls, const MessageShape& shape, std::string_view place) {
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string here = jinja::Cat(place, "[", i, "]");
    if (!calls[i].is_object()) return absl::InvalidArgumentError(jinja::Cat(here, ": expected an object"));
    // Some clients send {name, arguments} without the wrapping `function`.
    Json& call = calls[i].contains("function") && calls[i]["function"].is_object() ? calls[i]["function"] : calls[i];
    const auto arguments = call.find("arguments");
    if (arguments == call.end()) continue;
    absl::StatusOr<Json> fitted = FitArguments(*arguments, shape.arguments);
    if (!fitted.ok()) return Annotate(fitted.status(), jinja::Cat(here, ".arguments"));
    *arguments = *std::move(fitted);
  }
  return absl::OkStatus();
}

}  // namespace

MessageShape ProbeMessageShape(const RenderFunction& render) { return Prober(render).Run(); }

absl::StatusOr<Json> FitMessages(const Json& messages, const MessageShape& shape) {
  if (!messages.is_array()) return absl::InvalidArgumentError("messages: expected a list");
  if (messages.empty()) return absl::InvalidArgumentError("messages: the list is empty; send at least one message");
  Json fitted = messages;
  for (size_t i = 0; i < fitted.size(); ++i) {
    const std::string place = jinja::Cat("messages[", i, "]");
    Json& message = fitted[i];
    if (!message.is_object()) return absl::InvalidArgumentError(jinja::Cat(place, ": expected an object"));
    const auto role = message.find("role");
    if (role == message.end() || !role->is_string()) {
      return absl::InvalidArgumentError(jinja::Cat(place, ".role: expected a string such as \"user\""));
    }
    const auto taken = shape.content_by_role.find(role->get_ref<const std::string&>());
    const MessageShape::Content content_shape = taken == shape.content_by_role.end() ? MessageShape::Content() : taken->second;

    const auto calls = message.find("tool_calls");
    if (calls != message.end() && !calls->is_null() && !calls->is_array()) {
      return absl::InvalidArgumentError(jinja::Cat(place, ".tool_calls: expected a list"));
    }
    const bool calling = calls != message.end() && calls->is_array() && !calls->empty();
    // An empty list or null means no call; templates that only ask whether the key is there must not see it.
    if (calls != message.end() && !calling) message.erase(calls);
    if (calling) RETURN_IF_ERROR(FitToolCalls(message["tool_calls"], shape, jinja::Cat(place, ".tool_calls")));

    const auto content = message.find("content");
    if (content != message.end() && !content->is_null()) {
      ASSIGN_OR_RETURN(Json fit, FitContent(*content, content_shape, jinja::Cat(place, ".content")));
      *content = std::move(fit);
    }
    const auto now = message.find("content");
    const bool none = now == message.end() || now->is_null() || (now->is_string() && now->get_ref<const std::string&>().empty());
    if (none && calling && shape.calling_content == MessageShape::EmptyContent::kNull) {
      message["content"] = nullptr;
    } else if (none && (!calling || now == message.end() || shape.calling_content == MessageShape::EmptyContent::kEmptyText)) {
      message["content"] = "";
    }
  }
  return fitted;
}

}  // namespace hearth
