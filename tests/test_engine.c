/*
 * The engine on a toy model: the same request gives the same tokens alone, in a crowd, preempted and
 * from the cache; cancels free their pages before the next step in every state; the queue is bounded.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "backend/backend.h"
#include "engine_run.h"

enum { CROWD = 12, PROMPT = 90, ANSWER = 60 };

/* Requests of every kind: greedy, seeded, with penalties, with log-probabilities. */
static struct request_spec crowd_spec(int i, int32_t *prompt)
{
    int n = 20 + i * 37 % PROMPT;
    prompt_of(i / 2, prompt, n); /* pairs share their beginnings */
    struct request_spec s = spec_of(prompt, n, ANSWER, (uint64_t)i);
    if (i % 3 == 0)
        s.sample.temp = 0;
    if (i % 4 == 1)
        s.sample.repeat_penalty = 1.3f;
    if (i % 4 == 2)
        s.sample.presence_penalty = 0.5f;
    if (i % 4 == 3) {
        s.logprobs = true;
        s.n_top = 3;
    }
    return s;
}

/* Company, a lack of pages and the prefix cache change nothing, whatever the cache is of. Keys that are
 * multiplied as codes have pages of whole vectors. */
static void company(enum dtype k_type, enum dtype v_type)
{
    static struct answer alone[CROWD], crowd[CROWD];
    static int32_t prompts[CROWD][256];
    struct engine_options opt = {
        .runtime = {.context = 512, .max_seqs = 16, .k_type = k_type, .v_type = v_type},
        .no_prefix_cache = true};
    struct engine *e = open_engine(&opt);
    struct request_spec s[CROWD];
    for (int i = 0; i < CROWD; i++) {
        s[i] = crowd_spec(i, prompts[i]);
        run(e, &s[i], &alone[i]);
        assert_int_equal(alone[i].n, ANSWER);
        assert_int_equal(alone[i].finish, FINISH_LENGTH);
        assert_int_equal(alone[i].usage.n_cached, 0);
    }
    engine_close(e);
    assert_true(memcmp(alone[1].tokens, alone[2].tokens, sizeof alone[1].tokens));

    /* batched; then with hardly any pages; then from the cache; then with another page size */
    static const struct {
        int kv_tokens, page_len, rounds;
        double step_ms;
    } ways[] = {{0, 16, 1, 0.01}, {352, 16, 1, 0}, {0, 16, 2, 0}, {400, 8, 2, 0.01}};
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
        opt = (struct engine_options){
            .runtime = {.context = 300,
                        .max_seqs = CROWD,
                        .kv_tokens = ways[w].kv_tokens,
                        .k_type = k_type,
                        .v_type = v_type,
                        .page_len = k_type == DT_F16 ? ways[w].page_len : 16},
            .itl_ms = ways[w].step_ms};
        e = open_engine(&opt);
        struct events *q = events_new();
        for (int round = 0; round < ways[w].rounds; round++) {
            for (int i = 0; i < CROWD; i++)
                submit(e, &s[i], q, &crowd[i], NULL);
            wait_done(q, CROWD);
            for (int i = 0; i < CROWD; i++) {
                assert_same(&alone[i], &crowd[i]);
                if (s[i].logprobs)
                    assert_memory_equal(alone[i].logprobs, crowd[i].logprobs, ANSWER * 4);
                assert_int_equal(crowd[i].n_starts, 1);
            }
        }
        struct engine_stats st;
        engine_stats(e, &st);
        assert_int_equal(st.n_running + st.n_waiting + st.pages_held, 0);
        if (ways[w].kv_tokens)
            assert_true(st.n_preempted > 0);
        assert_true(st.cache_hits > 0);
        if (ways[w].rounds == 2 && !ways[w].kv_tokens) /* all but what is left of the last page */
            assert_true(crowd[3].usage.n_cached >= s[3].n_prompt - 16);
        events_free(q);
        engine_close(e);
    }
}

