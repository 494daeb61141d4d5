/*
 * Constraints on whole replies (text/chat/chat_grammar.h): what each format of tool calls accepts and
 * rejects, free reasoning before it, text beside calls, and tags as special tokens or spelled out.
 * Every reply that a constraint allows must be read back by the chat parser as calls with valid
 * arguments. Each test runs with the built-in model's vocabulary and with one that has every family's
 * tags as special tokens.
 */
#include "base/mem.h"
#include "reply_forms.h"
#include "schema_check.h"
#include "text/chat/chat_grammar.h"
#include "text/tokenizer/tokenizer_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

static struct tokenizer *tok;
static struct grammar_vocab *vocab;
static size_t words;
static bool tagged; /* the vocabulary has the tags */
static json_t *tools;

static const char TOOLS[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"strict\":true,\"parameters\":"
    "{"
    "\"type\":\"object\",\"properties\":{\"town\":{\"type\":\"string\",\"maxLength\":12},\"days\":{"
    "\"type\":\"integer\",\"minimum\":1,\"maximum\":9},\"unit\":{\"enum\":[\"C\",\"F\",null]}},"
    "\"required\":[\"town\",\"days\"],\"additionalProperties\":false}}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"ping\"}},"
    "{\"type\":\"function\",\"function\":{\"name\":\"send\",\"strict\":true,\"parameters\":{"
    "\"type\":\"object\",\"properties\":{\"to\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}"
    ","
    "\"minItems\":1},\"loud\":{\"type\":\"boolean\"}},\"required\":[\"to\"],"
    "\"additionalProperties\":false}}}]";

static struct grammar *compile(struct chat_constraint c)
{
    struct error err = {0};
    if (!c.tools && !c.response)
        c.tools = tools;
    char *text = chat_constraint_text(&c);
    struct grammar_source src = {GRAMMAR_REPLY, GRAMMAR_SCHEMA_ORDER, text, strlen(text)};
    struct grammar *g = grammar_compile(&src, &err);
    if (!g)
        fail_msg("%.300s: %s", text, err.msg);
    mem_free(text);
    return g;
}

/* How much of a text's tokens is taken, as in generation; *ends: it may end there. */
static size_t walk(struct grammar *g, const char *text, bool *ends)
{
    struct token_list ids = {0};
    struct error err = {0};
    uint32_t *bits = mem_zalloc(words, sizeof *bits);
    assert_true(tokenizer_encode(tok, text, strlen(text), TOKENIZE_SPECIAL, &ids, &err));
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    size_t done = 0;
    for (size_t i = 0; i < ids.n; i++) {
        int32_t id = ids.ids[i];
        assert_true(grammar_mask(m, bits, &err));
        bool ok = bits[id / 32] >> id % 32 & 1;
        assert_int_equal(ok, grammar_accept(m, id, &err));
        if (!ok)
            break;
        size_t n;
        tokenizer_piece(tok, id, &n);
        done += n;
        if (i % 3 == 1) { /* there and back again */
            grammar_rollback(m, 2);
            assert_true(grammar_accept(m, ids.ids[i - 1], &err) && grammar_accept(m, id, &err));
        }
    }
    *ends = grammar_is_accepting(m);
    if (*ends) {
        assert_true(grammar_mask(m, bits, &err));
        assert_true(bits[tokenizer_eos(tok) / 32] >> tokenizer_eos(tok) % 32 & 1);
        assert_true(grammar_accept(m, tokenizer_eos(tok), &err));
    }
    grammar_matcher_free(m);
    token_list_clear(&ids);
    mem_free(bits);
    return done;
}

static void takes(struct grammar *g, const char *text)
{
    bool ends;
    size_t n = walk(g, text, &ends);
    if (n < strlen(text) || !ends)
        fail_msg("stops at %zu of %zu, ends %d: %s", n, strlen(text), ends, text);
}

/* The text is not taken whole, or cannot end there. */
static void refuses(struct grammar *g, const char *text)
{
    bool ends;
    if (walk(g, text, &ends) == strlen(text) && ends)
        fail_msg("takes %s", text);
}

static json_t *parse(enum chat_format f, const char *text, size_t len, bool in_reasoning)
{
    struct chat_message m = {0};
    struct chat_parse_options opt = {.tools = true,
                                     .reasoning = true,
                                     .in_reasoning = in_reasoning,
                                     .schema = tools,
                                     .event = chat_message_event,
                                     .arg = &m};
    struct chat_parser *p = chat_parser_new(f, &opt);
    chat_parser_push(p, text, len);
    chat_parser_finish(p);
    json_t *j = chat_message_json(&m);
    chat_parser_free(p);
    chat_message_clear(&m);
    return j;
}

/* The calls that the parser reads: "name{arguments} ...". */
static void calls_are(enum chat_format f, const char *text, const char *want)
{
    json_t *m = parse(f, text, strlen(text), false), *call;
    struct buf got = {0};
    size_t i;
    buf_adds(&got, "");
    json_array_foreach(json_object_get(m, "tool_calls"), i, call)
    {
        json_t *fn = json_object_get(call, "function");
        json_t *args = json_loads(json_string_value(json_object_get(fn, "arguments")), 0, NULL);
        char *s = args ? json_dumps(args, JSON_COMPACT) : NULL;
        buf_addf(&got, "%s%s%s", i ? " " : "", json_string_value(json_object_get(fn, "name")),
                 s ? s : "?");
        free(s);
        json_decref(args);
    }
    assert_string_equal(got.p, want);
    buf_clear(&got);
    json_decref(m);
}

static void test_forms(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct form_case *c = &cases[i];
        calls_are(c->format, c->one, c->calls);
        struct grammar *any = compile((struct chat_constraint){.format = c->format});
        struct grammar *must =
            compile((struct chat_constraint){.format = c->format, .required = true});
        struct grammar *once = compile(
            (struct chat_constraint){.format = c->format, .required = true, .one_call = true});
        struct grammar *named = compile(
            (struct chat_constraint){.format = c->format, .required = true, .only = "get_weather"});
        takes(any, c->one);
        takes(must, c->one);
        takes(once, c->one);
        takes(named, c->one);
        if (c->two) {
            calls_are(c->format, c->two, c->both);
            takes(any, c->two);
            takes(must, c->two);
            refuses(once, c->two);
            refuses(named, c->two);
        }
        for (int k = 0; k < 8 && c->wrong[k]; k++) {
            refuses(any, c->wrong[k]);
            refuses(must, c->wrong[k]);
        }
        for (int k = 0; k < 4 && c->text[k]; k++) {
            takes(any, c->text[k]);
            refuses(must, c->text[k]);
        }
        refuses(must, "");
        takes(any, "");
        grammar_free(any);
        grammar_free(must);
        grammar_free(once);
        grammar_free(named);
    }
}

