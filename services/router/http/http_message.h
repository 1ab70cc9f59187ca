// Paths, dates and the text of answers. Room: services/router. Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "services/router/http/http_server.h"

namespace hearth::router {

// Without the query; percent-decoded; "//" as "/"; no trailing "/". A broken escape stays as it is.
std::string NormalPath(std::string_view target);
// "Mon, 30 Nov 2026 10:00:00 GMT"
std::string HttpDate(absl::Time time);
std::string_view ReasonPhrase(int status);
std::string_view Trim(std::string_view text);

}  // namespace hearth::router
