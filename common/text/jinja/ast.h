// The parsed template. Built once by the parser, then only read: by any number of renderings at once.
// Room: common/text/jinja. Names are numbers (indices into Template::names), so that a look-up compares integers.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/text/jinja/value.h"

namespace hearth::jinja {

using NameId = uint32_t;
// Names that the engine itself assigns; every template has them, in this order.
inline constexpr NameId kLoopName = 0, kCallerName = 1, kVarargsName = 2, kKwargsName = 3;
struct Expr;
using ExprPtr = std::unique_ptr<Expr>;
struct Statement;
using Block = std::vector<std::unique_ptr<Statement>>;

// `callee(args)`, or a filter's or test's arguments.
struct CallArguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr star;         // *list
  ExprPtr double_star;  // **dict
};

enum class ExprKind : uint8_t {
  kConstant,   // constant
  kName,       // name
  kList,       // children
  kTuple,      // children
  kDict,       // children: key, value, key, value...
  kAttribute,  // children[0].text
  kItem,       // children[0][children[1]]
  kSlice,      // children[0][children[1]:children[2]:children[3]], each bound may be null
  kCall,       // children[0](arguments)
  kFilter,     // children[0] | text(arguments); children[0] is null in filter blocks
  kTest,       // children[0] is text(arguments)
  kUnary,      // op children[0]: '-', '+', '!'
  kBinary,     // children[0] op children[1]: + - * / %, 'f' for //, 'p' for **
  kConcat,     // children joined by ~
  kAnd,        // children[0] and children[1]
  kOr,
  kCompare,    // children[0] op[0] children[1] op[1] ...: < > = (==) ! (!=) l (<=) g (>=) i (in) n (not in)
  kCondition,  // children[1] if children[0] else children[2] (may be null)
};

struct Expr {
  ExprKind kind;
  int line = 0;
  int depth = 1;  // of this tree
  NameId name = 0;
  std::string text;
  std::string ops;
  Value constant;
  std::vector<ExprPtr> children;
  CallArguments arguments;
};

// What `set`, `for` and `with` assign to: a name, a namespace's attribute, or a tuple of targets.
struct Target {
  NameId name = 0;
  std::string attribute;  // not empty: name.attribute
  std::vector<Target> parts;
  bool is_tuple = false;
};

struct Parameters {
  std::vector<NameId> names;
  std::vector<ExprPtr> defaults;  // of the last defaults.size() names
};

// A body that is called: a macro, or what a call block hands to one as `caller`.
struct MacroBody {
  std::string name;
  Parameters parameters;
  Block body;
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;
};

enum class StatementKind : uint8_t {
  kData,         // constant
  kOutput,       // exprs[0]
  kIf,           // exprs[i] -> blocks[i]; one more block than exprs: else
  kFor,          // target in exprs[0], kept if exprs[1] (may be null); blocks[0], else blocks[1]
  kSet,          // target = exprs[0]
  kSetBlock,     // target = blocks[0] through exprs[0] (filters, may be null)
  kMacro,        // target.name = macro
  kCallBlock,    // exprs[0] is the call; macro is the caller
  kFilterBlock,  // blocks[0] through exprs[0]
  kWith,         // targets[i] = exprs[i]; blocks[0]
  kScope,        // blocks[0] in a scope of its own (generation blocks)
  kBreak,
  kContinue,
};

struct Statement {
  StatementKind kind;
  int line = 0;
  bool recursive = false;
  Text data;
  Target target;
  std::vector<Target> targets;
  std::vector<ExprPtr> exprs;
  std::vector<Block> blocks;
  std::unique_ptr<MacroBody> macro;
};

struct Template {
  std::vector<std::string> names;
  Block body;
};

}  // namespace hearth::jinja