/* A tool without a schema takes any object, in any form. */
static void test_open_arguments(void **state)
{
    (void)state;
    static const char want[] =
        "ping{\"a\":\"b c\",\"d\":[1,{\"e\":\"f\"},null],\"g\":{\"h\":true}}";
    static const struct {
        enum chat_format format;
        const char *text;
    } rows[] = {
        {CHAT_HERMES,
         "<tool_call>\n{\"name\": \"ping\", \"arguments\": {\"a\": \"b c\", \"d\": [1, "
         "{\"e\": \"f\"}, null], \"g\": {\"h\": true}}}\n</tool_call>"},
        {CHAT_QWEN_XML,
         "<tool_call>\n<function=ping>\n<parameter=a>\nb c\n</parameter>\n<parameter=d>\n[1, "
         "{\"e\": \"f\"}, null]\n</parameter>\n<parameter=g>\n{\"h\": true}\n</parameter>\n"
         "</function>\n</tool_call>"},
        {CHAT_PYTHONIC, "[ping(a=\"b c\", d=[1, {\"e\": \"f\"}, None], g={\"h\": True})]"},
        {CHAT_GLM, G_CALL("ping", G_ARG("a", "b c") G_ARG("d", "[1, {\"e\": \"f\"}, null]")
                                      G_ARG("g", "{\"h\": true}"))},
        {CHAT_MINIMAX,
         M_FRAME(M_CALL("ping", M_ARG("a", "b c") M_ARG("d", "[1, {\"e\": \"f\"}, null]")
                                    M_ARG("g", "{\"h\": true}")))},
        {CHAT_DEEPSEEK_V4, V_FRAME(V_CALL("ping", V_ARG("a", "true", "b c") V_ARG(
                                                      "d", "false", "[1, {\"e\": \"f\"}, null]")
                                                      V_ARG("g", "false", "{\"h\": true}")))},
        {CHAT_SEED, S_CALL("ping", S_ARG("a", "b c") S_ARG("d", "[1, {\"e\": \"f\"}, null]")
                                       S_ARG("g", "{\"h\": true}"))},
        {CHAT_HUNYUAN,
         H_FRAME(H_CALL("ping", H_ARG("a", "b c") H_ARG("d", "[1, {\"e\": \"f\"}, null]")
                                    H_ARG("g", "{\"h\": true}")))},
        {CHAT_MINIMAX_M3,
         N_FRAME(N_CALL("ping", N_ARG("a", "b c") N_ARG(
                                    "d", N_ARG("item", "1") N_ARG("item", N_ARG("e", "f")) N_ARG(
                                             "item", "null")) N_ARG("g", N_ARG("h", "true"))))},
        {CHAT_MUSE, U_CALL("ping", U_ARG("a", "b c") U_ARG("d", "[1, {\"e\": \"f\"}, null]")
                                       U_ARG("g", "{\"h\": true}"))},
        {CHAT_GEMMA,
         E_CALL("ping", "a:" E_TEXT("b c") ",d:[1,{e:" E_TEXT("f") "},null],g:{h:true}")},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        calls_are(rows[i].format, rows[i].text, want);
        for (int must = 0; must < 2; must++) {
            struct grammar *g =
                compile((struct chat_constraint){.format = rows[i].format, .required = must});
            takes(g, rows[i].text);
            grammar_free(g);
        }
    }
}

