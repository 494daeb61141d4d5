/*
 * Constraints: what regular expressions, grammars, choices and each schema keyword accept and refuse,
 * what is refused at compile time and by which path, masks against single tokens for whole
 * vocabularies, going back, forced tokens, the caches of grammars and of masks, threads.
 */
#include "base/mem.h"
#include "text/grammar/grammar_int.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

static struct tokenizer *tok;
static struct grammar_vocab *vocab;
static size_t words;

static struct grammar *compile_flags(enum grammar_kind kind, const char *text, int flags,
                                     struct error *err)
{
    struct grammar_source src = {kind, flags, text, strlen(text)};
    return grammar_compile(&src, err);
}

static struct grammar *compile(enum grammar_kind kind, const char *text)
{
    struct error err = {0};
    struct grammar *g = compile_flags(kind, text, 0, &err);
    if (!g)
        fail_msg("%.200s: %s", text, err.msg);
    return g;
}

static bool has(const uint32_t *bits, int32_t id)
{
    return bits[id / 32] >> id % 32 & 1;
}

/* Walks a text through the masks, as in generation. */
static bool fits(struct grammar *g, const char *text)
{
    struct token_list ids = {0};
    struct error err = {0};
    uint32_t *bits = mem_zalloc(words, sizeof *bits);
    assert_true(tokenizer_encode(tok, text, strlen(text), 0, &ids, &err));
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    bool ok = true;
    for (size_t i = 0; ok && i < ids.n; i++) {
        assert_true(grammar_mask(m, bits, &err));
        ok = has(bits, ids.ids[i]);
        assert_int_equal(ok, grammar_accept(m, ids.ids[i], &err));
    }
    ok = ok && grammar_is_accepting(m);
    grammar_matcher_free(m);
    token_list_clear(&ids);
    mem_free(bits);
    return ok;
}

struct row {
    const char *source, *yes[8], *no[8];
};

static void check_rows(enum grammar_kind kind, const struct row *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct grammar *g = compile(kind, rows[i].source);
        for (int k = 0; k < 8 && rows[i].yes[k]; k++)
            if (!fits(g, rows[i].yes[k]))
                fail_msg("%s does not take %s", rows[i].source, rows[i].yes[k]);
        for (int k = 0; k < 8 && rows[i].no[k]; k++)
            if (fits(g, rows[i].no[k]))
                fail_msg("%s takes %s", rows[i].source, rows[i].no[k]);
        grammar_free(g);
    }
}

#define ROWS(rows) rows, sizeof rows / sizeof *rows

static void test_regex(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"[a-c]+d?", {"a", "abcd", "ccc"}, {"", "d", "add", "abcdd"}},
        {"(ab|cd){2,3}", {"abcd", "ababab"}, {"ab", "abababab"}},
        {"\\d{3}-\\d{4}", {"555-1234"}, {"555-123", "5555-1234"}},
        {"^(yes|no)$", {"yes", "no"}, {"maybe", "yesno"}},
        {"(?!foo)[a-z]{3}", {"bar", "fob"}, {"foo", "ba"}},
        {"(?=.*[0-9])[a-z0-9]{4}", {"ab1c", "1234"}, {"abcd"}},
        {"[^x]*", {"", "caf\xc3\xa9 \xe4\xb8\xad"}, {"box"}},
        {"\\p{Lu}\\p{Ll}+", {"Hello", "\xc3\x89tude"}, {"hello", "H"}},
        {"\\u00e9+", {"\xc3\xa9\xc3\xa9"}, {"e"}},
        {"a{0}b", {"b"}, {"ab"}},
        {"[\\w.-]+@[\\w.-]+\\.\\w{2,}", {"a.b@c.de"}, {"a@b", "@c.de"}},
        {"x*?y+?", {"xxy", "y"}, {"x"}},
        {"{a}", {"{a}"}, {"a"}},
    };
    check_rows(GRAMMAR_REGEX, ROWS(rows));
    static const char *const bad[][2] = {
        {"(a", "( without )"},       {"a)", ") without ("},        {"[z-a]", "reverse order"},
        {"*a", "nothing to repeat"}, {"(a)\\1", "back reference"}, {"\\bword", "word boundary"},
        {"(?<=a)b", "look-behind"},  {"a{3,2}", "minimum above"},  {"a{99999999}", "repeat count"},
        {"(?i)a", "inline flags"},   {"[]", "no text matches"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err = {0};
        assert_null(compile_flags(GRAMMAR_REGEX, bad[i][0], 0, &err));
        if (!strstr(err.msg, bad[i][1]))
            fail_msg("%s: %s", bad[i][0], err.msg);
    }
}

static const char json_gbnf[] =
    "root   ::= object\n"
    "value  ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n"
    "object ::=\n"
    "  \"{\" ws (\n"
    "            string \":\" ws value\n"
    "    (\",\" ws string \":\" ws value)*\n"
    "  )? \"}\" ws\n"
    "array  ::=\n"
    "  \"[\" ws (\n"
    "            value\n"
    "    (\",\" ws value)*\n"
    "  )? \"]\" ws\n"
    "string ::=\n"
    "  \"\\\"\" (\n"
    "    [^\"\\\\\\x7F\\x00-\\x1F] |\n"
    "    \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4}) # escapes\n"
    "  )* \"\\\"\" ws\n"
    "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? [0-9] "
    "[1-9]{0,15})? ws\n"
    "# Optional space: by convention, applied in this grammar after literal chars when allowed\n"
    "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";

