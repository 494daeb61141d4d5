/*
 * A crowd of requests of every kind, for tests of drafts (test_draft_text.c, test_draft_model.c): what they are answered
 * with drafts must be, byte for byte, what they are answered without. Included by one program each.
 * STEEL_TEST_DEVICE=cuda: the same on a GPU, with --deterministic. It refuses adapters then, and some families; the tests skip
 * those. STEEL_TEST_FAMILY=name: one model.
 */
#ifndef STEEL_TESTS_DRAFT_CROWD_H
#define STEEL_TESTS_DRAFT_CROWD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include <math.h>

#include "backend/devices.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "mtp_toy.h"
#include "text/grammar/grammar.h"

enum { CROWD = 9, MOST = 256, ANSWERS = CROWD + 1 };

static uint32_t draw(uint32_t *s, uint32_t n)
{
    *s = *s * 1664525u + 1013904223u;
    return (*s >> 8) % n;
}

static char dir[] = "/tmp/steel-drafts-XXXXXX";

struct answer {
    int32_t tokens[MOST];
    float logprobs[MOST];
    char text[2048];
    size_t n_text;
    int n, stop;
    enum finish finish;
    struct usage_count usage;
};

/* What is drafted: what the sources do, `fixed` tokens or as many as pay. random: other drafts of random depths, of the true tokens
 * with some wrong ones between. cut: a random number of the sources' drafts, some replaced by wrong ones. */
static struct drafting {
    int fixed;
    bool random, cut;
    uint32_t state;
} how;

/* The answers that random drafts are taken from: prompt and answer. */
static struct known {
    int32_t tokens[MOST];
    int n;
} known[ANSWERS];
static int n_known;

static int write_drafts(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n,
                        int most)
{
    (void)arg;
    int depth = (int)draw(&how.state, (uint32_t)most + 1);
    if (how.cut) {
        depth = (int)draw(&how.state, (uint32_t)n + 1);
        for (int k = 0; k < depth; k++)
            drafts[k] = draw(&how.state, 6) ? drafts[k] : (int32_t)draw(&how.state, 100);
        return depth;
    }
    if (!how.random)
        return n;
    for (int k = 0; k < depth; k++)
        drafts[k] = (int32_t)draw(&how.state, 100);
    for (int i = 0; i < n_known; i++) {
        const struct known *a = &known[i];
        if (a->n < n_tokens || memcmp(a->tokens, tokens, (size_t)n_tokens * sizeof *tokens) != 0)
            continue;
        for (int k = 0; k < depth && n_tokens + k < a->n; k++)
            if (draw(&how.state, 6))
                drafts[k] = a->tokens[n_tokens + k];
        break;
    }
    return depth;
}

struct setting {
    const char *model, *lora;
    enum dtype k_type, v_type;
    int kv_tokens;
    const char *small; /* a draft model; NULL = none */
    const char *path,
        *head; /* the model's folder, if it is none of tests/golden, and that of an EAGLE-3 head */
    unsigned from; /* runtime_options.draft_from; 0 = text and grammar */
};

static const char *device; /* STEEL_TEST_DEVICE, or NULL */

/* Whether tests cannot run: there is no such device. */
static bool device_is_missing(void)
{
    device = getenv("STEEL_TEST_DEVICE");
    if (!device || !strcmp(device, "cpu") || device_count(device))
        return false;
    printf("skipped: drafts on %s: there is no GPU\n", device);
    return true;
}

