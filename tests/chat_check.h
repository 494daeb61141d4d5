/*
 * What the chat parser makes of a text, whole, in bytes, in random pieces and cut at every byte, for its tests.
 */
#ifndef STEEL_TESTS_CHAT_CHECK_H
#define STEEL_TESTS_CHAT_CHECK_H

#include "base/mem.h"
#include "text/chat/chat_parse.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <cmocka.h>

static uint64_t seed = 1;
static uint32_t rnd(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return n ? (uint32_t)(seed >> 33) % n : 0;
}

static json_t *schema;

static json_t *the_schema(void)
{
    if (!schema)
        schema = json_pack("[{s:s,s:{s:s,s:{s:{s:{s:s},s:{s:s}}}}}]", "type", "function",
                           "function", "name", "f", "parameters", "properties", "text", "type",
                           "string", "n", "type", "integer");
    return schema;
}

#define NS "]<]minimax[>[" /* before each tag of MiniMax-M3 */

static enum chat_thoughts thoughts; /* of the texts that are parsed */

enum how { WHOLE, BYTES, RANDOM, TWO };

/* cut: the length of the first of two pieces, with how = TWO. */
static json_t *parse_cut(enum chat_format f, const char *text, size_t len, enum how how, size_t cut,
                         bool in_think, bool tools)
{
    struct chat_message m = {0};
    struct chat_parse_options opt = {.thoughts = thoughts,
                                     .tools = tools,
                                     .reasoning = true,
                                     .in_reasoning = in_think,
                                     .id_seed = 7,
                                     .schema = the_schema(),
                                     .event = chat_message_event,
                                     .arg = &m};
    struct chat_parser *p = chat_parser_new(f, &opt);
    for (size_t i = 0; i < len;) {
        size_t n = how == WHOLE   ? len
                   : how == BYTES ? 1
                   : how == TWO   ? (i ? len : cut)
                                  : 1 + rnd(rnd(4) ? 6 : 40);
        n = n > len - i ? len - i : n;
        chat_parser_push(p, text + i, n);
        i += n;
    }
    chat_parser_finish(p);
    assert_int_equal(chat_parser_calls(p), m.n_calls);
    chat_parser_free(p);
    json_t *j = chat_message_json(&m);
    chat_message_clear(&m);
    return j;
}

static json_t *parse(enum chat_format f, const char *text, size_t len, enum how how, bool in_think,
                     bool tools)
{
    return parse_cut(f, text, len, how, 0, in_think, tools);
}

/* In two pieces, cut at every byte, it is the same message. */
static void check_cuts(enum chat_format f, bool in_think, const char *text)
{
    size_t n = strlen(text);
    json_t *whole = parse(f, text, n, WHOLE, in_think, true);
    for (size_t cut = 1; cut < n; cut++) {
        json_t *two = parse_cut(f, text, n, TWO, cut, in_think, true);
        if (!json_equal(whole, two))
            fail_msg("%s, cut at %zu: %s", chat_format_name(f), cut, text);
        json_decref(two);
    }
    json_decref(whole);
}

#define DSML "｜DSML｜"
#define PARAMETER(k, s, v)                                                                         \
    "<" DSML "parameter name=\"" k "\" string=\"" s "\">" v "</" DSML "parameter>\n"

/* The text must give that content, reasoning and calls ("name args|name args"; NULL = none). */
static void check(enum chat_format f, bool in_think, const char *text, const char *content,
                  const char *reasoning, const char *calls)
{
    check_cuts(f, in_think, text);
    for (int how = WHOLE; how <= RANDOM; how++) {
        json_t *j = parse(f, text, strlen(text), (enum how)how, in_think, true);
        const char *c = json_string_value(json_object_get(j, "content"));
        const char *r = json_string_value(json_object_get(j, "reasoning_content"));
        json_t *tc = json_object_get(j, "tool_calls");
        struct buf b = {0};
        buf_adds(&b, "");
        for (size_t i = 0; i < json_array_size(tc); i++) {
            json_t *fn = json_object_get(json_array_get(tc, i), "function");
            buf_addf(&b, "%s%s %s", i ? "|" : "", json_string_value(json_object_get(fn, "name")),
                     json_string_value(json_object_get(fn, "arguments")));
        }
        if (strcmp(c ? c : "", content) || strcmp(r ? r : "", reasoning ? reasoning : "") ||
            strcmp(b.p, calls ? calls : "")) {
            printf("%s (%d): %s\n content <%s>\n reasoning <%s>\n calls <%s>\n",
                   chat_format_name(f), how, text, c, r, b.p);
            fail();
        }
        buf_clear(&b);
        json_decref(j);
    }
}

#endif
