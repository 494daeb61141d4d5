/*
 * The cost of drafting. Token ids are random, so the acceptance rate cannot be measured here.
 * Measured are the time of a step that verifies drafts, of the MTP block that makes them, if the model has one, and of a
 * step without drafts. The two kinds of step alternate.
 */
#include "backend/backend.h"
#include "cli/bench/bench_draft.h"
#include "base/clock.h"
#include "base/mem.h"

#include <stdio.h>

struct draft_run {
    struct runtime *rt;
    struct kv_seq *seqs;      /* (n_seqs) */
    struct step_item *items;  /* (n_seqs) */
    struct draft_item *draft; /* (n_seqs) */
    int32_t *ids;             /* (n_seqs, DRAFT_MOST + 2) */
    struct sampler *greedy;
    int n_seqs;
    uint32_t random;
};

static int32_t *random_ids(struct draft_run *d, int s, int n)
{
    int32_t *ids = d->ids + (size_t)s * (DRAFT_MOST + 2);
    for (int i = 0; i < n; i++) {
        d->random = d->random * 1664525u + 1013904223u;
        ids[i] = (int32_t)((d->random >> 8) % (uint32_t)d->rt->model->config.n_vocab);
    }
    return ids;
}

/* Runs the MTP block over the rows of the step, then over each draft token but the last. */
static bool run_block(struct draft_run *d, int draft, struct error *err)
{
    for (int j = 0; j < draft; j++) {
        for (int s = 0; s < d->n_seqs; s++) {
            struct draft_item *g = &d->draft[s];
            const int32_t *ids = d->ids + (size_t)s * (DRAFT_MOST + 2);
            int end = d->seqs[s].n_tokens;
            *g = j ? (struct draft_item){&d->seqs[s], ids, end - 1, 1, g->row, true, 0, 0}
                   : (struct draft_item){
                         &d->seqs[s], ids + 1, end - 1 - draft, 1 + draft, d->items[s].row, true,
                         0,           0};
        }
        if (!step_draft(d->rt->step, d->draft, d->n_seqs, err))
            return false;
    }
    return true;
}

/* Generates one token per sequence with `draft` draft tokens, all rejected. */
static bool run_step(struct draft_run *d, int draft, struct error *err)
{
    for (int s = 0; s < d->n_seqs; s++)
        d->items[s] = (struct step_item){.seq = &d->seqs[s],
                                         .tokens = random_ids(d, s, draft + 2),
                                         .n_tokens = 1 + draft,
                                         .n_draft = draft,
                                         .want = LOGITS_LAST,
                                         .sampler = d->greedy,
                                         .chained = d->rt->be->async};
    if (!step_run(d->rt->step, d->items, d->n_seqs, err) ||
        (d->rt->draft && !run_block(d, draft, err)))
        return false;
    for (int s = 0; s < d->n_seqs; s++)
        if (d->items[s].n_draft)
            kvcache_cut(d->rt->kv, &d->seqs[s], d->seqs[s].n_tokens - draft);
    return true;
}

static bool fill(struct draft_run *d, int depth, struct error *err)
{
    for (int s = 0; s < d->n_seqs; s++)
        for (int at = 0; at < depth; at++) {
            struct step_item it = {
                .seq = &d->seqs[s], .tokens = random_ids(d, s, 1), .n_tokens = 1};
            if (!step_run(d->rt->step, &it, 1, err))
                return false;
        }
    return true;
}

/* The time of a step without drafts, and with `draft` of them. */
static bool measure(struct draft_run *d, int draft, double ms[2], struct error *err)
{
    ms[0] = ms[1] = 0;
    for (int i = -2; i < BENCH_DRAFT_STEPS; i++)
        for (int k = 0; k < 2; k++) {
            int64_t start = clock_ns();
            if (!run_step(d, k ? draft : 0, err))
                return false;
            if (i >= 0) /* the first two warm up */
                ms[k] += (double)(clock_ns() - start) * 1e-6 / BENCH_DRAFT_STEPS;
        }
    return true;
}

static void print(int draft, int n_seqs, const double ms[2], bool json)
{
    double share = (ms[1] / ms[0] - 1) / draft, best = (1 + draft) * ms[0] / ms[1];
    if (json)
        printf("{\"test\": \"draft %d x%d\", \"step_ms\": %.4f, \"draft_step_ms\": %.4f, "
               "\"pays_above\": %.4f, \"best\": %.4f}\n",
               draft, n_seqs, ms[0], ms[1], share, best);
    else
        printf("drafting %d, %d sequence%s: a step takes %.2f ms, with drafts %.2f ms: drafting "
               "pays if more than %.0f %% are accepted; if all are, generation is %.2f times as "
               "fast\n",
               draft, n_seqs, n_seqs == 1 ? "" : "s", ms[0], ms[1], 100 * share, best);
    fflush(stdout);
}

bool bench_draft(struct runtime *rt, int n_seqs, int depth, bool json, struct error *err)
{
    size_t n = (size_t)n_seqs;
    struct draft_run d = {.rt = rt, .n_seqs = n_seqs, .random = 5};
    d.seqs = mem_zalloc(n, sizeof *d.seqs);
    d.items = mem_zalloc(n, sizeof *d.items);
    d.draft = mem_zalloc(n, sizeof *d.draft);
    d.ids = mem_zalloc(n * (DRAFT_MOST + 2), sizeof *d.ids);
    struct sample_params greedy = sample_params_default();
    greedy.temp = 0;
    greedy.repeat_penalty = 1;
    d.greedy = sampler_new(&greedy, rt->model->config.n_vocab);
    double ms[2];
    bool ok = fill(&d, depth > 0 ? depth : 1, err);
    for (int draft = 1; ok && draft <= rt->draft_fixed; draft++) {
        ok = measure(&d, draft, ms, err);
        if (ok)
            print(draft, n_seqs, ms, json);
    }
    for (size_t i = 0; i < n; i++)
        kvcache_release(rt->kv, &d.seqs[i]);
    sampler_free(d.greedy);
    mem_free(d.seqs);
    mem_free(d.items);
    mem_free(d.draft);
    mem_free(d.ids);
    return ok;
}