static void test_gbnf(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {json_gbnf,
         {"{}", "{\"a\": [1, 2.5, {\"b\": null}], \"c\":\"x\\n\"}", "{\"a\":{\"a\":{\"a\":[[]]}}}"},
         {"[]", "{\"a\":}", "{\"a\": 1,}", "{\"a\": [1}"}},
        {"root ::= (expr \"=\" term \"\\n\")+\nexpr ::= term ([-+*/] term)*\n"
         "term ::= ident | num | \"(\" expr \")\"\nident ::= [a-z] [a-z0-9_]*\nnum ::= [0-9]+",
         {"a+(b*2)=3\n", "x=y\n1-2=z9\n"},
         {"a+=1\n", "(a=1\n"}},
        {"root ::= root \"a\" | \"b\"", {"b", "baaa"}, {"", "ab"}}, /* left recursion */
        {"root ::= \"(\" root \")\" | \"x\"", {"x", "((x))"}, {"(x", "((x)"}},
        {"root ::= a a\na ::= \"x\" | \"\"", {"", "x", "xx"}, {"xxx"}},
        {"root ::= (\"a\" | \"b\" root){2}", {"aa", "baaa"}, {"a", "ba"}},
        {"root ::= [^\\n]+ \"\\n\"\n", {"any \xc3\xa9\n"}, {"\n", "a\nb"}},
        {"root ::= \"\\u00e9\" . \"\\x41\"", {"\xc3\xa9?A"}, {"eA"}},
        {"root ::= one\n  | two\none ::= \"1\"\ntwo ::= \"2\"", {"1", "2"}, {"3"}},
        {"root ::= item{2,3}\nitem ::= \"- \" [^\\n]+ \"\\n\"", {"- a\n- b\n"}, {"- a\n"}},
    };
    check_rows(GRAMMAR_GBNF, ROWS(rows));
    static const char *const bad[][2] = {{"root ::= a", "no rule \"a\""},
                                         {"a ::= \"x\"", "no rule \"root\""},
                                         {"root ::= \"x", "unterminated literal"},
                                         {"root ::= (\"x\"", "( without )"},
                                         {"root = \"x\"", "missing \"::=\""},
                                         {"root ::= root", "no text matches"},
                                         {"root ::= \"a\"\nroot ::= \"b\"", "line 2"},
                                         {"root ::= <tok>", "not supported"},
                                         {"root ::= [a", "["},
                                         {"", "no rule \"root\""},
                                         {"root ::= (root \"a\" | \"b\"){20000}", "10000"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err = {0};
        assert_null(compile_flags(GRAMMAR_GBNF, bad[i][0], 0, &err));
        if (!strstr(err.msg, bad[i][1]))
            fail_msg("%s: %s", bad[i][0], err.msg);
    }
}

/* Codex's grammar of patches. */
static const char patch_lark[] =
    "start: begin_patch hunk+ end_patch\n"
    "begin_patch: \"*** Begin Patch\" LF\n"
    "end_patch: \"*** End Patch\" LF?\n"
    "\n"
    "hunk: add_hunk | delete_hunk | update_hunk\n"
    "add_hunk: \"*** Add File: \" filename LF add_line+\n"
    "delete_hunk: \"*** Delete File: \" filename LF\n"
    "update_hunk: \"*** Update File: \" filename LF change_move? change?\n"
    "\n"
    "filename: /(.+)/\n"
    "add_line: \"+\" /(.*)/ LF -> line\n"
    "\n"
    "change_move: \"*** Move to: \" filename LF\n"
    "change: (change_context | change_line)+ eof_line?\n"
    "change_context: (\"@@\" | \"@@ \" /(.+)/) LF\n"
    "change_line: (\"+\" | \"-\" | \" \") /(.*)/ LF\n"
    "eof_line: \"*** End of File\" LF\n"
    "\n"
    "%import common.LF\n";
/* Sums with parentheses: recursive. */
#define SUMS                                                                                       \
    "start: sum\n?sum: product\n  | sum \"+\" product -> add\n"                                    \
    "?product.2: atom (\"*\" atom)*\n?atom: NUMBER -> number | \"(\" sum \")\"\n"                  \
    "NUMBER.1: /[0-9]/+ [\".\" /\\d+/]\n"
#define PATCH(body) "*** Begin Patch\n" body "*** End Patch"

static void test_lark(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {patch_lark,
         {PATCH("*** Delete File: a b\n"), PATCH("*** Add File: x\n+\n+y z\n") "\n",
          PATCH("*** Update File: x\n*** Move to: y\n@@ f\n-a\n+b\n c\n*** End of File\n"),
          PATCH("*** Update File: x\n")},
         {"", PATCH(""), PATCH("*** Add File: x\n"), PATCH("*** Add File: x\ny\n"),
          PATCH("*** Delete File: \n"), "*** Begin Patch\n*** Delete File: x\n",
          PATCH("*** Update File: x\n*** End of File\n")}},
        {SUMS, {"1", "1+2*3", "((1)+2.25)*(3+4)"}, {"", "1+", "(1", "1 + 2", "1)", "2."}},
        {SUMS "%import common.WS\n%ignore WS\n", {" ( 1 +2 ) *\n3 ", "1.5"}, {"1 .5 .", "1 2"}},
        {"start: \"a\"~3 \"b\" ~ 1..2 [\"c\"] (\"d\" | \"e\"+)* // all of them\n",
         {"aaab", "aaabbc", "aaabdeed"},
         {"aab", "aaabbb", "aaabcc"}},
        {"start: A | /[^x]/ x\nA: \"\\u00e9\"i \"0\"..\"2\"\nx: /Straße/i # a comment\n",
         {"\xc3\xa9"
          "0",
          "\xc3\x89"
          "2",
          "ySTRA\xc3\x9f"
          "e"},
         {"\xc3\xa9"
          "3",
          "e0",
          "xstra\xc3\x9f"
          "e",
          "ySTRASSE"}},
        {"start: /a.b/ | /c.d/s | / e [ f] # g\n h /x | /\\w\\d\\s/\n",
         {"a\rb", "c\nd", "e h", "efh", "\xc3\xb6\xd9\xa3\x0b"},
         {"a\nb", "eh", "e  h", "-1 "}},
        {"start: word*\n?word : ESCAPED_STRING | INT | C | OTHER\n"
         "%import common (ESCAPED_STRING, INT)\n%import common.C_COMMENT -> C\n"
         "%import common.SIGNED_FLOAT -> OTHER\n%ignore \" \"\n",
         {"", "12 \"a\\\"b\" -1e5", " /* * **/ .5"},
         {"\"a\"b\"", "/*/", "-1"}},
        {"start: \"\" | \"(\" start \")\" start\n", {"", "()", "(()())()"}, {"(", ")("}},
        {"start: A\nA: B B\nB: \"b\" | /c+?/\n%ignore /-/\n", {"bb", "-bccc--"}, {"b-b", "b"}},
        {"\n start:\n   \"a\"\n   \"b\"\n", {"ab"}, {"a"}},
    };
    check_rows(GRAMMAR_LARK, ROWS(rows));
    static const char *const bad[][2] = {
        {"", "there is no rule \"start\""},
        {"start: a\n\nb: \"x\"", "line 1: there is no rule \"a\""},
        {"start: \"a\"\n  (\"b\"", "line 2: ( without )"},
        {"start: \"a\"\nstart: \"b\"", "line 2: a name that is defined twice"},
        {"start: \"a\n\"", "line 1: a string without its closing quote"},
        {"start: \"\\q\"", "line 1: an unknown escape"},
        {"start: A\n\nA: /[/", "line 3: regular expression"},
        {"start: /a/q", "line 1: a flag"},
        {"start: /a", "line 1: a regular expression without its closing slash"},
        {"start: /a\nb/", "several lines without the flag x"},
        {"start: /^a/", "line 1: regular expression \"^a\": an anchor"},
        {"start: /(?=a)/", "look-ahead, which is not supported in a terminal"},
        {"start: /(?<!a)/", "look-behind"},
        {"start: x{\"a\"}\nx{y}: y", "line 1: a template"},
        {"start: A\nA: b\nb: \"b\"", "line 2: a terminal that uses a rule"},
        {"start: \"a\"\n%declare B", "line 2: a directive other than"},
        {"%import python.NAME\nstart: \"a\"", "line 1: %import of another module"},
        {"start: NAME\n%import common.NAME", "line 2: %import of common.NAME"},
        {"start: \"a\"~3..2", "minimum above maximum"},
        {"start: \"a\"~20000", "a repeat count over 10000"},
        {"start: \"ab\"..\"z\"", "a range of strings"},
        {"start: \"z\"..\"a\"", "a range in reverse"},
        {"start: <|im_end|>", "tokens by name"},
        {"start: a[max_tokens=3]\na: \"x\"", "attributes in brackets"},
        {"start: \"a\" start", "no text matches it"},
        {"start: \"a\" &", "line 1: an unexpected character"},
        {"start \"a\"", "line 1: missing \":\""}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err = {0};
        assert_null(compile_flags(GRAMMAR_LARK, bad[i][0], 0, &err));
        if (!strstr(err.msg, bad[i][1]))
            fail_msg("%s: %s", bad[i][0], err.msg);
    }
}

