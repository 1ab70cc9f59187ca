// See unicode_form.h.
#include "common/text/unicode_form.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text/utf8.h"

namespace hearth {
namespace {

constexpr int kDecomposedMax = 32;  // code points that one can become; Unicode's longest is 18

bool Composes(UnicodeForm form) { return form == UnicodeForm::kNfc || form == UnicodeForm::kNfkc; }
bool IsCompatible(UnicodeForm form) { return form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd; }

// A code point below this is a starter, is unchanged by the form and never joins the one before it, so text can be cut
// in front of it.
char32_t FirstAffected(UnicodeForm form) { return form == UnicodeForm::kNfc ? 0x300 : 0x80; }

// Stable order by combining class within each run of non-starters.
void OrderMarks(std::vector<utf8proc_int32_t>* code_points) {
  struct Mark {
    int combining_class;
    utf8proc_int32_t code_point;
  };
  std::vector<Mark> marks;
  const auto class_of = [](utf8proc_int32_t c) { return static_cast<int>(utf8proc_get_property(c)->combining_class); };
  for (size_t begin = 0; begin < code_points->size();) {
    marks.clear();
    size_t end = begin;
    for (; end < code_points->size(); ++end) {
      const int combining_class = class_of((*code_points)[end]);
      if (combining_class == 0) break;
      marks.push_back({combining_class, (*code_points)[end]});
    }
    if (marks.size() > 1) {
      std::stable_sort(marks.begin(), marks.end(), [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
      for (size_t i = 0; i < marks.size(); ++i) (*code_points)[begin + i] = marks[i].code_point;
    }
    begin = end + 1;
  }
}

absl::Status AppendNormalized(std::string_view text, UnicodeForm form, std::vector<utf8proc_int32_t>* buffer, std::string* out) {
  buffer->clear();
  const int options = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE | (IsCompatible(form) ? UTF8PROC_COMPAT : 0);
  for (size_t position = 0; position < text.size();) {
    const char32_t code_point = DecodeUtf8(text, &position);
    utf8proc_int32_t parts[kDecomposedMax];
    int last_boundclass = 0;
    const utf8proc_ssize_t num_parts = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point), parts, kDecomposedMax,
                                                               static_cast<utf8proc_option_t>(options), &last_boundclass);
    if (num_parts < 0 || num_parts > kDecomposedMax) {
      return absl::InternalError(absl::StrCat("utf8proc could not decompose code point ", static_cast<uint32_t>(code_point)));
    }
    buffer->insert(buffer->end(), parts, parts + num_parts);
  }
  OrderMarks(buffer);
  size_t num_code_points = buffer->size();
  if (Composes(form)) {
    const utf8proc_ssize_t composed = utf8proc_normalize_utf32(buffer->data(), static_cast<utf8proc_ssize_t>(buffer->size()),
                                                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (composed < 0) return absl::InternalError(absl::StrCat("utf8proc could not compose: ", utf8proc_errmsg(composed)));
    num_code_points = static_cast<size_t>(composed);
  }
  for (size_t i = 0; i < num_code_points; ++i) AppendUtf8(static_cast<char32_t>((*buffer)[i]), out);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ToUnicodeForm(std::string_view text, UnicodeForm form) {
  const char32_t first_affected = FirstAffected(form);
  std::string out;
  out.reserve(text.size());
  std::vector<utf8proc_int32_t> buffer;
  size_t previous = 0;  // where the last unaffected character begins, which a mark may join
  size_t copied = 0;
  for (size_t position = 0; position < text.size();) {
    const size_t start = position;
    if (DecodeUtf8(text, &position) < first_affected) {
      previous = start;
      continue;
    }
    size_t end = position;
    while (end < text.size()) {
      size_t next = end;
      if (DecodeUtf8(text, &next) < first_affected) break;
      end = next;
    }
    out += text.substr(copied, previous - copied);
    RETURN_IF_ERROR(AppendNormalized(text.substr(previous, end - previous), form, &buffer, &out));
    copied = previous = position = end;
  }
  out += text.substr(copied);
  return out;
}

}  // namespace hearth
