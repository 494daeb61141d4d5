/*
 * Requests that arrive together and begin alike: one computes the beginning, the others take it from the cache. With
 * attention, sliding windows, recurrent states, adapters and embedding rows. And how long one waits for another: not for
 * one that has left, nor for a slow one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "backend/backend.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "engine/scheduler.h"
#include "size.h"

enum { PAGE = 16, MAX_SEQS = 16, SLOTS = 24, COMMON = 1500, OWN = 60, PART = 98 /* percent */ };

/* The scheduler alone */

struct world {
    struct backend *be;
    struct kvcache *kv;
    struct scheduler s;
    struct step_item items[MAX_SEQS];
    int64_t read;  /* tokens of all steps */
    bool no_saves; /* as if no slot were free */
};

static struct layer layers[] = {
    {.mixer.attention = {.n_kv_heads = 1, .k_dim = 1, .v_dim = 1}},
    {.mixer =
         {.kind = MIXER_DELTA_NET,
          .delta_net = {.n_k_heads = 1, .n_v_heads = 1, .k_dim = 1, .v_dim = 1, .conv_len = 2}}},
};

static void world_open(struct world *w, bool states, int n_pages, int max_rows)
{
    struct network net = {.n_layers = states ? 2 : 1, .layers = layers};
    struct error err = {0};
    *w = (struct world){.be = backend_open_ref()};
    w->kv = kvcache_new(w->be, &net, DT_F32, DT_F32, PAGE, n_pages, MAX_SEQS + SLOTS, &err);
    assert_non_null(w->kv);
    w->kv->prefix = prefix_new(n_pages, PAGE, true);
    struct step_limits lim = {.max_tokens = max_rows, .max_seqs = MAX_SEQS, .max_out = MAX_SEQS};
    scheduler_init(&w->s, w->kv, &lim, n_pages * PAGE, 0);
}

static void world_close(struct world *w)
{
    scheduler_clear(&w->s);
    kvcache_verify(w->kv);
    kvcache_free(w->kv);
    w->be->ops->close(w->be);
}

/* A prompt of n tokens of text `common`, then n_own of text `own`. */
static struct seq *submit(struct world *w, uint64_t client, int common, int n, int own, int n_own)
{
    struct seq *q = mem_zalloc(1, sizeof *q);
    q->client = client;
    for (int i = 0; i < n + n_own; i++)
        seq_append(q, (i < n ? common : own) * 100000 + i);
    q->n_prompt = n + n_own;
    scheduler_add(&w->s, q);
    return q;
}

static void end(struct world *w, struct seq *q)
{
    scheduler_remove(&w->s, q);
    seq_clear(q);
    mem_free(q);
}

static void step(struct world *w)
{
    struct states *states = w->kv->states;
    int n = scheduler_plan(&w->s, w->items);
    assert_true(n > 0); /* somebody always runs */
    for (int i = 0; i < n; i++) {
        struct step_item *it = &w->items[i];
        assert_true(kvcache_grow(w->kv, it->seq, it->seq->n_tokens + it->n_tokens));
        if (states && it->save_at && !w->no_saves && states_available(states) > MAX_SEQS)
            kvcache_save(w->kv, it->seq, it->seq->n_tokens + it->save_at);
        kvcache_advance(w->kv, it->seq, it->n_tokens);
        w->read += it->n_tokens;
    }
    scheduler_commit(&w->s, (int64_t)(1e6 + 1e4 * w->s.n_read));
    for (int i = 0; i < n; i++)
        if (w->items[i].want == LOGITS_LAST)
            seq_append(w->s.planned[i], 7);
    kvcache_verify(w->kv);
}

static bool has_answer(const struct seq *q)
{
    return q->n_tokens > q->n_prompt;
}

/* Steps until all have their first token. Returns their number. */
static int run(struct world *w, struct seq **q, int n)
{
    for (int steps = 0;; steps++) {
        int done = 0;
        for (int i = 0; i < n; i++)
            done += has_answer(q[i]);
        if (done == n)
            return steps;
        assert_true(steps < 1000);
        step(w);
    }
}

/* Four with one beginning, of one client or of four; in steps of several sizes. */
static void test_one_prefix(void **state)
{
    (void)state;
    static const int rows[] = {64, 512, 2048};
    for (int k = 0; k < 12; k++) {
        struct world w;
        struct seq *q[4];
        world_open(&w, k % 2, 1024, rows[k / 4]);
        for (int i = 0; i < 4; i++)
            q[i] = submit(&w, k / 2 % 2 ? (uint64_t)i : 0, 1, COMMON, 2 + i, OWN);
        run(&w, q, 4);
        assert_int_equal(q[0]->n_cached, 0);
        for (int i = 1; i < 4; i++)
            assert_true(q[i]->n_cached * 100 >= COMMON * PART);
        for (int i = 0; i < 4; i++)
            end(&w, q[i]);
        world_close(&w);
    }
}

