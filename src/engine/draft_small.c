/* When a small model drafts: see draft.h. It follows a sequence where its drafts promise more than they cost, from the
 * second token of the answer on, so that the first one does not wait for it. It reads the prompt in pieces, between the
 * steps of the large model, and only if the answer may be long enough for that to pay. */
#include "engine/draft.h"

#include <math.h>

/* NEAR: with no more tokens to read first it drafts in the same round. TRY_LAG: it is tried for sequences of which it
 * has to read no more. ANSWER: tokens expected of an answer without a limit. PAUSE: where its cache has no room for a sequence, it tries again
 * after this many tokens. */
enum { PAUSE = 64, NEAR = 64, TRY_LAG = 1024, ANSWER = 256, MODEL_TRY = 8, MODEL_PERIOD = 512 };

/* The time of a round that reads prompts: with one sequence, and at least with several, which otherwise is that of a
 * plain step. */
static const double ROUND_ALONE = 250e6, ROUND_LEAST = 5e6;
/* The part of what drafts may save that reading the prompt may cost. */
static const double READ_SHARE = 0.3;

double draft_small_cost(const struct drafter *sp, int n)
{
    const double unknown = 0.1;
    double plain = draft_cost_known(&sp->cost, n) ? sp->cost.plain_ns[n] : 0;
    double pass = draft_model_pass_ns(sp->opt.model);
    return plain > 0 && pass > 0 ? pass / plain : unknown;
}

static int known_of(const struct seq *q)
{
    return q->n_tokens - (q->tokens[q->n_tokens - 1] < 0);
}

static struct draft_offer full_offer(const struct drafter *sp, const struct seq *q)
{
    struct draft_offer o = {
        .most = DRAFT_DEPTH, .again = sp->kv->states != NULL, .maker = MAKER_MODEL};
    draft_rates(sp, q->draft->rates, CLASS_MODEL, o.p);
    return o;
}

static bool may(const struct drafter *sp, const struct seq *q)
{
    int most = sp->kv->states ? DRAFT_SEQS : DRAFT_MODEL_SEQS;
    return sp->opt.model && q->draft && !q->no_draft && sp->sched->running.n <= most &&
           known_of(q) > q->n_prompt + 1 && known_of(q) >= q->draft->paused &&
           draft_model_may(sp->opt.model, q, known_of(q));
}

/* Whether it is to follow q, of whose answer `left` tokens may remain. */
static bool follows(const struct drafter *sp, const struct seq *q, int left)
{
    int n = sp->sched->running.n;
    if (!may(sp, q))
        return false;
    if (sp->opt.fixed)
        return true;
    if (!draft_cost_known(&sp->cost, n))
        return false;
    int lag = draft_model_lag(q->draft->mirror, known_of(q));
    if (lag <= TRY_LAG && sp->model_turn % MODEL_PERIOD < MODEL_TRY)
        return true;
    double make[DRAFT_MAKERS] = {[MAKER_MODEL] = draft_small_cost(sp, n)}, rate;
    struct draft_offer o = full_offer(sp, q);
    if (!draft_cost_choose(&sp->cost, n, &o, 1, make, sp->opt.async, &rate))
        return false;
    double saves = (1 - 1 / rate) * fmin(left, ANSWER) * sp->cost.plain_ns[n] / n;
    return lag <= NEAR || draft_model_read_ns(sp->opt.model, lag) <= READ_SHARE * saves;
}

struct draft_offer draft_small_offer(const struct drafter *sp, const struct seq *q, int most)
{
    struct draft_offer none = {0};
    if (!may(sp, q) || draft_model_lag(q->draft->mirror, known_of(q)) > NEAR)
        return none;
    struct draft_offer o = full_offer(sp, q);
    o.most = o.most < most ? o.most : most;
    return o;
}

bool draft_small_follows(struct drafter *sp, struct seq *const *seqs, int n)
{
    bool any = false;
    for (int i = 0; i < n && sp->opt.model && !any; i++)
        any = follows(sp, seqs[i], ANSWER);
    sp->model_turn += sp->opt.model != NULL;
    return any;
}

bool draft_small_make(struct drafter *sp, struct seq *const *seqs, const int *wants, int n,
                      struct error *err)
{
    int k = 0, running = sp->sched->running.n;
    for (int i = 0; i < n; i++) {
        struct seq *q = seqs[i];
        struct draft_seq *d = q ? q->draft : NULL;
        if (!d)
            continue;
        int depth = d->source == DRAFT_MODEL ? sp->offers[i].depth : 0;
        bool lags = !depth && may(sp, q) && draft_model_lag(d->mirror, known_of(q)) > NEAR &&
                    follows(sp, q, wants[i]);
        if (!depth && !lags)
            continue;
        sp->seqs[k] = q;
        sp->wishes[k++] = (struct draft_wish){.q = q,
                                              .n_known = known_of(q),
                                              .mirror = &d->mirror,
                                              .depth = depth,
                                              .drafts = sp->drafts + (size_t)i * DRAFT_DEPTH};
    }
    sp->model_turn += !sp->opt.async;
    double plain = draft_cost_known(&sp->cost, running) ? sp->cost.plain_ns[running] : 0;
    double budget = running == 1 ? ROUND_ALONE : fmax(plain, ROUND_LEAST);
    if (k && !draft_model_make(sp->opt.model, sp->wishes, k, budget, err))
        return false;
    for (int i = 0; i < k; i++) {
        const struct draft_wish *w = &sp->wishes[i];
        if (w->n)
            seq_draft(sp->seqs[i], w->drafts, w->n);
        if (w->waits)
            sp->seqs[i]->draft->paused = w->n_known + PAUSE;
        if (!w->depth) /* a piece of its prompt */
            scheduler_charge(sp->sched, sp->seqs[i], (int64_t)w->read_ns);
    }
    return true;
}