#define CALL "<tool_call>\n{\"name\": \"ping\", \"arguments\": {}}\n</tool_call>"
static void test_thinking(void **state)
{
    (void)state;
    struct grammar_source age = {GRAMMAR_REGEX, 0, "[0-9]{2}", 8};
    struct chat_constraint c = {.format = CHAT_HERMES, .response = &age};
    struct grammar *g = compile(c); /* the prompt has closed the thinking */
    takes(g, "42");
    refuses(g, "<think>Hm.</think>42");
    grammar_free(g);
    c.thinking = CHAT_THINKS_FIRST;
    g = compile(c);
    takes(g, "Hm. {5} 7 <tool_call> </thin </think>\n\n42");
    takes(g, "</think>42");
    refuses(g, "42");
    refuses(g, "Hm.</think>\n\nNo");
    grammar_free(g);
    c.thinking = CHAT_THINKS_MAYBE;
    g = compile(c);
    takes(g, "<think>\nHm. Let me see.</think>\n\n42");
    takes(g, "42");
    refuses(g, "Hm.</think>42");
    refuses(g, "<think>42");
    refuses(g, "<think>Hm.</think><think>Hm.</think>42");
    grammar_free(g);

    /* Marks of families, also around the answer. */
    c = (struct chat_constraint){.thinking = CHAT_THINKS_FIRST, .response = &age};
    c.thoughts = CHAT_THOUGHTS_SEED;
    g = compile(c);
    takes(g, "Hm. </think> 7</seed:think>42");
    refuses(g, "Hm.</think>42");
    grammar_free(g);
    c.thoughts = CHAT_THOUGHTS_COHERE;
    g = compile(c);
    takes(g, "Hm.<|END_THINKING|>42");
    if (tagged) /* only as a token */
        takes(g, "Hm.<|END_THINKING|><|START_TEXT|>42");
    else
        refuses(g, "Hm.<|END_THINKING|><|START_TEXT|>42");
    refuses(g, "Hm.<|END_THINKING|><|END_THINKING|>42");
    grammar_free(g);
    c.thinking = CHAT_THINKS_MAYBE;
    c.thoughts = CHAT_THOUGHTS_MUSE;
    g = compile(c);
    takes(g, "42");
    refuses(g, " to=f<|message|>");
    if (tagged)
        takes(g, " to=self<|message|>Hm.<|eom|><|start|>assistant<|message|>42");
    grammar_free(g);

    /* Families that call while they think: the call needs no end of thinking before it. */
    c = (struct chat_constraint){.thinking = CHAT_THINKS_FIRST};
    c.format = CHAT_APERTUS;
    c.thoughts = CHAT_THOUGHTS_APERTUS;
    for (int must = 0; must < 2; must++) {
        c.required = must;
        g = compile(c);
        takes(g, "Hm. [{}] " A_FRAME(A_CALL("ping", "{}")));
        takes(g, "Hm.<|inner_suffix|>" A_FRAME(A_CALL("ping", "{}")));
        refuses(g, "Hm. " A_FRAME(A_CALL("pong", "{}")));
        grammar_free(g);
    }

    /* The marks of an answer are not for calls. */
    c = (struct chat_constraint){.required = true};
    c.format = CHAT_MUSE;
    c.thoughts = CHAT_THOUGHTS_MUSE;
    g = compile(c);
    takes(g, " " U_CALL("ping", ""));
    refuses(g, " to=u");
    grammar_free(g);

    /* Calls: thoughts may mention them, text may surround them. */
    c = (struct chat_constraint){
        .format = CHAT_HERMES, .thinking = CHAT_THINKS_FIRST, .required = true};
    g = compile(c);
    takes(g, "I could <tool_call>\n nothing.</think>\n\n" CALL);
    refuses(g, "Hm.</think>\n\nHello");
    refuses(g, "Hm.");
    grammar_free(g);
    c.required = false;
    g = compile(c);
    takes(g, "I could <tool_call>\n nothing.</think>\n\nHello " CALL " and " CALL);
    refuses(g, "Hm.</think>\n\nHello <tool_call>\n no");
    takes(g, "cut off in the middle");
    grammar_free(g);
    c.thinking = CHAT_THINKS_MAYBE;
    g = compile(c);
    takes(g, "<think>I could <tool_call>\n nothing.</think>\n\nHello " CALL);
    takes(g, "\n<think>Hm.</think>" CALL);
    takes(g, CALL);
    refuses(g, "<tool_call>\n no");
    refuses(g, "Hello <think> <tool_call>\n no"); /* too late for thinking */
    grammar_free(g);

    /* Gemma's tag opens thinking with a word; without the tag's token only a text may begin so. */
    c = (struct chat_constraint){
        .format = CHAT_GEMMA, .response = &age, .thinking = CHAT_THINKS_MAYBE};
    g = compile(c);
    (tagged ? takes : refuses)(g, "<|channel>thought\nHm. <|tool_call>call:<channel|>42");
    takes(g, "42");
    refuses(g, "<|channel>final\nHm.<channel|>42");
    refuses(g, "<|channel>thought\nHm.");
    grammar_free(g);
    c = (struct chat_constraint){.format = CHAT_GEMMA, .thinking = CHAT_THINKS_MAYBE};
    g = compile(c);
    takes(g, "<|channel>thought\nI could <|tool_call>call:x<channel|>Hello" E_CALL("ping", ""));
    takes(g, "Hello" E_CALL("ping", "") E_CALL("ping", ""));
    refuses(g, "<|channel>thought\nHm.<channel|>" E_CALL("pong", ""));
    refuses(g, E_CALL("pong", ""));
    grammar_free(g);

    c = (struct chat_constraint){.format = CHAT_GPT_OSS, .response = &age};
    g = compile(c);
    takes(
        g,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42");
    takes(g, "<|channel|>final<|message|>42");
    refuses(g, "<|channel|>final<|message|>4");
    refuses(g, "42");
    grammar_free(g);
    c = (struct chat_constraint){.format = CHAT_GPT_OSS, .required = true};
    g = compile(c);
    takes(g, "<|channel|>analysis<|message|>to=functions.x <|end|><|start|>assistant<|channel|>"
             "commentary to=functions.ping <|constrain|>json<|message|>{}");
    takes(g,
          "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.ping<|channel|>"
          "commentary json<|message|>{}");
    refuses(g, "<|channel|>final<|message|>42");
    grammar_free(g);
}

/* A response beside tools: either, not both. */
static void test_either(void **state)
{
    (void)state;
    static const char schema[] =
        "{\"type\":\"object\",\"properties\":{\"n\":{\"type\":\"integer\"}},"
        "\"required\":[\"n\"],\"additionalProperties\":false}";
    struct grammar_source src = {GRAMMAR_SCHEMA, GRAMMAR_SCHEMA_ORDER, schema, strlen(schema)};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct grammar *g = compile(
            (struct chat_constraint){.format = cases[i].format, .tools = tools, .response = &src});
        const char *text = cases[i].format == CHAT_GPT_OSS ? "<|channel|>final<|message|>{\"n\": 5}"
                                                           : "{\"n\": 5}";
        takes(g, cases[i].one);
        if (cases[i].two)
            takes(g, cases[i].two);
        takes(g, text);
        refuses(g, "Hello");
        refuses(g, "{\"n\": \"x\"}");
        char both[1024];
        snprintf(both, sizeof both, "%s%s", text, cases[i].one);
        refuses(g, both);
        grammar_free(g);
    }
}

