/* Speculative decoding: see draft.h. */
#include "engine/draft.h"
#include "base/clock.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

/* What is expected of each class before anything is known. */
static const double priors[DRAFT_CLASSES] = {0.35, 0.5, 0.65, 0.75, 0.85, 0.3, 0.45, 0.6,
                                             0.7,  0.8, 0.6,  0.5,  0.65, 0.6, 0.35, 0.6};

void draft_init(struct drafter *sp, struct scheduler *sched, struct stepper *step,
                const struct draft_options *opt, int n_vocab)
{
    size_t n = (size_t)sched->limits.max_seqs;
    *sp = (struct drafter){
        .sched = sched, .kv = sched->kv, .step = step, .opt = *opt, .n_vocab = n_vocab};
    if (!opt->from)
        return;
    sp->items = mem_zalloc(n, sizeof *sp->items);
    sp->seqs = mem_zalloc(n, sizeof *sp->seqs);
    sp->wants = mem_zalloc(n, sizeof *sp->wants);
    sp->offers = mem_zalloc(n, sizeof *sp->offers);
    sp->depths = mem_zalloc(n, sizeof *sp->depths);
    sp->wishes = mem_zalloc(n, sizeof *sp->wishes);
    sp->drafts = mem_zalloc(n * DRAFT_DEPTH, sizeof *sp->drafts);
}

void draft_clear(struct drafter *sp)
{
    mem_free(sp->items);
    mem_free(sp->seqs);
    mem_free(sp->wants);
    mem_free(sp->offers);
    mem_free(sp->depths);
    mem_free(sp->wishes);
    mem_free(sp->drafts);
    draft_model_free(sp->opt.model);
    draft_history_clear(&sp->history);
    *sp = (struct drafter){0};
}

static bool uses(const struct drafter *sp, enum draft_source source)
{
    return sp->opt.from & 1u << source;
}

static int class_of(const struct draft_match *m)
{
    static const int lengths[TEXT_LENGTHS - 1] = {4, 6, 10, 16};
    int c = 0;
    if (!m->len)
        return CLASS_BRIDGE + m->near;
    while (c < TEXT_LENGTHS - 1 && m->len >= lengths[c])
        c++;
    return c + (m->recent ? CLASS_RECENT : 0);
}

/* The number of q's known tokens. At most one placeholder follows them, for the token of a step in flight. */
static int known_of(const struct seq *q)
{
    return q->n_tokens - (q->tokens[q->n_tokens - 1] < 0);
}

static void follow_text(struct drafter *sp, struct seq *q)
{
    enum { MORE = 512 }; /* tokens expected of an answer */
    int n = known_of(q);
    if (!q->draft) {
        q->draft = mem_ask(sizeof *q->draft);
        if (!q->draft)
            return;
        *q->draft = (struct draft_seq){.n_rested = q->n_tokens};
    }
    struct draft_seq *d = q->draft;
    for (; d->n_rested < n; d->n_rested++)
        draft_rate_rest(d->rates);
    if (uses(sp, DRAFT_TEXT))
        draft_match_follow(&d->match, q->tokens, n,
                           draft_history_of(&sp->history, q->client, q->root), n + MORE);
}

void draft_note(struct drafter *sp, struct seq *const *seqs, int n)
{
    for (int i = 0; i < n && sp->sched->running.n <= DRAFT_CROWD; i++)
        if (seqs[i])
            follow_text(sp, seqs[i]);
}

/* Writes the text that may follow q to drafts. Returns the number of tokens, `most` at most. */
static int write_text(const struct drafter *sp, const struct seq *q, int32_t *drafts, int most)
{
    int n = uses(sp, DRAFT_TEXT) && q->draft
                ? draft_match_write(&q->draft->match, q->tokens, known_of(q), drafts, most)
                : 0;
    for (int k = 0; k < n; k++)
        if (drafts[k] >= sp->n_vocab)
            return k;
    return n;
}

