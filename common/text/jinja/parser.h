// Template source -> Template. Everything that can be refused before a request comes is refused here, with line and
// column: syntax, unknown tags, unknown filters and tests (but, as in Jinja2, one inside an `if` only fails when it is
// reached). Room: common/text/jinja. Pure. Throws Error. Nesting is bounded, so no template can exhaust the stack.
#pragma once

#include <memory>
#include <string_view>

#include "common/text/jinja/ast.h"

namespace hearth::jinja {

std::unique_ptr<const Template> ParseTemplate(std::string_view source);

}  // namespace hearth::jinja