/* A string of a schema that follows a Lark grammar: escapes are resolved first, also where it is recursive. */
static void test_x_lark(void **state)
{
    (void)state;
#define LARK(text)                                                                                 \
    "{\"properties\":{\"a\":{\"type\":\"string\",\"x-lark\":\"" text "\"}},\"required\":[\"a\"]}"
    static const struct row rows[] = {
        {LARK("start: \\\"x\\\" /[^y]/+"),
         {"{\"a\": \"xz\"}", "{\"a\":\"x\\n\\\"\"}", "{\"a\":\"x\xc3\xa9\"}",
          "{\"a\":\"x\\u00e9\"}"},
         {"{\"a\":\"x\"}", "{\"a\":\"xy\"}", "{\"a\":\"z\"}", "{\"a\":3}"}},
        {LARK("start: \\\"<\\\" start \\\">\\\" | /\\\\n|😀/"),
         {"{\"a\":\"<<\\n>>\"}", "{\"a\":\"<\xf0\x9f\x98\x80>\"}", "{\"a\":\"\\ud83d\\ude00\"}"},
         {"{\"a\":\"<<\\n>\"}", "{\"a\":\"<\n>\"}", "{\"a\":\"\"}", "{\"a\":\"\\ud83d\\ude01\"}"}},
        {LARK("start: \\\"\\\""), {"{\"a\":\"\"}"}, {"{\"a\":\"x\"}"}},
    };
    check_rows(GRAMMAR_SCHEMA, ROWS(rows));
    static const char *const bad[][2] = {
        {LARK("start: a"), "/properties/a/x-lark: grammar, line 1: there is no rule"},
        {"{\"x-lark\":\"start: /a/\"}",
         "x-lark: is not a Lark grammar of a schema whose type is string"},
        {"{\"type\":\"string\",\"x-lark\":1}", "is not a Lark grammar"},
        {"{\"type\":\"string\",\"x-lark\":\"start: /a/\",\"pattern\":\"b\"}", "beside other rules"},
        {"{\"not\":{\"type\":\"string\",\"x-lark\":\"start: /a/\"}}", "cannot be negated"},
        {"{\"propertyNames\":{\"type\":\"string\",\"x-lark\":\"start: /a/\"}}", "for names"},
        {"{\"allOf\":[{\"type\":\"string\",\"x-lark\":\"start: "
         "/a/\"},{\"type\":\"string\",\"x-lark\":\"start: /b/\"}]}",
         "a second x-lark"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err = {0};
        assert_null(compile_flags(GRAMMAR_SCHEMA, bad[i][0], 0, &err));
        if (!strstr(err.msg, bad[i][1]))
            fail_msg("%s: %s", bad[i][0], err.msg);
    }
}

static void test_choice(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"[\"yes\", \"no\", \"no way\"]", {"yes", "no", "no way"}, {"y", "no w", "yes "}}};
    check_rows(GRAMMAR_CHOICE, ROWS(rows));
    struct error err = {0};
    assert_null(compile_flags(GRAMMAR_CHOICE, "[1]", 0, &err));
    assert_null(compile_flags(GRAMMAR_CHOICE, "[]", 0, &err));
    assert_null(compile_flags(GRAMMAR_CHOICE, "x", 0, &err));
}