/* Tags are their special tokens, where there are any: neither is spelled out, and neither can be
 * written from inside a string. */
static void test_tags(void **state)
{
    (void)state;
    int32_t open = tokenizer_find(tok, "<tool_call>", 11), close, lt = tokenizer_find(tok, "<", 1);
    close = tokenizer_find(tok, "</tool_call>", 12);
    assert_true(open >= 0 && close >= 0 && lt >= 0);
    struct grammar *g = compile((struct chat_constraint){.format = CHAT_HERMES, .required = true});
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    uint32_t *bits = mem_zalloc(words, 4);
    struct error err = {0};
    assert_true(grammar_mask(m, bits, &err));
    assert_true(bits[open / 32] >> open % 32 & 1);
    assert_false(bits[lt / 32] >> lt % 32 & 1);
    assert_int_equal(grammar_forced(m), open);
    struct token_list ids = {0};
    static const char begin[] = "<tool_call>\n{\"name\": \"send\", \"arguments\": {\"to\": [\"a";
    assert_true(tokenizer_encode(tok, begin, strlen(begin), TOKENIZE_SPECIAL, &ids, &err));
    for (size_t i = 0; i < ids.n; i++)
        assert_true(grammar_accept(m, ids.ids[i], &err));
    assert_true(grammar_mask(m, bits, &err));
    for (int32_t id = 0; id < tokenizer_n_vocab(tok); id++)
        if (tokenizer_kind(tok, id) == TOKEN_CONTROL || id == open || id == close)
            assert_false(bits[id / 32] >> id % 32 & 1);
    token_list_clear(&ids);
    mem_free(bits);
    grammar_matcher_free(m);
    grammar_free(g);
}

