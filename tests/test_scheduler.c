/*
 * The prefix index and the scheduler alone: pages and made-up step times, no model. The driver below
 * plays engine: it "runs" each planned step by moving tokens into the KV sequences.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>

#include "base/mem.h"
#include "backend/backend.h"
#include "engine/scheduler.h"

enum { PAGE = 4, MAX_SEQS = 16, MAX_ROWS = 512 };

struct world {
    struct backend *be;
    struct kvcache *kv;
    struct scheduler s;
    struct step_item items[MAX_SEQS];
    double base_ns, decode_ns, read_ns; /* what a step costs */
    double last_ns, longest_ns;         /* of steps with decodes */
    int n_steps;
};

static void world_open(struct world *w, int n_pages, double budget_ms, bool keep)
{
    struct layer layer = {.mixer.attention = {.n_kv_heads = 1, .k_dim = 1, .v_dim = 1}};
    struct network net = {.n_layers = 1, .layers = &layer};
    struct error err = {0};
    *w = (struct world){.be = backend_open_ref(), .base_ns = 1e6, .decode_ns = 1e5, .read_ns = 1e5};
    w->kv = kvcache_new(w->be, &net, DT_F32, DT_F32, PAGE, n_pages, 0, &err);
    assert_non_null(w->kv);
    w->kv->prefix = prefix_new(n_pages, PAGE, keep);
    struct step_limits lim = {.max_tokens = MAX_ROWS, .max_seqs = MAX_SEQS, .max_out = MAX_SEQS};
    scheduler_init(&w->s, w->kv, &lim, n_pages * PAGE, budget_ms);
}

static void world_close(struct world *w)
{
    scheduler_clear(&w->s);
    assert_int_equal(kvcache_available(w->kv), w->kv->n_pages);
    kvcache_free(w->kv);
    w->be->ops->close(w->be);
}

static struct seq *seq_new_for(struct world *w, uint64_t client, int n_prompt, int first)
{
    struct seq *q = mem_zalloc(1, sizeof *q);
    q->client = client;
    for (int i = 0; i < n_prompt; i++)
        seq_append(q, first + i);
    q->n_prompt = n_prompt;
    scheduler_add(&w->s, q);
    return q;
}

static struct seq *seq_new(struct world *w, int n_prompt, int first)
{
    return seq_new_for(w, 0, n_prompt, first);
}

static void seq_end(struct world *w, struct seq *q)
{
    scheduler_remove(&w->s, q);
    seq_clear(q);
    mem_free(q);
}

/* One step; sequences that reach the end of their tokens get `token` appended. */
static int step(struct world *w, int32_t token)
{
    struct scheduler *s = &w->s;
    int n = scheduler_plan(s, w->items), rows = 0;
    for (int i = 0; i < n; i++) {
        struct step_item *it = &w->items[i];
        rows += it->n_tokens;
        assert_true(kvcache_grow(w->kv, it->seq, it->seq->n_tokens + it->n_tokens));
        it->seq->n_tokens += it->n_tokens;
    }
    assert_true(rows <= MAX_ROWS && n <= MAX_SEQS);
    if (!n)
        return 0;
    w->last_ns = w->base_ns + w->decode_ns * s->n_decode + w->read_ns * s->n_read;
    if (s->n_decode && w->last_ns > w->longest_ns)
        w->longest_ns = w->last_ns;
    w->n_steps++;
    scheduler_commit(s, (int64_t)w->last_ns);
    for (int i = 0; i < n; i++)
        if (w->items[i].want == LOGITS_LAST)
            seq_append(s->planned[i], token);
    kvcache_verify(w->kv);
    return n;
}

/* Tokens that were forced on answers: where steps of decodes are recorded, few of them are read one a
 * step, as if they had been chosen; many together. */
static void test_forced(void **state)
{
    (void)state;
    for (int records = 0; records < 2; records++) {
        struct world w;
        struct seq *q[8];
        world_open(&w, 64, 0, true);
        w.s.records = records;
        for (int i = 0; i < 8; i++)
            q[i] = seq_new(&w, 3, 100 * i);
        for (int k = 0; k < 20 && w.s.n_decode < 8; k++)
            step(&w, 7);
        assert_int_equal(w.s.n_decode, 8);
        seq_append(q[2], 8); /* one more than is read anyway */
        int at = q[2]->kv.n_tokens;
        assert_int_equal(scheduler_plan(&w.s, w.items), 8);
        assert_int_equal(w.s.n_decode, records ? 8 : 7);
        assert_int_equal(w.s.n_forced, records ? 0 : 2);
        assert_int_equal(w.s.n_read, 0);
        for (int i = 0; i < 8; i++) { /* all have logits: the step is like one without */
            assert_int_equal(w.items[i].want, LOGITS_LAST);
            assert_int_equal(w.items[i].n_tokens, w.s.planned[i] == q[2] && !records ? 2 : 1);
        }
        assert_int_equal(q[2]->kv.n_tokens, at);
        seq_append(q[5], 8); /* two of eight */
        scheduler_plan(&w.s, w.items);
        assert_int_equal(w.s.n_decode, 6);
        assert_int_equal(w.s.n_forced, 4);
        q[5]->n_tokens--;
        /* However little of prompts a step would read: nobody's answer waits for another's. */
        int chunk = w.s.limits.read_chunk;
        w.s.limits.read_chunk = 1 << 20;
        for (int i = 0; i < 8; i++)
            seq_append(q[i], 8);
        assert_int_equal(scheduler_plan(&w.s, w.items), 8);
        assert_int_equal(w.s.n_decode, 0);
        assert_int_equal(w.s.n_forced, 17);
        double learned = w.s.cost.read_ns; /* a few forced tokens say nothing of prompts */
        scheduler_commit(&w.s, (int64_t)1e12);
        assert_true(w.s.cost.read_ns == learned);
        for (int i = 0; i < 8; i++)
            q[i]->n_tokens--;
        w.s.limits.read_chunk = chunk;
        struct seq *late = seq_new(&w, 9, 5000); /* a prompt is read: then they are, too */
        scheduler_plan(&w.s, w.items);
        assert_int_equal(w.s.n_decode, 7);
        assert_true(w.s.n_read > 0);
        seq_end(&w, late);
        for (int i = 0; i < 8; i++)
            seq_end(&w, q[i]);
        world_close(&w);
    }
}