static void test_company(void **state)
{
    (void)state;
    company(DT_F16, DT_F16);
}

static void test_company_quant(void **state)
{
    (void)state;
    char toy[sizeof path];
    memcpy(toy, path, sizeof path);
    snprintf(path, sizeof path, "tests/golden/qwen3moe"); /* heads of 32 */
    company(DT_Q8_0, DT_Q8_0);
    company(DT_F8_E4M3, DT_F8_E4M3);
    company(DT_Q4_0, DT_Q4_0);
    company(DT_Q8_0, DT_F16);
    snprintf(path, sizeof path, "tests/golden/qwen3_next"); /* states beside */
    company(DT_Q8_0, DT_Q4_0);
    memcpy(path, toy, sizeof path);
}

/* Turn two of a conversation reads only what is new. */
static void test_second_turn(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 4, .context = 4096}};
    struct engine *e = open_engine(&opt);
    static int32_t prompt[2400];
    static struct answer a, b, c;
    prompt_of(1, prompt, 2000);
    struct request_spec s = spec_of(prompt, 2000, 100, 1);
    run(e, &s, &a);
    memcpy(prompt + 2000, a.tokens, 100 * sizeof *prompt);
    prompt_of(2, prompt + 2100, 10);
    s = spec_of(prompt, 2110, 20, 1);
    run(e, &s, &b);
    assert_int_equal(b.usage.n_cached, 2099); /* the last sampled token was never computed */
    s.no_cache = true;
    run(e, &s, &c);
    assert_int_equal(c.usage.n_cached, 0);
    assert_same(&b, &c);
    s.no_cache = false;
    s.salt = "another key";
    run(e, &s, &c);
    assert_int_equal(c.usage.n_cached, 0);
    assert_same(&b, &c);
    engine_close(e);
}

/* The same where states, index keys and keys that an indexer chose are in the cache. */
static void test_second_turn_of_parts(void **state)
{
    (void)state;
    static const char *const models[] = {"falcon_h1", "jamba",         "glm_moe_dsa", "minimax_m3",
                                         "minimax",   "longcat_flash", "deepseek_v4", "inkling"};
    char toy[sizeof path];
    memcpy(toy, path, sizeof path);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        struct engine_options opt = {
            .runtime = {.max_seqs = 2, .context = 512, .k_type = DT_F32, .v_type = DT_F32}};
        static int32_t prompt[320];
        static struct answer a, b, c;
        snprintf(path, sizeof path, "tests/golden/%s", models[i]);
        struct engine *e = open_engine(&opt);
        for (int k = 0; k < 320; k++)
            prompt[k] = 3 + (k * k + 7 * k) % 131;
        struct request_spec s = spec_of(prompt, 200, 20, 1);
        run(e, &s, &a);
        memcpy(prompt + 200, a.tokens, 20 * sizeof *prompt);
        s = spec_of(prompt, 240, 20, 1);
        run(e, &s, &b);
        assert_true(b.usage.n_cached >= 192);
        s.no_cache = true;
        run(e, &s, &c);
        assert_int_equal(c.usage.n_cached, 0);
        assert_same(&b, &c);
        engine_close(e);
    }
    memcpy(path, toy, sizeof path);
}

static void test_choices(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 8, .context = 2048}};
    struct engine *e = open_engine(&opt);
    static int32_t prompt[1000];
    static struct answer a[5], one;
    prompt_of(4, prompt, 1000);
    struct request_spec s = spec_of(prompt, 1000, 30, 7);
    s.n = 5;
    run(e, &s, a);
    struct engine_stats st;
    engine_stats(e, &st);
    assert_true(st.read_tokens < 1000 + 5 * 16); /* the prompt is computed once */
    for (int i = 0; i < 5; i++) {
        s.n = 1;
        s.sample.seed = 7 + (uint64_t)i;
        run(e, &s, &one);
        assert_same(&one, &a[i]);
    }
    assert_true(memcmp(a[0].tokens, a[1].tokens, sizeof a[0].tokens));
    engine_close(e);
}