static bool in_mask(struct grammar_matcher *m, const char *token)
{
    struct error err = {0};
    uint32_t *bits = mem_zalloc(words, 4);
    int32_t id = tokenizer_find(tok, token, strlen(token));
    assert_true(id >= 0 && grammar_mask(m, bits, &err));
    bool in = bits[id / 32] >> id % 32 & 1;
    mem_free(bits);
    return in;
}

static void accept_all(struct grammar_matcher *m, const char *text)
{
    struct token_list ids = {0};
    struct error err = {0};
    assert_true(tokenizer_encode(tok, text, strlen(text), TOKENIZE_SPECIAL, &ids, &err));
    for (size_t i = 0; i < ids.n; i++)
        assert_true(grammar_accept(m, ids.ids[i], &err));
    token_list_clear(&ids);
}

/* Tags that arguments are made of: tokens where they belong, and not inside of a text. */
static void test_spelled(void **state)
{
    (void)state;
    static const char schema[] = "{\"type\":\"string\"}";
    struct grammar_source src = {GRAMMAR_SCHEMA, 0, schema, strlen(schema)};
    static const struct {
        enum chat_format format;
        const char *text;   /* up to a text */
        const char *end;    /* the token that ends it */
        const char *wrong;  /* one that may not be in it */
        const char *behind; /* what follows */
    } rows[] = {
        {CHAT_GLM, "<tool_call>get_weather<arg_key>town</arg_key><arg_value>Pra", "</arg_value>",
         "<arg_key>", "<arg_key>"},
        {CHAT_GEMMA, "<|tool_call>call:get_weather{town:<|\"|>Pra", "<|\"|>", "<tool_call|>", ","},
        {CHAT_HUNYUAN,
         "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
         "<arg_key:opensource>town</arg_key:opensource>\n<arg_value:opensource>Pra",
         "</arg_value:opensource>", "<arg_key:opensource>", "<arg_key:opensource>"},
        {CHAT_MINIMAX_M3, N "<tool_call>" N "<invoke name=\"get_weather\">" N "<town>Pra", N,
         "<tool_call>", "</"},
    };
    for (size_t i = 0; tagged && i < sizeof rows / sizeof *rows; i++) {
        struct grammar *g = compile((struct chat_constraint){
            .format = rows[i].format, .tools = tools, .required = i, .response = i ? NULL : &src});
        struct grammar_matcher *m = grammar_matcher_new(g, vocab);
        accept_all(m, rows[i].text);
        assert_true(in_mask(m, rows[i].end));
        assert_false(in_mask(m, rows[i].wrong));
        accept_all(m, rows[i].end);
        assert_true(in_mask(m, rows[i].behind));
        grammar_matcher_free(m);
        m = grammar_matcher_new(g, vocab); /* a JSON text beside calls has no tags in it */
        if (!i) {
            accept_all(m, "\"Pra");
            assert_false(in_mask(m, rows[i].wrong));
            assert_false(in_mask(m, rows[i].end));
        }
        grammar_matcher_free(m);
        grammar_free(g);
    }
}

/* Any token that is allowed, by chance: what comes is calls that fit their schemas, in every form. */
static void random_answer(struct grammar *g, uint32_t *seed, struct buf *out)
{
    enum { BUDGET = 150 };
    uint32_t *bits = mem_zalloc(words, 4);
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    struct error err = {0};
    bool done = false;
    grammar_set_budget(m, BUDGET);
    for (int i = 0; i < BUDGET && !done; i++) {
        int32_t id = -1;
        uint32_t ties = 0;
        assert_true(grammar_mask(m, bits, &err));
        for (int32_t k = 0; k < tokenizer_n_vocab(tok); k++)
            if (bits[k / 32] >> k % 32 & 1) {
                *seed = *seed * 1664525 + 1013904223;
                id = (*seed >> 8) % ++ties ? id : k;
            }
        assert_true(id >= 0);
        assert_true(grammar_accept(m, id, &err));
        done = tokenizer_is_end(tok, id);
        size_t n;
        const char *p = tokenizer_piece(tok, id, &n);
        if (!done)
            buf_add(out, p, n);
    }
    if (!done)
        fail_msg("no end: %.400s", out->p);
    grammar_matcher_free(m);
    mem_free(bits);
}