static void test_index(void **state)
{
    (void)state;
    struct prefix *p = prefix_new(8, PAGE, true);
    uint16_t ref[8] = {0};
    uint64_t a[PAGE] = {1, 2, 3, 4}, b[PAGE] = {1, 2, 3, 5};
    uint64_t s0 = prefix_add(p, 0, a, 0);
    assert_int_equal(prefix_find(p, 0, a), 0);
    assert_int_equal(prefix_find(p, 0, b), -1);
    assert_int_equal(prefix_find(p, s0, a), -1);
    uint64_t s1 = prefix_add(p, s0, a, 1);
    assert_int_equal(prefix_find(p, s0, a), 1);
    assert_true(s1 != s0);
    /* a salt is another tree */
    uint64_t salt = prefix_root(p, "key", 3), other = prefix_root(p, "kez", 3);
    assert_true(salt != other && salt != 0 && salt == prefix_root(p, "key", 3));
    assert_int_equal(prefix_find(p, salt, a), -1);
    prefix_add(p, salt, a, 2);
    assert_int_equal(prefix_find(p, salt, a), 2);
    /* the longest tail that fits */
    prefix_add_tail(p, s1, (uint64_t[]){7}, 1, 3);
    prefix_add_tail(p, s1, (uint64_t[]){7, 8, 9}, 3, 4);
    prefix_add_tail(p, s1, (uint64_t[]){7, 6}, 2, 5);
    int len;
    assert_int_equal(prefix_find_tail(p, s1, (uint64_t[]){7, 8, 9, 1}, 4, &len), 4);
    assert_int_equal(len, 3);
    assert_int_equal(prefix_find_tail(p, s1, (uint64_t[]){7, 8, 9, 1}, 2, &len), 3);
    assert_int_equal(prefix_find_tail(p, s1, (uint64_t[]){8, 8}, 2, &len), -1);
    /* the same tail again is not indexed twice */
    prefix_add_tail(p, s1, (uint64_t[]){7, 6}, 2, 6);
    assert_int_equal(prefix_serial(p, 6), 0);
    assert_false(prefix_idle(p, 6));
    /* eviction: longest idle first, and what is held again is not evicted */
    for (int32_t i = 5; i >= 0; i--)
        assert_true(prefix_idle(p, i));
    prefix_verify(p, ref);
    prefix_hold(p, 2);
    ref[2] = 1;
    prefix_verify(p, ref);
    static const int32_t order[] = {5, 4, 3, 1, 0};
    for (int i = 0; i < 5; i++)
        assert_int_equal(prefix_evict(p), order[i]);
    assert_int_equal(prefix_evict(p), -1);
    assert_int_equal(prefix_find(p, 0, a), -1);
    assert_int_equal(prefix_find(p, salt, a), 2);
    prefix_free(p);
}

/* Content ids: tokens are themselves, rows of images are their image and index, and no two are equal. */
static void test_content(void **state)
{
    (void)state;
    struct prefix *p = prefix_new(8, PAGE, true);
    assert_true(prefix_text(7, 0) == 7);
    assert_true(prefix_text(7, -30) != prefix_text(7, 0));
    assert_true(prefix_text(7, -30) != prefix_text(7, 30));
    assert_true(prefix_text(INT32_MAX, -1) >> 63 == 0);
    assert_true(prefix_embed(p, "cat0", 4) >> 63 == 1);
    assert_true(prefix_embed(p, "cat0", 4) == prefix_embed(p, "cat0", 4));
    assert_true(prefix_embed(p, "cat0", 4) != prefix_embed(p, "cat1", 4));
    prefix_free(p);
}

/* A prompt of the same placeholder tokens around an image that `image` names. */
static struct seq *seq_of_image(struct world *w, struct prompt_rows *rows, uint64_t *content,
                                const char *image, int delta)
{
    struct seq *q = mem_zalloc(1, sizeof *q);
    for (int i = 0; i < 30; i++) {
        bool inside = i >= 6 && i < 22;
        char name[16];
        snprintf(name, sizeof name, "%s %d", image, i);
        seq_append(q, inside ? 999 : 100 + i);
        content[i] = inside ? prefix_embed(w->kv->prefix, name, strlen(name))
                            : prefix_text(100 + i, i < 6 ? 0 : delta);
    }
    *rows = (struct prompt_rows){.n = 30, .rope_delta = delta, .content = content};
    q->rows = rows;
    q->n_prompt = 30;
    scheduler_add(&w->s, q);
    return q;
}