static void test_schema(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"true",
         {"1", "{\"a\":[null,true,1.5e3]}", "\"\\u00e9\\ud83d\\ude00\""},
         {"", "{", "tru", "01"}},
        {"{\"type\":\"integer\",\"minimum\":-5,\"exclusiveMaximum\":120}",
         {"-5", "0", "119", "7"},
         {"-6", "120", "1.5", "1e1", "00", "-", "200"}},
        {"{\"type\":\"number\",\"minimum\":-1.25,\"maximum\":10}",
         {"-1.25", "-1.2", "0", "10", "10.00", "9.999"},
         {"-1.26", "10.01", "11", "-2"}},
        {"{\"type\":\"integer\",\"multipleOf\":7}", {"0", "7", "-49", "700"}, {"1", "8", "-50"}},
        {"{\"multipleOf\":0.01,\"type\":\"number\"}", {"0.25", "3", "1.10", "2.500"}, {"0.125"}},
        {"{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
         {"\"ab\"", "\"abc\"", "\"\\n\\u00e9\"", "\"\xf0\x9f\x98\x80x\""},
         {"\"a\"", "\"abcd\"", "\"\xf0\x9f\x98\x80\""}},
        {"{\"type\":\"string\",\"pattern\":\"^a.*z$\",\"maxLength\":4}",
         {"\"az\"", "\"abcz\"", "\"a\\u007az\""},
         {"\"abcdz\"", "\"a\"", "\"za\""}},
        {"{\"type\":\"string\",\"format\":\"date\"}",
         {"\"2024-02-29\"", "\"1999-12-31\""},
         {"\"2023-02-29\"", "\"2024-13-01\"", "\"2024-04-31\"", "\"24-01-01\""}},
        {"{\"type\":\"string\",\"format\":\"date-time\"}",
         {"\"2024-02-29T23:59:59Z\"", "\"2024-02-29T23:59:59.5+02:00\""},
         {"\"2024-02-29T24:00:00Z\"", "\"2024-02-29T23:59:59\""}},
        {"{\"format\":\"ipv4\",\"type\":\"string\"}",
         {"\"1.2.3.255\""},
         {"\"1.2.3.256\"", "\"01.2.3.4\""}},
        {"{\"format\":\"ipv6\",\"type\":\"string\"}",
         {"\"::1\"", "\"fe80::1:2\"", "\"1:2:3:4:5:6:7:8\"", "\"::ffff:1.2.3.4\""},
         {"\"1::2::3\"", "\"12345::\"", "\":\""}},
        {"{\"format\":\"uuid\",\"type\":\"string\"}",
         {"\"123e4567-e89b-12d3-a456-426655440000\""},
         {"\"123e4567\""}},
        {"{\"format\":\"email\",\"type\":\"string\"}",
         {"\"a.b+c@d-e.org\""},
         {"\"a@@b\"", "\"a.@b\"", "\"@b\""}},
        {"{\"format\":\"uri\",\"type\":\"string\"}",
         {"\"https://a.b/c?d=e#f\"", "\"urn:x:y\""},
         {"\"//a\"", "\"a b:c\""}},
        {"{\"format\":\"duration\",\"type\":\"string\"}",
         {"\"P1Y2M3DT4H5M6S\"", "\"PT5M\"", "\"P2W\""},
         {"\"P\"", "\"PT\"", "\"5M\""}},
        {"{\"format\":\"hostname\",\"type\":\"string\"}",
         {"\"a-b.example\""},
         {"\"-a\"", "\"a_b\""}},
        {"{\"enum\":[1,\"a\",null,[1,2],{\"k\":true}]}",
         {"1", "\"a\"", "null", "[1, 2]", "{\"k\":true}"},
         {"2", "\"b\"", "[1]", "{}", "{\"k\":true,\"l\":1}"}},
        {"{\"const\":\"x\\ny\"}", {"\"x\\ny\""}, {"\"xy\""}},
        {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":1,\"maxItems\":3}",
         {"[1]", "[1,2,3]", "[ 1 , 2 ]"},
         {"[]", "[1,2,3,4]", "[\"a\"]", "[1,]"}},
        {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"null\"}],"
         "\"items\":false}",
         {"[]", "[\"a\"]", "[\"a\",null]"},
         {"[1]", "[\"a\",null,1]"}},
        {"{\"type\":\"array\",\"contains\":{\"const\":5},\"items\":{\"type\":\"integer\"},"
         "\"maxItems\":2}",
         {"[5]", "[1,5]", "[5,5]"},
         {"[]", "[1]", "[1,2]"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{}},\"required\":"
         "[\"a\"],"
         "\"additionalProperties\":false}",
         {"{\"a\":1}", "{\"a\":1,\"b\":2}", "{\"b\":[],\"a\":1}"},
         {"{}", "{\"b\":1}", "{\"a\":1,\"c\":1}", "{\"a\":1,\"a\":2}", "{\"a\":1.5}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},"
         "\"additionalProperties\":{\"type\":\"string\"}}",
         {"{\"x\":\"y\",\"a\":1,\"ab\":\"z\"}"},
         {"{\"x\":1}", "{\"a\":\"y\"}", "{\"x\":\"y\",\"x\":\"z\"}",
          "{\"x\":\"y\",\"\\u0078\":\"z\"}"}},
        {"{\"type\":\"object\",\"patternProperties\":{\"^s_\":{\"type\":\"string\"},\"_i$\":{"
         "\"maxLength\":2}},"
         "\"additionalProperties\":false}",
         {"{\"s_a\":\"long\"}", "{\"s_i\":\"ab\"}", "{\"x_i\":5}"},
         {"{\"s_i\":\"abc\"}", "{\"s_a\":1}", "{\"z\":1}"}},
        {"{\"type\":\"object\",\"propertyNames\":{\"pattern\":\"^[a-z]+$\"},\"minProperties\":1,"
         "\"maxProperties\":2}",
         {"{\"a\":1}", "{\"a\":1,\"bc\":2}"},
         {"{}", "{\"A\":1}", "{\"a\":1,\"b\":1,\"c\":1}"}},
        {"{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"integer\",\"maximum\":3}]}",
         {"\"a\"", "3"},
         {"4", "null"}},
        {"{\"oneOf\":[{\"type\":\"integer\",\"multipleOf\":2},{\"type\":\"integer\",\"multipleOf\":"
         "3}]}",
         {"2", "3", "4"},
         {"6", "1", "0"}},
        {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"oneOf\":[{\"required\":[\"a\"]}"
         ",{\"required\":[\"b\"]}]}",
         {"{\"a\":1}", "{\"b\":1,\"c\":2}"},
         {"{}", "{\"a\":1,\"b\":1}"}},
        {"{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},"
         "\"required\":[\"a\"]},"
         "{\"properties\":{\"a\":{\"minimum\":5},\"b\":{\"type\":\"null\"}}}]}",
         {"{\"a\":5}", "{\"a\":9,\"b\":null}"},
         {"{\"a\":4}", "{\"a\":5,\"b\":1}", "5"}},
        {"{\"not\":{\"type\":[\"string\",\"null\"]}}", {"1", "[]", "{}"}, {"\"a\"", "null"}},
        {"{\"type\":\"string\",\"not\":{\"enum\":[\"a\",\"bc\"]}}",
         {"\"b\"", "\"ab\""},
         {"\"a\"", "\"bc\""}},
        {"{\"type\":\"object\",\"properties\":{\"k\":{\"enum\":[\"x\",\"y\"]},\"n\":{\"type\":"
         "\"integer\"}},\"required\":[\"k\"],"
         "\"if\":{\"properties\":{\"k\":{\"const\":\"x\"}}},\"then\":{\"required\":[\"n\"]},"
         "\"else\":{\"properties\":{\"n\":false}}}",
         {"{\"k\":\"x\",\"n\":1}", "{\"k\":\"y\"}"},
         {"{\"k\":\"x\"}", "{\"k\":\"y\",\"n\":1}"}},
        {"{\"dependentRequired\":{\"a\":[\"b\"],\"b\":[\"c\"]},\"type\":\"object\"}",
         {"{}", "{\"c\":1}", "{\"a\":1,\"b\":1,\"c\":1}"},
         {"{\"a\":1}", "{\"a\":1,\"b\":1}"}},
        {"{\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},"
         "\"next\":{\"$ref\":\"#/$defs/n\"}},"
         "\"required\":[\"v\"],\"additionalProperties\":false}},\"$ref\":\"#/$defs/n\"}",
         {"{\"v\":1}", "{\"v\":1,\"next\":{\"v\":2,\"next\":{\"v\":3}}}"},
         {"{\"v\":1,\"next\":{}}", "{\"next\":{\"v\":1}}"}},
        {"{\"type\":\"object\",\"properties\":{\"a\\\"b\":{\"type\":\"null\"},\"\xc3\xa9\":{"
         "\"type\":\"null\"}},"
         "\"additionalProperties\":false}",
         {"{\"a\\\"b\":null}", "{\"\xc3\xa9\":null}"},
         {"{\"ab\":null}"}},
        {"{\"properties\":{\"gone\":false,\"a\":{\"type\":\"null\"}},\"type\":\"object\"}",
         {"{\"a\":null}", "{\"go\":1}", "{\"gones\":1}"},
         {"{\"gone\":1}"}},
    };
    check_rows(GRAMMAR_SCHEMA, ROWS(rows));
}

