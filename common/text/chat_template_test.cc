// The engine against what Jinja2 renders: published templates (outside oracle), constructs one by one, trust, limits,
// and fitting messages.
#include "common/text/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace hearth {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::filesystem::path SharedDir() {
  if (const char* dir = std::getenv("HEARTH_SHARED_DIR"); dir != nullptr) return dir;
  const char* source = std::getenv("HEARTH_SOURCE_DIR");
  return std::filesystem::path(source != nullptr ? source : ".") / "../shared";
}

RenderOptions At(int year, int month, int day, int hour, int minute, int second) {
  std::tm time{};
  time.tm_year = year - 1900;
  time.tm_mon = month - 1;
  time.tm_mday = day;
  time.tm_hour = hour;
  time.tm_min = minute;
  time.tm_sec = second;
  timegm(&time);  // fills in the day of the week and of the year
  RenderOptions options;
  options.local_time = time;
  return options;
}

// The text, or "error: ..." from either step.
std::string Rendered(std::string_view source, const Json& context = Json::object()) {
  const auto parsed = ChatTemplate::Parse(source);
  if (!parsed.ok()) return "refused: " + std::string(parsed.status().message());
  const auto text = (*parsed)->RenderText(context, At(2026, 1, 2, 3, 4, 5));
  return text.ok() ? *text : "error: " + std::string(text.status().message());
}

Json User(const std::string& content) { return Json::array({{{"role", "user"}, {"content", content}}}); }

TEST(ChatTemplateOracle, PublishedTemplatesRenderAsTransformersRendersThem) {
  const std::filesystem::path dir = SharedDir() / "oracles/templates";
  if (!std::filesystem::exists(dir / "cases.json")) GTEST_SKIP() << "no outside oracle at " << dir;
  const Json cases = Json::parse(ReadFile(dir / "cases.json"));
  int checked = 0;
  for (const auto& [name, expected] : cases["expected"].items()) {
    const auto parsed = ChatTemplate::Parse(ReadFile(dir / (name + ".jinja")));
    ASSERT_TRUE(parsed.ok()) << name << ": " << parsed.status();
    for (const auto& [input, right] : expected.items()) {
      Json context = cases["inputs"][input];
      if (!context.contains("add_generation_prompt")) context["add_generation_prompt"] = true;
      context["bos_token"] = cases["bos_token"];
      context["eos_token"] = cases["eos_token"];
      const auto text = (*parsed)->RenderText(context, At(2026, 1, 2, 3, 4, 5));
      if (right.contains("error")) {
        EXPECT_FALSE(text.ok()) << name << " " << input << " should fail: " << right["error"];
      } else {
        ASSERT_TRUE(text.ok()) << name << " " << input << ": " << text.status();
        EXPECT_EQ(*text, right["text"].get<std::string>()) << name << " " << input;
      }
      ++checked;
    }
  }
  EXPECT_GT(checked, 200);
}

struct Construct {
  const char* source;
  const char* text;
};

class Constructs : public ::testing::TestWithParam<Construct> {};

TEST_P(Constructs, RenderAsJinja2Does) {
  const Json context = {{"s", "Hello, Wörld"}, {"l", {3, 1, 2}},      {"d", {{"b", 1}, {"a", 2}}},
                        {"z", nullptr},        {"u", "你好🦊é"}, {"m", {{{"role", "user"}, {"n", 2}}, {{"role", "assistant"}, {"n", 1}}}}};
  EXPECT_EQ(Rendered(GetParam().source, context), GetParam().text) << GetParam().source;
}