/* Prompts of the same tokens share pages up to where their images differ, or their positions do. */
static void test_images(void **state)
{
    (void)state;
    struct world w;
    struct prompt_rows rows[6];
    uint64_t content[6][30];
    world_open(&w, 64, 0, true);
    struct seq *cat = seq_of_image(&w, &rows[0], content[0], "cat", -9);
    struct seq *dog = seq_of_image(&w, &rows[1], content[1], "dog", -9);
    step(&w, 500); /* at the same time: neither waits for the other's page */
    step(&w, 500);
    assert_true(cat->kv.n_tokens >= 30 && dog->kv.n_tokens >= 30);
    assert_int_equal(cat->kv.pages[0], dog->kv.pages[0]);
    for (int i = 1; i < 7; i++)
        assert_int_not_equal(cat->kv.pages[i], dog->kv.pages[i]);
    for (int i = 0; i < 5; i++)
        step(&w, 500 + i);
    struct seq *again = seq_of_image(&w, &rows[2], content[2], "cat", -9);
    struct seq *bird = seq_of_image(&w, &rows[3], content[3], "bird", -9);
    struct seq *turned = seq_of_image(&w, &rows[4], content[4], "cat", -8);
    struct seq *text = seq_new(&w, 0, 0);
    scheduler_remove(&w.s, text);
    for (int i = 0; i < 30; i++)
        seq_append(text, i >= 6 && i < 22 ? 999 : 100 + i);
    text->n_prompt = 30;
    scheduler_add(&w.s, text);
    step(&w, 500);
    assert_int_equal(again->n_cached, 28); /* whole pages before the last token */
    assert_int_equal(bird->n_cached, PAGE);
    assert_int_equal(turned->n_cached, 20); /* to the page in which the text's positions differ */
    assert_int_equal(text->n_cached, PAGE);
    /* an answer to an image is found as a part of the next prompt */
    int n = cat->n_tokens;
    uint64_t longer[64];
    memcpy(longer, content[0], sizeof content[0]);
    for (int i = 30; i < n; i++)
        longer[i] = prefix_text(cat->tokens[i], -9);
    rows[5] = (struct prompt_rows){.n = n, .rope_delta = -9, .content = longer};
    struct seq *next = mem_zalloc(1, sizeof *next);
    for (int i = 0; i < n; i++)
        seq_append(next, cat->tokens[i]);
    next->rows = &rows[5];
    next->n_prompt = n;
    scheduler_add(&w.s, next);
    step(&w, 500);
    assert_true(next->n_cached >= (n - 1) / PAGE * PAGE);
    struct seq *all[] = {cat, dog, again, bird, turned, text, next};
    for (int i = 0; i < 7; i++)
        seq_end(&w, all[i]);
    world_close(&w);
}

/* The second time a prompt comes, all but its last token is there already; the answer too. */
static void test_reuse(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 64, 0, true);
    struct seq *a = seq_new(&w, 30, 100);
    for (int i = 0; i < 9; i++)
        step(&w, 500 + i);
    assert_int_equal(a->n_tokens, 39);
    int32_t all[39];
    memcpy(all, a->tokens, sizeof all);
    seq_end(&w, a);
    assert_int_equal(kvcache_available(w.kv), 64);
    assert_int_equal(w.kv->n_free, 64 - 10); /* 38 tokens computed: nine pages and a tail of two */
    struct seq *b = seq_new(&w, 39, 0);
    memcpy(b->tokens, all, sizeof all);
    step(&w, 1);
    assert_int_equal(b->n_cached, 38);
    assert_int_equal(w.s.n_read + w.s.n_decode, 1);
    assert_int_equal(w.s.cache_hits, 38);
    /* a third that differs in token 20 shares five pages */
    struct seq *c = seq_new(&w, 39, 0);
    memcpy(c->tokens, all, sizeof all);
    c->tokens[20] = 1;
    step(&w, 1);
    assert_int_equal(c->n_cached, 20);
    /* another salt shares nothing */
    struct seq *d = mem_zalloc(1, sizeof *d);
    for (int i = 0; i < 39; i++)
        seq_append(d, all[i]);
    d->n_prompt = 39;
    d->root = prefix_root(w.kv->prefix, "other", 5);
    scheduler_add(&w.s, d);
    step(&w, 1);
    assert_int_equal(d->n_cached, 0);
    seq_end(&w, b);
    seq_end(&w, c);
    seq_end(&w, d);
    world_close(&w);
}

/* Equal prompts at the same time are computed once, with the cache kept or not. */
static void test_twins(void **state)
{
    (void)state;
    for (int keep = 0; keep < 2; keep++) {
        struct world w;
        world_open(&w, 256, 0, keep);
        struct seq *q[8];
        for (int i = 0; i < 8; i++)
            q[i] = seq_new(&w, 102, 7);
        int64_t read = 0;
        int n = 0;
        while (n < 8) {
            step(&w, 3);
            read += w.s.n_read + w.s.n_decode;
            n = 0;
            for (int i = 0; i < 8; i++)
                n += q[i]->n_tokens > 102;
        }
        /* 25 full pages once, then two tokens each; decodes of the early ones besides */
        assert_true(read <= 100 + 8 * 2 + 8 * 8);
        int held = w.kv->n_pages - kvcache_available(w.kv);
        assert_true(held <= 25 + 8 * 3);
        for (int i = 0; i < 8; i++)
            seq_end(&w, q[i]);
        assert_int_equal(w.kv->n_free == w.kv->n_pages, !keep);
        world_close(&w);
    }
}

/* Two sequences that come to the same content by different ways end up holding one copy. */
static void test_merge(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 64, 0, true);
    struct seq *a = seq_new(&w, 6, 0), *b = seq_new(&w, 6, 0);
    for (int i = 0; i < 12; i++) /* both "generate" the same tokens */
        step(&w, 9);
    int pages = a->n_indexed < b->n_indexed ? a->n_indexed : b->n_indexed;
    assert_true(pages >= 3);
    assert_memory_equal(a->kv.pages, b->kv.pages, (size_t)pages * sizeof *a->kv.pages);
    seq_end(&w, a);
    seq_end(&w, b);
    world_close(&w);
}

/* More work than pages: the young give way, everyone ends, nobody is overtaken for ever. */
static void test_preemption(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 24, 0, true);
    enum { N = 6, PROMPT = 10, ANSWER = 50 };
    struct seq *q[N];
    for (int i = 0; i < N; i++)
        q[i] = seq_new(&w, PROMPT, 1000 * (i + 1));
    int left = N, guard = 0;
    bool ended[N] = {false};
    int last_ended = -1;
    while (left) {
        assert_true(step(&w, 5 + guard) > 0);
        assert_true(++guard < 2000);
        for (int i = 0; i < N; i++)
            if (!ended[i] && q[i]->n_tokens >= PROMPT + ANSWER) {
                ended[i] = true;
                assert_int_equal(i, last_ended + 1); /* the oldest end first */
                last_ended = i;
                seq_end(&w, q[i]);
                left--;
            }
    }
    assert_true(w.s.n_preempted > 0);
    world_close(&w);
}