/* A step gate: the engine thread waits before each step until the test lets it go on. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int allowed, at; /* steps allowed, steps begun */
};

static void gate_step(void *arg, int n_items)
{
    (void)n_items;
    struct gate *g = arg;
    pthread_mutex_lock(&g->lock);
    g->at++;
    pthread_cond_broadcast(&g->changed);
    while (g->at > g->allowed)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void gate_wait(struct gate *g, int step)
{
    pthread_mutex_lock(&g->lock);
    while (g->at < step)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void gate_allow(struct gate *g, int step)
{
    pthread_mutex_lock(&g->lock);
    g->allowed = step;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

/* Pages of 16 a sequence holds whose last token is not computed yet. */
static int pages_of(int n_prompt, const struct answer *a)
{
    return (n_prompt + a->n - 1 + 15) / 16;
}

/* Cancelled while step k is about to run: when step k + 1 begins, it is gone and so are its pages. */
static void test_cancel(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 2, .context = 2048, .page_len = 16},
                                 .itl_ms = 0.01};
    struct engine *e = open_engine(&opt);
    struct gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
    engine_on_step(e, gate_step, &g);
    static int32_t prompt[1500];
    static struct answer other, victim;
    struct events *q = events_new();
    struct engine_stats st;
    struct engine_event ev;
    prompt_of(1, prompt, 1500);
    struct request_spec s = spec_of(prompt, 20, 400, 1);
    struct request *r_other, *r;
    submit(e, &s, q, &other, &r_other);
    gate_wait(&g, 1);
    int step = 1;
    /* decoding, reading (1,500 tokens at 16 a step), waiting (behind two running ones) */
    for (int phase = 0; phase < 3; phase++) {
        struct request *r_fill = NULL;
        static struct answer fill;
        if (phase == 2) {
            s = spec_of(prompt + 100, 20, 400, 3);
            submit(e, &s, q, &fill, &r_fill);
        }
        s = phase == 0 ? spec_of(prompt + 50, 30, 400, 2) : spec_of(prompt, 1500, 400, 2);
        s.no_cache = true;
        submit(e, &s, q, &victim, &r);
        gate_allow(&g, step + 9);
        gate_wait(&g, step + 10);
        step += 10;
        engine_stats(e, &st);
        assert_int_equal(st.n_running, 2);
        assert_int_equal(st.n_waiting, phase == 2);
        int held = st.pages_held;
        request_cancel(r);
        gate_allow(&g, step); /* the step under way ends */
        gate_wait(&g, ++step);
        engine_stats(e, &st);
        assert_int_equal(st.n_running, phase == 2 ? 2 : 1);
        assert_int_equal(st.n_waiting, 0);
        while (events_next(q, &ev, 0)) /* already delivered */
            take(&ev);
        assert_int_equal(victim.n_done, 1);
        if (phase < 2)
            assert_true(held > st.pages_held);
        assert_int_equal(st.pages_held,
                         pages_of(20, &other) + (phase == 2 ? pages_of(20, &fill) : 0));
        assert_int_equal(victim.finish, FINISH_CANCEL);
        assert_int_equal(victim.n > 0, phase == 0);
        assert_int_equal(victim.n_starts, phase < 2);
        assert_int_equal(st.finished[FINISH_CANCEL], (uint64_t)(phase < 2 ? phase + 1 : 3));
        request_free(r);
        if (r_fill) {
            request_cancel(r_fill);
            request_free(r_fill);
        }
    }
    gate_allow(&g, 1 << 30);
    request_cancel(r_other);
    request_free(r_other);
    while (!other.n_done) {
        assert_true(events_next(q, &ev, -1));
        take(&ev);
    }
    engine_stats(e, &st);
    assert_int_equal(st.pages_held, 0);
    engine_close(e);
    events_free(q);
}

static void test_queue(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 1, .context = 256}, .max_queue = 3};
    struct engine *e = open_engine(&opt);
    struct gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
    engine_on_step(e, gate_step, &g);
    int32_t prompt[300];
    static struct answer a[6];
    struct events *q = events_new();
    struct error err = {0};
    prompt_of(1, prompt, 300);
    struct request_spec s = spec_of(prompt, 10, 5, 1);
    submit(e, &s, q, &a[0], NULL);
    gate_wait(&g, 1); /* runs: not in the queue any more */
    for (int i = 1; i < 3; i++)
        submit(e, &s, q, &a[i], NULL);
    s.n = 2; /* two places where there is one: not accepted at all */
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_FULL);
    s.n = 1;
    submit(e, &s, q, &a[3], NULL);
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_FULL);
    assert_non_null(strstr(err.msg, "queue is full"));
    gate_allow(&g, 1 << 30);
    wait_done(q, 4);
    struct engine_stats st;
    engine_stats(e, &st);
    assert_int_equal(st.n_rejected, 2);
    /* what can never run is refused by name */
    s.n_prompt = 256;
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_TOO_LONG);
    assert_non_null(strstr(err.msg, "256 tokens"));
    s.n_prompt = 0;
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_INVALID);
    s.n_prompt = 3;
    prompt[1] = TOY_VOCAB;
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_INVALID);
    prompt[1] = -1;
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_INVALID);
    prompt[1] = 40;
    /* the context ends an answer */
    s = spec_of(prompt, 250, 0, 1);
    run(e, &s, &a[0]);
    assert_int_equal(a[0].n, 6);
    assert_int_equal(a[0].finish, FINISH_LENGTH);
    /* closing with work in hand: everyone hears of it */
    s = spec_of(prompt, 10, 0, 1);
    for (int i = 0; i < 3; i++)
        submit(e, &s, q, &a[i], NULL);
    engine_close(e);
    wait_done(q, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(a[i].finish, FINISH_CANCEL);
    events_free(q);
}

