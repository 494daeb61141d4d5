/*
 * The gain of each row of the kernel tables over the rows after it, in one process: the model is
 * loaded once, and a row is left out by name between steps. A round measures all rows and then
 * each row left out, and then the same in reverse order, so that drift of the clock cancels.
 * Every measurement begins at the same context lengths.
 */
#include "backend/backend.h"
#include "cli/bench/bench_picks.h"
#include "base/clock.h"
#include "base/mem.h"
#include "cli/cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_ROWS = 64, MOST_TABLE = 256 };

struct audited {
    char name[64];
    const char *op;
    char instead[256]; /* rows that ran more often without it */
    double sum_log;    /* of the rates without it */
    bool stays;        /* it runs even if left out: nothing else fits */
};

struct audit {
    struct runtime *rt;
    const struct bench_test *test;
    struct kv_seq *seqs;
    uint64_t before[MOST_TABLE], base[MOST_TABLE]; /* picks by table row */
    struct audited rows[MOST_ROWS];
    int n_rows;
};

/* All sequences have exactly the test's depth. A recurrent state that cannot go back is computed again. */
static bool rewind_all(struct audit *a, struct error *err)
{
    const struct bench_test *t = a->test;
    struct kvcache *kv = a->rt->kv;
    const struct bench_loras none = {.n = 0};
    bool again = false;
    for (int s = 0; s < t->n_seqs; s++) {
        if (a->seqs[s].n_tokens > t->depth)
            kvcache_cut(kv, &a->seqs[s], t->depth);
        again |= a->seqs[s].n_tokens < t->depth || !kvcache_can_grow(kv, &a->seqs[s]);
    }
    if (!again)
        return true;
    for (int s = 0; s < t->n_seqs; s++)
        kvcache_release(kv, &a->seqs[s]);
    return bench_fill(a->rt, &none, a->seqs, t->n_seqs, t->depth, err);
}

static bool run_once(struct audit *a, int steps, struct error *err)
{
    const struct bench_test *t = a->test;
    const struct bench_loras none = {.n = 0};
    return t->n_gen ? bench_decode(a->rt, &none, a->seqs, t->n_seqs, steps, err)
                    : bench_fill(a->rt, &none, a->seqs, t->n_seqs, t->n_prompt, err);
}

/* Tokens per second without the row `out`; NULL: with all. picks (by table row): how often each was picked. */
static bool measure(struct audit *a, const char *out, double *rate, uint64_t *picks,
                    struct error *err)
{
    const struct bench_test *t = a->test;
    struct backend *be = a->rt->be;
    struct pick_info info;
    char names[80];
    snprintf(names, sizeof names, "-%s", out ? out : "");
    if (!rewind_all(a, err))
        return false;
    be->ops->picks->force(be, out ? names : NULL);
    for (int i = 0; i < MOST_TABLE && be->ops->picks->row(be, i, &info); i++)
        a->before[i] = info.runs;
    int64_t t0 = 0;
    bool ok = run_once(a, BENCH_WARM_STEPS, err) && (t->n_gen || rewind_all(a, err));
    if (ok) {
        t0 = clock_ns();
        ok = run_once(a, t->n_gen, err);
    }
    double tokens = t->n_seqs * (t->n_gen ? t->n_gen : t->n_prompt);
    *rate = tokens / ((double)(clock_ns() - t0) * 1e-9);
    for (int i = 0; i < MOST_TABLE && be->ops->picks->row(be, i, &info); i++)
        picks[i] = info.runs - a->before[i];
    be->ops->picks->force(be, NULL);
    return ok;
}

/* The rows that a run with all of them picked, each name once. */
static void list_rows(struct audit *a)
{
    struct backend *be = a->rt->be;
    struct pick_info info;
    a->n_rows = 0;
    for (int i = 0; i < MOST_TABLE && be->ops->picks->row(be, i, &info); i++) {
        bool known = !a->base[i] || a->n_rows == MOST_ROWS;
        for (int j = 0; j < a->n_rows; j++)
            known |= !strcmp(a->rows[j].name, info.name);
        if (known)
            continue;
        struct audited *r = &a->rows[a->n_rows++];
        *r = (struct audited){.op = info.op};
        snprintf(r->name, sizeof r->name, "%s", info.name);
    }
}

static bool measure_without(struct audit *a, struct audited *r, struct error *err)
{
    struct backend *be = a->rt->be;
    uint64_t picks[MOST_TABLE] = {0};
    struct pick_info info;
    double rate;
    if (!measure(a, r->name, &rate, picks, err))
        return false;
    r->sum_log += log(rate);
    r->instead[0] = 0;
    for (int i = 0; i < MOST_TABLE && be->ops->picks->row(be, i, &info); i++) {
        size_t len = strlen(r->instead);
        if (!strcmp(info.name, r->name))
            r->stays |= picks[i] > 0;
        else if (picks[i] > a->base[i] && !strstr(r->instead, info.name))
            snprintf(r->instead + len, sizeof r->instead - len, "%s%s", len ? " " : "", info.name);
    }
    return true;
}

static void print_row(const struct audit *a, const struct audited *r, double base, double spread,
                      int n, bool json)
{
    double gain = exp(base - r->sum_log / n) - 1;
    const struct bench_test *t = a->test;
    int rows = t->n_gen ? t->n_seqs : t->n_prompt;
    if (json)
        printf("{\"kind\": \"pick\", \"op\": \"%s\", \"row\": \"%s\", "
               "\"test\": \"%s\", \"rows\": %d, \"depth\": %d, \"gain\": %.4f, \"spread\": %.4f, "
               "\"tok_s\": %.1f, \"instead\": \"%s\"}\n",
               r->op, r->name, t->n_gen ? "decode" : "prompt", rows, t->depth, gain, spread,
               exp(base), r->instead);
    else
        printf("%-6s %5d @%-6d %-14s %-30s %+7.1f %%  over %s\n", t->n_gen ? "decode" : "prompt",
               rows, t->depth, r->op, r->name, 100 * gain, r->instead);
    fflush(stdout);
}

bool bench_picks(struct runtime *rt, const struct bench_test *t, int rounds, bool json,
                 struct error *err)
{
    struct audit *a = mem_zalloc(1, sizeof *a);
    a->rt = rt;
    a->test = t;
    a->seqs = mem_zalloc((size_t)t->n_seqs, sizeof *a->seqs);
    double rate, base = 0, least = 0, most = 0;
    bool ok = measure(a, NULL, &rate, a->base, err);
    list_rows(a);
    for (int i = 0; ok && i < 2 * rounds; i++) {
        for (int k = 0; ok && k <= a->n_rows; k++) {
            int j = i % 2 ? a->n_rows - k : k; /* 0: all rows */
            if (j) {
                ok = measure_without(a, &a->rows[j - 1], err);
                continue;
            }
            ok = measure(a, NULL, &rate, a->base, err);
            base += log(rate) / (2 * rounds);
            least = !i || rate < least ? rate : least;
            most = rate > most ? rate : most;
        }
    }
    for (int i = 0; ok && i < a->n_rows; i++)
        if (!a->rows[i].stays)
            print_row(a, &a->rows[i], base, most / least - 1, 2 * rounds, json);
    for (int s = 0; s < t->n_seqs; s++)
        kvcache_release(rt->kv, &a->seqs[s]);
    mem_free(a->seqs);
    mem_free(a);
    return ok;
}