/* A waiting sequence taken out leaves nothing behind; so does one half read. */
static void test_remove(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 64, 1, true);
    struct seq *a = seq_new(&w, 200, 0), *b = seq_new(&w, 200, 5000), *c = seq_new(&w, 8, 9000);
    step(&w, 1);
    assert_true(a->running && !b->running &&
                !c->running); /* b does not fit beside a; c is behind b */
    assert_true(a->kv.n_tokens > 0 && seq_unread(a) > 1);
    seq_end(&w, b);
    step(&w, 1);
    assert_true(c->running);
    seq_end(&w, a);
    seq_end(&w, c);
    kvcache_verify(w.kv);
    world_close(&w);
}

/* With 8 answers running, a long prompt is read in pieces that keep the step within its budget. */
static void test_budget(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 4096, 20, true);
    struct seq *run[8];
    for (int i = 0; i < 8; i++)
        run[i] = seq_new(&w, 4, 100 * (i + 1));
    for (int i = 0; i < 20; i++)
        step(&w, i);
    w.longest_ns = 0;
    struct seq *long_one = seq_new(&w, 4000, 100000);
    int steps = 0;
    while (long_one->n_tokens == 4000) {
        step(&w, 1);
        assert_int_equal(w.s.n_decode + (w.s.n_planned - w.s.n_decode > 0), w.s.n_planned);
        assert_true(w.s.n_decode >= 8); /* nobody is left out of a step */
        steps++;
    }
    /* 1.8 ms for the decodes leave 18.2 ms: at most 182 tokens a step, 142 planned */
    assert_true(w.longest_ns < 2 * 20e6);
    assert_true(steps >= 26 && steps < 45);
    /* reading becomes five times dearer (a longer context): the pieces follow */
    struct seq *second = seq_new(&w, 4000, 200000);
    w.read_ns *= 5;
    int over = 0;
    while (second->n_tokens == 4000) {
        step(&w, 1);
        over += w.last_ns > 20e6 * 1.25;
    }
    assert_true(over <= 3);
    for (int i = 0; i < 8; i++)
        seq_end(&w, run[i]);
    seq_end(&w, long_one);
    seq_end(&w, second);
    world_close(&w);
}

/* What steps cost is learned by rows, though neither part is proportional to them. Where every step reads prompts, what
 * decodes cost is found, too. */
static void test_cost(void **state)
{
    (void)state;
    struct step_cost c = {0};
    assert_true(step_cost_decode(&c, 5) == 0 && step_cost_read(&c, 5) == 0);
    assert_int_equal(step_cost_reads_in(&c, 1, 700), 700); /* nothing is known */
    assert_int_equal(step_cost_decodes_in(&c, 1, 700), COST_FIRST);
    for (int n = 1; n <= 1024; n *= 2)
        step_cost_learn(&c, n, 0, 1e6 + 2e4 * n);
    for (int i = 0; i < 400; i++)
        step_cost_learn(&c, 64, 16 << i % 8, 1e6 + 2e4 * 64 + 5e5 + 1e3 * (16 << i % 8));
    for (int n = 1; n <= 1024; n += 7)
        assert_true(fabs(step_cost_decode(&c, n) / (1e6 + 2e4 * n) - 1) < 0.05);
    for (int n = 16; n <= 2048; n += 13)
        assert_true(fabs((step_cost_decode(&c, 64) + step_cost_read(&c, n)) / (2.78e6 + 1e3 * n) -
                         1) < 0.02);
    assert_in_range(step_cost_reads_in(&c, 5e5 + 1e3 * 700, 4096), 640, 760);
    assert_int_equal(step_cost_reads_in(&c, 1e3, 4096), 0);
    assert_in_range(step_cost_decodes_in(&c, 1e6 + 2e4 * 300, 4096), 298, 302);
    assert_int_equal(step_cost_decodes_in(&c, 1, 4096), 0);
    assert_int_equal(step_cost_decodes_in(&c, 1e12, 4096), 2048); /* no further than twice */
    /* 512 decodes in every step, of which only eight were ever measured alone */
    c = (struct step_cost){0};
    step_cost_learn(&c, 8, 0, 1e6 + 2e4 * 8);
    for (int i = 0; i < 400; i++)
        step_cost_learn(&c, 512, 64 + 64 * (i % 4), 1e6 + 2e4 * 512 + 1e3 * (64 + 64 * (i % 4)));
    double both = step_cost_decode(&c, 512) + step_cost_read(&c, 128);
    assert_true(fabs(both - (1e6 + 2e4 * 512 + 1e3 * 128)) < 0.1 * both);
}

/* With a target of inter-token latency no more answers run than decode within it, prompts take what is left, and both
 * end. One that a single answer exceeds bounds prompts alone. */
static void test_itl(void **state)
{
    (void)state;
    struct world w;
    struct seq *q[MAX_SEQS];
    world_open(&w, 4096, 2.5, true); /* 2 ms are planned: ten decodes of 0.1 ms beside 1 ms */
    w.s.itl_ns = 2.5e6;
    w.read_ns = 1e4;
    for (int i = 0; i < MAX_SEQS; i++)
        q[i] = seq_new(&w, 100, 1000 * (i + 1));
    int most = 0, n_over = 0, n_steps = 0;
    for (int i = 0; i < 300; i++) {
        step(&w, i);
        most = w.s.running.n > most ? w.s.running.n : most;
        n_over += i > 60 && w.s.n_decode && w.last_ns > 2.5e6;
        n_steps += w.s.n_decode > 0;
    }
    assert_in_range(most, 8, 12); /* it is found by trying */
    assert_int_equal(scheduler_most_running(&w.s), 10);
    assert_true(n_over == 0 && n_steps > 250);
    assert_true(w.s.waiting.n > 0);
    for (int i = 0; i < MAX_SEQS; i++) /* those that wait get the places of those that end */
        if (q[i]->running) {
            seq_end(&w, q[i]);
            q[i] = NULL;
        }
    for (int i = 0; i < 40; i++)
        step(&w, i);
    assert_int_equal(w.s.waiting.n, 0);
    w.s.itl_ns = w.s.budget_ns = 1e5;
    assert_int_equal(scheduler_most_running(&w.s), MAX_SEQS);
    for (int i = 0; i < MAX_SEQS; i++)
        if (q[i])
            seq_end(&w, q[i]);
    world_close(&w);
}