static void test_whitespace(void **state)
{
    (void)state;
    struct grammar *g = compile(GRAMMAR_SCHEMA, "{\"type\":\"object\",\"required\":[\"a\"],"
                                                "\"properties\":{\"a\":{\"type\":\"array\"}}}");
    assert_true(fits(g, "{\n  \"a\": [\n    1,\n    2\n  ]\n}"));
    assert_true(fits(g, "\n{ \"a\" : [ ] }"));
    assert_true(fits(g, "{\r\n\t\"a\":\t[]\r\n}"));
    assert_false(fits(g, "{\"a\":[]} "));
    char many[400] = "{";
    memset(many + 1, '\n', 300);
    strcpy(many + 301, "\"a\":[]}");
    assert_false(fits(g, many)); /* bounded */
    grammar_free(g);
    struct error err = {0};
    g = compile_flags(GRAMMAR_SCHEMA, "{\"type\":\"object\"}", GRAMMAR_COMPACT, &err);
    assert_true(fits(g, "{\"a\":[1,2]}"));
    assert_false(fits(g, "{\"a\": 1}"));
    grammar_free(g);
}

static void test_order(void **state)
{
    (void)state;
    struct error err = {0};
    struct grammar *g = compile_flags(GRAMMAR_SCHEMA,
                                      "{\"type\":\"object\",\"properties\":{\"z\":{\"type\":"
                                      "\"integer\"},\"m\":{\"type\":\"integer\"},"
                                      "\"a\":{\"type\":\"integer\"}},\"required\":[\"m\"]}",
                                      GRAMMAR_SCHEMA_ORDER, &err);
    assert_non_null(g);
    assert_true(fits(g, "{\"z\":1,\"m\":2,\"a\":3,\"other\":4}"));
    assert_true(fits(g, "{\"m\":2}"));
    assert_false(fits(g, "{\"m\":2,\"z\":1}"));
    assert_false(fits(g, "{\"a\":3,\"m\":2}"));
    assert_false(fits(g, "{\"other\":1,\"m\":2}"));
    grammar_free(g);
}

static void test_refused(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"{\"properties\":{\"a\":{\"unevaluatedProperties\":false}}}",
         "#/properties/a/unevaluatedProperties"},
        {"{\"items\":{\"uniqueItems\":true}}", "#/items/uniqueItems"},
        {"{\"properties\":{\"x/y\":{\"pattern\":\"(?<=a)b\"}}}", "#/properties/x~1y/pattern"},
        {"{\"format\":\"regex\"}", "#/format"},
        {"{\"$ref\":\"https://example.com/other.json\"}", "#/$ref"},
        {"{\"$ref\":\"#/$defs/none\"}", "does not exist"},
        {"{\"$ref\":\"#\"}", "refers to itself"},
        {"{\"type\":\"strin\"}", "#/type"},
        {"{\"minimum\":\"1\"}", "#/minimum"},
        {"{\"multipleOf\":0}", "#/multipleOf"},
        {"{\"not\":{\"additionalProperties\":false}}", "#/not"},
        {"{\"contains\":{},\"maxContains\":2}", "#/maxContains"},
        {"{\"enum\":[]}", "no value fits"},
        {"{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}", "no value fits"},
        {"{\"type\":\"object\",\"required\":[\"a\"],\"properties\":{\"a\":false}}",
         "no value fits"},
        {"{\"$defs\":{\"x\":{\"type\":\"object\",\"required\":[\"x\"],\"properties\":{\"x\":{\"$"
         "ref\":\"#/$defs/x\"}}}},"
         "\"$ref\":\"#/$defs/x\"}",
         "no value fits"},
        {"{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"a\",\"b\"]},\"minProperties\":2}",
         "finitely many names"},
        {"[1]", "a schema is an object"},
        {"{", "not valid JSON"},
        {"{\"a\":\"\\ud800\"}", "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct error err = {0};
        struct grammar *g = compile_flags(GRAMMAR_SCHEMA, rows[i][0], 0, &err);
        if (g || !strstr(err.msg, rows[i][1]))
            fail_msg("%s: %s", rows[i][0], g ? "compiled" : err.msg);
    }
}

