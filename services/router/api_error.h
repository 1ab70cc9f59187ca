// Errors as clients see them: one shape over HTTP, one mapping from Status, which carries the field and OpenAI's code as payloads.
// Room: services/router. May touch: common/base.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace hearth::router {

// InvalidArgument about a field of the request.
absl::Status FieldError(std::string_view param, std::string_view message);
// What a client asked for and this server does not have: refused, never ignored.
absl::Status Unsupported(std::string_view param, std::string_view message);
absl::Status WithCode(absl::Status status, std::string_view code);
// For ResourceExhausted and Unavailable: when to ask again, instead of after a second or two.
absl::Status WithRetryAfter(absl::Status status, int seconds);
absl::Status WithParam(absl::Status status, std::string_view param);
// A status that HTTP knows and Status does not: 405, 413, 415, 431.
absl::Status HttpError(int http_status, std::string_view code, std::string_view message);

struct ApiError {
  int http_status = 500;
  std::string message;
  std::string type;
  std::optional<std::string> param;
  std::optional<std::string> code;
  int retry_after_seconds = 0;  // 0: none
};
ApiError ToApiError(const absl::Status& status);
// {"error":{"message","type","param","code"}}
std::string RenderError(const ApiError& error);

}  // namespace hearth::router