/* With a target of the first token, the prompts of a client are read in order of arrival, so that most end sooner than if all
 * were read at once. One that misses it gets a part. */
static void test_ttft(void **state)
{
    (void)state;
    double mean[2] = {0};
    for (int target = 0; target < 2; target++) {
        struct world w;
        struct seq *q[8];
        int done[8] = {0};
        world_open(&w, 4096, 8, true);
        w.s.limits.read_chunk = 32;
        struct seq *first = seq_new(&w, 4, 1); /* it decodes, so that steps are short */
        for (int i = 0; i < 20; i++)
            step(&w, i);
        w.s.ttft_ns = target ? 1e9 : 0;
        for (int i = 0; i < 8; i++)
            q[i] = seq_new(&w, 400, 1000 * (i + 1));
        for (int t = 1, left = 8; left; t++) {
            assert_true(t < 2000);
            w.s.now_ns += w.last_ns;
            step(&w, 1);
            for (int i = 0; i < 8; i++)
                if (!done[i] && q[i]->n_tokens > 400) {
                    done[i] = t;
                    mean[target] += t / 8.0;
                    left--;
                }
        }
        for (int i = 1; i < 8 && target; i++)
            assert_true(done[i] >= done[i - 1]);
        /* The older one has missed its target: the younger goes first, but does not take all. */
        struct seq *old = seq_new(&w, 2000, 50000), *young = seq_new(&w, 2000, 60000);
        old->arrived_ns = w.s.now_ns - 2e9;
        young->arrived_ns = w.s.now_ns;
        while (old->n_tokens == 2000 && young->n_tokens == 2000)
            step(&w, 1);
        if (target) {
            assert_true(young->n_tokens > 2000 && old->n_tokens == 2000);
            assert_true(old->kv.n_tokens > 400 && old->kv.n_tokens < 1000);
        }
        seq_end(&w, old);
        seq_end(&w, young);
        seq_end(&w, first);
        for (int i = 0; i < 8; i++)
            seq_end(&w, q[i]);
        world_close(&w);
    }
    assert_true(mean[1] < 0.7 * mean[0]);
}

/* The automatic budget on machines far apart: steps keep to it from the first piece on, and reading
 * does not crawl. */
static void test_auto_budget(void **state)
{
    (void)state;
    static const struct {
        double base_ms, decode_ms, read_ms;
    } machines[] = {{2, 0.05, 0.02}, {40, 6, 1.2}, {150, 10, 20}};
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++) {
        struct world w;
        world_open(&w, 4096, 0, true);
        w.base_ns = machines[m].base_ms * 1e6;
        w.decode_ns = machines[m].decode_ms * 1e6;
        w.read_ns = machines[m].read_ms * 1e6;
        struct seq *run[8];
        for (int i = 0; i < 8; i++)
            run[i] = seq_new(&w, 4, 100 * (i + 1));
        for (int i = 0; i < 20; i++)
            step(&w, i);
        double budget = scheduler_budget_ns(&w.s, 8), took = 0;
        assert_true(budget >= 250e6 && budget >= 2.9 * (w.base_ns + 8 * w.decode_ns));
        w.longest_ns = 0;
        struct seq *long_one = seq_new(&w, 4000, 100000);
        while (long_one->n_tokens == 4000) {
            step(&w, 1);
            took += w.last_ns;
        }
        assert_true(w.longest_ns < 1.1 * budget);
        /* no more than twice what reading alone takes: the answers have at most half of the machine */
        double alone = 4000 * w.read_ns + 4000.0 / MAX_ROWS * w.base_ns;
        assert_true(took < 2.2 * alone);
        for (int i = 0; i < 8; i++)
            seq_end(&w, run[i]);
        seq_end(&w, long_one);
        world_close(&w);
    }
}

/* Beside decodes, an image makes steps at most three times as long. Alone, and with a text in its place, they are longer. */
static void test_images_beside(void **state)
{
    (void)state;
    enum { N = 1000, DECODES = 8 };
    static const float *embeds[N];
    static const float row = 1;
    for (int i = 10; i < N - 10; i++)
        embeds[i] = &row;
    uint64_t content[N];
    struct prompt_rows rows = {.n = N, .embeds = embeds, .content = content};
    for (int seen = 0; seen < 2; seen++) {
        struct world w;
        world_open(&w, 4096, 0, true);
        w.base_ns = 5e6;
        w.decode_ns = 0.05e6;
        w.read_ns = 0.04e6;
        struct seq *run[DECODES], *one;
        for (int i = 0; i < DECODES; i++)
            run[i] = seq_new(&w, 40, 100 * (i + 1));
        for (int i = 0; i < 30; i++)
            step(&w, i);
        double decode = w.base_ns + DECODES * w.decode_ns;
        for (int beside = 1; beside >= 0; beside--) {
            one = seq_new(&w, N, 10000 * (1 + beside));
            one->rows = seen ? &rows : NULL;
            for (int i = 0; i < N; i++)
                content[i] = (uint64_t)(beside * N + i + 1);
            double longest = 0;
            while (one->n_tokens == N) {
                step(&w, 1);
                longest = fmax(longest, w.last_ns);
            }
            if (seen && beside)
                assert_true(longest < 3.1 * decode && longest > 2 * decode);
            else
                assert_true(longest > 4 * decode);
            seq_end(&w, one);
            for (int i = 0; beside && i < DECODES; i++)
                seq_end(&w, run[i]);
        }
        world_close(&w);
    }
}