/* At every place of these texts, the mask holds exactly the tokens that accept takes. */
static void test_masks(void **state)
{
    (void)state;
    static const struct {
        enum grammar_kind kind;
        const char *source, *text;
    } rows[] = {
        {GRAMMAR_SCHEMA,
         "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"n\":{\"type\":"
         "\"integer\"}}}",
         "{\"name\": \"A \\\"b\\\" \xc3\xa9\", \"nam\": [1, \"x\"], \"n\": -5}"},
        {GRAMMAR_SCHEMA,
         "{\"type\":\"object\",\"properties\":{\"id\":{\"pattern\":\"^[a-z][^/"
         "]*$\",\"type\":\"string\",\"maxLength\":9},"
         "\"in\":{\"enum\":[\"one\",\"only\",3]}},\"additionalProperties\":false}",
         "{\"id\":\"abc d\",\"in\":\"only\"}"},
        {GRAMMAR_SCHEMA,
         "{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"}},"
         "\"required\":[\"a\"]},"
         "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\",\"minimum\":2}}}]}",
         "{\"ab\":1.5,\"a\":27.5}"},
        {GRAMMAR_SCHEMA, "{\"type\":\"string\",\"minLength\":3,\"maxLength\":12}", "\"Hello wor\""},
        {GRAMMAR_GBNF, json_gbnf, "{\"a\": [\"x y\", 2]}"},
        {GRAMMAR_REGEX, "[A-Za-z ]{1,20}[.!]", "Some words."},
    };
    uint32_t *bits = mem_zalloc(words, sizeof *bits);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct grammar *g = compile(rows[i].kind, rows[i].source);
        struct grammar_matcher *m = grammar_matcher_new(g, vocab);
        struct token_list ids = {0};
        struct error err = {0};
        assert_true(tokenizer_encode(tok, rows[i].text, strlen(rows[i].text), 0, &ids, &err));
        for (size_t k = 0; k <= ids.n; k++) {
            assert_true(grammar_mask(m, bits, &err));
            for (int32_t id = 0; id < tokenizer_n_vocab(tok); id++) {
                if (tokenizer_kind(tok, id) == TOKEN_USER)
                    continue; /* fewer of them are offered than taken */
                bool took = grammar_accept(m, id, &err);
                if (took)
                    grammar_rollback(m, 1);
                if (took != has(bits, id)) {
                    size_t n;
                    const char *p = tokenizer_piece(tok, id, &n);
                    fail_msg("%s after %zu tokens: %d \"%.*s\": mask %d, accept %d", rows[i].text,
                             k, (int)id, (int)n, p, has(bits, id), took);
                }
            }
            if (k < ids.n)
                assert_true(grammar_accept(m, ids.ids[k], &err));
        }
        assert_true(grammar_is_accepting(m));
        token_list_clear(&ids);
        grammar_matcher_free(m);
        grammar_free(g);
    }
    mem_free(bits);
}

static void test_rollback(void **state)
{
    (void)state;
    struct grammar *g = compile(
        GRAMMAR_SCHEMA, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\"}}}");
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    const char *text = "{\"a\": [{\"b\": [1, 2, {\"c\": \"dd\"}]}, null], \"e\": true}";
    struct token_list ids = {0};
    struct error err = {0};
    assert_true(tokenizer_encode(tok, text, strlen(text), 0, &ids, &err));
    uint32_t **masks = mem_zalloc(ids.n + 1, sizeof *masks), *bits = mem_zalloc(words, 4);
    for (size_t i = 0; i <= ids.n; i++) {
        masks[i] = mem_zalloc(words, 4);
        assert_true(grammar_mask(m, masks[i], &err));
        if (i < ids.n)
            assert_true(grammar_accept(m, ids.ids[i], &err));
    }
    assert_true(grammar_is_accepting(m));
    unsigned seed = 1;
    size_t at = ids.n;
    for (int round = 0; round < 300; round++) {
        seed = seed * 1664525 + 1013904223;
        size_t to = (seed >> 8) % (ids.n + 1);
        if (to < at)
            grammar_rollback(m, at - to);
        for (; at < to; at++)
            assert_true(grammar_accept(m, ids.ids[at], &err));
        at = to;
        assert_false(grammar_accept(m, -1, &err));
        assert_true(grammar_mask(m, bits, &err));
        assert_memory_equal(bits, masks[at], words * 4);
    }
    grammar_rollback(m, 100000); /* all of them */
    assert_true(grammar_mask(m, bits, &err));
    assert_memory_equal(bits, masks[0], words * 4);
    for (size_t i = 0; i <= ids.n; i++)
        mem_free(masks[i]);
    mem_free(masks);
    mem_free(bits);
    token_list_clear(&ids);
    grammar_matcher_free(m);
    grammar_free(g);
}

/* What is foreseen: drafts up to the first that does not fit, then forced tokens. It leaves no trace, also in the decisions of
 * a budget. */
static void test_foresee(void **state)
{
    (void)state;
    enum { MOST = 24 };
    static const char *const text = "{\"name\":\"Ab c\",\"size\":12,\"tags\":[\"x\",\"yz\"]}";
    static const char *const schema =
        "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"size\":{\"type\":"
        "\"integer\"},\"tags\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}}},\"required\":["
        "\"name\",\"size\",\"tags\"],\"additionalProperties\":false}";
    struct error err = {0};
    uint32_t *bits = mem_zalloc(words, 4), *want = mem_zalloc(words, 4);
    int cut = 0, added = 0;
    for (int budget = 0; budget <= 80; budget += 40) {
        struct grammar *g = compile_flags(GRAMMAR_SCHEMA, schema, GRAMMAR_COMPACT, &err);
        struct grammar_matcher *m = grammar_matcher_new(g, vocab),
                               *plain = grammar_matcher_new(g, vocab);
        struct token_list ids = {0};
        grammar_set_budget(m, budget);
        grammar_set_budget(plain, budget);
        assert_true(tokenizer_encode(tok, text, strlen(text), 0, &ids, &err));
        for (size_t k = 0; k < ids.n; k++) {
            for (int wrong = 0; wrong <= 4; wrong++) {
                int32_t drafts[MOST];
                int n = ids.n - k < 4 ? (int)(ids.n - k) : 4;
                memcpy(drafts, ids.ids + k, (size_t)n * sizeof *drafts);
                if (wrong < n)
                    drafts[wrong] = (drafts[wrong] + 7 * (int)k + 1) % tokenizer_n_vocab(tok);
                int32_t asked[4];
                memcpy(asked, drafts, sizeof asked);
                int got = grammar_foresee(m, drafts, n, MOST);
                assert_true(got <= MOST);
                int taken = 0; /* each is allowed after those before it */
                while (taken < got && grammar_accept(plain, drafts[taken], &err))
                    taken++;
                assert_int_equal(taken, got);
                grammar_rollback(plain, (size_t)taken);
                int same = 0;
                while (same < got && same < n && drafts[same] == asked[same])
                    same++;
                cut += same < n;
                added += got > same;
                assert_true(wrong < n || same == n); /* the text itself fits */
            }
            assert_true(grammar_mask(m, bits, &err));
            struct grammar_matcher *fresh = grammar_matcher_new(g, vocab);
            grammar_set_budget(fresh, budget);
            for (size_t j = 0; j <= k; j++) { /* as one that foresaw nothing */
                assert_true(grammar_mask(fresh, want, &err));
                if (j < k)
                    assert_true(grammar_accept(fresh, ids.ids[j], &err));
            }
            assert_memory_equal(bits, want, words * 4);
            grammar_matcher_free(fresh);
            assert_true(grammar_accept(m, ids.ids[k], &err) &&
                        grammar_accept(plain, ids.ids[k], &err));
        }
        token_list_clear(&ids);
        grammar_matcher_free(m);
        grammar_matcher_free(plain);
        grammar_free(g);
    }
    print_message("%d drafts were cut, %d continued\n", cut, added);
    assert_true(cut > 20 && added > 20);
    mem_free(bits);
    mem_free(want);
}