INSTANTIATE_TEST_SUITE_P(
    Statements, Constructs,
    ::testing::Values(
        Construct{"{% for m in [1,2,3][::-1] %}{{m}}{% endfor %}", "321"},
        Construct{"{% set ns = namespace(c=0) %}{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{% set "
                  "ns.c = ns.c + 1 %}{% endfor %}{{ ns.c }}",
                  "3"},
        Construct{"{% for i in range(6) %}{% if i is odd %}{% continue %}{% endif %}{{ i }}{% endfor %}", "024"},
        Construct{"{% for k,v in {\"b\":1,\"a\":2}|items %}{{k}}={{v}};{% endfor %}", "b=1;a=2;"},
        Construct{"{% macro f(a, b=2, c=a) %}{{a}}-{{b}}-{{c}}{% endmacro %}{{ f(1) }} {{ f(1, c=9) }} {{ f(1,2,3) }}", "1-2-1 1-2-9 1-2-3"},
        Construct{"{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f() }}", "[]"},
        Construct{"{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}", "error: line 1: macro 'f' takes not more than 1 argument(s)"},
        Construct{"{% generation %}x{% endgeneration %}", "x"},
        Construct{"{{ strftime_now('%d %B %Y %H:%M:%S %j %%') }}", "02 January 2026 03:04:05 002 %"},
        Construct{"{% set x = 1 %}{% for i in [1,2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}", "231"},
        Construct{"{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}", "2"},
        Construct{"{% set b %}hi {{ 1 + 1 }}{% endset %}[{{ b }}]{% set c | upper %}q{% endset %}[{{ c }}]", "[hi 2][Q]"},
        Construct{"{% filter upper %}abc{% endfilter %}", "ABC"},
        Construct{"{% macro o() %}<{{ caller(1, b=2) }}>{% endmacro %}{% call(a, b=5) o() %}{{a}}{{b}}{% endcall %}", "<12>"},
        Construct{"{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}", "3"},
        Construct{"{% for i in [1,2] %}{{ i }}{% for j in [] %}{% else %}{% break %}{% endfor %}x{% endfor %}", "1"},
        Construct{"{% for i in range(3) %}{% macro f() %}{{ i }}{% endmacro %}{{ f() }}{% endfor %}", "012"},
        Construct{"{% raw %}{{ not }}{% endraw %}", "{{ not }}"}, Construct{"{% for x in [] %}a{% else %}none{% endfor %}", "none"},
        Construct{"{% for x in l if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}", "1:3/2 2:2/2 "},
        Construct{"{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.cycle('a','b') }} {% endfor %}", "<3>1a 3<1>2b 1<2>a "},
        Construct{"{% for i in [{'n':1,'c':[{'n':2,'c':[]}]}] recursive %}{{ i.n }}[{{ loop(i.c) }}]{% endfor %}", "1[2[]]"},
        Construct{"a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"}, Construct{"a\n  {%- if true -%}\n  b\n  {%- endif +%}\n c", "ab\n c"},
        Construct{"a\n  {%+ if true %}\nb{% endif %}", "a\n  b"}, Construct{"{{ 'x' }}\n  {# comment #}\n y", "x\n y"}));