static void test_random(void **state)
{
    (void)state;
    uint32_t seed = 7;
    for (enum chat_format f = 0; f < CHAT_N_FORMATS; f++) {
        if (f == CHAT_PLAIN)
            continue;
        for (int round = 0; round < 30; round++) {
            struct buf out = {0};
            struct grammar *g = compile((struct chat_constraint){
                .format = f, .required = true, .one_call = round % 2, .tools = tools});
            random_answer(g, &seed, &out);
            json_t *m = parse(f, out.p, out.len, false), *call, *tool;
            json_t *calls = json_object_get(m, "tool_calls");
            size_t i, k;
            if (!json_array_size(calls) || (round % 2 && json_array_size(calls) != 1))
                fail_msg("%s: %zu calls: %s", chat_format_name(f), json_array_size(calls), out.p);
            json_array_foreach(calls, i, call)
            {
                json_t *fn = json_object_get(call, "function");
                const char *name = json_string_value(json_object_get(fn, "name"));
                const char *text = json_string_value(json_object_get(fn, "arguments"));
                json_t *args = json_loads(text, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, NULL);
                int valid = 0;
                json_array_foreach(tools, k, tool)
                {
                    json_t *def = json_object_get(tool, "function");
                    json_t *schema = json_object_get(def, "parameters");
                    if (!strcmp(json_string_value(json_object_get(def, "name")), name))
                        valid =
                            !schema ? json_is_object(args) : check_value(schema, schema, args, 0);
                }
                if (valid != 1)
                    fail_msg("%s: %s(%s) in %s", chat_format_name(f), name, text, out.p);
                json_decref(args);
            }
            json_decref(m);
            grammar_free(g);
            buf_clear(&out);
        }
    }
}

/* sum: part ("+" part)*; part: "(" sum ")" | "<" | a quote and a newline | an umlaut. */
static const char *read_sum(const char *p);
static const char *read_part(const char *p)
{
    if (p && *p == '(') {
        p = read_sum(p + 1);
        return p && *p == ')' ? p + 1 : NULL;
    }
    if (p && (*p == '<' || !strncmp(p, "\"\n", 2) || !strncmp(p, "\xc3\xb6", 2)))
        return p + (*p == '<' ? 1 : 2);
    return NULL;
}

static const char *read_sum(const char *p)
{
    for (p = read_part(p); p && *p == '+';)
        p = read_part(p + 1);
    return p;
}

/* A custom tool's text follows its Lark grammar in every form of calls: one that is recursive, with characters that
 * forms escape or use. */
static void test_lark(void **state)
{
    (void)state;
    json_t *own = json_loads(
        "[{\"type\":\"function\",\"function\":{\"name\":\"sum\",\"strict\":true,\"parameters\":{"
        "\"type\":\"object\",\"properties\":{\"input\":{\"type\":\"string\",\"x-lark\":"
        "\"start: part (\\\"+\\\" part)*\\npart: \\\"(\\\" start \\\")\\\" | \\\"<\\\" | "
        "/\\\"\\\\n|\xc3\xb6/\"}},\"required\":[\"input\"],\"additionalProperties\":false}}}]",
        0, NULL);
    assert_non_null(own);
    uint32_t seed = 11;
    int nested = 0;
    for (enum chat_format f = 0; f < CHAT_N_FORMATS; f++) {
        if (f == CHAT_PLAIN)
            continue;
        for (int round = 0; round < 20; round++) {
            struct buf out = {0};
            struct grammar *g = compile((struct chat_constraint){
                .format = f, .required = true, .one_call = true, .tools = own});
            random_answer(g, &seed, &out);
            json_t *m = parse(f, out.p, out.len, false);
            json_t *call = json_array_get(json_object_get(m, "tool_calls"), 0);
            json_t *text = json_object_get(json_object_get(call, "function"), "arguments");
            json_t *args = json_loads(json_is_string(text) ? json_string_value(text) : "", 0, NULL);
            const char *input = json_string_value(json_object_get(args, "input"));
            const char *end = read_sum(input);
            if (!end || *end)
                fail_msg("%s: %s in %s", chat_format_name(f), input ? input : "?", out.p);
            nested += strchr(input, '(') != NULL;
            json_decref(args);
            json_decref(m);
            grammar_free(g);
            buf_clear(&out);
        }
    }
    assert_true(nested > 20);
    json_decref(own);
}

static void refused(struct chat_constraint c, const char *why)
{
    struct error err = {0};
    char *text = chat_constraint_text(&c);
    struct grammar_source src = {GRAMMAR_REPLY, 0, text, strlen(text)};
    assert_null(grammar_compile(&src, &err));
    if (!strstr(err.msg, why))
        fail_msg("%s, not %s", err.msg, why);
    mem_free(text);
}