static void test_forced(void **state)
{
    (void)state;
    struct error err = {0};
    struct grammar *g =
        compile_flags(GRAMMAR_SCHEMA, "{\"const\":{\"only\":[null]}}", GRAMMAR_COMPACT, &err);
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    uint32_t *bits = mem_zalloc(words, 4);
    struct buf out = {0};
    int forced = 0;
    for (int i = 0; i < 100 && !grammar_is_accepting(m); i++) {
        assert_true(grammar_mask(m, bits, &err));
        int32_t only = grammar_forced(m), n = 0, first = -1;
        for (int32_t id = tokenizer_n_vocab(tok) - 1; id >= 0; id--)
            if (has(bits, id)) {
                n++;
                first = id;
            }
        assert_true(n > 0);
        assert_int_equal(only, n == 1 ? first : -1);
        forced += n == 1;
        size_t len;
        const char *p = tokenizer_piece(tok, first, &len);
        buf_add(&out, p, len);
        assert_true(grammar_accept(m, first, &err));
    }
    assert_string_equal(out.p, "{\"only\":[null]}");
    assert_true(grammar_forced(m) == tokenizer_eos(tok) || grammar_forced(m) == -1);
    print_message("%d tokens were forced\n", forced);
    buf_clear(&out);
    mem_free(bits);
    grammar_matcher_free(m);
    grammar_free(g);
}

/* Gives up at the first call after `left` ones. */
struct patience {
    int left, calls;
};
static bool is_patient(void *arg)
{
    struct patience *p = arg;
    p->calls++;
    return p->left-- > 0;
}

/* A mask or a token that is given up changes nothing: it comes out the same later, as it does without. It is asked
 * about at steady intervals of work. */
static void test_pace(void **state)
{
    (void)state;
    struct buf text = {0};
    struct error err = {0};
    buf_adds(&text, "root ::= ");
    for (int i = 0; i < 300; i++)
        buf_addf(&text, "[a-z] root \"%d\" | ", i);
    buf_adds(&text, "\"\"\n");
    struct grammar *g = compile(GRAMMAR_GBNF, text.p);
    struct grammar_matcher *m = grammar_matcher_new(g, vocab),
                           *plain = grammar_matcher_new(g, vocab);
    uint32_t *bits = mem_zalloc(words, 4), *want = mem_zalloc(words, 4);
    int given_up = 0;
    m->no_cache = plain->no_cache = true;
    grammar_set_budget(m, 40);
    grammar_set_budget(plain, 40);
    for (int n = 0; n < 30; n++) {
        struct patience p = {0};
        assert_true(grammar_mask(plain, want, &err));
        size_t work = grammar_mask_work(plain);
        grammar_set_pace(m, is_patient, &p);
        for (int left = 0; left < 6; left += 2) {
            p = (struct patience){.left = left};
            if (grammar_mask(m, bits, &err))
                break;
            assert_true(!err.msg[0] && p.calls == left + 1);
            given_up++;
        }
        p = (struct patience){.left = 1 << 30};
        assert_true(grammar_mask(m, bits, &err));
        assert_memory_equal(bits, want, words * 4);
        assert_true(p.calls >= (int)(work / GRAMMAR_PIECE / 4) &&
                    p.calls <= (int)(work / GRAMMAR_PIECE));
        int32_t id = -1;
        for (int32_t i = 0; i < tokenizer_n_vocab(tok) && id < 0; i++)
            id = has(bits, (i * 7919 + n * 31) % tokenizer_n_vocab(tok))
                     ? (i * 7919 + n * 31) % tokenizer_n_vocab(tok)
                     : -1;
        assert_true(id >= 0);
        if (tokenizer_is_end(tok, id))
            break;
        p = (struct patience){0};
        if (!grammar_accept(m, id, &err)) {
            assert_false(err.msg[0]);
            given_up++;
            grammar_set_pace(m, NULL, NULL);
            assert_true(grammar_accept(m, id, &err));
        }
        grammar_set_pace(m, NULL, NULL);
        assert_true(grammar_accept(plain, id, &err));
    }
    assert_true(given_up > 10);
    mem_free(bits);
    mem_free(want);
    grammar_matcher_free(m);
    grammar_matcher_free(plain);
    grammar_free(g);
    buf_clear(&text);
}

/* A place where a sequence stood before has its mask: the next item of a list, another sequence; not
 * where something else may follow. */
