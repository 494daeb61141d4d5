/* Runs requests on an engine and collects their answers. Include cmocka before it. */
#ifndef STEEL_TESTS_ENGINE_RUN_H
#define STEEL_TESTS_ENGINE_RUN_H

#include "engine/engine.h"
#include "text/grammar/grammar.h"
#include "toy_model.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static char path[64]; /* of the model; set by main */

struct answer {
    int32_t tokens[512];
    float logprobs[512];
    int n, n_starts, n_done;
    char text[4096];
    size_t n_text;
    enum finish finish;
    int stop;
    struct usage_count usage;
    struct token_prob top[8]; /* of the first token */
    int n_top;
    char error[64];
};

static inline struct engine *open_engine(struct engine_options *opt)
{
    opt->runtime.backend.threads = 1;
    opt->runtime.backend.deterministic = true;
    struct engine *e = engine_open(path, opt);
    struct error err = {0};
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    return e;
}

static inline struct request_spec spec_of(const int32_t *prompt, int n, int max_tokens,
                                          uint64_t seed)
{
    struct request_spec s = {.prompt = prompt, .n_prompt = n, .max_tokens = max_tokens};
    s.sample = sample_params_default();
    s.sample.seed = seed;
    s.ignore_eos = true;
    return s;
}

static inline void prompt_of(int which, int32_t *out, int n)
{
    uint64_t state = (uint64_t)which * 77 + 1;
    for (int i = 0; i < n; i++)
        out[i] = 32 + (int32_t)(fabsf(toy_random(&state)) * 90);
}

/* Feeds one event to the answer it belongs to; true on EVENT_DONE. */
static inline bool take(const struct engine_event *ev)
{
    struct answer *a = (struct answer *)ev->user + ev->index;
    assert_int_equal(a->n_done, 0); /* nothing comes after DONE */
    memcpy(a->text + a->n_text, ev->text, ev->n_text);
    a->n_text += ev->n_text;
    if (ev->kind == EVENT_START)
        a->n_starts++;
    if (ev->kind == EVENT_TOKEN) {
        if (a->n == 0 && ev->n_top) {
            a->n_top = ev->n_top;
            memcpy(a->top, ev->top, (size_t)ev->n_top * sizeof *ev->top);
        }
        a->logprobs[a->n] = ev->logprob;
        a->tokens[a->n++] = ev->token;
    }
    if (ev->kind == EVENT_DONE) {
        a->n_done++;
        a->finish = ev->finish;
        a->stop = ev->stop;
        a->usage = ev->usage;
        snprintf(a->error, sizeof a->error, "%s", ev->error ? ev->error : "");
    }
    return ev->kind == EVENT_DONE;
}

static inline void wait_done(struct events *q, int n)
{
    struct engine_event ev;
    while (n > 0) {
        assert_true(events_next(q, &ev, -1));
        n -= take(&ev);
    }
}

static inline void submit(struct engine *e, struct request_spec *s, struct events *q,
                          struct answer *a, struct request **r)
{
    memset(a, 0, sizeof *a * (size_t)(s->n ? s->n : 1));
    s->queue = q;
    s->user = a;
    struct error err = {0};
    if (engine_submit(e, s, r, &err) != SUBMIT_OK)
        fail_msg("%s", err.msg);
}

static inline void run(struct engine *e, struct request_spec *s, struct answer *a)
{
    struct events *q = events_new();
    submit(e, s, q, a, NULL);
    wait_done(q, s->n ? s->n : 1);
    events_free(q);
}

static inline void assert_same(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens);
    assert_int_equal(a->n_text, b->n_text);
    assert_memory_equal(a->text, b->text, a->n_text);
    assert_int_equal(a->finish, b->finish);
}

static inline struct grammar *grammar_of(enum grammar_kind kind, const char *text)
{
    struct grammar_source src = {.kind = kind, .text = text, .len = strlen(text)};
    struct error err = {0};
    struct grammar *g = grammar_compile(&src, &err);
    if (!g)
        fail_msg("%s", err.msg);
    return g;
}

#endif