/* Opening what is no model, and closing while it loads. */
static void test_open(void **state)
{
    (void)state;
    struct engine_options opt = {0};
    struct engine *e = engine_open("/nonexistent.gguf", &opt);
    struct error err = {0};
    assert_false(engine_wait(e, &err));
    assert_non_null(strstr(err.msg, "/nonexistent.gguf"));
    int32_t one = 1;
    struct request_spec s = spec_of(&one, 1, 1, 1);
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_NOT_READY);
    engine_close(e);
    engine_close(engine_open(path, &opt));
}

/* Many threads submit, read and cancel at once. */
struct client {
    struct engine *e;
    int id;
    const struct answer *want; /* (8) */
    atomic_int *submitted;
};

static void *client_main(void *arg)
{
    struct client *c = arg;
    struct events *q = events_new();
    struct answer *a = mem_alloc(sizeof *a);
    uint64_t state = (uint64_t)c->id;
    int32_t prompt[64];
    for (int i = 0; i < 12; i++) {
        int which = (c->id + i) % 8;
        prompt_of(which, prompt, 64);
        struct request_spec s = spec_of(prompt, 64, 24, (uint64_t)which);
        struct request *r;
        submit(c->e, &s, q, a, &r);
        atomic_fetch_add(c->submitted, 1);
        bool cancel = i > 0 && toy_random(&state) > 0.4f;
        struct engine_event ev;
        while (!a->n_done) {
            CHECK(events_next(q, &ev, -1), "no event");
            take(&ev);
            if (cancel && a->n > 3)
                request_cancel(r);
        }
        request_free(r);
        if (a->finish != FINISH_CANCEL)
            assert_same(a, &c->want[which]);
        else
            assert_true(cancel);
    }
    events_free(q);
    mem_free(a);
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    /* 11 pages: two sequences begin with 5 each and end with 6. Prompts are read at once, however
     * slow the machine, so that those who meet also grow together. */
    struct engine_options opt = {
        .runtime = {.max_seqs = 4, .context = 128, .kv_tokens = 112, .page_len = 16},
        .itl_ms = 1e6};
    struct engine *e = open_engine(&opt);
    static struct answer want[8];
    int32_t prompt[64];
    for (int i = 0; i < 8; i++) {
        prompt_of(i, prompt, 64);
        struct request_spec s = spec_of(prompt, 64, 24, (uint64_t)i);
        run(e, &s, &want[i]);
    }
    /* The first step waits for the first request of everyone: they meet, and two at a time outgrow
     * the pages. One more is cancelled before it runs. */
    struct gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
    engine_on_step(e, gate_step, &g);
    pthread_t threads[6];
    struct client clients[6];
    atomic_int submitted = 0;
    for (int i = 0; i < 6; i++) {
        clients[i] = (struct client){e, i, want, &submitted};
        pthread_create(&threads[i], NULL, client_main, &clients[i]);
    }
    while (atomic_load(&submitted) < 6)
        usleep(1000);
    struct events *q = events_new();
    static struct answer gone;
    struct request *r;
    struct request_spec s = spec_of(prompt, 64, 24, 7);
    submit(e, &s, q, &gone, &r);
    request_cancel(r);
    gate_allow(&g, 1 << 30);
    wait_done(q, 1);
    assert_int_equal(gone.finish, FINISH_CANCEL);
    request_free(r);
    events_free(q);
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    struct engine_stats st;
    engine_stats(e, &st);
    assert_int_equal(st.pages_held + st.n_running + st.n_waiting, 0);
    assert_true(st.finished[FINISH_CANCEL] > 0 && st.n_preempted > 0);
    engine_close(e);
}