/* Alone, a prompt may use longer steps. */
static void test_idle_budget(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 4096, 20, true);
    struct seq *a = seq_new(&w, 8000, 0);
    while (a->n_tokens == 8000)
        step(&w, 1);
    assert_true(w.n_steps < 8000 / 400);
    seq_end(&w, a);
    world_close(&w);
}

/* A short prompt behind a long one does not wait for it. */
static void test_fairness(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 4096, 20, true);
    struct seq *answer = seq_new(&w, 4, 9);
    for (int i = 0; i < 5; i++)
        step(&w, i);
    struct seq *big[3], *small[3];
    for (int i = 0; i < 3; i++)
        big[i] = seq_new(&w, 3000, 10000 * (i + 1));
    for (int i = 0; i < 4; i++)
        step(&w, i);
    for (int i = 0; i < 3; i++)
        small[i] = seq_new(&w, 60, 100000 * (i + 1));
    int steps = 0;
    while (small[0]->n_tokens == 60 || small[1]->n_tokens == 60 || small[2]->n_tokens == 60) {
        step(&w, 1);
        steps++;
    }
    assert_true(steps <= 5);
    for (int i = 0; i < 3; i++)
        assert_true(seq_unread(big[i]) > 1000);
    /* and the long ones advance alike */
    for (int i = 0; i < 8; i++)
        step(&w, 1);
    assert_true(abs(big[0]->kv.n_tokens - big[2]->kv.n_tokens) < 300);
    for (int i = 0; i < 3; i++) {
        seq_end(&w, big[i]);
        seq_end(&w, small[i]);
    }
    seq_end(&w, answer);
    world_close(&w);
}

/* Random arrivals, ends and removals in a small cache: the accounts hold at every step. */
static void test_random(void **state)
{
    (void)state;
    for (int keep = 0; keep < 2; keep++) {
        struct world w;
        world_open(&w, 60, 2, keep);
        srand(11);
        struct seq *q[24] = {0};
        for (int i = 0; i < 6000; i++) {
            int k = rand() % 24;
            if (!q[k]) {
                q[k] = seq_new_for(&w, (uint64_t)(rand() % 4), 1 + rand() % 100, rand() % 3 * 1000);
                q[k]->no_cache = rand() % 8 == 0;
            } else if (rand() % 10 == 0 || q[k]->n_tokens > 180) {
                seq_end(&w, q[k]);
                q[k] = NULL;
            }
            for (int j = 0; j < 24; j++)
                if (q[j] && q[j]->n_tokens >= 60 * PAGE) {
                    seq_end(&w, q[j]);
                    q[j] = NULL;
                }
            step(&w, rand() % 2);
        }
        assert_true(w.s.n_preempted > 0 && w.s.cache_hits > 0);
        for (int k = 0; k < 24; k++)
            if (q[k])
                seq_end(&w, q[k]);
        world_close(&w);
    }
}

static int n_running(struct seq *const *q, int n)
{
    int running = 0;
    for (int i = 0; i < n; i++)
        running += q[i]->running;
    return running;
}

/* One client fills every place and the queue, with answers that do not end. Whoever comes is in the
 * next step, and two who want everything get half each. */
static void test_clients(void **state)
{
    (void)state;
    enum { N = 100 };
    struct world w;
    world_open(&w, 4096, 20, true);
    struct seq *a[N], *b[N];
    for (int i = 0; i < N; i++)
        a[i] = seq_new_for(&w, 7, 20, 1000 * (i + 1));
    for (int i = 0; i < 30; i++)
        step(&w, i);
    assert_int_equal(n_running(a, N), MAX_SEQS);
    b[0] = seq_new_for(&w, 8, 20, 500);
    step(&w, 1);
    assert_true(b[0]->running && n_running(a, N) == MAX_SEQS - 1);
    for (int i = 0; i < 3; i++)
        step(&w, 1);
    assert_true(b[0]->n_tokens > 20); /* its first token */
    assert_true(a[0]->running && a[0]->n_preempted == 0);
    for (int i = 1; i < N; i++)
        b[i] = seq_new_for(&w, 8, 20, 1000 * (i + 200));
    step(&w, 1);
    assert_int_equal(n_running(a, N), MAX_SEQS / 2);
    assert_int_equal(n_running(b, N), MAX_SEQS / 2);
    int64_t preempted = w.s.n_preempted;
    for (int i = 0; i < 50; i++) /* that is settled: nobody is thrown out again */
        step(&w, i);
    assert_int_equal(w.s.n_preempted, preempted);
    /* each client's own stay in order; places that fall free go to whom has fewer */
    for (int i = 0; i < 4; i++)
        seq_end(&w, a[i]);
    step(&w, 1);
    for (int i = 4; i < N; i++)
        assert_int_equal(a[i]->running, i < 4 + MAX_SEQS / 2);
    /* more clients than places: each has one at most, and all come in turn */
    struct seq *c[2 * MAX_SEQS];
    for (int i = 0; i < 2 * MAX_SEQS; i++)
        c[i] = seq_new_for(&w, (uint64_t)(100 + i), 20, 300000 + 1000 * i);
    for (int i = 0; i < 2 * MAX_SEQS; i++) {
        int guard = 0;
        while (!c[i]->running && guard++ < 200) {
            step(&w, 1);
            for (int k = 0; k < i; k++) /* those before end after some tokens */
                if (c[k] && c[k]->n_tokens > 30) {
                    seq_end(&w, c[k]);
                    c[k] = NULL;
                }
        }
        assert_true(c[i]->running);
    }
    for (int i = 0; i < N; i++) {
        if (i >= 4)
            seq_end(&w, a[i]);
        seq_end(&w, b[i]);
    }
    for (int i = 0; i < 2 * MAX_SEQS; i++)
        if (c[i])
            seq_end(&w, c[i]);
    world_close(&w);
}

/* The last token of a held sequence is not read: it sits steps out, and others run. A step of held ones alone is
 * none, and nobody is preempted for want of something to do. */