/* NULL: the device does not support the model; the reason is printed. */
static struct engine *try_engine(const struct setting *s, bool drafts)
{
    char path[128], small[128];
    struct adapter_ref lora;
    struct error err = {0};
    if (!s->path)
        mtp_toy_plain(dir, s->model, path, sizeof path);
    struct engine_options opt = {.runtime = {.context = MOST,
                                             .kv_tokens = s->kv_tokens,
                                             .k_type = s->k_type,
                                             .v_type = s->v_type,
                                             .max_seqs = 8,
                                             .max_tokens = 128}};
    if (drafts && s->small) {
        mtp_toy_plain(dir, s->small, small, sizeof small);
        opt.runtime.draft_model = small;
    }
    if (drafts && s->head)
        opt.runtime.draft_model = s->head;
    if (drafts) {
        opt.runtime.draft = how.random ? 1 : how.fixed;
        opt.runtime.draft_from = s->from ? s->from : 1u << DRAFT_TEXT | 1u << DRAFT_GRAMMAR;
    }
    opt.runtime.backend.threads = 2;
    opt.runtime.backend.deterministic = true;
    opt.runtime.backend.device = device;
    opt.runtime.gpu_memory = device ? 0.2f : 0; /* other tests run beside this one */
    if (s->lora) {
        CHECK(adapter_ref_parse(s->lora, &lora, &err), "%s", err.msg);
        opt.runtime.loras = &lora;
        opt.runtime.n_loras = 1;
    }
    struct engine *e = engine_open(s->path ? s->path : path, &opt);
    bool ok = engine_wait(e, &err);
    if (s->lora)
        mem_free(lora.path);
    if (!ok) {
        if (!device || !strstr(err.msg, "not supported on"))
            fail_msg("%s", err.msg);
        print_message("skipped: %s\n", err.msg);
        engine_close(e);
        return NULL;
    }
    if (drafts)
        engine_on_draft(e, true, write_drafts, NULL);
    return e;
}

static struct engine *open_engine(const struct setting *s, bool drafts)
{
    struct engine *e = try_engine(s, drafts);
    assert_non_null(e);
    return e;
}

static bool is_left_out(const struct setting *s)
{
    const char *only = getenv("STEEL_TEST_FAMILY");
    if ((only && strcmp(only, s->model) != 0) || (device && s->lora))
        return true;
    how = (struct drafting){.fixed = 1};
    struct engine *e = device ? try_engine(s, true) : NULL;
    if (e)
        engine_close(e);
    return device && !e;
}

static void run(struct engine *e, struct request_spec *specs, struct answer *answers, int n)
{
    struct events *q = events_new();
    struct engine_event ev;
    struct error err = {0};
    int left = 0;
    for (int i = 0; i < n; i++) {
        int choices = specs[i].n ? specs[i].n : 1;
        specs[i].queue = q;
        specs[i].user = answers + left;
        memset(answers + left, 0, sizeof *answers * (size_t)choices);
        left += choices;
    }
    for (int i = 0; i < n; i++)
        if (engine_submit(e, &specs[i], NULL, &err) != SUBMIT_OK)
            fail_msg("%s", err.msg);
    while (left > 0) {
        assert_true(events_next(q, &ev, -1));
        struct answer *a = (struct answer *)ev.user + ev.index;
        memcpy(a->text + a->n_text, ev.text, ev.n_text);
        a->n_text += ev.n_text;
        if (ev.kind == EVENT_TOKEN) {
            a->logprobs[a->n] = ev.logprob;
            a->tokens[a->n++] = ev.token;
        }
        if (ev.kind == EVENT_DONE) {
            left--;
            a->finish = ev.finish;
            a->stop = ev.stop;
            a->usage = ev.usage;
        }
    }
    events_free(q);
}

static struct grammar *grammar, *form;

/* Requests of every kind, whose prompts repeat themselves. */
static void crowd(struct request_spec *specs, int32_t prompts[][64], bool lora)
{
    static const char *const stops[] = {"q", "zz"};
    for (int i = 0; i < CROWD; i++) {
        uint32_t s = 77u * (uint32_t)i + 5;
        int n = 24 + 5 * i;
        for (int k = 0; k < n; k++)
            prompts[i][k] = k < 12 ? (int32_t)draw(&s, 90) : prompts[i][k - 12];
        specs[i] = (struct request_spec){
            .prompt = prompts[i], .n_prompt = n, .max_tokens = 60, .ignore_eos = true};
        specs[i].sample = sample_params_default();
        specs[i].sample.seed = (uint64_t)i;
        specs[i].sample.temp = i % 2 ? 1.0f : 0;
        specs[i].client = (uint64_t)i % 3;
        specs[i].n_loras = lora && i % 2;
        specs[i].loras[0] = (struct lora_pick){.adapter = 0, .scale = 1, .serial = 1};
    }
    specs[2].sample.repeat_penalty = 1.3f;
    specs[3].sample.frequency_penalty = 0.4f;
    specs[3].logprobs = specs[0].logprobs = true;
    specs[3].n_top = 3;
    specs[4].stop = specs[1].stop = stops;
    specs[4].n_stop = specs[1].n_stop = 2;
    specs[5].n = 2;
    specs[6].grammar = grammar;
    specs[8].grammar = form; /* mostly determined, but its logits are wanted */
    specs[6].ignore_eos = specs[8].ignore_eos = false;
    specs[8].logprobs = true;
    specs[7].min_tokens = 7;
    specs[7].ignore_eos = false;
}

