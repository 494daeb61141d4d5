/*
 * What the tests of a tokenizer's parts share: small tokenizers from JSON, and checks of the words,
 * tokens and text they give.
 */
#ifndef STEEL_TESTS_TOKENIZER_PARTS_H
#define STEEL_TESTS_TOKENIZER_PARTS_H

#include "tokens.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

/* JSON with ' for " so that it can be read in C. */
static inline json_t *parse(const char *s)
{
    char *copy = mem_strdup(s);
    for (char *p = copy; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_error_t e;
    json_t *v = json_loads(copy, JSON_DECODE_ANY, &e);
    if (!v)
        fail_msg("%s: %s", e.text, copy);
    mem_free(copy);
    return v;
}

static inline struct tokenizer *load(const json_t *root, const json_t *config, struct error *err)
{
    char *text = json_dumps(root, 0);
    struct tokenizer *t = tokenizer_load_json(text, strlen(text), "test", config, err);
    free(text);
    return t;
}

static inline struct tokenizer *must_load(const json_t *root, const json_t *config)
{
    struct error err = {0};
    struct tokenizer *t = load(root, config, &err);
    if (!t)
        fail_msg("%s", err.msg);
    return t;
}

/* ------------------------------------------------------------------------------------ what is checked */

/* The words of a text with | between them. */
static inline void words(const struct tokenizer *t, const char *text, struct buf *out)
{
    struct pre_words w = {0};
    struct regex_scratch re = {0};
    struct error err = {0};
    if (!pretokenizer_run(&t->pretokenizer, &w, &re, text, strlen(text), true, false, &err))
        fail_msg("%s", err.msg);
    for (size_t i = 0; i < w.n; i++) {
        if (i)
            buf_addc(out, '|');
        buf_add(out, w.text + w.list[i].at, w.list[i].len);
    }
    buf_add(out, "", 0);
    pre_words_clear(&w);
    regex_scratch_clear(&re);
}

static inline void check_words(const struct tokenizer *t, const char *what, const char *text,
                               const char *want)
{
    struct buf got = {0};
    words(t, text, &got);
    if (strcmp(got.p, want))
        fail_msg("%s on \"%s\":\n  want %s\n  got  %s", what, text, want, got.p);
    buf_clear(&got);
}

/* The pieces of the tokens of a text with | between them; ids of special tokens in <>. */
static inline void check_tokens(const struct tokenizer *t, const char *text, int flags,
                                const char *want)
{
    struct token_list l = {0};
    struct error err = {0};
    struct buf got = {0};
    if (!tokenizer_encode(t, text, strlen(text), flags, &l, &err))
        fail_msg("%s", err.msg);
    for (size_t i = 0; i < l.n; i++) {
        size_t n, m;
        const char *p = vocab_key(&t->vocab, l.ids[i], &n),
                   *q = vocab_piece(&t->vocab, l.ids[i], &m);
        if (i)
            buf_addc(&got, '|');
        buf_add(&got, n ? p : q, n ? n : m);
    }
    buf_add(&got, "", 0);
    if (strcmp(got.p, want))
        fail_msg("\"%s\":\n  want %s\n  got  %s", text, want, got.p);
    buf_clear(&got);
    token_list_clear(&l);
}

static inline void check_decode(const struct tokenizer *t, const int32_t *ids, size_t n,
                                bool special, const char *want)
{
    struct buf out = {0};
    tokenizer_decode(t, ids, n, special, &out);
    buf_add(&out, "", 0);
    assert_string_equal(out.p, want);
    /* streaming gives the same */
    struct detok d = {0};
    buf_reset(&out);
    for (size_t i = 0; i < n; i++)
        detok_push(&d, t, ids[i], special, &out);
    detok_flush(&d, &out);
    buf_add(&out, "", 0);
    assert_string_equal(out.p, want);
    buf_clear(&out);
}

#define RE(X) "{'type':'Split','behavior':'Isolated','invert':false,'pattern':{'Regex':'" X "'}}"

#define ADDED(ID, TEXT, FLAGS) "{'id':" #ID ",'content':'" TEXT "'," FLAGS "}"

static inline void check_ids(const struct tokenizer *t, const char *text, int flags,
                             const char *want)
{
    struct token_list l = {0};
    struct error err = {0};
    struct buf got = {0};
    assert_true(tokenizer_encode(t, text, strlen(text), flags, &l, &err));
    for (size_t i = 0; i < l.n; i++)
        buf_addf(&got, "%s%d", i ? " " : "", l.ids[i]);
    buf_add(&got, "", 0);
    assert_string_equal(got.p, want);
    buf_clear(&got);
    token_list_clear(&l);
}

#endif
