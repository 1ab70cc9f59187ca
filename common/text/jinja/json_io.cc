#include "common/text/jinja/json_io.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/text/jinja/error.h"
#include "common/text/jinja/python_format.h"
#include "common/text/jinja/utf8.h"

namespace hearth::jinja {
namespace {

Value Convert(const nlohmann::ordered_json& json, bool trusted, int depth) {
  CheckNesting(depth);
  using Type = nlohmann::ordered_json::value_t;
  switch (json.type()) {
    case Type::boolean: return Value::OfBool(json.get<bool>());
    case Type::number_integer: return Value::OfInt(json.get<int64_t>());
    case Type::number_unsigned: return Value::OfInt(json.get<uint64_t>());
    case Type::number_float: return Value::OfFloat(json.get<double>());
    case Type::string: return Value::OfString(json.get_ref<const std::string&>(), trusted);
    case Type::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(Convert(item, trusted, depth + 1));
      return Value::OfList(std::move(items));
    }
    case Type::object: {
      auto dict = std::make_shared<Dict>();
      for (const auto& [key, item] : json.items()) {
        dict->Set(Value::OfString(key, trusted), Convert(item, trusted, depth + 1));
      }
      return Value::OfDict(std::move(dict));
    }
    default: return Value::OfNone();
  }
}

class Writer {
 public:
  explicit Writer(const JsonStyle& style) : style_(style) {}

  void Write(const Value& value, int depth) {
    switch (value.kind()) {
      case Kind::kNone: out_ += "null"; break;
      case Kind::kBool: out_ += value.boolean() ? "true" : "false"; break;
      case Kind::kInt: out_ += IntToString(value.integer()); break;
      case Kind::kFloat: out_ += Number(value.number()); break;
      case Kind::kString: String(value.view()); break;
      case Kind::kSequence: Array(value, depth); break;
      case Kind::kDict: Object(*value.dict(), depth); break;
      case Kind::kUndefined:
      case Kind::kObject: Refuse(value);
    }
    if (out_.size() > kMaxTextBytes) Fail("the template builds a string of more than ", kMaxTextBytes >> 20, " MiB");
  }

  std::string Take() { return std::move(out_); }

 private:
  [[noreturn]] static void Refuse(const Value& value) { Fail("Object of type ", value.type_name(), " is not JSON serializable"); }

  static std::string Number(double number) {
    if (std::isnan(number)) return "NaN";
    if (std::isinf(number)) return number < 0 ? "-Infinity" : "Infinity";
    return FloatRepr(number);
  }

  void String(std::string_view text) {
    out_ += '"';
    size_t plain = 0;
    for (size_t pos = 0; pos < text.size();) {
      const auto byte = static_cast<unsigned char>(text[pos]);
      const bool special = byte < 0x20 || byte == '"' || byte == '\\' || (style_.ensure_ascii && byte >= 0x7F);
      if (!special) {
        ++pos;
        continue;
      }
      out_ += text.substr(plain, pos - plain);
      Escape(NextCodePoint(text, pos));
      plain = pos;
    }
    out_ += text.substr(plain);
    out_ += '"';
  }

  void Escape(char32_t code) {
    switch (code) {
      case '"': out_ += "\\\""; return;
      case '\\': out_ += "\\\\"; return;
      case '\n': out_ += "\\n"; return;
      case '\r': out_ += "\\r"; return;
      case '\t': out_ += "\\t"; return;
      case '\b': out_ += "\\b"; return;
      case '\f': out_ += "\\f"; return;
      default: break;
    }
    char buffer[16];
    if (code >= 0x10000) {
      std::snprintf(buffer, sizeof(buffer), "\\u%04x\\u%04x", static_cast<unsigned>(0xD800 + ((code - 0x10000) >> 10)),
                    static_cast<unsigned>(0xDC00 + ((code - 0x10000) & 0x3FF)));
    } else {
      std::snprintf(buffer, sizeof(buffer), "\\u%04x", static_cast<unsigned>(code));
    }
    out_ += buffer;
  }

  void Break(int depth) {
    if (!style_.pretty) return;
    out_ += '\n';
    for (int i = 0; i < depth; ++i) out_ += style_.indent;
  }

  void Array(const Value& value, int depth) {
    const Sequence& sequence = *value.sequence();
    if (sequence.flavor > Sequence::Flavor::kTuple) Refuse(value);
    if (sequence.items.empty()) {
      out_ += "[]";
      return;
    }
    CheckNesting(depth);
    out_ += '[';
    for (size_t i = 0; i < sequence.items.size(); ++i) {
      if (i > 0) out_ += style_.item_separator;
      Break(depth + 1);
      Write(sequence.items[i], depth + 1);
    }
    Break(depth);
    out_ += ']';
  }

  static std::string Key(const Value& key) {
    switch (key.kind()) {
      case Kind::kString: return std::string(key.view());
      case Kind::kNone: return "null";
      case Kind::kBool: return key.boolean() ? "true" : "false";
      case Kind::kInt: return IntToString(key.integer());
      case Kind::kFloat: return Number(key.number());
      default: Fail("keys must be str, int, float, bool or None, not ", key.type_name());
    }
  }

  void Object(const Dict& dict, int depth) {
    if (dict.entries.empty()) {
      out_ += "{}";
      return;
    }
    CheckNesting(depth);
    std::vector<const std::pair<Value, Value>*> entries;
    entries.reserve(dict.entries.size());
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      std::stable_sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) { return Compare(a->first, b->first, "<") < 0; });
    }
    out_ += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out_ += style_.item_separator;
      Break(depth + 1);
      String(Key(entries[i]->first));
      out_ += style_.key_separator;
      Write(entries[i]->second, depth + 1);
    }
    Break(depth);
    out_ += '}';
  }

  const JsonStyle& style_;
  std::string out_;
};

}  // namespace

Value FromJson(const nlohmann::ordered_json& json, bool trusted) { return Convert(json, trusted, 1); }

Text ToJson(const Value& value, const JsonStyle& style) {
  Writer writer(style);
  writer.Write(value, 0);
  return Text(writer.Take(), IsTrusted(value));
}

}  // namespace hearth::jinja