static void assert_same(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens);
    if (!device)
        assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n * sizeof *a->logprobs);
    for (int i = 0; i < a->n;
         i++) { /* of a device's logits, host and device sum in another order */
        float far = fabsf(a->logprobs[i] - b->logprobs[i]);
        if (!(far <= 2e-6f * (1 + fabsf(a->logprobs[i]))))
            fail_msg("log-probability %d: %.9g and %.9g", i, (double)a->logprobs[i],
                     (double)b->logprobs[i]);
    }
    assert_int_equal(a->n_text, b->n_text);
    assert_memory_equal(a->text, b->text, a->n_text);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->stop, b->stop);
    assert_int_equal(a->usage.n_generated, b->usage.n_generated);
}

static struct engine_stats close_engine(struct engine *e)
{
    struct engine_stats st;
    const struct runtime *small = engine_runtime(e)->small;
    engine_stats(e, &st);
    assert_int_equal(st.pages_held, 0);
    kvcache_verify(engine_runtime(e)->kv);
    if (small) {
        kvcache_verify(small->kv);
        assert_int_equal(kvcache_available(small->kv), small->kv->n_pages);
    }
    engine_close(e);
    return st;
}

static void make_grammars(void)
{
    struct error err = {0};
    const char *regex = "([a-f]{3}[0-9]+ ){2,9}END";
    grammar = grammar_compile(
        &(struct grammar_source){.kind = GRAMMAR_REGEX, .text = regex, .len = strlen(regex)}, &err);
    CHECK(grammar, "%s", err.msg);
    regex = "(\\{\"name\": \"[a-e]{2,4}\", \"value\": [0-9]{1,2}\\} ){1,3}";
    form = grammar_compile(
        &(struct grammar_source){.kind = GRAMMAR_REGEX, .text = regex, .len = strlen(regex)}, &err);
    CHECK(form, "%s", err.msg);
}

/* What the crowd is answered without drafts. Returns the number of steps. */
static uint64_t answer_plainly(const struct setting *s, struct request_spec *specs,
                               struct answer *want)
{
    struct engine *e = open_engine(s, false);
    run(e, specs, want, CROWD);
    uint64_t steps = close_engine(e).n_steps;
    n_known = 0;
    for (int i = 0; i < CROWD; i++) {
        struct known *k = &known[n_known++];
        const struct answer *a = &want[i < 6 ? i : i + 1];
        k->n = specs[i].n_prompt + a->n;
        memcpy(k->tokens, specs[i].prompt, (size_t)specs[i].n_prompt * sizeof *k->tokens);
        memcpy(k->tokens + specs[i].n_prompt, a->tokens, (size_t)a->n * sizeof *k->tokens);
    }
    return steps;
}

/* The same with drafts: all at once, again, and each alone. */
static struct engine_stats answer_with_drafts(const struct setting *s, struct request_spec *specs,
                                              const struct answer *want)
{
    static struct answer got[ANSWERS];
    struct engine *e = open_engine(s, true);
    for (int again = 0; again < 2; again++) {
        run(e, specs, got, CROWD);
        for (int i = 0; i < ANSWERS; i++)
            assert_same(&want[i], &got[i]);
    }
    for (int i = 0, at = 0; i < CROWD; at += specs[i++].n == 2 ? 2 : 1) {
        run(e, &specs[i], got, 1);
        for (int k = 0; k < (specs[i].n ? specs[i].n : 1); k++)
            assert_same(&want[at + k], &got[k]);
    }
    return close_engine(e);
}

#endif