static void test_held(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 20, 20, true);
    struct seq *a = seq_new(&w, 30, 1000), *b = seq_new(&w, 10, 2000);
    a->held = true;
    for (int i = 0; i < 4; i++)
        step(&w, i);
    assert_int_equal(seq_unread(a), 1);
    assert_int_equal(a->n_tokens, 30);
    assert_int_equal(b->n_tokens, 14);
    a->held = false;
    b->held = true;
    for (int i = 0; i < 3; i++)
        assert_int_equal(step(&w, i), 1);
    assert_int_equal(a->n_tokens, 33);
    assert_int_equal(b->n_tokens, 14);
    seq_append(b, 1); /* forced: the tokens before the last one are read */
    seq_append(b, 2);
    step(&w, 3);
    step(&w, 4);
    assert_int_equal(seq_unread(b), 1);
    a->held = true;
    assert_int_equal(step(&w, 5), 0);
    assert_int_equal(w.s.n_preempted, 0);
    assert_true(a->running && b->running);
    /* one that the oldest, held, leaves no pages: it waits, and is not thrown out for ever */
    struct seq *c = seq_new(&w, 6 * PAGE, 5000);
    for (int i = 0; i < 4; i++)
        step(&w, i);
    assert_true(c->n_tokens > 6 * PAGE || !c->running);
    b->held = a->held = false;
    assert_true(step(&w, 6) >= 2);
    seq_end(&w, a);
    seq_end(&w, b);
    seq_end(&w, c);
    world_close(&w);
}

/* What masks cost a client is taken from its prompts' share while others want it, down to a chunk, and from the
 * step's time. */
/* Draws that take the host long: beside a client whose draws are cheap, those that fit take turns. Alone, or among clients who all
 * draw much, nobody waits. */
static void test_draws(void **state)
{
    (void)state;
    enum { COSTLY = 12 };
    for (int cheap = 0; cheap < 2; cheap++) {
        struct world w;
        struct seq *q[COSTLY + 1];
        world_open(&w, 256, 0, true);
        for (int i = 0; i <= COSTLY; i++) {
            q[i] = seq_new_for(&w, i ? 1 : 2, 3, 100 * i);
            q[i]->draw_ns = i || !cheap ? 400e3 : 40e3;
        }
        for (int k = 0; k < 40 && w.s.n_decode < COSTLY + 1; k++)
            step(&w, 7);
        assert_int_equal(w.s.n_decode, COSTLY + 1); /* nothing is known of the time beside draws */
        scheduler_drew(&w.s, 4e6, 4e6 / 4, 4e6 / 4);
        for (int k = 0; k < 100; k++)
            scheduler_drew(&w.s, 4e6 + 1e6, 1e6, 1e6); /* room for two of them */
        int before[COSTLY + 1], n = 0;
        for (int i = 0; i <= COSTLY; i++)
            before[i] = q[i]->n_tokens;
        for (int k = 0; k < 6; k++) {
            step(&w, 7);
            n += w.s.n_decode;
        }
        assert_int_equal(n, cheap ? 6 * 3 : 6 * (COSTLY + 1));
        for (int i = 0; i <= COSTLY; i++)
            assert_int_equal(q[i]->n_tokens - before[i], cheap && i ? 1 : 6);
        for (int k = 0; k < 100; k++)
            scheduler_drew(&w.s, 4.2e6 + 0.25e6, 0.25e6, 1e6); /* four threads draw: room for ten */
        step(&w, 7);
        assert_int_equal(w.s.n_decode, cheap ? 11 : COSTLY + 1);
        q[1]->draw_ns = 100e6; /* more than the room: alone in its turn, and it has one */
        int at = q[1]->n_tokens;
        for (int k = 0; k < 3 * COSTLY && q[1]->n_tokens == at; k++)
            step(&w, 7);
        assert_int_equal(q[1]->n_tokens, at + 1);
        for (int i = 0; i <= COSTLY; i++)
            seq_end(&w, q[i]);
        world_close(&w);
    }
}

static void test_debt(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 6000, 20, true);
    struct seq *a = seq_new_for(&w, 1, 4000, 10000), *b = seq_new_for(&w, 2, 4000, 20000);
    for (int i = 0; i < 8; i++)
        step(&w, i);
    int even = a->kv.n_tokens - b->kv.n_tokens;
    step(&w, 1);
    even -= a->kv.n_tokens - b->kv.n_tokens;
    assert_in_range(even + 2, 0, 4);
    int before = scheduler_read_tokens(&w.s, 0);
    w.s.mask_ns = 20e6;
    assert_true(scheduler_read_tokens(&w.s, 0) < before);
    w.s.mask_ns = 0;
    scheduler_charge(&w.s, a, (int64_t)(400 * w.read_ns));
    assert_true(scheduler_debt_ns(&w.s, a) > 0 && scheduler_debt_ns(&w.s, b) <= 0);
    int n_a = a->kv.n_tokens, n_b = b->kv.n_tokens, steps = 0;
    while (scheduler_debt_ns(&w.s, a) > 0 && ++steps < 50) {
        int last = a->kv.n_tokens;
        step(&w, 1);
        assert_true(a->kv.n_tokens > last); /* it advances */
    }
    int lost = (b->kv.n_tokens - n_b) - (a->kv.n_tokens - n_a);
    assert_in_range(lost, 100, 801); /* the free part of the time pays the rest */
    n_a = a->kv.n_tokens;
    n_b = b->kv.n_tokens;
    step(&w, 1);
    assert_in_range(a->kv.n_tokens - n_a - (b->kv.n_tokens - n_b) + 2, 0, 4);
    /* alone it loses nothing */
    seq_end(&w, b);
    step(&w, 1);
    before = a->kv.n_tokens;
    step(&w, 1);
    int free_run = a->kv.n_tokens - before;
    scheduler_charge(&w.s, a, (int64_t)(400 * w.read_ns));
    before = a->kv.n_tokens;
    step(&w, 1);
    assert_true(a->kv.n_tokens - before >= free_run);
    seq_end(&w, a);
    world_close(&w);
}