/* The reference backend lets steps overlap as a device does; with a profile they do not. The answers
 * are the same, whatever ends them: length, a stop string, a cancel of others; and however tokens are
 * chosen: by constraints and penalties, whose next choice waits for the last one, too. */
static void test_ahead(void **state)
{
    (void)state;
    static struct answer apart[CROWD], ahead[CROWD];
    uint64_t overlapped = 0;
    setenv("STEEL_ISA", "ref", 1);
    for (int round = 0; round < 2; round++) {
        struct engine_options opt = {
            .runtime = {.max_seqs = CROWD, .context = 512, .page_len = 16, .profile = round == 0}};
        struct engine *e = open_engine(&opt);
        struct events *q = events_new();
        struct engine_event ev;
        static int32_t prompts[CROWD + 1][PROMPT + 40];
        struct answer *answers = round ? ahead : apart;
        static struct answer leaver;
        struct request *r;
        static const char *const stops[] = {"a", "e", "zq"};
        struct grammar *g = grammar_of(GRAMMAR_REGEX, "(xyz[a-k]{4} literally ){4,9}");
        /* Some in one go; the last ones when the others decode already. */
        for (int i = 0; i < CROWD; i++) {
            struct request_spec s = crowd_spec(i, prompts[i]);
            s.logprobs = i == 7;
            s.n_top = 0;
            s.sample.repeat_penalty = i == 11 ? 1.2f : 1;
            s.sample.presence_penalty = i == 5 ? 0.5f : 0;
            s.max_tokens = 20 + 4 * i;
            s.min_tokens = i == 2 ? 9 : 0;
            s.ignore_eos = i != 2;
            if (i == 3 || i == 10) {
                s.grammar = g;
                s.ignore_eos = false;
            }
            if (i % 4 == 0) {
                s.stop = stops;
                s.n_stop = 3;
            }
            submit(e, &s, q, &answers[i], NULL);
            if (i == 8) {
                struct request_spec l = spec_of(prompts[0], 30, 400, 5);
                submit(e, &l, q, &leaver, &r);
                while (leaver.n < 4) {
                    assert_true(events_next(q, &ev, -1));
                    take(&ev);
                }
                request_cancel(r);
                request_free(r);
            }
        }
        int left = leaver.n_done == 0;
        for (int i = 0; i < CROWD; i++)
            left += answers[i].n_done == 0;
        wait_done(q, left);
        assert_int_equal(leaver.finish, FINISH_CANCEL);
        assert_int_equal(leaver.usage.n_generated, leaver.n);
        struct engine_stats st;
        engine_stats(e, &st);
        assert_int_equal(st.pages_held, 0);
        overlapped = st.n_ahead;
        if (round == 0)
            assert_int_equal(overlapped, 0);
        if (round == 1) {
            assert_true(st.n_forced > 20);
            assert_true(overlapped > st.n_steps / 2);
        }
        engine_close(e);
        events_free(q);
        grammar_free(g);
    }
    unsetenv("STEEL_ISA");
    for (int i = 0; i < CROWD; i++) {
        assert_same(&apart[i], &ahead[i]);
        assert_int_equal(ahead[i].usage.n_generated, ahead[i].n);
    }
}