static void test_refused(void **state)
{
    (void)state;
    json_t *odd = json_loads(
        "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,\"parameters\":{"
        "\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"uniqueItems\":true}},"
        "\"required\":[\"a\"]}}}]",
        0, NULL);
    refused((struct chat_constraint){.format = CHAT_HERMES, .tools = odd},
            "the parameters of the tool 'f': #/properties/a/uniqueItems");
    refused((struct chat_constraint){.format = CHAT_PLAIN, .tools = tools}, "no tool-call format");
    refused((struct chat_constraint){.format = CHAT_HERMES}, "nothing to constrain");
    refused((struct chat_constraint){.format = CHAT_HERMES, .tools = tools, .only = "x"},
            "nothing to constrain");
    struct grammar_source bad = {GRAMMAR_REGEX, 0, "(", 1};
    refused((struct chat_constraint){.format = CHAT_HERMES, .response = &bad}, "( without )");
    /* Not strict: loosened to names, types and which are required. */
    json_object_del(json_object_get(json_array_get(odd, 0), "function"), "strict");
    struct grammar *g = compile(
        (struct chat_constraint){.format = CHAT_LLAMA_JSON, .tools = odd, .required = true});
    takes(g, "{\"name\": \"f\", \"parameters\": {\"a\": [1, 1]}}");
    refuses(g, "{\"name\": \"f\", \"parameters\": {}}");
    refuses(g, "{\"name\": \"f\", \"parameters\": {\"a\": 5}}");
    grammar_free(g);
    json_decref(odd);
    for (enum chat_format f = 0; f < CHAT_N_FORMATS; f++)
        assert_int_equal(chat_format_calls(f), f != CHAT_PLAIN);
}

/* Many tools with expensive schemas end in an error that names the limit, or are loosened. */
static void test_hostile(void **state)
{
    (void)state;
    json_t *list = json_array();
    for (int i = 0; i < 500; i++) {
        char name[16], pattern[64];
        snprintf(name, sizeof name, "f%d", i);
        snprintf(pattern, sizeof pattern, "^(a|b)*a(a|b){9}x{%d}$", i % 7 + 1);
        json_t *p = json_pack("{s:s,s:{s:{s:s,s:s}}}", "type", "object", "properties", "a", "type",
                              "string", "pattern", pattern);
        json_array_append_new(list,
                              json_pack("{s:s,s:{s:s,s:b,s:o}}", "type", "function", "function",
                                        "name", name, "strict", 1, "parameters", p));
    }
    refused((struct chat_constraint){.format = CHAT_HERMES, .tools = list, .required = true},
            "over 1500000 steps");
    json_t *t;
    size_t i;
    json_array_foreach(list, i, t)
    {
        json_t *f = json_object_get(t, "function");
        json_object_del(f, "strict");
        json_object_set_new(json_object_get(f, "parameters"), "uniqueItems", json_true());
        json_object_set_new(
            json_object_get(json_object_get(json_object_get(f, "parameters"), "properties"), "a"),
            "pattern", json_string("(x{1000}){1000}"));
    }
    struct grammar *g =
        compile((struct chat_constraint){.format = CHAT_HERMES, .tools = list, .required = true});
    takes(g, "<tool_call>\n{\"name\": \"f499\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>");
    assert_true(grammar_bytes(g) < 32 << 20);
    grammar_free(g);
    json_decref(list);
}