/* Each shares another length with the first, and equal prompts share all but their last tokens. */
static void test_several_prefixes(void **state)
{
    (void)state;
    static const int common[] = {3000, 700, 1500, 2200, 3000, 1500};
    for (int states = 0; states < 2; states++) {
        struct world w;
        struct seq *q[6];
        world_open(&w, states, 2048, 512);
        for (int i = 0; i < 6; i++)
            q[i] = submit(&w, 0, 1, common[i], common[i] == 3000 ? 2 : 2 + i, OWN);
        run(&w, q, 6);
        for (int i = 1; i < 6; i++)
            assert_true(q[i]->n_cached * 100 >= common[i] * PART);
        assert_true(q[4]->n_cached >= 3000 + OWN - 2 * PAGE);
        for (int i = 0; i < 6; i++)
            end(&w, q[i]);
        world_close(&w);
    }
}

/* The one that computes is cancelled, or loses its pages: another one continues where it was. */
static void test_leader_leaves(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        struct world w;
        struct seq *q[4];
        bool states = k % 2, preempted = k / 2;
        world_open(&w, states, 1024, 256);
        for (int i = 0; i < 4; i++)
            q[i] = submit(&w, 0, 1, COMMON, 2 + i, OWN);
        for (int i = 0; i < 4; i++)
            step(&w);
        int had = q[0]->kv.n_tokens;
        assert_true(had > 256 && had < COMMON);
        if (preempted) { /* as the scheduler does it, then a place in the queue behind the others */
            scheduler_remove(&w.s, q[0]);
            scheduler_add(&w.s, q[0]);
        } else {
            end(&w, q[0]);
            q[0] = NULL;
        }
        run(&w, q + !preempted, 4 - !preempted);
        /* nothing but the tokens since the last saved state is computed twice */
        assert_true(w.read <= COMMON + 4 * (OWN + 2 * PAGE) + (states ? 256 : 0) + 16);
        for (int i = !preempted; i < 4; i++)
            end(&w, q[i]);
        world_close(&w);
    }
}

/* A stranger does not wait for a prompt that reads slowly among many of its client. */
static void test_slow_leader(void **state)
{
    (void)state;
    for (int states = 0; states < 2; states++) {
        int steps[2] = {0};
        for (int alike = 0; alike < 2; alike++) {
            struct world w;
            struct seq *a[12];
            world_open(&w, states, 8192, 256);
            for (int i = 0; i < 12; i++)
                a[i] = submit(&w, 1, 10 + i, 6000, 2, OWN);
            for (int i = 0; i < 10; i++)
                step(&w);
            /* it begins like one of them, or like none */
            struct seq *b = submit(&w, 2, alike ? 21 : 50, 6000, 3, OWN);
            steps[alike] = run(&w, &b, 1);
            for (int i = 0; i < 12; i++)
                end(&w, a[i]);
            end(&w, b);
            world_close(&w);
        }
        assert_true(steps[1] <= steps[0] + 8);
    }
}

/* Nobody waits for long for a prompt that stands still: here no planned step ever runs. */
static void test_stopped_leader(void **state)
{
    (void)state;
    for (int states = 0; states < 2; states++) {
        struct world w;
        struct seq *q[4];
        world_open(&w, states, 1024, 256);
        for (int i = 0; i < 4; i++)
            q[i] = submit(&w, (uint64_t)i, 1, COMMON, 2 + i, OWN);
        assert_int_equal(scheduler_plan(&w.s, w.items), 1);
        int n = 0;
        for (int i = 0; i < 8 && n < 4; i++)
            n = scheduler_plan(&w.s, w.items);
        assert_int_equal(n, 4);
        run(&w, q, 4);
        for (int i = 0; i < 4; i++)
            end(&w, q[i]);
        world_close(&w);
    }
}