static void test_kept(void **state)
{
    (void)state;
    static const char text[] =
        "[{\"a\":12,\"b\":\"x y\"},{\"a\":12,\"b\":\"x y\"},{\"a\":12,\"b\":\"x y\"}]";
    struct grammar *g =
        compile(GRAMMAR_SCHEMA,
                "{\"type\":\"array\",\"minItems\":2,\"items\":{\"type\":\"object\",\"required\":["
                "\"a\",\"b\"],\"additionalProperties\":false,\"properties\":{\"a\":{\"type\":"
                "\"integer\"},\"b\":{\"type\":\"string\"}}}}");
    struct token_list ids = {0};
    struct error err = {0};
    uint32_t *bits = mem_zalloc(words, 4), *made = mem_zalloc(words, 4);
    assert_true(tokenizer_encode(tok, text, strlen(text), 0, &ids, &err));
    uint64_t hits[3] = {memo_hits(vocab->memo)};
    for (int round = 0; round < 2; round++) {
        struct grammar_matcher *m = grammar_matcher_new(g, vocab);
        struct grammar_matcher *fresh = grammar_matcher_new(g, vocab);
        fresh->no_cache = true;
        for (size_t i = 0; i < ids.n; i++) {
            assert_true(grammar_mask(m, bits, &err) && grammar_mask(fresh, made, &err));
            assert_memory_equal(bits, made, words * 4);
            assert_true(grammar_accept(m, ids.ids[i], &err));
            assert_true(grammar_accept(fresh, ids.ids[i], &err));
        }
        grammar_matcher_free(m);
        grammar_matcher_free(fresh);
        hits[round + 1] = memo_hits(vocab->memo);
    }
    /* the third item is like the second; the second sequence like the first */
    assert_true(hits[1] - hits[0] > ids.n / 5);
    assert_true(hits[2] - hits[1] > ids.n / 2);
    print_message("%zu masks: %d were there, then %d\n", ids.n, (int)(hits[1] - hits[0]),
                  (int)(hits[2] - hits[1]));
    token_list_clear(&ids);
    mem_free(bits);
    mem_free(made);
    grammar_free(g);
}

/* Tokens that end an answer where it is complete, control tokens never. */
static void test_special(void **state)
{
    (void)state;
    struct grammar *g = compile(GRAMMAR_SCHEMA, "{\"type\":\"string\"}");
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    struct error err = {0};
    uint32_t *bits = mem_zalloc(words, 4);
    const char *text = "\"a <|im_end|> b\"";
    struct token_list ids = {0};
    assert_true(tokenizer_encode(tok, text, strlen(text), 0, &ids, &err));
    for (size_t i = 0; i <= ids.n; i++) {
        assert_true(grammar_mask(m, bits, &err));
        for (int32_t id = 0; id < tokenizer_n_vocab(tok); id++) {
            bool end = tokenizer_is_end(tok, id);
            if (end)
                assert_int_equal(has(bits, id), i == ids.n);
            else if (tokenizer_kind(tok, id) == TOKEN_CONTROL)
                assert_false(has(bits, id) || grammar_accept(m, id, &err));
        }
        if (i < ids.n)
            assert_true(grammar_accept(m, ids.ids[i], &err));
    }
    assert_true(grammar_accept(m, tokenizer_eos(tok), &err));
    assert_false(grammar_accept(m, ids.ids[0], &err)); /* nothing follows the end */
    token_list_clear(&ids);
    mem_free(bits);
    grammar_matcher_free(m);
    grammar_free(g);
}

static void test_cache(void **state)
{
    (void)state;
    struct grammar_cache *c = grammar_cache_new(2);
    struct error err = {0};
    bool hit;
    struct grammar_source a = {GRAMMAR_REGEX, 0, "a+", 2}, b = {GRAMMAR_REGEX, 0, "b+", 2};
    struct grammar_source d = {GRAMMAR_GBNF, 0, "a+", 2}, e = {GRAMMAR_REGEX, 0, "c+", 2};
    struct grammar *g1 = grammar_cache_get(c, &a, &hit, &err);
    assert_false(hit);
    struct grammar *g2 = grammar_cache_get(c, &a, &hit, &err);
    assert_true(hit && g1 == g2);
    assert_null(grammar_cache_get(c, &d, &hit, &err)); /* the same text, another kind */
    grammar_free(g2);
    grammar_free(grammar_cache_get(c, &b, &hit, &err));
    assert_false(hit);
    grammar_free(grammar_cache_get(c, &a, &hit, &err));
    assert_true(hit);
    grammar_free(grammar_cache_get(c, &e, &hit, &err)); /* b is the oldest now */
    grammar_free(grammar_cache_get(c, &a, &hit, &err));
    assert_true(hit);
    grammar_free(grammar_cache_get(c, &b, &hit, &err));
    assert_false(hit);
    grammar_cache_free(c);
    assert_true(fits(g1, "aa")); /* outlives the cache */
    grammar_free(g1);
}

static void *thread_walk(void *arg)
{
    struct grammar *g = arg;
    for (int i = 0; i < 20; i++)
        if (!fits(g, "{\"name\": \"x y z\", \"more\": [1, 2, {\"deep\": null}]}"))
            return NULL;
    return g;
}

static void test_threads(void **state)
{
    (void)state;
    struct grammar *g = compile(
        GRAMMAR_SCHEMA, "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"}}}");
    pthread_t t[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&t[i], NULL, thread_walk, g), 0);
    for (int i = 0; i < 4; i++) {
        void *ok;
        pthread_join(t[i], &ok);
        assert_non_null(ok);
    }
    grammar_free(g);
}

int main(void)
{
    struct error err = {0};
    tok = tokenizer_open(NULL, &err); /* the built-in model's */
    if (!tok) {
        printf("skipped: %s\n", err.msg);
        return 77;
    }
    vocab = grammar_vocab_new(tok);
    words = grammar_mask_words(tokenizer_n_vocab(tok));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_regex),      cmocka_unit_test(test_gbnf),
        cmocka_unit_test(test_lark),       cmocka_unit_test(test_x_lark),
        cmocka_unit_test(test_choice),     cmocka_unit_test(test_schema),
        cmocka_unit_test(test_whitespace), cmocka_unit_test(test_order),
        cmocka_unit_test(test_refused),    cmocka_unit_test(test_masks),
        cmocka_unit_test(test_rollback),   cmocka_unit_test(test_forced),
        cmocka_unit_test(test_foresee),    cmocka_unit_test(test_special),
        cmocka_unit_test(test_cache),      cmocka_unit_test(test_threads),
        cmocka_unit_test(test_kept),       cmocka_unit_test(test_pace),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    grammar_vocab_free(vocab);
    tokenizer_free(tok);
    return failed;
}