static void test_prompts(void **state)
{
    (void)state;
    static const struct {
        const char *prompt;
        enum chat_thinking want;
    } rows[] = {{"<|im_start|>assistant\n", CHAT_THINKS_MAYBE},
                {"<|im_start|>assistant\n<think>\n", CHAT_THINKS_FIRST},
                {"<|im_start|>assistant\n<think>\n\n</think>\n\n", CHAT_THINKS_NOT},
                {"[THINK]", CHAT_THINKS_FIRST},
                {"<seed:bos>assistant\n<seed:think>\n\n</seed:think>", CHAT_THINKS_NOT},
                {"<|CHATBOT_TOKEN|><|START_THINKING|>", CHAT_THINKS_FIRST},
                {"<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", CHAT_THINKS_NOT},
                {"<think:opensource></think:opensource>", CHAT_THINKS_NOT},
                {"<mm:think>", CHAT_THINKS_FIRST},
                {"<|begin|>assistant", CHAT_THINKS_MAYBE},
                {"<|begin|>assistant<|think|><|end|><|begin|>assistant", CHAT_THINKS_NOT},
                {"<|turn>model\n<|channel>thought\n<channel|>", CHAT_THINKS_NOT},
                {"", CHAT_THINKS_MAYBE}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_int_equal(chat_thinking_of(rows[i].prompt, strlen(rows[i].prompt)), rows[i].want);
}

/* The built-in model's vocabulary, and every tag of every family. */
static struct tokenizer *load_tagged(void)
{
    static const char *const tags[] = {"<arg_key>",
                                       "</arg_key>",
                                       "<arg_value>",
                                       "</arg_value>",
                                       "<minimax:tool_call>",
                                       "</minimax:tool_call>",
                                       "<|tool_call>",
                                       "<tool_call|>",
                                       "<|\"|>",
                                       "<|channel>",
                                       "<channel|>",
                                       "[TOOL_CALLS]",
                                       "[ARGS]",
                                       "<|tool_calls_section_begin|>",
                                       "<|tool_calls_section_end|>",
                                       "<|tool_call_begin|>",
                                       "<|tool_call_end|>",
                                       "<|tool_call_argument_begin|>",
                                       "<|channel|>",
                                       "<|message|>",
                                       "<|constrain|>",
                                       "<|start|>",
                                       "<|python_tag|>",
                                       "<|START_TEXT|>",
                                       "<|START_ACTION|>",
                                       "<|END_ACTION|>",
                                       "<|tools_prefix|>",
                                       "<|tools_suffix|>",
                                       "<seed:tool_call>",
                                       "</seed:tool_call>",
                                       "<tool_calls:opensource>",
                                       "</tool_calls:opensource>",
                                       "<tool_call:opensource>",
                                       "</tool_call:opensource>",
                                       "<tool_sep:opensource>",
                                       "<arg_key:opensource>",
                                       "</arg_key:opensource>",
                                       "<arg_value:opensource>",
                                       "</arg_value:opensource>",
                                       "<|begin|>",
                                       "<|tool_calls|>",
                                       "<|tool_call:begin|>",
                                       "<|tool_call:name|>",
                                       "<|tool_call:args|>",
                                       "<|tool_call:end|>",
                                       "<|calls|>",
                                       "<|eom|>",
                                       "<TOOLCALL>",
                                       "</TOOLCALL>",
                                       "<|tool_call|>",
                                       "<|tool_call_start|>",
                                       "<|tool_call_end|>",
                                       "]<]minimax[>[",
                                       "<｜tool▁calls▁begin｜>",
                                       "<｜tool▁calls▁end｜>",
                                       "<｜tool▁call▁begin｜>",
                                       "<｜tool▁call▁end｜>",
                                       "<｜tool▁sep｜>"};
    json_t *root = json_load_file("demo/steel-demo/tokenizer.json", 0, NULL);
    json_t *added = json_object_get(root, "added_tokens");
    if (!added)
        return NULL;
    int id = (int)json_object_size(json_object_get(json_object_get(root, "model"), "vocab")) +
             (int)json_array_size(added);
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++)
        json_array_append_new(added, json_pack("{s:i,s:s,s:b,s:b,s:b,s:b,s:b}", "id", id + (int)i,
                                               "content", tags[i], "single_word", 0, "lstrip", 0,
                                               "rstrip", 0, "normalized", 0, "special", i % 2));
    char *text = json_dumps(root, 0);
    json_t *config = json_load_file("demo/steel-demo/tokenizer_config.json", 0, NULL);
    struct error err = {0};
    struct tokenizer *t = tokenizer_load_json(text, strlen(text), "test", config, &err);
    if (!t)
        printf("%s\n", err.msg);
    free(text);
    json_decref(config);
    json_decref(root);
    return t;
}

int main(void)
{
    struct error err = {0};
    int failed = 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),    cmocka_unit_test(test_open_arguments),
        cmocka_unit_test(test_thinking), cmocka_unit_test(test_either),
        cmocka_unit_test(test_tags),     cmocka_unit_test(test_spelled),
        cmocka_unit_test(test_random),   cmocka_unit_test(test_lark),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_hostile),
    };
    tools = json_loads(TOOLS, 0, NULL);
    for (int round = 0; round < 2; round++) {
        tagged = round;
        tok = tagged ? load_tagged() : tokenizer_open(NULL, &err); /* the built-in model's */
        if (!tok) {
            printf("skipped: %s\n", tagged ? "demo/steel-demo/tokenizer.json" : err.msg);
            return failed ? failed : 77;
        }
        vocab = grammar_vocab_new(tok);
        words = grammar_mask_words(tokenizer_n_vocab(tok));
        failed += cmocka_run_group_tests_name(tagged ? "tags are tokens" : "tags are text", tests,
                                              NULL, NULL);
        grammar_vocab_free(vocab);
        tokenizer_free(tok);
    }
    json_decref(tools);
    return failed;
}