INSTANTIATE_TEST_SUITE_P(
    Expressions, Constructs,
    ::testing::Values(Construct{"{{ 1 ~ none ~ true }}", "1NoneTrue"},
                      Construct{"{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }}", "3 -4 -2 3.5 1024 0.5"},
                      Construct{"{{ 1e16 }} {{ 1e-5 }} {{ 0.1 + 0.2 }} {{ 2.0 }} {{ 100000.0 }}", "1e+16 1e-05 0.30000000000000004 2.0 100000.0"},
                      Construct{"{{ 18446744073709551615 }} {{ 10 ** 30 }} {{ -(2 ** 126) }} {{ -0.0 }}",
                                "18446744073709551615 1000000000000000000000000000000 -85070591730234615865843651857942052864 -0.0"},
                      Construct{"{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ not 1 == 2 }} {{ 'b' in d }} {{ 4 not in l }}", "True False True True True"},
                      Construct{"{{ [1, 'a', none, true, 2.0, {'k': \"it's\"}, (1,)] }}", "[1, 'a', None, True, 2.0, {'k': \"it's\"}, (1,)]"},
                      Construct{"{{ 'A' if false }}|{{ 'A' if false else 'B' }}", "|B"},
                      Construct{"{{ s[1:5] }}|{{ s[::-1] }}|{{ s[:-2] }}|{{ u[1:3] }}|{{ u[-2] }}", "ello|dlröW ,olleH|Hello, Wör|好🦊|🦊"},
                      Construct{"{{ nope }}|{{ nope is defined }}|{{ d.nope is defined }}|{{ nope|default('d') }}|{{ z|default('d', "
                                "true) }}",
                                "|False|False|d|d"},
                      Construct{"{{ nope.x }}", "error: line 1: 'nope' is undefined"},
                      Construct{"\n{{ d.nope.x }}", "error: line 2: 'dict object' has no attribute 'nope'"},
                      Construct{"{{ 'a' + 1 }}", "error: line 1: can only concatenate str (not \"int\") to str"},
                      Construct{"{{ raise_exception('no such role') }}", "error: no such role"},
                      Construct{"{{ 'a,b,c'.split(',', 1) }} {{ 'a b '.split(none, 1) }} {{ 'xaxx'.strip('x') }}", "['a', 'b,c'] ['a', 'b '] a"},
                      Construct{"{{ 'abc'.startswith('a') }} {{ 'aXbX'.replace('X', '-', 1) }} {{ '-'.join(['a','b']) }} {{ 'it "
                                "is'.title() }}",
                                "True a-bX a-b It Is"},
                      Construct{"{{ '%s is %d, %.2f' % ('Bob', 5, 2.345) }} {{ '{} {x}'.format(1, x=2) }}", "Bob is 5, 2.35 1 2"},
                      Construct{"{{ d.get('q') }} {{ d.get('q', 5) }} {{ d.items() }} {{ d.keys()|list }}",
                                "None 5 dict_items([('b', 1), ('a', 2)]) ['b', 'a']"},
                      Construct{"{% set q = [] %}{% set _ = q.append(1) %}{{ q }} {{ q.pop(0) }} {{ q }}", "[1] 1 []"},
                      Construct{"{{ m.0.role }} {{ m[-1].role }} {{ d['nope'] }}", "user assistant "},
                      Construct{"{{ s is string and d is mapping and l is iterable and z is none and 1 is integer and 1.0 is float "
                                "and true is boolean and true is number }}",
                                "True"},
                      Construct{"{{ 1 is in [1] }} {{ 'a' is equalto 'a' }} {{ 4 is divisibleby 2 }} {{ true is true }} {{ l is "
                                "sequence }} {{ s is not mapping }}",
                                "True True True True True True"}));

INSTANTIATE_TEST_SUITE_P(
    Filters, Constructs,
    ::testing::Values(Construct{"{{ l|sort }} {{ l|sort(reverse=true) }} {{ l|first }} {{ l|last }} {{ l|length }} {{ l|join('-') }} "
                                "{{ l|sum }}",
                                "[1, 2, 3] [3, 2, 1] 3 2 3 3-1-2 6"},
                      Construct{"{{ m|map(attribute='role')|join(', ') }} {{ m|selectattr('role','equalto','user')|list|length }} {{ "
                                "m|sort(attribute='n')|map(attribute='n')|list }}",
                                "user, assistant 1 [1, 2]"},
                      Construct{"{{ [1,2,3]|select('odd')|list }} {{ [1,2,3]|reject('gt', 1)|list }} {{ "
                                "m|rejectattr('n','eq',1)|map(attribute='n')|list }}",
                                "[1, 3] [1] [2]"},
                      Construct{"{{ ['a','A','b']|unique|list }} {{ d|dictsort }}", "['a', 'b'] [('a', 2), ('b', 1)]"},
                      Construct{"{{ {'a': 'é\"\\n', 'b': [1, true, none, 1.5]}|tojson }}", "{\"a\": \"é\\\"\\n\", \"b\": [1, true, null, 1.5]}"},
                      Construct{"{{ d|tojson(indent=2) }} {{ d|tojson(sort_keys=true, separators=(',', ':')) }} {{ "
                                "u|tojson(ensure_ascii=true) }}",
                                "{\n  \"b\": 1,\n  \"a\": 2\n} {\"a\":2,\"b\":1} \"\\u4f60\\u597d\\ud83e\\udd8a\\u00e9\""},
                      Construct{"{{ l|map('string')|tojson }}", "error: line 1: Object of type generator is not JSON serializable"},
                      Construct{"{{ '  x '|trim }}|{{ s|upper }}|{{ s|replace('l', 'L', 1) }}|{{ 'ab'|capitalize }}|{{ "
                                "\"it's-me\"|title }}",
                                "x|HELLO, WÖRLD|HeLlo, Wörld|Ab|It's-Me"},
                      Construct{"{{ '3.7'|int }} {{ 'x'|int(7) }} {{ '2.5'|float }} {{ 2.5|round }} {{ 42.55|round(1, 'floor') }} {{ "
                                "-3|abs }} {{ 5|string + 'a' }}",
                                "3 7 2.5 2.0 42.5 3 5a"},
                      Construct{"{{ 'a\\nb\\n\\nc'|indent(2) }}|{{ 'a\\nb'|indent('>', first=true) }}", "a\n  b\n\n  c|>a\n>b"},
                      Construct{"{{ '<b>' ~ ('<i>'|safe) }} {{ '<b>' + ('<i>'|safe) }}", "<b><i> &lt;b&gt;<i>"}));