/* A device that fails: one step's end says so. */
static struct backend_ops failing_ops;
static const struct backend_ops *true_ops;
static atomic_int steps_left;

static bool failing_end(struct backend *be, int32_t *tokens, struct error *err)
{
    bool ok = true_ops->end(be, tokens, err);
    return atomic_fetch_sub(&steps_left, 1) > 0 ? ok : error_set(err, "the device fell over");
}

static void test_device_failure(void **state)
{
    (void)state;
    enum { N = 6 };
    static struct answer a[N];
    static int32_t prompts[N][20];
    /* two run, four wait */
    struct engine_options opt = {.runtime = {.max_seqs = 2, .context = 256}};
    struct engine *e = open_engine(&opt);
    struct backend *be = engine_runtime(e)->be;
    true_ops = be->ops;
    failing_ops = *be->ops;
    failing_ops.end = failing_end;
    atomic_store(&steps_left, 1 << 20); /* until all have been accepted */
    be->ops = &failing_ops;
    struct events *q = events_new();
    for (int i = 0; i < N; i++) {
        prompt_of(i, prompts[i], 20);
        struct request_spec s = spec_of(prompts[i], 20, 200, (uint64_t)i);
        submit(e, &s, q, &a[i], NULL);
    }
    atomic_store(&steps_left, 8);
    wait_done(q, N);
    int n = 0;
    for (int i = 0; i < N; i++) {
        assert_int_equal(a[i].finish, FINISH_ERROR);
        assert_string_equal(a[i].error, "the device fell over");
        n += a[i].n;
    }
    assert_true(n > 0); /* there was an answer under way */
    struct error err = {0};
    assert_int_equal(engine_state(e, NULL, &err), ENGINE_FAILED);
    assert_string_equal(err.msg, "the device fell over");
    /* later requests are turned away with the same words, and the engine closes */
    struct request_spec s = spec_of(prompts[0], 20, 5, 1);
    s.queue = q;
    err = (struct error){0};
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_NOT_READY);
    assert_string_equal(err.msg, "the device fell over");
    struct engine_stats st;
    engine_stats(e, &st);
    assert_int_equal(st.finished[FINISH_ERROR], N);
    assert_int_equal(st.n_running + st.n_waiting, 0);
    engine_close(e);
    events_free(q);
}

/* Where sequences with states start: behind a prompt whose answer is told differently, where two
 * prompts part, all choices of a request behind one reading. */