/* Nobody waits for a prompt whose pages it may not use, nor for one that has passed the end of what they share. */
static void test_useless_leader(void **state)
{
    (void)state;
    struct world w;
    for (int states = 0; states < 2; states++) {
        world_open(&w, states, 1024, 256);
        struct seq *a = submit(&w, 0, 1, COMMON, 2, OWN), *b = submit(&w, 0, 1, COMMON, 3, OWN);
        b->root = prefix_root(w.kv->prefix, "other", 5);
        scheduler_remove(&w.s, b); /* and again, with that root */
        scheduler_add(&w.s, b);
        assert_int_equal(scheduler_plan(&w.s, w.items), 2);
        end(&w, a);
        end(&w, b);
        world_close(&w);
    }
    world_open(&w, true, 1024, 256);
    w.no_saves = true;
    struct seq *a = submit(&w, 0, 1, 400, 2, 3000), *b = submit(&w, 0, 1, 400, 3, OWN);
    while (a->kv.n_tokens < 400) {
        assert_int_equal(b->kv.n_tokens, 0);
        step(&w);
    }
    step(&w);
    assert_true(b->kv.n_tokens > 0 && !b->n_cached);
    end(&w, a);
    end(&w, b);
    world_close(&w);
}

/* Prompts with many common beginnings in few pages and slots, that come and go: all end, and the books balance. */
static void test_random(void **state)
{
    (void)state;
    uint32_t random = 1;
    for (int states = 0; states < 2; states++) {
        struct world w;
        struct seq *q[32] = {0};
        int n_done = 0, n_submitted = 0;
        world_open(&w, states, 160, 256);
        for (int steps = 0; n_done < 400; steps++) {
            assert_true(steps < 20000);
            for (int i = 0; i < 32; i++) {
                random = random * 1664525u + 1013904223u;
                uint32_t r = random >> 8;
                if (!q[i] && n_submitted < 400 && r % 8 == 0) {
                    q[i] = submit(&w, r / 8 % 3, (int)(r / 24 % 4), 16 + (int)(r / 96 % 700),
                                  4 + (int)(r % 50), (int)(r / 7 % 90));
                    n_submitted++;
                } else if (q[i] && (q[i]->n_tokens >= q[i]->n_prompt + 20 || r % 400 == 0)) {
                    end(&w, q[i]);
                    q[i] = NULL;
                    n_done++;
                }
            }
            if (w.s.running.n + w.s.waiting.n)
                step(&w);
        }
        world_close(&w);
    }
}

/* The engine */

enum { ROWS = 1000, ANSWER = 3, MOST = 4 };
enum { COMMON_SMALL = 480, ROWS_SMALL = 160 }; /* the same for slow machines */

static int common_tokens(void)
{
    return test_small() ? COMMON_SMALL : COMMON;
}

static int image_rows(void)
{
    return test_small() ? ROWS_SMALL : ROWS;
}

struct ask {
    int common, own; /* texts */
    int image;       /* 0 = none: its rows replace ROWS tokens of the beginning */
    bool adapter;
    int cached;
    int32_t tokens[ANSWER];
    int n;
};

static atomic_int n_submitted, n_expected;

/* The first step waits until all requests are there. */
static void wait_for_all(void *arg, int n_items)
{
    (void)arg;
    (void)n_items;
    while (atomic_load(&n_submitted) < atomic_load(&n_expected))
        usleep(100);
}

static void text_of(int which, int32_t *out, int n)
{
    uint32_t random = (uint32_t)which * 77777u + 1;
    for (int i = 0; i < n; i++) {
        random = random * 1664525u + 1013904223u;
        out[i] = 1 + (int32_t)(random >> 16) % 140;
    }
}

static void ask_all(struct engine *e, struct ask *asks, int n, bool no_cache)
{
    static float rows[2 * ROWS * 64];
    static int32_t prompts[MOST][COMMON + OWN];
    struct events *q = events_new();
    struct error err = {0};
    uint32_t random = 5;
    int common = common_tokens(), n_rows = image_rows();
    for (int i = 0; i < 2 * n_rows * 64; i++) {
        random = random * 1664525u + 1013904223u;
        rows[i] = (float)(random >> 16) / 65536.0f - 0.5f;
    }
    atomic_store(&n_submitted, 0);
    atomic_store(&n_expected, n);
    for (int i = 0; i < n; i++) {
        struct ask *a = &asks[i];
        struct prompt_embeds image = {
            .at = 300, .n = n_rows, .rows = rows + (a->image == 2) * n_rows * 64};
        struct lora_pick picks[LORA_MAX_USES];
        a->n = a->cached = 0;
        text_of(a->common, prompts[i], common);
        text_of(a->own, prompts[i] + common, OWN);
        image.id[0] = (uint8_t)a->image;
        struct request_spec s = {.prompt = prompts[i],
                                 .n_prompt = common + OWN,
                                 .embeds = a->image ? &image : NULL,
                                 .n_embeds = a->image > 0,
                                 .client = (uint64_t)i,
                                 .max_tokens = ANSWER,
                                 .ignore_eos = true,
                                 .no_cache = no_cache,
                                 .queue = q,
                                 .user = a};
        s.sample = sample_params_default();
        s.sample.temp = 0;
        if (a->adapter) {
            assert_true(adapters_parse(engine_adapters(e), "one", picks, &s.n_loras, &err));
            s.loras[0] = picks[0];
        }
        if (engine_submit(e, &s, NULL, &err) != SUBMIT_OK)
            fail_msg("%s", err.msg);
        atomic_fetch_add(&n_submitted, 1);
    }
    for (struct engine_event ev; n > 0;) {
        assert_true(events_next(q, &ev, -1));
        struct ask *a = ev.user;
        if (ev.kind == EVENT_TOKEN)
            a->tokens[a->n++] = ev.token;
        if (ev.kind == EVENT_DONE)
            a->cached = ev.usage.n_cached;
        n -= ev.kind == EVENT_DONE;
    }
    events_free(q);
}