INSTANTIATE_TEST_SUITE_P(Refused, Constructs,
                         ::testing::Values(Construct{"a\n{{ 1 +* }}", "refused: line 2, column 7: unexpected '*'"},
                                           Construct{"x {% if a %}",
                                                     "refused: line 1, column 13: unexpected end of the template: the tag 'endif' is missing"},
                                           Construct{"{% frob %}", "refused: line 1, column 4: unknown tag 'frob'"},
                                           Construct{"é {{ x|frob }}", "refused: line 1, column 8: no filter named 'frob'"},
                                           Construct{"{% if false %}{{ x|frob }}{% endif %}ok", "ok"},
                                           Construct{"{{ 'abc }}", "refused: line 1, column 4: this string is never closed"},
                                           Construct{"{{ (1, 2 }}", "refused: line 1, column 10: unexpected '}', expected ')'"},
                                           Construct{"{% break %}", "refused: line 1, column 4: 'break' outside a loop"},
                                           Construct{"{% include 'x' %}",
                                                     "refused: line 1, column 4: the tag 'include' is not supported: a chat template is one "
                                                     "file; put the text in place"}));

TEST(ChatTemplate, FableMoeTemplateJoinsSystemMessagesAndReadsToolCalls) {
  const char* source = std::getenv("HEARTH_SOURCE_DIR");
  const std::filesystem::path path = std::filesystem::path(source != nullptr ? source : ".") / "deploy/models/fable-moe/tokenizer_config.json";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no demo model at " << path;
  const auto parsed = ChatTemplate::Parse(Json::parse(ReadFile(path))["chat_template"].get<std::string>());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  Json messages = Json::array({{{"role", "system"}, {"content", "S1"}},
                               {{"role", "user"}, {"content", "u"}},
                               {{"role", "system"}, {"content", "S2"}},
                               {{"role", "user"}, {"content", "v"}}});
  const auto text = (*parsed)->RenderText({{"messages", messages}, {"bos_token", "<BOS>"}, {"add_generation_prompt", true}});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "<BOS>S1\n\nS2<｜User｜>u<｜User｜>v<｜Assistant｜>");

  // This template tells tool calls by null content and concatenates their arguments.
  messages = Json::array({{{"role", "user"}, {"content", "u"}},
                          {{"role", "assistant"},
                           {"content", ""},
                           {"tool_calls", {{{"id", "1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", {{"a", 1}}}}}}}}}});
  const auto fitted = (*parsed)->PrepareMessages(messages);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  EXPECT_TRUE((*fitted)[1]["content"].is_null());
  EXPECT_EQ((*fitted)[1]["tool_calls"][0]["function"]["arguments"], "{\"a\": 1}");
  EXPECT_THAT(*(*parsed)->RenderText({{"messages", *fitted}, {"bos_token", ""}}), HasSubstr("f\n```json\n{\"a\": 1}\n```"));
}

// --- trust ---

std::vector<std::pair<std::string, bool>> Spans(std::string_view source, const Json& context) {
  const auto parsed = ChatTemplate::Parse(source);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  const auto spans = (*parsed)->Render(context);
  EXPECT_TRUE(spans.ok()) << spans.status();
  std::vector<std::pair<std::string, bool>> out;
  if (spans.ok()) {
    for (const RenderedSpan& span : *spans) out.emplace_back(span.text, span.trusted);
  }
  return out;
}

using Pairs = std::vector<std::pair<std::string, bool>>;

