#include "services/router/api_error.h"

#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "common/base/strings.h"
#include "services/router/utf8.h"

namespace hearth::router {
namespace {

constexpr char kParam[] = "hearth/param";
constexpr char kCode[] = "hearth/code";
constexpr char kRetryAfter[] = "hearth/retry-after";
constexpr char kHttp[] = "hearth/http";

std::optional<std::string> Payload(const absl::Status& status, const char* key) {
  const auto payload = status.GetPayload(key);
  if (!payload) return std::nullopt;
  return std::string(*payload);
}

}  // namespace

absl::Status WithParam(absl::Status status, std::string_view param) {
  status.SetPayload(kParam, absl::Cord(Sv(param)));
  return status;
}
absl::Status WithCode(absl::Status status, std::string_view code) {
  status.SetPayload(kCode, absl::Cord(Sv(code)));
  return status;
}
absl::Status WithRetryAfter(absl::Status status, int seconds) {
  status.SetPayload(kRetryAfter, absl::Cord(std::to_string(seconds)));
  return status;
}
absl::Status FieldError(std::string_view param, std::string_view message) { return WithParam(absl::InvalidArgumentError(Sv(message)), param); }
absl::Status Unsupported(std::string_view param, std::string_view message) { return WithCode(FieldError(param, message), "unsupported"); }
absl::Status HttpError(int http_status, std::string_view code, std::string_view message) {
  absl::Status status = absl::InvalidArgumentError(Sv(message));
  status.SetPayload(kHttp, absl::Cord(std::to_string(http_status)));
  return WithCode(std::move(status), code);
}

ApiError ToApiError(const absl::Status& status) {
  ApiError error;
  error.message = std::string(status.message());
  error.param = Payload(status, kParam);
  error.code = Payload(status, kCode);
  const auto set = [&](int http_status, const char* type, const char* code) {
    error.http_status = http_status;
    error.type = type;
    if (!error.code && code != nullptr) error.code = code;
  };
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument: set(400, "invalid_request_error", nullptr); break;
    case absl::StatusCode::kAlreadyExists: set(409, "invalid_request_error", nullptr); break;
    case absl::StatusCode::kUnauthenticated: set(401, "authentication_error", "invalid_api_key"); break;
    case absl::StatusCode::kNotFound: set(404, "invalid_request_error", "not_found"); break;
    case absl::StatusCode::kResourceExhausted:
      set(429, "rate_limit_error", "queue_full");
      error.retry_after_seconds = 1;
      break;
    case absl::StatusCode::kUnavailable:
      set(503, "service_unavailable", "unavailable");
      error.retry_after_seconds = 2;
      break;
    default: set(500, "server_error", "internal"); break;
  }
  int seconds = 0;
  if (const auto retry = Payload(status, kRetryAfter); retry && absl::SimpleAtoi(*retry, &seconds)) error.retry_after_seconds = seconds;
  int http_status = 0;
  if (const auto http = Payload(status, kHttp); http && absl::SimpleAtoi(*http, &http_status)) error.http_status = http_status;
  return error;
}

std::string RenderError(const ApiError& error) {
  const auto text = [](const std::optional<std::string>& value) {
    return value ? nlohmann::ordered_json(ReplaceInvalidUtf8(*value)) : nlohmann::ordered_json();
  };
  nlohmann::ordered_json body;
  body["error"]["message"] = ReplaceInvalidUtf8(error.message);
  body["error"]["type"] = error.type;
  body["error"]["param"] = text(error.param);
  body["error"]["code"] = text(error.code);
  return body.dump();
}

}  // namespace hearth::router
