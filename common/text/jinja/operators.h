// Arithmetic, concatenation, membership and indexing, with Python's results and Python's complaints.
// Room: common/text/jinja. Pure functions; the interpreter charges for what they build.
#pragma once

#include <optional>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

// op: + - * / % and f (//), p (**).
Value Arithmetic(char op, const Value& left, const Value& right);
Value Negate(const Value& value);
Value Plus(const Value& value);
bool Contains(const Value& container, const Value& item);
// object[key] for strings, sequences and dicts; nullopt where Python raises LookupError or TypeError.
std::optional<Value> Index(const Value& object, const Value& key);
// object[start:stop:step]; a null bound is absent.
Value Slice(const Value& object, const Value* start, const Value* stop, const Value* step);
// One Text per character.
std::vector<Value> Characters(const Text& text);

}  // namespace hearth::jinja
