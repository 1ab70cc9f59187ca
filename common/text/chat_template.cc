#include "common/text/chat_template.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/interpreter.h"
#include "common/text/jinja/json_io.h"
#include "common/text/jinja/parser.h"
#include "common/text/message_shape.h"

namespace hearth {
namespace {

constexpr size_t kMaxTemplateBytes = size_t{4} << 20;
constexpr size_t kMaxProbeWork = 1'000'000;  // a probe is a conversation of three messages: published templates need some thousand

absl::Status ToStatus(const jinja::Error& error) {
  if (error.raised_by_template || error.line == 0) return absl::InvalidArgumentError(error.message);
  if (error.column == 0) return absl::InvalidArgumentError(jinja::Cat("line ", error.line, ": ", error.message));
  return absl::InvalidArgumentError(jinja::Cat("line ", error.line, ", column ", error.column, ": ", error.message));
}

// Roles that templates build special tokens around ('<|' + role + '|>'). No other word of a caller may become part of
// one.
bool IsUsualRole(std::string_view role) {
  static constexpr std::string_view kRoles[] = {"system", "user",     "assistant", "tool",         "developer",
                                                "model",  "function", "ipython",   "tool_results", "observation"};
  return std::find(std::begin(kRoles), std::end(kRoles), role) != std::end(kRoles);
}

bool IsCallers(std::string_view name, const RenderOptions& options) {
  if (name == "messages" || name == "tools" || name == "documents") return true;
  return std::find(options.untrusted_names.begin(), options.untrusted_names.end(), name) != options.untrusted_names.end();
}

void TrustRoles(const jinja::Value& messages) {
  if (!messages.is_sequence()) return;
  for (const jinja::Value& message : messages.sequence()->items) {
    if (!message.is_dict()) continue;
    jinja::Value* role = message.dict()->Find("role");
    if (role == nullptr || !role->is_string() || !IsUsualRole(role->view())) continue;
    *role = jinja::Value::OfString(std::string(role->view()), true);
  }
}

std::string Joined(const std::vector<RenderedSpan>& spans) {
  std::string text;
  for (const RenderedSpan& span : spans) text += span.text;
  return text;
}

std::tm LocalTime() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  return local;
}

}  // namespace

struct ChatTemplate::Impl {
  std::unique_ptr<const jinja::Template> parsed;
  MessageShape shape;

  absl::StatusOr<std::vector<RenderedSpan>> Render(const nlohmann::ordered_json& context, const RenderOptions& options, size_t work_max) const;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(std::string_view source) {
  if (source.size() > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(jinja::Cat("the chat template has ", source.size(), " bytes; at most ", kMaxTemplateBytes, " are accepted"));
  }
  auto impl = std::make_unique<Impl>();
  try {
    impl->parsed = jinja::ParseTemplate(source);
  } catch (const jinja::Error& error) {
    return ToStatus(error);
  } catch (const std::exception& error) {
    return absl::InternalError(jinja::Cat("parsing the chat template: ", error.what()));
  }
  impl->shape = ProbeMessageShape([&impl](const nlohmann::ordered_json& context) -> absl::StatusOr<std::string> {
    ASSIGN_OR_RETURN(const std::vector<RenderedSpan> spans, impl->Render(context, RenderOptions(), kMaxProbeWork));
    return Joined(spans);
  });
  return std::unique_ptr<ChatTemplate>(new ChatTemplate(std::move(impl)));
}

absl::StatusOr<nlohmann::ordered_json> ChatTemplate::PrepareMessages(const nlohmann::ordered_json& messages) const {
  return FitMessages(messages, impl_->shape);
}

absl::StatusOr<std::vector<RenderedSpan>> ChatTemplate::Impl::Render(const nlohmann::ordered_json& context, const RenderOptions& options,
                                                                     size_t work_max) const {
  if (!context.is_object()) return absl::InvalidArgumentError("the context of a chat template must be an object");
  jinja::Interpreter interpreter(*parsed, options.local_time.has_value() ? *options.local_time : LocalTime(), work_max);
  try {
    for (const auto& [name, value] : context.items()) {
      const jinja::Value converted = jinja::FromJson(value, !IsCallers(name, options));
      if (name == "messages") TrustRoles(converted);
      interpreter.SetVariable(name, converted);
    }
    std::vector<RenderedSpan> spans;
    interpreter.Run().ForEachRun([&spans](std::string_view piece, bool trusted) { spans.push_back({std::string(piece), trusted}); });
    return spans;
  } catch (jinja::Error& error) {
    if (error.line == 0) error.line = interpreter.current_line();
    return ToStatus(error);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory to render the chat template");
  } catch (const std::exception& error) {
    return absl::InternalError(jinja::Cat("rendering the chat template: ", error.what()));
  }
}

absl::StatusOr<std::vector<RenderedSpan>> ChatTemplate::Render(const nlohmann::ordered_json& context, const RenderOptions& options) const {
  return impl_->Render(context, options, jinja::kMaxWork);
}

absl::StatusOr<std::string> ChatTemplate::RenderText(const nlohmann::ordered_json& context, const RenderOptions& options) const {
  ASSIGN_OR_RETURN(const std::vector<RenderedSpan> spans, Render(context, options));
  return Joined(spans);
}

}  // namespace hearth
