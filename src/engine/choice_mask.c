/*
 * Masks of constrained choices: which tokens may be chosen next. A choice whose mask takes longer than a step
 * should wait is held: its last token is not read, the background computes the mask (masks.h), and steps run
 * without it until then. The engine's thread only.
 */
#include "engine/engine_int.h"
#include "backend/backend.h"
#include "base/clock.h"

#include <stddef.h>

enum {
    HOST_SHARE = 4,          /* of the time of steps on the CPU, for masks in the background */
    TRY_SHARE = 2,           /* of a step's time, for masks that the engine waits for */
    TRY_NS = 1000000,        /* ... but at least this long */
    FIRST_GRANT_NS = 250000, /* before a step has been measured */
};

static bool is_constrained(const struct choice *c)
{
    return c && c->sampler && sampler_is_constrained(c->sampler);
}

/* Charges a mask's time to the client. */
static void charge(struct engine *e, struct choice *c)
{
    e->stats.mask_s += (double)c->mask.cpu_ns * 1e-9;
    scheduler_charge(&e->sched, &c->seq, c->mask.cpu_ns);
}

static void hold(struct engine *e, struct choice *c)
{
    c->costly = c->seq.held = true;
    e->n_held++;
    e->stats.n_held++;
    masks_start(e->masks, &c->mask);
}

static void release(struct engine *e, struct choice *c)
{
    c->seq.held = false;
    e->n_held--;
}

/* Steps in flight will not choose for c. Where one has read its last token for that, it reads it again. */
static void skip_choosing(struct engine *e, struct choice *c)
{
    for (int k = 0; k < 2; k++)
        if (c->at[k] && e->steps[k].items[c->at[k] - 1].sampler) {
            e->steps[k].items[c->at[k] - 1].sampler = NULL;
            c->reread = true;
        }
}

/* Whether a step in flight reads c's last token and cannot be undone. */
static bool must_choose(const struct engine *e, const struct choice *c)
{
    for (int k = 0; k < 2; k++)
        if (c->at[k] && e->steps[k].items[c->at[k] - 1].sampler)
            return e->rt->kv->states;
    return false;
}

/* Computes the masks of choices (n) that are not known to take long, and holds the others. */
static void prepare(struct engine *e, struct choice **choices, int n)
{
    int64_t start = clock_ns(), most = e->step_ns / TRY_SHARE;
    int n_jobs = 0;
    most = most > TRY_NS ? most : TRY_NS;
    for (int i = 0; i < n; i++) {
        struct choice *c = choices[i];
        c->mask.sampler = c->sampler;
        c->mask.used_ns = (int64_t)scheduler_debt_ns(&e->sched, &c->seq);
        c->mask.most = c->mask.used_ns ? MASK_TRY_DEBTOR : MASK_TRY;
        if (!c->costly && !sampler_is_prepared(c->sampler))
            e->mask_jobs[n_jobs++] = &c->mask;
    }
    if (n_jobs)
        masks_try(e->masks, e->mask_jobs, n_jobs, start + most - e->try_ns);
    for (int i = 0; i < n_jobs; i++)
        charge(e, (struct choice *)((char *)e->mask_jobs[i] - offsetof(struct choice, mask)));
    for (int i = 0; i < n; i++) {
        struct choice *c = choices[i];
        if (sampler_is_prepared(c->sampler))
            continue;
        if (must_choose(e, c)) {
            sampler_prepare(c->sampler);
        } else {
            skip_choosing(e, c);
            hold(e, c);
        }
    }
    e->try_ns += clock_ns() - start;
}

/* Appends forced tokens: those that c's masks leave as the only choice. False: c has ended. */
static bool take_forced(struct engine *e, struct choice *c)
{
    for (int32_t token; !c->seq.held && (token = sampler_forced(c->sampler)) >= 0;) {
        for (int k = 0; k < 2; k++)
            if (c->at[k])
                e->steps[k].items[c->at[k] - 1].sampler = NULL;
        e->stats.n_forced++;
        if (!choice_take_token(e, c, token, &(struct engine_event){.stop = -1}))
            return false;
        prepare(e, &c, 1);
    }
    return true;
}

void choices_prepare(struct engine *e, struct engine_step *f)
{
    int n = 0;
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (is_constrained(c) && f->items[i].want != LOGITS_NONE && !c->seq.held)
            e->constrained[n++] = c;
    }
    if (!n)
        return;
    prepare(e, e->constrained, n);
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (is_constrained(c) && f->items[i].want != LOGITS_NONE && !c->seq.held &&
            !take_forced(e, c))
            f->seqs[i] = NULL;
    }
}

void choices_prepare_planned(struct engine *e, struct choice **choices, int n)
{
    int n_kept = 0;
    for (int i = 0; i < n; i++)
        if (is_constrained(choices[i]) && !choices[i]->seq.held)
            choices[n_kept++] = choices[i];
    if (n_kept)
        prepare(e, choices, n_kept);
}

int choice_fit_drafts(void *engine, struct seq *q, int32_t *drafts, int n, int most, int *n_kept)
{
    enum { PIECES = 2 };
    struct engine *e = engine;
    struct choice *c = (struct choice *)q;
    *n_kept = n;
    if (!is_constrained(c) || q->held || c->costly)
        return n;
    int64_t start = clock_ns();
    n = sampler_foresee(c->sampler, drafts, n, most, PIECES, n_kept);
    c->mask.cpu_ns = clock_ns() - start;
    charge(e, c);
    return n;
}

void choices_release(struct engine *e)
{
    if (!e->n_held)
        return;
    pthread_mutex_lock(&e->lock);
    e->masks_done = false;
    pthread_mutex_unlock(&e->lock);
    struct seq *lists[] = {e->sched.waiting.first, e->sched.running.first};
    for (int l = 0; l < 2; l++)
        for (struct seq *q = lists[l], *next; q; q = next) {
            struct choice *c = (struct choice *)q;
            next = q->next;
            if (!q->held || c->reread || !masks_take(e->masks, &c->mask))
                continue;
            release(e, c);
            charge(e, c);
            c->costly = c->mask.pieces >= MASK_TRY;
            take_forced(e, c);
        }
}

void choice_drop_mask(struct engine *e, struct choice *c)
{
    if (!c->seq.held)
        return;
    masks_drop(e->masks, &c->mask);
    release(e, c);
}

void choices_grant(struct engine *e, bool idle)
{
    int64_t ns = e->step_ns ? e->step_ns / (e->rt->be->async ? 1 : HOST_SHARE) : FIRST_GRANT_NS;
    e->sched.mask_ns = (double)((e->n_held ? ns : 0) + e->try_ns);
    e->try_ns = 0;
    if (e->n_held)
        masks_grant(e->masks, idle ? INT64_MAX : ns);
}