TEST(ChatTemplateTrust, ConcatenationKeepsEveryPiece) {
  const Json context = {{"messages", User("<|eos|>hi")}, {"bos_token", "<s>"}};
  EXPECT_EQ(Spans("{{ bos_token + '<|User|>' + messages[0]['content'] + '<|end|>' }}", context),
            (Pairs{{"<s><|User|>", true}, {"<|eos|>hi", false}, {"<|end|>", true}}));
  EXPECT_EQ(Spans("{% set ns = namespace(s='') %}{% for i in range(2) %}{% set ns.s = ns.s + '<|' ~ "
                  "messages[0].content %}{% endfor %}{{ ns.s }}",
                  context),
            (Pairs{{"<|", true}, {"<|eos|>hi", false}, {"<|", true}, {"<|eos|>hi", false}}));
  EXPECT_EQ(Spans("{% set x = messages[0].content %}{% set a = x + '<a>' %}{% set b = x + '<b>' %}{{ a }}{{ b }}{{ x + x }}", context),
            (Pairs{{"<|eos|>hi", false}, {"<a>", true}, {"<|eos|>hi", false}, {"<b>", true}, {"<|eos|>hi<|eos|>hi", false}}));
}

TEST(ChatTemplateTrust, CuttingAndJoiningKeepEveryPiece) {
  const Json context = {{"messages", User("  a|b  ")}};
  EXPECT_EQ(Spans("{{ ('<s>' + messages[0].content)|trim }}", context), (Pairs{{"<s>", true}, {"  a|b", false}}));
  EXPECT_EQ(Spans("{{ ('<s>' + messages[0].content.strip())[1:4] }}", context), (Pairs{{"s>", true}, {"a", false}}));
  EXPECT_EQ(Spans("{{ (messages[0].content.strip() + '|<x>').split('|')|join('<sep>') }}", context),
            (Pairs{{"a", false}, {"<sep>", true}, {"b", false}, {"<sep><x>", true}}));
  EXPECT_EQ(Spans("{{ messages[0].content.strip().replace('|', '<bar>') }}", context), (Pairs{{"a", false}, {"<bar>", true}, {"b", false}}));
  EXPECT_EQ(Spans("{% macro f(x) %}<m>{{ x }}{% endmacro %}{% set y %}[{{ f(messages[0].content.strip()) }}]{% endset "
                  "%}{{ y }}",
                  context),
            (Pairs{{"[<m>", true}, {"a|b", false}, {"]", true}}));
}

TEST(ChatTemplateTrust, RewritingTaintsTheWholeAndKeysAreCallersToo) {
  const Json context = {{"messages", User("hi")}, {"tools", {{{"<|key|>", 1}}}}, {"kwarg", "<|eos|>"}, {"bos_token", "<s>"}};
  EXPECT_EQ(Spans("<t>{{ ('<s>' + messages[0].content)|upper }}", context), (Pairs{{"<t>", true}, {"<S>HI", false}}));
  EXPECT_EQ(Spans("<t>{{ tools|tojson }}", context), (Pairs{{"<t>", true}, {"[{\"<|key|>\": 1}]", false}}));
  EXPECT_EQ(Spans("{% for k, v in tools[0]|items %}{{ k }}{% endfor %}<t>", context), (Pairs{{"<|key|>", false}, {"<t>", true}}));
  EXPECT_EQ(Spans("{{ bos_token|upper }}{{ ['<x>'] }}", context), (Pairs{{"<S>['<x>']", true}}));
  const auto parsed = ChatTemplate::Parse("{{ kwarg }}");
  ASSERT_TRUE(parsed.ok());
  RenderOptions options;
  options.untrusted_names = {"kwarg"};
  EXPECT_FALSE((*parsed)->Render(context, options)->at(0).trusted);
}

TEST(ChatTemplateTrust, UsualRolesMayFormSpecialTokensOthersMayNot) {
  const char* source = "{{ '<|' + messages[0].role + '|>' }}";
  EXPECT_EQ(Spans(source, {{"messages", User("x")}}), (Pairs{{"<|user|>", true}}));
  EXPECT_EQ(Spans(source, {{"messages", {{{"role", "endoftext"}}}}}), (Pairs{{"<|", true}, {"endoftext", false}, {"|>", true}}));
}

