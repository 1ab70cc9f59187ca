// Status macros: the one way errors travel here. Codes and their meaning: docs/glossary.md, "Errors".
// Room: common/base. Fallible functions return absl::Status or absl::StatusOr<T>; nothing throws across our interfaces.
#pragma once

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/base/strings.h"

namespace hearth {

// The same code with `context` put before the message, so that an error reads outside in: "loading X: shard Y: ...".
inline absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(Sv(context), ": ", status.message()));
}

}  // namespace hearth

#define HEARTH_CONCAT_INNER(a, b) a##b
#define HEARTH_CONCAT(a, b) HEARTH_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expr)                             \
  do {                                                    \
    if (absl::Status _st = (expr); !_st.ok()) return _st; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL(HEARTH_CONCAT(_status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)    \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()