static void test_states(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 4, .context = 4096}};
    struct engine *e = open_engine(&opt);
    static int32_t prompt[2400];
    static struct answer a, b, c, four[4];
    prompt_of(1, prompt, 2000);
    struct request_spec s = spec_of(prompt, 2000, 40, 1);
    run(e, &s, &a);
    prompt_of(7, prompt + 2000, 40); /* not what was answered */
    s = spec_of(prompt, 2040, 20, 1);
    run(e, &s, &b);
    assert_true(b.usage.n_cached > 2040 - 64);
    s.no_cache = true;
    run(e, &s, &c);
    assert_same(&b, &c);

    /* the third that begins alike finds a state where the first two parted */
    for (int i = 0; i < 3; i++) {
        prompt_of(50, prompt, 1000);
        prompt_of(60 + i, prompt + 1000, 200);
        s = spec_of(prompt, 1200, 10, 1);
        run(e, &s, &b);
        s.no_cache = true;
        run(e, &s, &c);
        assert_same(&b, &c);
    }
    assert_int_equal(b.usage.n_cached, 992);

    struct engine_stats before, after;
    engine_stats(e, &before);
    prompt_of(90, prompt, 500);
    s = spec_of(prompt, 500, 20, 5);
    s.n = 4;
    run(e, &s, four);
    engine_stats(e, &after);
    assert_true(after.read_tokens - before.read_tokens <= 500 + 3 * 16);
    s.n = 1;
    s.no_cache = true;
    for (int i = 0; i < 4; i++) {
        s.sample.seed = 5 + (uint64_t)i;
        run(e, &s, &c);
        assert_same(&four[i], &c);
    }
    engine_close(e);
}

/* An answer that ended while the next step was under way: whoever goes on otherwise than that step did
 * still finds the state behind all but the last token. A stop string, then a cancel. */
static void test_end_state(void **state)
{
    (void)state;
    static const char *const stops[] = {"a", "e", "s", "t"};
    static int32_t prompt[400];
    static struct answer a, b, c;
    struct engine_stats st;
    setenv("STEEL_ISA", "ref", 1);
    struct engine_options opt = {.runtime = {.max_seqs = 2, .context = 512, .page_len = 16}};
    struct engine *e = open_engine(&opt);
    for (int round = 0; round < 2; round++) {
        prompt_of(40 + round, prompt, 100);
        struct request_spec s = spec_of(prompt, 100, 200, 3);
        memset(&a, 0, sizeof a);
        if (round) {
            struct events *q = events_new();
            struct engine_event ev;
            struct request *r;
            submit(e, &s, q, &a, &r);
            while (a.n < 20) {
                assert_true(events_next(q, &ev, -1));
                take(&ev);
            }
            request_cancel(r);
            wait_done(q, a.n_done == 0);
            request_free(r);
            events_free(q);
        } else {
            s.stop = stops;
            s.n_stop = 4;
            run(e, &s, &a);
            assert_int_equal(a.finish, FINISH_STOP);
        }
        int n = 100 + a.n - !round; /* the token that ended it is replaced */
        memcpy(prompt + 100, a.tokens, (size_t)(n - 100) * sizeof *prompt);
        prompt_of(60 + round, prompt + n, 40);
        s = spec_of(prompt, n + 40, 8, 3);
        run(e, &s, &b);
        assert_true(b.usage.n_cached >= n - 1);
        s.no_cache = true;
        run(e, &s, &c);
        assert_same(&b, &c);
    }
    engine_stats(e, &st);
    assert_true(st.n_ahead > 20);
    engine_close(e);
    unsetenv("STEEL_ISA");
}

/* No room for checkpoints but those that are handed over: slower, never wrong. */
static void test_few_states(void **state)
{
    (void)state;
    static struct answer a, b, c;
    static int32_t prompt[400];
    struct engine_options opt = {.runtime = {.max_seqs = 2, .context = 1024, .state_bytes = 1}};
    struct engine *e = open_engine(&opt);
    prompt_of(3, prompt, 300);
    struct request_spec s = spec_of(prompt, 300, 20, 1);
    run(e, &s, &a);
    run(e, &s, &b);
    assert_same(&a, &b);
    memcpy(prompt + 300, a.tokens, 20 * sizeof *prompt);
    s = spec_of(prompt, 320, 20, 1);
    run(e, &s, &b);
    s.no_cache = true;
    run(e, &s, &c);
    assert_same(&b, &c);
    engine_close(e);
}