static double expected(const struct draft_offer *o)
{
    double sum = 0, all = 1;
    for (int k = 0; k < o->most; k++)
        sum += all *= o->p[k > 0];
    return sum;
}

void draft_rates(const struct drafter *sp, const struct draft_rate *own, int class, double p[2])
{
    for (int k = 0; k < 2; k++)
        p[k] = draft_rate_of(&sp->cost, own, class + k, priors[class + k]);
}

static void costs_of(const struct drafter *sp, double make[DRAFT_MAKERS])
{
    int n = sp->sched->running.n;
    make[MAKER_NONE] = 0;
    make[MAKER_HEAD] = uses(sp, DRAFT_HEAD) ? draft_head_cost(sp, n) : 0;
    make[MAKER_MODEL] = uses(sp, DRAFT_MODEL) ? draft_small_cost(sp, n) : 0;
}

/* What an offer is worth: tokens per time, or tokens while times are unknown. */
static double worth(const struct drafter *sp, const struct draft_offer *o)
{
    double make[DRAFT_MAKERS], rate = 0;
    struct draft_offer alone = *o;
    if (!o->most || !draft_cost_known(&sp->cost, sp->sched->running.n))
        return o->most ? expected(o) : 0;
    costs_of(sp, make);
    draft_cost_choose(&sp->cost, sp->sched->running.n, &alone, 1, make, sp->opt.async, &rate);
    return rate;
}

/* The best source for q, and its offer. head: the block may draft for it. drafts (most): the text's. */
static struct draft_offer offer_of(const struct drafter *sp, struct seq *q, bool head,
                                   int32_t *drafts, int most)
{
    struct draft_seq *d = q->draft;
    struct draft_offer text = {.again = sp->kv->states != NULL}, best = text;
    if (!d || q->no_draft || q->n_tokens <= q->n_prompt)
        return text;
    text.most = write_text(sp, q, drafts, most);
    d->class = class_of(&d->match);
    text.p[0] = text.p[1] = draft_rate_of(&sp->cost, d->rates, d->class, priors[d->class]);
    struct draft_offer block = {.most = !head                      ? 0
                                        : most < sp->opt.most_head ? most
                                                                   : sp->opt.most_head,
                                .again = text.again,
                                .maker = MAKER_HEAD};
    draft_rates(sp, d->rates, CLASS_HEAD, block.p);
    struct draft_offer small = draft_small_offer(sp, q, most);
    best = text;
    d->source = DRAFT_TEXT;
    if (block.most && (!best.most || worth(sp, &block) > worth(sp, &best))) {
        best = block;
        d->source = DRAFT_HEAD;
    }
    if (small.most && (!best.most || worth(sp, &small) > worth(sp, &best))) {
        best = small;
        d->source = DRAFT_MODEL;
    }
    return best;
}

/* Offers for the sequences of a step; many sequences get none. */
static void make_offers(struct drafter *sp, struct seq *const *seqs, const int *wants, int n)
{
    bool few = sp->sched->running.n <= (sp->kv->states ? DRAFT_SEQS : DRAFT_CROWD);
    for (int i = 0; i < n; i++) {
        int most = !wants || wants[i] > DRAFT_DEPTH ? DRAFT_DEPTH : wants[i];
        most = sp->opt.fixed && sp->opt.fixed < most ? sp->opt.fixed : most;
        sp->offers[i] = (struct draft_offer){0};
        if (seqs[i] && few && most > 0)
            sp->offers[i] = offer_of(sp, seqs[i], wants && draft_head_may(sp, seqs[i]),
                                     sp->drafts + (size_t)i * DRAFT_DEPTH, most);
    }
}