/* Asks all at once. `from[i]` tokens of request i are another one's, of which it takes 98 %, and no more. Answers are those
 * that each gets alone. */
static void check_model(const char *model, struct ask *asks, const int *from)
{
    struct adapter_ref one = {.name = "one", .path = "tests/golden/qwen3-lora", .scale = 1};
    struct engine_options opt = {.runtime = {.max_seqs = MOST, .context = 1800, .kv_tokens = 8000}};
    struct error err = {0};
    opt.runtime.backend.threads = 1;
    opt.runtime.backend.deterministic = true;
    for (int i = 0; i < MOST; i++) {
        opt.runtime.embeds |= asks[i].image > 0;
        opt.runtime.loras = asks[i].adapter ? &one : opt.runtime.loras;
        opt.runtime.n_loras |= asks[i].adapter;
    }
    struct engine *e = engine_open(model, &opt);
    if (!engine_wait(e, &err))
        fail_msg("%s: %s", model, err.msg);
    engine_on_step(e, wait_for_all, NULL);
    ask_all(e, asks, MOST, false);
    for (int i = 0; i < MOST; i++) {
        struct ask alone = asks[i];
        print_message("%s: %d of %d tokens\n", model, asks[i].cached, from[i]);
        assert_true(asks[i].cached <= from[i]);
        assert_true(asks[i].cached * 100 >=
                    from[i] * PART - 100 * PAGE * (from[i] < common_tokens()));
        ask_all(e, &alone, 1, true);
        assert_int_equal(asks[i].n, ANSWER);
        assert_memory_equal(asks[i].tokens, alone.tokens, sizeof alone.tokens);
    }
    engine_close(e);
}

static void test_models(void **state)
{
    (void)state;
    static const char *const models[] = {"qwen3", "gemma3", "gpt_oss", "qwen3_5"};
    int common = common_tokens();
    for (int i = 0; i < 4; i++) {
        char path[64];
        struct ask asks[MOST] = {{.common = 1, .own = 2},
                                 {.common = 1, .own = 3},
                                 {.common = 1, .own = 4},
                                 {.common = 1, .own = 5}};
        snprintf(path, sizeof path, "tests/golden/%s", models[i]);
        check_model(path, asks, (const int[]){0, common, common, common});
    }
}

/* Prompts of one adapter share, those of none do, and never both. */
static void test_adapters(void **state)
{
    (void)state;
    struct ask asks[MOST] = {{.common = 1, .own = 2, .adapter = true},
                             {.common = 1, .own = 3},
                             {.common = 1, .own = 4, .adapter = true},
                             {.common = 1, .own = 5}};
    check_model("tests/golden/qwen3", asks, (const int[]){0, 0, common_tokens(), common_tokens()});
}

/* Rows of embeddings in place of a picture's tokens: equal tokens are shared as far as the pictures are the same. */
static void test_rows(void **state)
{
    (void)state;
    struct ask asks[MOST] = {{.common = 1, .own = 2, .image = 1},
                             {.common = 1, .own = 3, .image = 2},
                             {.common = 1, .own = 4, .image = 1},
                             {.common = 1, .own = 5, .image = 2}};
    const int from[] = {0, 300, common_tokens(), common_tokens()};
    check_model("tests/golden/qwen3", asks, from);
    check_model("tests/golden_images/qwen3_5", asks, from);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_prefix),     cmocka_unit_test(test_several_prefixes),
        cmocka_unit_test(test_leader_leaves),  cmocka_unit_test(test_slow_leader),
        cmocka_unit_test(test_stopped_leader), cmocka_unit_test(test_useless_leader),
        cmocka_unit_test(test_random),         cmocka_unit_test(test_models),
        cmocka_unit_test(test_adapters),       cmocka_unit_test(test_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