// --- limits ---

TEST(ChatTemplateLimits, RunawayTemplatesAreStopped) {
  EXPECT_THAT(Rendered("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
              AnyOf(HasSubstr("error: line 1: macros call each other"), HasSubstr("error: line 1: the template recurses")));
  EXPECT_THAT(Rendered("{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"),
              HasSubstr("64 MiB"));
  EXPECT_THAT(Rendered("{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"), HasSubstr("error: line 1"));
  EXPECT_THAT(Rendered("{{ 'x' * 100000000000 }}"), HasSubstr("64 MiB"));
  EXPECT_THAT(Rendered("{{ '%999999999d' % 1 }}"), HasSubstr("too large"));
  EXPECT_THAT(Rendered("{{ range(10000000)|length }}"), HasSubstr("range()"));
  EXPECT_THAT(Rendered("{{ 10 ** 1000 }}"), HasSubstr("too large"));
  EXPECT_THAT(Rendered("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"), HasSubstr("recurses too deeply"));
  EXPECT_THAT(Rendered("{% set l = [] %}{% set _ = l.append(l) %}{{ l }}"), HasSubstr("error: line 1"));
  EXPECT_THAT(Rendered("{% set ns = namespace(v=[]) %}{% for i in range(9999) %}{% set ns.v = [ns.v] %}{% endfor %}"), HasSubstr("nested"));
}

TEST(ChatTemplateLimits, DeepSourcesAndContextsAreRefused) {
  EXPECT_THAT(Rendered("{{ " + std::string(100000, '(') + "1" + std::string(100000, ')') + " }}"), HasSubstr("refused: line 1"));
  EXPECT_THAT(Rendered("{{ " + std::string(100000, '-') + "1 }}"), HasSubstr("refused: line 1"));
  std::string blocks, sum = "1";
  for (int i = 0; i < 10000; ++i) blocks += "{% if a %}", sum += "+1";
  EXPECT_THAT(Rendered(blocks), HasSubstr("nested too deeply"));
  EXPECT_THAT(Rendered("{{ " + sum + " }}"), HasSubstr("refused: line 1"));
  Json deep = Json::array();
  for (int i = 0; i < 1000; ++i) deep = Json::array({deep});
  EXPECT_THAT(Rendered("{{ messages }}", {{"messages", deep}}), HasSubstr("nested"));
}

TEST(ChatTemplateLimits, LongMessagesAndLongConversationsTakeLinearTime) {
  const auto parsed = ChatTemplate::Parse(
      "{% set ns = namespace(s='') %}{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}{% set c = "
      "c.split('</think>')[-1].lstrip('\\n') %}"
      "{% endif %}{% set ns.s = ns.s + '<|' + m.role + '|>' + c|trim %}{{ c.strip() + '<e>' }}{{ c|tojson }}{{ "
      "c|replace('q', 'r')|length }}{% endfor %}{{ ns.s }}");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  std::string text;
  while (text.size() < (1 << 20)) text += "words é 字 ";
  Json many = Json::array();
  for (int i = 0; i < 10000; ++i) many.push_back({{"role", "user"}, {"content", "<think>x</think>\nmessage number " + std::to_string(i)}});
  for (const Json& messages : {User(text), many}) {
    const auto start = std::chrono::steady_clock::now();
    const auto rendered = (*parsed)->Render({{"messages", messages}});
    const auto took = std::chrono::steady_clock::now() - start;
    ASSERT_TRUE(rendered.ok()) << rendered.status();
    EXPECT_LT(std::chrono::duration<double>(took).count(), 1.0);
  }
}

// --- fitting messages ---

Json ToolConversation(const Json& arguments) {
  return Json::array({{{"role", "user"}, {"content", "hi"}},
                      {{"role", "assistant"},
                       {"content", nullptr},
                       {"tool_calls", {{{"id", "call_1"}, {"type", "function"}, {"function", {{"name", "w"}, {"arguments", arguments}}}}}}}});
}

// A megabyte of each took ten seconds and more when a step looked at all that came before it.
TEST(ChatTemplate, ReadingTakesTimeInProportion) {
  const auto repeated = [](const std::string& piece) {
    std::string text;
    while (text.size() < 1'000'000) text += piece;
    return text;
  };
  const auto numbered = [](const std::string& before, const std::string& after) {
    std::string text;
    for (int i = 0; text.size() < 1'000'000; ++i) text += before + std::to_string(i) + after;
    return text;
  };
  const std::string sources[] = {"{% if a %}" + repeated("{% elif a %}") + "{% endif %}",
                                 repeated("{##}"),
                                 repeated("{% raw %}{% endraw %}"),
                                 repeated("  {% if a %}  {% endif %}"),
                                 numbered("{% set a", " = 1 %}"),
                                 numbered("{% macro m", "() %}{% endmacro %}")};
  for (const std::string& source : sources) {
    const std::clock_t begin = std::clock();
    EXPECT_TRUE(ChatTemplate::Parse(source).ok()) << source.substr(0, 40);
    EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 4.0) << source.substr(0, 40);
  }
  EXPECT_THAT(Rendered("{% macro m(" + numbered("a", ",") + "b) %}{% endmacro %}"), HasSubstr("more than 1000 parameters"));
  EXPECT_THAT(Rendered("{{ dict(" + numbered("a", "=1,") + "b=1) }}"), HasSubstr("more than 1000 named arguments"));
}

