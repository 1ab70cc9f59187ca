#include "common/text/jinja/parser.h"

#include <algorithm>
#include <map>

#include "common/text/jinja/cat.h"
#include "common/text/jinja/error.h"
#include "common/text/jinja/filters.h"
#include "common/text/jinja/lexer.h"
#include "common/text/jinja/tests.h"

namespace hearth::jinja {
namespace {

constexpr int kMaxExpressionDepth = 400;  // of a tree: `a + b + c ...` counts, too
constexpr int kMaxParseDepth = 100;       // of brackets, conditions and calls inside each other
constexpr int kMaxBlockDepth = 100;
constexpr size_t kMaxNamed = 1000;  // parameters of a macro, named arguments of a call: each is looked for among all

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(Tokenize(source)), template_(std::make_unique<Template>()) {}

  std::unique_ptr<const Template> Run() {
    for (const char* name : {"loop", "caller", "varargs", "kwargs"}) Intern(name);
    template_->body = ParseBody({});
    return std::move(template_);
  }

 private:
  // --- tokens ---

  const Token& Current() const { return tokens_[at_]; }
  const Token& Ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token Next() {
    Token token = tokens_[at_];
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  bool IsOp(std::string_view op) const { return Current().type == TokenType::kOperator && Current().text == op; }
  bool IsName(std::string_view name) const { return Current().type == TokenType::kName && Current().text == name; }
  bool SkipOp(std::string_view op) { return IsOp(op) && (Next(), true); }
  bool SkipName(std::string_view name) { return IsName(name) && (Next(), true); }

  [[noreturn]] static void FailAt(const Token& token, std::string message) { throw Error{std::move(message), token.line, token.column}; }

  static std::string Describe(const Token& token) {
    switch (token.type) {
      case TokenType::kVariableEnd: return "'}}'";
      case TokenType::kBlockEnd: return "'%}'";
      case TokenType::kEnd: return "the end of the template";
      case TokenType::kString: return Cat("the string '", token.text, "'");
      case TokenType::kInteger:
      case TokenType::kFloat: return "a number";
      default: return Cat("'", token.text, "'");
    }
  }

  void ExpectOp(std::string_view op) {
    if (!SkipOp(op)) FailAt(Current(), Cat("expected '", op, "', got ", Describe(Current())));
  }

  Token ExpectName() {
    if (Current().type != TokenType::kName) FailAt(Current(), Cat("expected a name, got ", Describe(Current())));
    return Next();
  }

  void Expect(TokenType type, std::string_view what) {
    if (Current().type != type) FailAt(Current(), Cat("expected '", what, "', got ", Describe(Current())));
    Next();
  }

  NameId Intern(const std::string& name) {
    const auto [it, added] = ids_.emplace(name, static_cast<NameId>(template_->names.size()));
    if (added) template_->names.push_back(name);
    return it->second;
  }

  struct Depth {
    Depth(Parser& parser, int& counter, int limit) : counter_(counter) {
      if (++counter_ > limit) FailAt(parser.Current(), "the template is nested too deeply here");
    }
    ~Depth() { --counter_; }
    int& counter_;
  };

  // --- statements ---

  // Until a tag named in `ends` (left as the current token, behind its "{%") or, when `ends` is empty, to the end of
  // the template.
  Block ParseBody(const std::vector<std::string_view>& ends) {
    Depth guard(*this, block_depth_, kMaxBlockDepth);
    Block body;
    while (true) {
      switch (Current().type) {
        case TokenType::kEnd:
          if (!ends.empty()) FailAt(Current(), Cat("unexpected end of the template: the tag '", ends.back(), "' is missing"));
          return body;
        case TokenType::kData: {
          auto statement = Make(StatementKind::kData);
          statement->data = Text(Next().text, true);
          body.push_back(std::move(statement));
          break;
        }
        case TokenType::kVariableBegin: {
          Next();
          auto statement = Make(StatementKind::kOutput);
          statement->exprs.push_back(ParseTuple({}));
          Expect(TokenType::kVariableEnd, "}}");
          body.push_back(std::move(statement));
          break;
        }
        case TokenType::kBlockBegin: {
          Next();
          if (Current().type != TokenType::kName) FailAt(Current(), Cat("expected a tag name, got ", Describe(Current())));
          if (std::find(ends.begin(), ends.end(), Current().text) != ends.end()) return body;
          body.push_back(ParseStatement(ends));
          Expect(TokenType::kBlockEnd, "%}");
          break;
        }
        default: FailAt(Current(), Cat("unexpected ", Describe(Current())));
      }
    }
  }

  // The rest of a tag's head, then its body; the end tag's name is the current token afterwards.
  Block ParseTagBody(const std::vector<std::string_view>& ends) {
    SkipOp(":");
    Expect(TokenType::kBlockEnd, "%}");
    return ParseBody(ends);
  }

  // A body in a frame of its own: names set there stay there, and an unknown filter is refused again.
  Block ParseFramedBody(std::string_view end) {
    const bool conditional = std::exchange(conditional_, false);
    Block body = ParseTagBody({end});
    conditional_ = conditional;
    Next();
    return body;
  }

  std::unique_ptr<Statement> Make(StatementKind kind) {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = Current().line;
    return statement;
  }

  std::unique_ptr<Statement> ParseStatement(const std::vector<std::string_view>& ends) {
    const Token tag = Current();
    const std::string& name = tag.text;
    if (name == "if") return ParseIf();
    if (name == "for") return ParseFor();
    if (name == "set") return ParseSet();
    if (name == "macro") return ParseMacro();
    if (name == "call") return ParseCallBlock();
    if (name == "filter") return ParseFilterBlock();
    if (name == "with") return ParseWith();
    if (name == "generation") {
      auto statement = Make(StatementKind::kScope);
      Next();
      statement->blocks.push_back(ParseFramedBody("endgeneration"));
      return statement;
    }
    if (name == "break" || name == "continue") {
      if (loop_depth_ == 0) FailAt(tag, Cat("'", name, "' outside a loop"));
      auto statement = Make(name == "break" ? StatementKind::kBreak : StatementKind::kContinue);
      Next();
      return statement;
    }
    if (name == "print") {
      auto statement = Make(StatementKind::kOutput);
      Next();
      statement->exprs.push_back(ParseExpression());
      return statement;
    }
    if (name == "include" || name == "import" || name == "from" || name == "extends" || name == "block") {
      FailAt(tag, Cat("the tag '", name, "' is not supported: a chat template is one file; put the text in place"));
    }
    if (name == "autoescape") FailAt(tag, "the tag 'autoescape' is not supported: prompts are never HTML-escaped; remove it");
    std::string message = Cat("unknown tag '", name, "'");
    if (!ends.empty()) message += Cat("; the innermost open block ends with '", ends.back(), "'");
    FailAt(tag, std::move(message));
  }

  std::unique_ptr<Statement> ParseIf() {
    auto statement = Make(StatementKind::kIf);
    const bool conditional = std::exchange(conditional_, true);
    while (true) {
      Next();
      statement->exprs.push_back(ParseTuple({}, /*with_condition=*/false));
      statement->blocks.push_back(ParseTagBody({"elif", "else", "endif"}));
      if (!IsName("elif")) break;
    }
    if (SkipName("else")) statement->blocks.push_back(ParseTagBody({"endif"}));
    Next();
    conditional_ = conditional;
    return statement;
  }

  std::unique_ptr<Statement> ParseFor() {
    auto statement = Make(StatementKind::kFor);
    Next();
    statement->target = ParseTarget(/*namespaces=*/false);
    if (!SkipName("in")) FailAt(Current(), Cat("expected 'in', got ", Describe(Current())));
    statement->exprs.push_back(ParseTuple({"recursive"}, /*with_condition=*/false));
    const bool conditional = std::exchange(conditional_, false);
    statement->exprs.push_back(SkipName("if") ? ParseExpression() : nullptr);
    statement->recursive = SkipName("recursive");
    ++loop_depth_;
    statement->blocks.push_back(ParseTagBody({"else", "endfor"}));
    --loop_depth_;
    if (SkipName("else")) statement->blocks.push_back(ParseTagBody({"endfor"}));
    Next();
    conditional_ = conditional;
    return statement;
  }

  std::unique_ptr<Statement> ParseSet() {
    auto statement = Make(StatementKind::kSet);
    Next();
    statement->target = ParseTarget(/*namespaces=*/true);
    if (SkipOp("=")) {
      statement->exprs.push_back(ParseTuple({}));
      return statement;
    }
    statement->kind = StatementKind::kSetBlock;
    statement->exprs.push_back(IsOp("|") ? ParseFilters(nullptr) : nullptr);
    statement->blocks.push_back(ParseFramedBody("endset"));
    return statement;
  }

  Parameters ParseParameters(MacroBody& macro) {
    Parameters parameters;
    ExpectOp("(");
    while (!IsOp(")")) {
      if (!parameters.names.empty()) ExpectOp(",");
      const Token name = ExpectName();
      if (parameters.names.size() == kMaxNamed) FailAt(name, Cat("a macro of more than ", kMaxNamed, " parameters"));
      if (name.text == "caller") macro.uses_caller = true;
      parameters.names.push_back(Intern(name.text));
      if (SkipOp("=")) {
        parameters.defaults.push_back(ParseExpression());
      } else if (!parameters.defaults.empty()) {
        FailAt(name, Cat("parameter '", name.text, "' without a default follows one with a default"));
      }
    }
    ExpectOp(")");
    return parameters;
  }

  void ParseMacroBody(MacroBody& macro, std::string_view end) {
    const int loop_depth = std::exchange(loop_depth_, 0);
    const size_t first_use = uses_.size();
    macro.body = ParseFramedBody(end);
    for (size_t i = first_use; i < uses_.size(); ++i) {
      macro.uses_caller |= uses_[i] == "caller";
      macro.uses_varargs |= uses_[i] == "varargs";
      macro.uses_kwargs |= uses_[i] == "kwargs";
    }
    loop_depth_ = loop_depth;
  }

  std::unique_ptr<Statement> ParseMacro() {
    auto statement = Make(StatementKind::kMacro);
    Next();
    statement->macro = std::make_unique<MacroBody>();
    statement->macro->name = ExpectName().text;
    statement->target.name = Intern(statement->macro->name);
    statement->macro->parameters = ParseParameters(*statement->macro);
    ParseMacroBody(*statement->macro, "endmacro");
    return statement;
  }

  std::unique_ptr<Statement> ParseCallBlock() {
    auto statement = Make(StatementKind::kCallBlock);
    Next();
    statement->macro = std::make_unique<MacroBody>();
    statement->macro->name = "caller";
    if (IsOp("(")) statement->macro->parameters = ParseParameters(*statement->macro);
    const Token at = Current();
    statement->exprs.push_back(ParseExpression());
    if (statement->exprs[0]->kind != ExprKind::kCall) FailAt(at, "a call block needs a macro call: {% call name(...) %}");
    ParseMacroBody(*statement->macro, "endcall");
    return statement;
  }

  std::unique_ptr<Statement> ParseFilterBlock() {
    auto statement = Make(StatementKind::kFilterBlock);
    Next();
    statement->exprs.push_back(ParseFilters(ParseFilter(nullptr)));
    statement->blocks.push_back(ParseFramedBody("endfilter"));
    return statement;
  }

  std::unique_ptr<Statement> ParseWith() {
    auto statement = Make(StatementKind::kWith);
    Next();
    while (Current().type != TokenType::kBlockEnd && !IsOp(":")) {
      if (!statement->targets.empty()) ExpectOp(",");
      statement->targets.push_back(ParseTarget(/*namespaces=*/false));
      ExpectOp("=");
      statement->exprs.push_back(ParseExpression());
    }
    statement->blocks.push_back(ParseFramedBody("endwith"));
    return statement;
  }

  Target ParseTarget(bool namespaces) {
    Target first = ParseTargetPart(namespaces);
    if (!IsOp(",")) return first;
    Target tuple;
    tuple.is_tuple = true;
    tuple.parts.push_back(std::move(first));
    while (SkipOp(",")) {
      if (IsName("in") || IsOp("=") || IsOp(")")) break;
      tuple.parts.push_back(ParseTargetPart(namespaces));
    }
    return tuple;
  }

  Target ParseTargetPart(bool namespaces) {
    if (IsOp("(")) {
      Depth guard(*this, parse_depth_, kMaxParseDepth);
      Next();
      Target inner = ParseTarget(namespaces);
      ExpectOp(")");
      return inner;
    }
    const Token name = ExpectName();
    static constexpr std::string_view kReserved[] = {"true", "false", "none", "True", "False", "None"};
    if (std::find(std::begin(kReserved), std::end(kReserved), name.text) != std::end(kReserved)) {
      FailAt(name, Cat("can't assign to '", name.text, "'"));
    }
    Target target;
    target.name = Intern(name.text);
    if (namespaces && SkipOp(".")) target.attribute = ExpectName().text;
    return target;
  }

  // --- expressions ---

  ExprPtr MakeExpr(ExprKind kind, int line) {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = line;
    return expr;
  }

  // Adds a child and keeps the tree's depth within what the evaluator's recursion can bear.
  void Adopt(Expr& parent, ExprPtr child) {
    if (child != nullptr) {
      parent.depth = std::max(parent.depth, child->depth + 1);
      if (parent.depth > kMaxExpressionDepth) FailAt(Current(), "this expression is too long or nested too deeply");
    }
    parent.children.push_back(std::move(child));
  }

  ExprPtr Combine(ExprKind kind, int line, std::string ops, ExprPtr left, ExprPtr right) {
    ExprPtr expr = MakeExpr(kind, line);
    expr->ops = std::move(ops);
    Adopt(*expr, std::move(left));
    Adopt(*expr, std::move(right));
    return expr;
  }

  // One expression, or several with commas between them: a tuple.
  ExprPtr ParseTuple(const std::vector<std::string_view>& ends, bool with_condition = true, bool in_parentheses = false) {
    const int line = Current().line;
    const auto at_end = [&] {
      return Current().type == TokenType::kVariableEnd || Current().type == TokenType::kBlockEnd || IsOp(")") ||
             std::any_of(ends.begin(), ends.end(), [this](std::string_view end) { return IsName(end); });
    };
    std::vector<ExprPtr> items;
    bool tuple = false;
    while (!at_end()) {
      items.push_back(with_condition ? ParseExpression() : ParseOr());
      if (!SkipOp(",")) break;
      tuple = true;
    }
    if (!tuple && items.size() == 1) return std::move(items[0]);
    if (items.empty() && !in_parentheses) FailAt(Current(), Cat("expected an expression, got ", Describe(Current())));
    ExprPtr expr = MakeExpr(ExprKind::kTuple, line);
    for (ExprPtr& item : items) Adopt(*expr, std::move(item));
    return expr;
  }

  ExprPtr ParseExpression() {
    Depth guard(*this, parse_depth_, kMaxParseDepth);
    int line = Current().line;
    ExprPtr value = ParseOr();
    while (SkipName("if")) {
      const bool conditional = std::exchange(conditional_, true);
      ExprPtr expr = MakeExpr(ExprKind::kCondition, line);
      Adopt(*expr, ParseOr());
      Adopt(*expr, std::move(value));
      Adopt(*expr, SkipName("else") ? ParseExpression() : nullptr);
      conditional_ = conditional;
      value = std::move(expr);
      line = Current().line;
    }
    // A filter in the branch that stands before `if` was read before the `if` was seen; see DeferredCheck.
    CheckDeferred(value->kind == ExprKind::kCondition);
    return value;
  }

  ExprPtr ParseOr() {
    const int line = Current().line;
    ExprPtr left = ParseAnd();
    while (SkipName("or")) left = Combine(ExprKind::kOr, line, {}, std::move(left), ParseAnd());
    return left;
  }

  ExprPtr ParseAnd() {
    const int line = Current().line;
    ExprPtr left = ParseNot();
    while (SkipName("and")) left = Combine(ExprKind::kAnd, line, {}, std::move(left), ParseNot());
    return left;
  }

  ExprPtr ParseNot() {
    if (!IsName("not")) return ParseCompare();
    Depth guard(*this, parse_depth_, kMaxParseDepth);
    ExprPtr expr = MakeExpr(ExprKind::kUnary, Next().line);
    expr->ops = "!";
    Adopt(*expr, ParseNot());
    return expr;
  }

  ExprPtr ParseCompare() {
    const int line = Current().line;
    ExprPtr first = ParseSum();
    ExprPtr expr;
    while (true) {
      char op = 0;
      if (Current().type == TokenType::kOperator) {
        static constexpr std::pair<std::string_view, char> kOps[] = {{"==", '='}, {"!=", '!'}, {"<", '<'}, {">", '>'}, {"<=", 'l'}, {">=", 'g'}};
        for (const auto& [text, code] : kOps) {
          if (Current().text == text) op = code;
        }
      } else if (IsName("in")) {
        op = 'i';
      } else if (IsName("not") && Ahead().type == TokenType::kName && Ahead().text == "in") {
        op = 'n';
        Next();
      }
      if (op == 0) break;
      Next();
      if (expr == nullptr) {
        expr = MakeExpr(ExprKind::kCompare, line);
        Adopt(*expr, std::move(first));
      }
      expr->ops += op;
      Adopt(*expr, ParseSum());
    }
    return expr == nullptr ? std::move(first) : std::move(expr);
  }

  ExprPtr ParseSum() {
    const int line = Current().line;
    ExprPtr left = ParseConcat();
    while (IsOp("+") || IsOp("-")) {
      std::string op = Next().text;
      left = Combine(ExprKind::kBinary, line, std::move(op), std::move(left), ParseConcat());
    }
    return left;
  }

  ExprPtr ParseConcat() {
    const int line = Current().line;
    ExprPtr first = ParseProduct();
    if (!IsOp("~")) return first;
    ExprPtr expr = MakeExpr(ExprKind::kConcat, line);
    Adopt(*expr, std::move(first));
    while (SkipOp("~")) Adopt(*expr, ParseProduct());
    return expr;
  }

  ExprPtr ParseProduct() {
    const int line = Current().line;
    ExprPtr left = ParsePower();
    while (IsOp("*") || IsOp("/") || IsOp("//") || IsOp("%")) {
      std::string op = Next().text;
      if (op == "//") op = "f";
      left = Combine(ExprKind::kBinary, line, std::move(op), std::move(left), ParsePower());
    }
    return left;
  }

  ExprPtr ParsePower() {
    const int line = Current().line;
    ExprPtr left = ParseUnary(true);
    while (SkipOp("**")) left = Combine(ExprKind::kBinary, line, "p", std::move(left), ParseUnary(true));
    return left;
  }

  ExprPtr ParseUnary(bool with_filters) {
    ExprPtr expr;
    if (IsOp("-") || IsOp("+")) {
      Depth guard(*this, parse_depth_, kMaxParseDepth);
      const Token op = Next();
      expr = MakeExpr(ExprKind::kUnary, op.line);
      expr->ops = op.text;
      Adopt(*expr, ParseUnary(false));
    } else {
      expr = ParsePrimary();
    }
    expr = ParsePostfix(std::move(expr));
    if (!with_filters) return expr;
    while (true) {
      if (IsOp("|")) {
        expr = ParseFilters(std::move(expr));
      } else if (IsName("is")) {
        expr = ParseTest(std::move(expr));
      } else if (IsOp("(")) {
        expr = ParseCall(std::move(expr));
      } else {
        return expr;
      }
    }
  }

  ExprPtr ParsePrimary() {
    const Token token = Current();
    ExprPtr expr = MakeExpr(ExprKind::kConstant, token.line);
    switch (token.type) {
      case TokenType::kName:
        Next();
        if (token.text == "true" || token.text == "True") {
          expr->constant = Value::OfBool(true);
        } else if (token.text == "false" || token.text == "False") {
          expr->constant = Value::OfBool(false);
        } else if (token.text == "none" || token.text == "None") {
          expr->constant = Value::OfNone();
        } else {
          expr->kind = ExprKind::kName;
          expr->name = Intern(token.text);
          if (token.text == "caller" || token.text == "varargs" || token.text == "kwargs") uses_.push_back(token.text);
        }
        return expr;
      case TokenType::kString: {
        std::string text;
        while (Current().type == TokenType::kString) text += Next().text;
        expr->constant = Value::OfString(std::move(text), true);
        return expr;
      }
      case TokenType::kInteger:
        Next();
        expr->constant = Value::OfInt(token.integer);
        return expr;
      case TokenType::kFloat:
        Next();
        expr->constant = Value::OfFloat(token.number);
        return expr;
      default: break;
    }
    if (SkipOp("(")) {
      Depth guard(*this, parse_depth_, kMaxParseDepth);
      expr = ParseTuple({}, true, /*in_parentheses=*/true);
      ExpectOp(")");
      return expr;
    }
    if (SkipOp("[")) {
      expr->kind = ExprKind::kList;
      while (!IsOp("]")) {
        Adopt(*expr, ParseExpression());
        if (!IsOp("]")) ExpectOp(",");
      }
      Next();
      return expr;
    }
    if (SkipOp("{")) {
      expr->kind = ExprKind::kDict;
      while (!IsOp("}")) {
        Adopt(*expr, ParseExpression());
        ExpectOp(":");
        Adopt(*expr, ParseExpression());
        if (!IsOp("}")) ExpectOp(",");
      }
      Next();
      return expr;
    }
    FailAt(token, Cat("unexpected ", Describe(token)));
  }

  ExprPtr ParsePostfix(ExprPtr expr) {
    while (true) {
      if (IsOp(".") || IsOp("[")) {
        expr = ParseSubscript(std::move(expr));
      } else if (IsOp("(")) {
        expr = ParseCall(std::move(expr));
      } else {
        return expr;
      }
    }
  }

  ExprPtr ParseSubscript(ExprPtr object) {
    const Token open = Next();
    if (open.text == ".") {
      const Token name = Next();
      ExprPtr expr = MakeExpr(name.type == TokenType::kInteger ? ExprKind::kItem : ExprKind::kAttribute, open.line);
      Adopt(*expr, std::move(object));
      if (name.type == TokenType::kName) {
        expr->text = name.text;
      } else if (name.type == TokenType::kInteger) {
        ExprPtr index = MakeExpr(ExprKind::kConstant, name.line);
        index->constant = Value::OfInt(name.integer);
        Adopt(*expr, std::move(index));
      } else {
        FailAt(name, Cat("expected a name or a number behind '.', got ", Describe(name)));
      }
      return expr;
    }
    ExprPtr expr = MakeExpr(ExprKind::kItem, open.line);
    Adopt(*expr, std::move(object));
    if (IsOp("]")) FailAt(Current(), "expected an index or a slice, got ']'");
    ExprPtr first = IsOp(":") ? nullptr : ParseExpression();
    if (IsOp(":")) {
      expr->kind = ExprKind::kSlice;
      Adopt(*expr, std::move(first));
      Next();
      Adopt(*expr, IsOp(":") || IsOp("]") ? nullptr : ParseExpression());
      Adopt(*expr, SkipOp(":") && !IsOp("]") ? ParseExpression() : nullptr);
    } else if (IsOp(",")) {
      ExprPtr tuple = MakeExpr(ExprKind::kTuple, open.line);
      Adopt(*tuple, std::move(first));
      while (SkipOp(",")) {
        if (!IsOp("]")) Adopt(*tuple, ParseExpression());
      }
      Adopt(*expr, std::move(tuple));
    } else {
      Adopt(*expr, std::move(first));
    }
    ExpectOp("]");
    return expr;
  }

  void ParseArguments(Expr& owner) {
    const Token open = Current();
    ExpectOp("(");
    CallArguments& arguments = owner.arguments;
    const auto adopt = [&](ExprPtr child) {
      owner.depth = std::max(owner.depth, child->depth + 1);
      if (owner.depth > kMaxExpressionDepth) FailAt(open, "this expression is too long or nested too deeply");
      return child;
    };
    while (!IsOp(")")) {
      if (SkipOp("*")) {
        if (arguments.star != nullptr || arguments.double_star != nullptr) FailAt(open, "invalid arguments of a call");
        arguments.star = adopt(ParseExpression());
      } else if (SkipOp("**")) {
        if (arguments.double_star != nullptr) FailAt(open, "invalid arguments of a call");
        arguments.double_star = adopt(ParseExpression());
      } else if (Current().type == TokenType::kName && Ahead().type == TokenType::kOperator && Ahead().text == "=") {
        if (arguments.double_star != nullptr) FailAt(open, "invalid arguments of a call");
        if (arguments.named.size() == kMaxNamed) FailAt(Current(), Cat("a call with more than ", kMaxNamed, " named arguments"));
        std::string name = Next().text;
        Next();
        arguments.named.emplace_back(std::move(name), adopt(ParseExpression()));
      } else {
        if (arguments.star != nullptr || arguments.double_star != nullptr || !arguments.named.empty()) {
          FailAt(Current(), "a positional argument follows a named one");
        }
        arguments.positional.push_back(adopt(ParseExpression()));
      }
      if (!IsOp(")")) ExpectOp(",");
    }
    Next();
  }

  ExprPtr ParseCall(ExprPtr callee) {
    ExprPtr expr = MakeExpr(ExprKind::kCall, Current().line);
    Adopt(*expr, std::move(callee));
    ParseArguments(*expr);
    return expr;
  }

  ExprPtr ParseFilters(ExprPtr expr) {
    while (SkipOp("|")) expr = ParseFilter(std::move(expr));
    return expr;
  }

  ExprPtr ParseFilter(ExprPtr input) {
    const Token name = ExpectName();
    ExprPtr expr = MakeExpr(ExprKind::kFilter, name.line);
    expr->text = name.text;
    Adopt(*expr, std::move(input));
    if (FindFilter(name.text) == nullptr) Defer(name, Cat("no filter named '", name.text, "'"));
    if (IsOp("(")) ParseArguments(*expr);
    return expr;
  }

  ExprPtr ParseTest(ExprPtr input) {
    Next();
    const bool negated = SkipName("not");
    const Token name = ExpectName();
    ExprPtr expr = MakeExpr(ExprKind::kTest, name.line);
    expr->text = name.text;
    Adopt(*expr, std::move(input));
    if (FindTest(name.text) == nullptr) Defer(name, Cat("no test named '", name.text, "'"));
    if (IsOp("(")) {
      ParseArguments(*expr);
    } else if (TestArgumentFollows()) {
      if (IsName("is")) FailAt(Current(), "tests can't be chained with 'is'");
      ExprPtr argument = ParsePostfix(ParsePrimary());
      expr->depth = std::max(expr->depth, argument->depth + 1);
      expr->arguments.positional.push_back(std::move(argument));
    }
    if (!negated) return expr;
    ExprPtr negation = MakeExpr(ExprKind::kUnary, name.line);
    negation->ops = "!";
    Adopt(*negation, std::move(expr));
    return negation;
  }

  bool TestArgumentFollows() const {
    switch (Current().type) {
      case TokenType::kName: return !IsName("else") && !IsName("or") && !IsName("and");
      case TokenType::kString:
      case TokenType::kInteger:
      case TokenType::kFloat: return true;
      case TokenType::kOperator: return IsOp("[") || IsOp("{");
      default: return false;
    }
  }

  // An unknown filter or test is refused here unless it stands in a conditional place, where Jinja2 fails only when it
  // gets there. `x | nosuch if y` shows its condition after the filter: the complaint waits until the expression is
  // complete.
  void Defer(const Token& token, std::string message) {
    if (conditional_) return;
    if (!deferred_.has_value()) deferred_ = Error{std::move(message), token.line, token.column};
    if (parse_depth_ == 0) CheckDeferred(false);
  }

  void CheckDeferred(bool conditional) {
    if (conditional) deferred_.reset();
    if (parse_depth_ <= 1 && deferred_.has_value()) throw *deferred_;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  std::unique_ptr<Template> template_;
  std::map<std::string, NameId, std::less<>> ids_;
  std::vector<std::string> uses_;  // caller, varargs and kwargs, as the macro being read mentions them
  std::optional<Error> deferred_;
  bool conditional_ = false;
  int loop_depth_ = 0, parse_depth_ = 0, block_depth_ = 0;
};

}  // namespace

std::unique_ptr<const Template> ParseTemplate(std::string_view source) { return Parser(source).Run(); }

}  // namespace hearth::jinja