static bool text_pays(struct drafter *sp, struct seq *const *seqs, int n)
{
    int running = sp->sched->running.n;
    if (!uses(sp, DRAFT_TEXT) || running > DRAFT_CROWD)
        return false;
    make_offers(sp, seqs, NULL, n);
    for (int i = 0; sp->opt.fixed && i < n; i++)
        if (sp->offers[i].most)
            return true;
    if (!draft_cost_known(&sp->cost, running))
        return false;
    double make[DRAFT_MAKERS];
    costs_of(sp, make);
    bool pays = draft_cost_choose(&sp->cost, running, sp->offers, n, make, false, NULL) > 0;
    for (int i = 0; !pays && i < n; i++)
        if (sp->offers[i].most && seqs[i]->draft->source == DRAFT_TEXT &&
            draft_rate_try(&sp->cost, seqs[i]->draft->class, running, 0))
            return sp->tries_text = true;
    return pays;
}

bool draft_follows(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                   int n)
{
    bool drafts = false, head = uses(sp, DRAFT_HEAD);
    for (int i = 0; i < n; i++)
        drafts |= items[i].n_draft > 0;
    if (!sp->opt.from)
        return false;
    if (!sp->opt.async || (head && drafts)) {
        sp->head_follows = head;
        return true;
    }
    sp->head_follows = head && draft_head_follows(sp, seqs, n);
    for (int i = 0; head && !sp->head_follows && i < n; i++)
        seqs[i]->unfollowed = true;
    return sp->head_follows || drafts || sp->hook_makes || draft_small_follows(sp, seqs, n) ||
           text_pays(sp, seqs, n);
}

/* The drafts of each offer: the fixed number, or what pays. */
static void choose_depths(struct drafter *sp, struct seq *const *seqs, int n)
{
    int running = sp->sched->running.n;
    bool tries =
        sp->head_follows && running <= DRAFT_SEQS && sp->head_turn++ % HEAD_PERIOD < HEAD_TRY;
    if (sp->opt.fixed) {
        for (int i = 0; i < n; i++)
            sp->offers[i].depth = sp->offers[i].most;
        return;
    }
    if (draft_cost_known(&sp->cost, running)) {
        double make[DRAFT_MAKERS];
        costs_of(sp, make);
        draft_cost_choose(&sp->cost, running, sp->offers, n, make, sp->opt.async, NULL);
    }
    for (int i = 0; i < n; i++) {
        struct draft_offer *o = &sp->offers[i];
        if (!o->most || o->depth)
            continue;
        enum draft_source source = seqs[i]->draft->source;
        if (source == DRAFT_TEXT && !sp->opt.async)
            o->depth = draft_rate_try(&sp->cost, seqs[i]->draft->class, running, 0);
        else if (source == DRAFT_MODEL)
            o->depth =
                draft_rate_try(&sp->cost, CLASS_MODEL, running, draft_small_cost(sp, running));
        else
            o->depth = source == DRAFT_TEXT ? sp->tries_text : tries;
    }
    sp->tries_text = false;
}

/* The class of its drafts; of those that are made, of the first one. */
static int class_from(const struct draft_seq *d)
{
    return d->source == DRAFT_TEXT ? d->class : d->source == DRAFT_HEAD ? CLASS_HEAD : CLASS_MODEL;
}

/* Fits the drafts of q to its constraint. Forced tokens are added where the chance that all drafts before them are accepted
 * is worth a row. */
static void fit_drafts(struct drafter *sp, struct seq *q, int most)
{
    struct draft_seq *d = q->draft;
    int running = sp->sched->running.n, n = q->n_draft;
    int32_t drafts[DRAFT_DEPTH];
    d->n_own = n;
    if (q->no_draft || most < n || running > DRAFT_CROWD || q->n_tokens <= q->n_prompt)
        return;
    memcpy(drafts, q->tokens + q->n_tokens, (size_t)n * sizeof *drafts);
    int class = class_from(d);
    double p = draft_rate_of(&sp->cost, d->rates, class, priors[class]);
    double row = running * (draft_cost_ratio(&sp->cost, running, 1) - 1);
    bool more = uses(sp, DRAFT_GRAMMAR) && (sp->opt.fixed || pow(p, n) > row);
    int fits = sp->fit(sp->fit_arg, q, drafts, n, more ? most : n, &d->n_own);
    if (fits != n || d->n_own != n)
        seq_draft(q, drafts, fits);
}