// More names than are searched one by one: set again, looked up from inside, gone with their frame.
TEST(ChatTemplate, AFrameOfManyNames) {
  std::string sets, sum = "0";
  for (int i = 0; i < 40; ++i) {
    sets += "{% set a" + std::to_string(i) + " = " + std::to_string(i) + " %}";
    sum += " + a" + std::to_string(i);
  }
  EXPECT_EQ(Rendered(sets + "{% set a3 = 103 %}{% set a39 = 139 %}{{ " + sum + " }}"), "980");
  EXPECT_EQ(Rendered(sets + "{% for i in [1, 2] %}{{ a39 }}{% set a39 = i %}{{ a39 }} {% endfor %}{{ a39 }}"), "391 392 39");
  EXPECT_EQ(Rendered("{% for i in [1, 2] %}{{ a39 is defined }}" + sets + "{{ " + sum + " }} {% endfor %}"), "False780 False780 ");
}

std::string Fitted(const std::string& source, const Json& messages) {
  const auto parsed = ChatTemplate::Parse(source);
  if (!parsed.ok()) return "refused: " + std::string(parsed.status().message());
  const auto fitted = (*parsed)->PrepareMessages(messages);
  if (!fitted.ok()) return "error: " + std::string(fitted.status().message());
  const auto text = (*parsed)->RenderText({{"messages", *fitted}, {"bos_token", ""}, {"eos_token", ""}});
  return text.ok() ? *text : "error: " + std::string(text.status().message());
}

std::string ForCalls(const std::string& body) {
  return "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}" + body + "{% endfor %}{% endfor %}";
}

TEST(PrepareMessages, ArgumentsTakeTheFormThatTheTemplateNeeds) {
  const Json text = "{\"city\":\"Paris\"}";
  const Json object = {{"city", "Paris"}};
  EXPECT_EQ(Fitted(ForCalls("{{ 'A' + a }}"), ToolConversation(text)), "A{\"city\":\"Paris\"}");
  EXPECT_EQ(Fitted(ForCalls("{{ 'A' + a }}"), ToolConversation(object)), "A{\"city\": \"Paris\"}");
  EXPECT_EQ(Fitted(ForCalls("{{ a|tojson }}"), ToolConversation(text)), "{\"city\": \"Paris\"}");
  EXPECT_EQ(Fitted(ForCalls("{{ a|tojson }}"), ToolConversation("not json")), "\"not json\"");
  EXPECT_EQ(Fitted(ForCalls("{% for k, v in a|items %}{{ k }}={{ v }}{% endfor %}"), ToolConversation(text)), "city=Paris");
  EXPECT_EQ(Fitted(ForCalls("{% for k, v in a|items %}{{ k }}={{ v }}{% endfor %}"), ToolConversation("")), "");
  EXPECT_THAT(Fitted(ForCalls("{% for k, v in a|items %}{{ k }}={{ v }}{% endfor %}"), ToolConversation("[1]")), HasSubstr("error: line 1"));
  // A template that asks which form it got is left alone: the model's own text comes back byte for byte.
  EXPECT_EQ(Fitted(ForCalls("{% if a is string %}{{ a }}{% else %}{{ a|tojson }}{% endif %}"), ToolConversation(text)), "{\"city\":\"Paris\"}");
}

