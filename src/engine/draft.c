/* Speculative decoding with an MTP block: see draft.h. */
#include "engine/draft.h"
#include "base/mem.h"

void draft_init(struct drafter *sp, struct scheduler *sched, struct stepper *step, int most,
                int max_seqs, bool async, bool adapts)
{
    size_t n = (size_t)sched->limits.max_seqs;
    CHECK(max_seqs <= DRAFT_MAX_SEQS, "%d sequences", max_seqs);
    *sp = (struct drafter){.sched = sched,
                           .kv = sched->kv,
                           .step = step,
                           .most = most,
                           .max_seqs = max_seqs,
                           .async = async,
                           .adapts = adapts};
    if (!most)
        return;
    sp->items = mem_zalloc(n, sizeof *sp->items);
    sp->seqs = mem_zalloc(n, sizeof *sp->seqs);
    sp->wants = mem_zalloc(n, sizeof *sp->wants);
    sp->drafts = mem_zalloc(n * (size_t)most, sizeof *sp->drafts);
}

void draft_clear(struct drafter *sp)
{
    mem_free(sp->items);
    mem_free(sp->seqs);
    mem_free(sp->wants);
    mem_free(sp->drafts);
    *sp = (struct drafter){0};
}

static bool rate_pays(const struct draft_rate *r)
{
    return r->plain_ns * r->tokens > r->draft_ns;
}

/* Whether the block should follow steps of n sequences: if drafts pay or are being measured. Otherwise counts steps until
 * the next measurement, which needs a sequence whose rows the block has all processed. */
static bool follows_pay(struct drafter *sp, int n)
{
    if (n > sp->max_seqs)
        return false;
    struct draft_rate *r = &sp->rates[n];
    uint64_t at = r->turn % SPEC_PERIOD;
    if (!sp->adapts || at < SPEC_TRY + SPEC_REST || at == SPEC_PERIOD - 1 || rate_pays(r))
        return true;
    r->turn++;
    return false;
}

bool draft_follows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                   int n)
{
    bool drafts = false, any = false;
    for (int i = 0; i < n; i++) {
        drafts |= items[i].n_draft > 0;
        any |= !seqs[i]->unfollowed;
    }
    if (!sp->most || !sp->async || drafts)
        return sp->most > 0;
    if (follows_pay(sp, sp->sched->running.n) && any)
        return true;
    for (int i = 0; i < n; i++)
        seqs[i]->unfollowed = true;
    return false;
}

bool draft_pays(struct drafter *sp, int n)
{
    if (n > sp->max_seqs)
        return false;
    struct draft_rate *r = &sp->rates[n];
    uint64_t at = r->turn++ % SPEC_PERIOD;
    if (!sp->adapts || at < SPEC_TRY)
        return true;
    return at >= SPEC_TRY + SPEC_REST && rate_pays(r);
}

/* A running mean, over about the last 32 values. */
static void learn(double *mean, int *n, double seen)
{
    *n += *n < 32;
    *mean += (seen - *mean) / *n;
}

void draft_learn(struct drafter *sp, const struct step_item *items, int n, int n_accepted,
                 int64_t ns)
{
    int drafting = 0;
    for (int i = 0; i < n; i++)
        drafting += items[i].n_draft > 0;
    if (n > sp->max_seqs || (drafting && drafting < n)) /* mixed steps measure neither case */
        return;
    struct draft_rate *r = &sp->rates[n];
    if (!drafting) {
        learn(&r->plain_ns, &r->n_plain, (double)ns);
        return;
    }
    learn(&r->draft_ns, &r->n_draft, (double)ns);
    learn(&r->tokens, &r->n_tokens, 1 + (double)n_accepted / n);
}

/* Items for the rows of a step, except unverified drafts, each with the token after it. Returns the number of items. */
static int add_rows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                    const int *wants, int n)
{
    bool pays = draft_pays(sp, sp->sched->running.n);
    int k = 0;
    for (int i = 0; i < n; i++) {
        struct seq *q = seqs[i];
        if (!q || q->unfollowed)
            continue;
        int first = q->kv.n_tokens - items[i].n_tokens, end = q->kv.n_tokens - q->n_open;
        CHECK(end > first && end < q->n_tokens, "rows %d to %d of %d tokens", first, end - 1,
              q->n_tokens);
        /* no drafts after tokens that no step has read yet */
        int want = pays && end == q->n_tokens - 1 ? wants[i] : 0;
        want = want < sp->most ? want : sp->most;
        sp->seqs[k] = q;
        sp->wants[k] = want;
        sp->items[k++] = (struct draft_item){.seq = &q->kv,
                                             .tokens = q->tokens + first + 1,
                                             .first = first,
                                             .n = end - first,
                                             .from = items[i].row,
                                             .want = want > 0};
    }
    return k;
}

/* Items for draft j + 1 of the sequences that want one and have a page for its row. Moves them to the front and returns
 * their number. */
static int add_next(struct drafter *sp, int n, int j)
{
    int k = 0;
    for (int i = 0; i < n; i++) {
        struct draft_item it = sp->items[i];
        struct seq *q = sp->seqs[i];
        int32_t *own = sp->drafts + (size_t)k * (size_t)sp->most;
        if (!it.want)
            continue;
        if (k != i)
            for (int g = 0; g < j - 1; g++)
                own[g] = sp->drafts[(size_t)i * (size_t)sp->most + (size_t)g];
        own[j - 1] = it.token;
        seq_draft(q, own, j);
        int at = it.first + it.n;
        if (j == sp->wants[i] || at >= it.seq->n_pages * sp->kv->page_len)
            continue;
        sp->seqs[k] = q;
        sp->wants[k] = sp->wants[i];
        sp->items[k++] = (struct draft_item){.seq = it.seq,
                                             .tokens = &own[j - 1],
                                             .first = at,
                                             .n = 1,
                                             .from = it.row,
                                             .want = true};
    }
    return k;
}

bool draft_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                const int *wants, int n, struct error *err)
{
    int k = add_rows(sp, items, seqs, wants, n);
    for (int j = 1; k; j++) {
        if (!step_draft(sp->step, sp->items, k, err))
            return false;
        k = add_next(sp, k, j);
    }
    for (int i = 0; sp->draft && i < n; i++) {
        struct seq *q = seqs[i];
        if (q && q->n_draft)
            sp->draft(sp->draft_arg, q->tokens, q->n_tokens, q->tokens + q->n_tokens, q->n_draft);
    }
    return true;
}

void draft_settle(struct drafter *sp, struct seq *q)
{
    struct kv_seq *kv = &q->kv;
    if (q->n_open)
        kvcache_cut(sp->kv, kv, sp->kv->states ? kv->back_at : kv->n_tokens - q->n_open);
    else
        kvcache_settle(sp->kv, kv);
    q->n_open = 0;
}