bool draft_make(struct drafter *sp, const struct step_item *items, struct seq *const *seqs,
                const int *wants, int n, struct error *err)
{
    draft_note(sp, seqs, n);
    make_offers(sp, seqs, wants, n);
    choose_depths(sp, seqs, n);
    for (int i = 0; i < n; i++) {
        int depth = sp->offers[i].depth;
        enum draft_source source = depth ? seqs[i]->draft->source : DRAFT_TEXT;
        sp->depths[i] = source == DRAFT_HEAD ? depth : 0;
        if (depth && source == DRAFT_TEXT)
            seq_draft(seqs[i], sp->drafts + (size_t)i * DRAFT_DEPTH, depth);
    }
    int64_t start = clock_ns();
    if (uses(sp, DRAFT_MODEL) && !draft_small_make(sp, seqs, wants, n, err))
        return false;
    if (sp->head_follows && !draft_head_make(sp, items, seqs, sp->depths, n, err))
        return false;
    sp->made_ns = clock_ns() - start;
    for (int i = 0; sp->fit && i < n; i++)
        if (seqs[i] && seqs[i]->draft)
            fit_drafts(sp, seqs[i], wants[i] < DRAFT_DEPTH ? wants[i] : DRAFT_DEPTH);
    for (int i = 0; sp->hook && i < n; i++) {
        struct seq *q = seqs[i];
        int most = wants[i] < DRAFT_DEPTH ? wants[i] : DRAFT_DEPTH, own = q ? q->n_draft : 0;
        int32_t drafts[DRAFT_DEPTH];
        if (!q || most <= 0 || q->n_tokens <= q->n_prompt)
            continue;
        memcpy(drafts, q->tokens + q->n_tokens, (size_t)own * sizeof *drafts);
        int made = sp->hook(sp->hook_arg, q->tokens, q->n_tokens, drafts, own, most);
        bool same =
            made == own && !memcmp(drafts, q->tokens + q->n_tokens, (size_t)own * sizeof *drafts);
        if (q->draft && !same)
            q->draft->n_own = made;
        seq_draft(q, drafts, made);
    }
    return true;
}

void draft_learn(struct drafter *sp, const struct step_item *items, int n, bool follows, int64_t ns)
{
    int rows = 0;
    for (int i = 0; i < n; i++)
        rows += items[i].n_draft;
    draft_cost_learn(&sp->cost, n, rows, follows && sp->opt.async, ns);
}

void draft_verified(struct drafter *sp, struct seq *q, int n_draft, int n_accepted)
{
    struct draft_seq *d = q->draft;
    if (!d)
        return;
    /* what the grammar forced says nothing of the source */
    n_draft = n_draft < d->n_own ? n_draft : d->n_own;
    n_accepted = n_accepted < n_draft ? n_accepted : n_draft;
    bool failed = n_accepted < n_draft;
    if (!n_draft)
        return;
    int class = class_from(d);
    if (d->source == DRAFT_TEXT) {
        draft_rate_learn(&sp->cost, d->rates, class, n_accepted, failed);
        return;
    }
    draft_rate_learn(&sp->cost, d->rates, class, n_accepted > 0, !n_accepted);
    if (n_accepted)
        draft_rate_learn(&sp->cost, d->rates, class + 1, n_accepted - 1, failed);
}

enum draft_source draft_source_of(const struct seq *q, int i)
{
    const struct draft_seq *d = q->draft;
    return !d ? DRAFT_TEXT : i < d->n_own ? d->source : DRAFT_GRAMMAR;
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

void draft_leave(struct drafter *sp, struct seq *q, bool keep)
{
    if (!q->draft)
        return;
    if (keep && uses(sp, DRAFT_TEXT))
        draft_history_add(&sp->history, q->client, q->root, q->tokens + q->n_prompt,
                          known_of(q) - q->n_prompt);
    if (sp->opt.model)
        draft_model_leave(sp->opt.model, &q->draft->mirror);
    draft_match_clear(&q->draft->match);
    mem_free(q->draft);
    q->draft = NULL;
}