TEST(PrepareMessages, ContentOfACallingMessageIsWhatTheTemplateBears) {
  const std::string fails_on_null = ForCalls("{{ 'A' + a }}{% if 'x' in m.content %}{% endif %}");
  EXPECT_EQ(Fitted(fails_on_null, ToolConversation("{}")), "A{}");
  const std::string needs_null = ForCalls("{% if m.content is none %}{{ 'A' + a }}{% endif %}");
  Json messages = ToolConversation("{}");
  messages[1]["content"] = "";
  EXPECT_EQ(Fitted(needs_null, messages), "A{}");
  messages[1].erase("content");
  EXPECT_EQ(Fitted(needs_null, messages), "A{}");
}

TEST(PrepareMessages, PartsAreJoinedOrKeptByWhatTheTemplateReads) {
  const Json parts = {{{"type", "text"}, {"text", "A"}}, {{"type", "text"}, {"text", "B"}}};
  const std::string strings = "{% for m in messages %}[{{ m.role + ':' + m.content }}]{% endfor %}";
  const std::string prints = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
  const std::string iterates =
      "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text "
      "}}>{% endfor %}{% endif %}{% endfor %}";
  const std::string only_parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
  for (const char* role : {"user", "system", "assistant", "tool", "developer", "other"}) {
    const Json messages = {{{"role", role}, {"content", parts}}};
    EXPECT_EQ(Fitted(strings, messages), std::string("[") + role + ":AB]");
    EXPECT_EQ(Fitted(prints, messages), "[AB]");
  }
  const Json messages = {{{"role", "user"}, {"content", parts}}};
  EXPECT_EQ(Fitted(iterates, messages), "<A><B>");
  EXPECT_EQ(Fitted(only_parts, messages), "<A><B>");
  EXPECT_EQ(Fitted(only_parts, User("x")), "<x>");
  EXPECT_EQ(Fitted(strings, {{{"role", "user"}, {"content", Json::array()}}}), "[user:]");
}

TEST(PrepareMessages, WhatCannotBeFittedIsNamed) {
  const std::string source = "{{ messages[0].content }}";
  EXPECT_EQ(Fitted(source, {{{"role", "user"}, {"content", {{{"type", "image_url"}, {"image_url", {{"url", "x"}}}}}}}}),
            "error: messages[0].content[0]: content parts of type \"image_url\" are not supported: this model reads "
            "text only");
  EXPECT_THAT(Fitted(source, Json::array()), HasSubstr("the list is empty"));
  EXPECT_THAT(Fitted(source, {{{"content", "x"}}}), HasSubstr("messages[0].role"));
  EXPECT_THAT(Fitted(source, {{{"role", "user"}, {"content", 5}}}), HasSubstr("messages[0].content: expected a string"));
}

TEST(PrepareMessages, PublishedTemplatesReadToolCallsAsClientsSendThem) {
  const std::filesystem::path dir = SharedDir() / "oracles/templates";
  if (!std::filesystem::exists(dir / "cases.json")) GTEST_SKIP() << "no outside oracle at " << dir;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().extension() != ".jinja") continue;
    const std::string name = entry.path().stem();
    if (name.find("SmolLM3") != std::string::npos) continue;  // prints no tool calls at all
    Json messages = ToolConversation("{\"city\": \"Paris\"}");
    messages[1]["tool_calls"][0]["id"] = "abcdefghi";
    const std::string text = Fitted(ReadFile(entry.path()), messages);
    EXPECT_THAT(text, Not(HasSubstr("error"))) << name;
    EXPECT_THAT(text, HasSubstr("Paris")) << name;
    EXPECT_THAT(text, Not(HasSubstr("\\\"city"))) << name << ": escaped twice";
  }
}

}  // namespace
}  // namespace hearth