/* 64 clients at once, more than may run, in a cache that is too small for those, with common
 * beginnings, several choices and cancels: everybody who stays gets what it would get alone. */
static void test_rough_load(void **state)
{
    (void)state;
    enum { N = 64, MOST = 60 };
    static struct answer got[N][2], alone;
    static int32_t prompts[N][200];
    struct request_spec s[N];
    struct request *r[N];
    struct engine_options opt = {
        .runtime = {.max_seqs = 8, .context = 256, .kv_tokens = 640, .state_bytes = 1 << 17}};
    struct engine *e = open_engine(&opt);
    struct events *q = events_new();
    for (int round = 0; round < 2; round++) {
        int n = 0;
        for (int i = 0; i < N; i++) {
            int len = 30 + i * 29 % 150;
            prompt_of(i % 5, prompts[i], len);
            if (i % 3)
                prompt_of(100 + i, prompts[i] + len / 2, len - len / 2);
            s[i] = spec_of(prompts[i], len, 30 + i * 7 % MOST, (uint64_t)i);
            s[i].client = (uint64_t)i;
            s[i].n = 1 + i % 2;
            submit(e, &s[i], q, got[i], &r[i]);
            n += s[i].n;
            if (i % 7 == 6)
                request_cancel(r[i - 3]);
        }
        wait_done(q, n);
        for (int i = 0; i < N; i++)
            request_free(r[i]);
    }
    struct engine_stats st;
    engine_stats(e, &st);
    assert_true(st.n_preempted > 0 && st.cache_hits > 0);
    assert_int_equal(st.n_running + st.n_waiting, 0);
    for (int i = 0; i < N; i += 3) {
        s[i].n = 1;
        s[i].no_cache = true;
        run(e, &s[i], &alone);
        if (got[i][0].finish != FINISH_CANCEL)
            assert_same(&got[i][0], &alone);
    }
    engine_close(e);
    events_free(q);
}

/* What depends on the cache again, with recurrent states in it. */
static int run_hybrid(void)
{
    struct error err = {0};
    if (!toy_write_hybrid(path, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_company),     cmocka_unit_test(test_choices),
        cmocka_unit_test(test_second_turn), cmocka_unit_test(test_second_turn_of_parts),
        cmocka_unit_test(test_cancel),      cmocka_unit_test(test_queue),
        cmocka_unit_test(test_threads),     cmocka_unit_test(test_ahead),
        cmocka_unit_test(test_states),      cmocka_unit_test(test_few_states),
        cmocka_unit_test(test_rough_load),  cmocka_unit_test(test_end_state),
    };
    return cmocka_run_group_tests_name("hybrid", tests, NULL, NULL);
}

int main(void)
{
    struct error err = {0};
    snprintf(path, sizeof path, "/tmp/steel-engine-%d.gguf", (int)getpid());
    if (!toy_write(path, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),        cmocka_unit_test(test_company_quant),
        cmocka_unit_test(test_company),     cmocka_unit_test(test_choices),
        cmocka_unit_test(test_second_turn), cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_queue),       cmocka_unit_test(test_threads),
        cmocka_unit_test(test_ahead),
    };
    /* Some again where steps overlap; the reference is too slow for all. */
    const struct CMUnitTest overlapping[] = {
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_queue),
        cmocka_unit_test(test_device_failure),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    setenv("STEEL_ISA", "ref", 1);
    rc |= cmocka_run_group_tests(overlapping, NULL, NULL);
    unsetenv("STEEL_ISA");
    rc |= run_hybrid();
    unlink(path);
    return rc;
}
