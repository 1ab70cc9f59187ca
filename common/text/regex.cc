// See regex.h.
#include "common/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/text/json_access.h"
#include "common/text/regex_dialect.h"

namespace hearth {
namespace {

// Patterns that repeat a *group* use some 32 bytes of JIT stack a repetition; 64 MiB serves two million. Only touched
// pages count.
constexpr size_t kJitStackBytesMin = 64 << 10;
constexpr size_t kJitStackBytesMax = 64 << 20;
// The interpreter's frames, in KiB: 256 MiB.
constexpr uint32_t kHeapLimitKib = 256 << 10;
// Backtracking points of one match: a run of 100 MB may be given back character by character, and no more.
constexpr uint32_t kMatchLimit = 200'000'000;
constexpr size_t kPatternBytesMax = 64 << 10;

struct MatchState {
  MatchState()
      : data(pcre2_match_data_create(1, nullptr)),
        context(pcre2_match_context_create(nullptr)),
        stack(pcre2_jit_stack_create(kJitStackBytesMin, kJitStackBytesMax, nullptr)) {
    if (context == nullptr) return;
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_set_heap_limit(context, kHeapLimitKib);
    pcre2_set_depth_limit(context, kMatchLimit);
    // Without a stack of its own the JIT has 32 KiB of the machine's, and what needs more is matched by the
    // interpreter.
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~MatchState() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
  MatchState(const MatchState&) = delete;
  MatchState& operator=(const MatchState&) = delete;

  pcre2_match_data* data;
  pcre2_match_context* context;
  pcre2_jit_stack* stack;
};

std::string PcreMessage(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof buffer) < 0) return absl::StrCat("PCRE2 error ", code);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

struct Regex::Impl {
  ~Impl() { pcre2_code_free(code); }
  pcre2_code* code = nullptr;
  bool jit = false;
};

Regex::Regex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

absl::StatusOr<Regex> Regex::Compile(std::string_view pattern) {
  const absl::StatusOr<std::string> translated = PcreFromOniguruma(pattern);
  if (!translated.ok()) return Annotate(translated.status(), absl::StrCat("pattern ", Sv(pattern)));
  return CompilePcre(*translated, pattern);
}

absl::StatusOr<Regex> Regex::Literal(std::string_view literal) {
  std::string escaped;
  for (const char c : literal) {
    // A backslash before an ASCII character that is neither letter nor digit always means the character itself.
    const bool alphanumeric = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    if (static_cast<unsigned char>(c) < 0x80 && !alphanumeric) escaped.push_back('\\');
    escaped.push_back(c);
  }
  return CompilePcre(escaped, literal);
}

absl::StatusOr<Regex> Regex::CompilePcre(std::string_view pcre_pattern, std::string_view shown) {
  if (pcre_pattern.size() > kPatternBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("pattern of ", pcre_pattern.size(), " bytes; at most ", kPatternBytesMax, " are read"));
  }
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  if (context == nullptr) return absl::ResourceExhaustedError("no memory for a pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  auto impl = std::make_unique<Impl>();
  int error_code = 0;
  PCRE2_SIZE error_offset = 0;
  // MULTILINE: in Ruby's syntax ^ and $ always mean lines.
  impl->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pcre_pattern.data()), pcre_pattern.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error_code, &error_offset, context);
  pcre2_compile_context_free(context);
  if (impl->code == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("pattern ", Sv(shown), " (read as ", Sv(pcre_pattern), "): ", PcreMessage(error_code), " at byte ",
                                                   static_cast<size_t>(error_offset), " of the latter"));
  }
  impl->jit = pcre2_jit_compile(impl->code, PCRE2_JIT_COMPLETE) == 0;
  return Regex(std::move(impl));
}

absl::Status Regex::FindAll(std::string_view text, std::vector<ByteRange>* matches) const {
  thread_local MatchState state;
  if (state.data == nullptr || state.context == nullptr) return absl::ResourceExhaustedError("no memory to match a pattern");
  const PCRE2_SIZE* const ovector = pcre2_get_ovector_pointer(state.data);
  const auto* const subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t offset = 0;
  while (offset < text.size()) {
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (impl_->jit) rc = pcre2_jit_match(impl_->code, subject, text.size(), offset, 0, state.data, state.context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT || rc == PCRE2_ERROR_MATCHLIMIT) {
      rc = pcre2_match(impl_->code, subject, text.size(), offset, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, state.data, state.context);
    }
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) {
      return absl::ResourceExhaustedError(absl::StrCat("the tokenizer's split pattern gave up on a text of ", text.size(), " bytes at byte ", offset,
                                                       " (", PcreMessage(rc), "); send the text in smaller parts"));
    }
    matches->push_back({ovector[0], ovector[1]});
    offset = ovector[1];
    if (ovector[1] == ovector[0]) {  // an empty match: go on behind the next character
      ++offset;
      while (offset < text.size() && (static_cast<unsigned char>(text[offset]) & 0xC0) == 0x80) ++offset;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Regex> ParsePattern(const nlohmann::json& spec, const std::string& where) {
  const nlohmann::json& regex = JsonMember(spec, "Regex");
  const nlohmann::json& literal = JsonMember(spec, "String");
  absl::StatusOr<Regex> compiled = JsonTypeError(where, "{\"Regex\": text} or {\"String\": text}", spec);
  if (regex.is_string()) {
    compiled = Regex::Compile(regex.get_ref<const std::string&>());
  } else if (literal.is_string()) {
    compiled = Regex::Literal(literal.get_ref<const std::string&>());
  } else {
    return compiled.status();
  }
  if (!compiled.ok()) return Annotate(compiled.status(), where);
  return compiled;
}

}  // namespace hearth