/* A client that holds all pages gives some to one that comes. */
static void test_clients_pages(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 64, 20, true);
    struct seq *a[8];
    for (int i = 0; i < 8; i++)
        a[i] = seq_new_for(&w, 1, 24, 1000 * (i + 1));
    for (int i = 0; i < 8; i++)
        step(&w, i);
    int before = n_running(a, 8);
    assert_true(before >= 6);
    struct seq *b = seq_new_for(&w, 2, 40, 50000);
    for (int i = 0; i < 6; i++)
        step(&w, i);
    assert_true(b->running && b->n_tokens > 40);
    assert_true(n_running(a, 8) >= 2 && a[0]->running);
    /* what cannot be had that way is not tried: nobody is thrown out for nothing */
    int64_t preempted = w.s.n_preempted;
    struct seq *c = seq_new_for(&w, 3, 62 * PAGE, 90000);
    int running = n_running(a, 8);
    step(&w, 1);
    assert_true(!c->running && w.s.n_preempted == preempted && n_running(a, 8) == running);
    for (int i = 0; i < 8; i++)
        seq_end(&w, a[i]);
    seq_end(&w, b);
    seq_end(&w, c);
    world_close(&w);
}

/* Fifteen long prompts of one client and one of another: each client's prompts are read alike. */
/* A large prompt that must wait for pages does not hold up other clients' small ones, and is not
 * overtaken for ever. */
static void test_clients_pass(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 100, 20, true);
    struct seq *holder = seq_new_for(&w, 1, 60 * PAGE, 1000);
    for (int i = 0; i < 20; i++)
        step(&w, 1);
    struct seq *large = seq_new_for(&w, 2, 70 * PAGE, 5000);
    step(&w, 1);
    assert_true(holder->running && !large->running);
    /* one small one after another, of many clients: max_seqs of them, then it is the large one's turn */
    int passed = 0;
    for (int i = 0; i < 4 * MAX_SEQS; i++) {
        struct seq *small = seq_new_for(&w, (uint64_t)(10 + i), 2 * PAGE, 20000 + 100 * i);
        step(&w, 1);
        passed += small->running;
        assert_int_equal(small->running, i < MAX_SEQS);
        assert_false(large->running);
        seq_end(&w, small);
    }
    assert_int_equal(passed, MAX_SEQS);
    struct seq *small = seq_new_for(&w, 9, 2 * PAGE, 90000);
    step(&w, 1);
    assert_false(small->running);
    seq_end(&w, holder);
    step(&w, 1);
    assert_true(large->running && small->running);
    /* the next one that lacks pages may be passed again */
    struct seq *again = seq_new_for(&w, 3, 60 * PAGE, 50000);
    struct seq *third = seq_new_for(&w, 4, 2 * PAGE, 95000);
    step(&w, 1);
    assert_true(!again->running && third->running);
    /* its own client's sequences stay behind it */
    struct seq *own = seq_new_for(&w, 3, PAGE, 97000);
    step(&w, 1);
    assert_false(own->running);
    struct seq *all[] = {large, small, again, third, own};
    for (int i = 0; i < 5; i++)
        seq_end(&w, all[i]);
    world_close(&w);
}

static void test_clients_read(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 16384, 20, true);
    struct seq *a[MAX_SEQS - 1];
    for (int i = 0; i < MAX_SEQS - 1; i++)
        a[i] = seq_new_for(&w, 1, 3000, 10000 * (i + 1));
    for (int i = 0; i < 5; i++)
        step(&w, i);
    struct seq *b = seq_new_for(&w, 2, 3000, 900000);
    int64_t all = 0, steps = 0;
    while (seq_unread(b) > 1) {
        step(&w, 1);
        all += w.s.n_read;
        steps++;
    }
    assert_true(all < 2.2 * 3000); /* half of what was read was b's */
    for (int i = 0; i < MAX_SEQS - 1; i++)
        seq_end(&w, a[i]);
    seq_end(&w, b);
    world_close(&w);
}

/* A bound on each client, whatever is free. */
static void test_clients_bound(void **state)
{
    (void)state;
    struct world w;
    world_open(&w, 1024, 20, true);
    w.s.max_per_client = 3;
    struct seq *a[8], *b[2];
    for (int i = 0; i < 8; i++)
        a[i] = seq_new_for(&w, 1, 10, 1000 * (i + 1));
    for (int i = 0; i < 2; i++)
        b[i] = seq_new_for(&w, 2, 10, 50000 * (i + 1));
    for (int i = 0; i < 10; i++)
        step(&w, i);
    assert_int_equal(n_running(a, 8), 3);
    assert_int_equal(n_running(b, 2), 2);
    seq_end(&w, a[0]);
    step(&w, 1);
    assert_true(a[3]->running && !a[4]->running);
    for (int i = 1; i < 8; i++)
        seq_end(&w, a[i]);
    for (int i = 0; i < 2; i++)
        seq_end(&w, b[i]);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forced),       cmocka_unit_test(test_index),
        cmocka_unit_test(test_content),      cmocka_unit_test(test_images),
        cmocka_unit_test(test_reuse),        cmocka_unit_test(test_twins),
        cmocka_unit_test(test_merge),        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_remove),       cmocka_unit_test(test_budget),
        cmocka_unit_test(test_cost),         cmocka_unit_test(test_itl),
        cmocka_unit_test(test_ttft),         cmocka_unit_test(test_idle_budget),
        cmocka_unit_test(test_auto_budget),  cmocka_unit_test(test_images_beside),
        cmocka_unit_test(test_fairness),     cmocka_unit_test(test_random),
        cmocka_unit_test(test_clients),      cmocka_unit_test(test_clients_pages),
        cmocka_unit_test(test_clients_read), cmocka_unit_test(test_clients_bound),
        cmocka_unit_test(test_clients_pass), cmocka_unit_test(test_held),
        cmocka_unit_test(test_debt),         cmocka_unit_test(test_draws),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
