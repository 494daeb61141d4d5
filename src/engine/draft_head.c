/* Draft tokens of an MTP block: see draft.h. */
#include "engine/draft.h"
#include "backend/backend.h"
#include "base/clock.h"

bool draft_head_may(const struct drafter *sp, const struct seq *q)
{
    /* no drafts after tokens that no step has read yet */
    return sp->opt.from & 1u << DRAFT_HEAD && sp->head_follows && !q->unfollowed &&
           sp->sched->running.n <= DRAFT_SEQS && q->kv.n_tokens - q->n_open == q->n_tokens - 1;
}

double draft_head_cost(const struct drafter *sp, int n)
{
    const double unknown = 0.1;
    double plain = draft_cost_known(&sp->cost, n) ? sp->cost.plain_ns[n] : 0;
    return plain > 0 && sp->n_pass ? sp->pass_ns / plain : unknown;
}

bool draft_head_follows(struct drafter *sp, struct seq *const *seqs, int n)
{
    bool any = false;
    for (int i = 0; i < n; i++)
        any |= !seqs[i]->unfollowed;
    if (!any || sp->sched->running.n > DRAFT_SEQS)
        return false;
    /* one step earlier, so that the first try has drafts */
    if (sp->opt.fixed || (sp->head_turn + 1) % HEAD_PERIOD <= HEAD_TRY ||
        !draft_cost_known(&sp->cost, sp->sched->running.n))
        return true;
    struct draft_offer offers[DRAFT_SEQS];
    const double make[DRAFT_MAKERS] = {[MAKER_HEAD] = draft_head_cost(sp, sp->sched->running.n)};
    static const struct draft_rate none[DRAFT_CLASSES];
    int n_offers = n < DRAFT_SEQS ? n : DRAFT_SEQS;
    for (int i = 0; i < n_offers; i++) {
        const struct draft_rate *own = seqs[i]->draft ? seqs[i]->draft->rates : none;
        offers[i] = (struct draft_offer){.most = sp->opt.most_head, .maker = MAKER_HEAD};
        draft_rates(sp, own, CLASS_HEAD, offers[i].p);
    }
    return draft_cost_choose(&sp->cost, sp->sched->running.n, offers, n_offers, make, false, NULL) >
           0;
}

/* Items for the rows of a step, except unverified drafts, each with the token after it. Returns the number of items. */
static int add_rows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                    const int *wants, int n)
{
    int k = 0;
    for (int i = 0; i < n; i++) {
        struct seq *q = seqs[i];
        if (!q || q->unfollowed)
            continue;
        int first = q->kv.n_tokens - items[i].n_tokens, end = q->kv.n_tokens - q->n_open;
        CHECK(end > first && end < q->n_tokens, "rows %d to %d of %d tokens", first, end - 1,
              q->n_tokens);
        sp->seqs[k] = q;
        sp->wants[k] = wants[i];
        sp->items[k++] = (struct draft_item){.seq = &q->kv,
                                             .tokens = q->tokens + first + 1,
                                             .first = first,
                                             .n = end - first,
                                             .from = items[i].row,
                                             .want = wants[i] > 0};
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
        int32_t *own = sp->drafts + (size_t)k * DRAFT_DEPTH;
        if (!it.want)
            continue;
        if (k != i)
            for (int g = 0; g < j - 1; g++)
                own[g] = sp->drafts[(size_t)i * DRAFT_DEPTH + (size_t)g];
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

bool draft_head_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                     const int *wants, int n, struct error *err)
{
    int k = add_rows(sp, items, seqs, wants, n);
    bool wanted = false, decodes = true;
    for (int i = 0; i < k; i++) {
        wanted |= sp->items[i].want;
        decodes &= sp->items[i].n <= DRAFT_DEPTH;
    }
    for (int j = 1; k; j++) {
        int64_t start = clock_ns();
        uint64_t recorded = sp->kv->be->n_recorded;
        if (!step_draft(sp->step, sp->items, k, err))
            return false;
        if (wanted && decodes && sp->kv->be->n_recorded == recorded) {
            sp->n_pass += sp->n_pass < 16;
            sp->pass_ns += ((double)(clock_ns() - start) - sp->pass_ns) / sp->n_pass;
        }
        k = add_next(sp, k, j);
    }
    return true;
}
