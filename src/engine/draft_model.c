/* Drafts of a small model: see draft_model.h. */
#include "engine/draft_model.h"
#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/runtime.h"

#include <math.h>
#include <string.h>

/* FEW_ROWS: up to this many rows of a sequence a GPU reads as one recorded step. MEAN_OF: measurements of a pass. */
enum { FEW_ROWS = 8, MEAN_OF = 16, FEW = 4 };

struct draft_mirror {
    struct seq seq; /* first: the scheduler returns it */
    int n_known;
    struct draft_wish *wish; /* during a round; NULL = none */
};

struct draft_model {
    struct runtime *rt;
    const struct draft_vocab *vocab;
    struct scheduler sched;
    struct sampler *greedy;
    struct step_item *items;  /* (max_seqs) */
    struct draft_mirror **of; /* (max_seqs) whose items they are */
    int context;
    double pass_ns;
    int n_pass;
};

struct draft_model *draft_model_new(struct runtime *rt, const struct draft_vocab *vocab)
{
    struct draft_model *m = mem_zalloc(1, sizeof *m);
    const struct step_limits *lim = stepper_limits(rt->step);
    struct kvcache *kv = rt->kv;
    int64_t room = (int64_t)kv->n_pages * kv->page_len;
    struct sample_params greedy = sample_params_default();
    greedy.temp = 0;
    greedy.repeat_penalty = 1;
    m->rt = rt;
    m->vocab = vocab;
    m->context = room < rt->context ? (int)room : rt->context;
    kv->prefix = prefix_new(kv->n_pages, kv->page_len, true);
    scheduler_init(&m->sched, kv, lim, m->context, 0);
    m->greedy = sampler_new(&greedy, rt->model->config.n_vocab);
    m->items = mem_zalloc((size_t)lim->max_seqs, sizeof *m->items);
    m->of = mem_zalloc((size_t)lim->max_seqs, sizeof *m->of);
    return m;
}

void draft_model_free(struct draft_model *m)
{
    if (!m)
        return;
    scheduler_clear(&m->sched);
    sampler_free(m->greedy);
    mem_free(m->items);
    mem_free(m->of);
    mem_free(m);
}

bool draft_model_may(const struct draft_model *m, const struct seq *q, int n_tokens)
{
    return !q->rows && n_tokens < m->context;
}

int draft_model_lag(const struct draft_mirror *mirror, int n_tokens)
{
    if (!mirror)
        return n_tokens;
    int read = mirror->seq.kv.n_tokens;
    return n_tokens - (read < mirror->n_known ? read : mirror->n_known);
}

double draft_model_read_ns(const struct draft_model *m, int n_tokens)
{
    return m->sched.cost.read_ns * n_tokens;
}

double draft_model_pass_ns(const struct draft_model *m)
{
    return m->n_pass > 1 ? m->pass_ns : 0;
}

void draft_model_leave(struct draft_model *m, struct draft_mirror **mirror)
{
    if (!*mirror)
        return;
    scheduler_remove(&m->sched, &(*mirror)->seq);
    seq_clear(&(*mirror)->seq);
    mem_free(*mirror);
    *mirror = NULL;
}

static struct draft_mirror *mirror_new(const struct seq *q)
{
    struct draft_mirror *x = mem_ask(sizeof *x);
    if (!x)
        return NULL;
    *x = (struct draft_mirror){.seq = {.n_prompt = q->n_prompt,
                                       .root = q->root,
                                       .no_cache = q->no_cache,
                                       .client = q->client}};
    return x;
}

/* Cuts the mirror to what it has in common with the sequence, and appends the sequence's other tokens. False: there is
 * no memory. */
static bool follow(struct draft_model *m, struct draft_wish *w)
{
    struct draft_mirror *x = *w->mirror;
    bool fresh = !x;
    if (fresh)
        x = *w->mirror = mirror_new(w->q);
    if (!x)
        return false;
    struct seq *s = &x->seq;
    int same = x->n_known;
    while (same < w->n_known && same < s->n_tokens &&
           s->tokens[same] == draft_vocab_to_draft(m->vocab, w->q->tokens[same]))
        same++;
    if (s->kv.n_tokens > same) /* states return to the last known token */
        kvcache_cut(m->sched.kv, &s->kv, m->sched.kv->states ? s->kv.back_at : same);
    else
        kvcache_settle(m->sched.kv, &s->kv);
    s->n_tokens = same;
    while (s->n_tokens < w->n_known)
        seq_append(s, draft_vocab_to_draft(m->vocab, w->q->tokens[s->n_tokens]));
    x->n_known = w->n_known;
    if (fresh)
        scheduler_add(&m->sched, s);
    return true;
}

/* Appends a draft to the wish. False: the model has no such token. */
static bool add_draft(struct draft_model *m, struct draft_wish *w, int32_t token)
{
    int32_t id = draft_vocab_to_target(m->vocab, token);
    if (id >= 0)
        w->drafts[w->n++] = id;
    return id >= 0;
}

static void learn_pass(struct draft_model *m, double ns)
{
    m->n_pass += m->n_pass <= MEAN_OF;
    int weight = m->n_pass - 1; /* in the first one kernels may be loaded */
    if (weight < 2)
        m->pass_ns = ns;
    else if (weight < FEW)
        m->pass_ns = fmin(m->pass_ns, ns);
    else
        m->pass_ns += (fmin(ns, 4 * m->pass_ns) - m->pass_ns) / weight;
}

/* On a GPU few rows of a sequence are laid out as drafts are, which is a recorded step. */
static void lay_few(struct draft_model *m, struct step_item *it)
{
    const struct backend *be = m->rt->be;
    int more = it->n_tokens - 1;
    if (be->records && be->async && !m->sched.kv->states && it->want == LOGITS_LAST && more > 0 &&
        more < FEW_ROWS && more <= m->sched.n_spare) {
        it->n_draft = more;
        it->chained = it->sampler != NULL;
        m->sched.n_spare -= more;
    }
}

/* The token that was chosen from the item's last row. */
static int32_t chosen(const struct draft_model *m, const struct step_item *it)
{
    return it->n_draft ? step_token(m->rt->step, it->first_row + it->n_draft) : it->token;
}

/* Reads what mirrors lack, and makes the first draft of those that are read to their end. */
static bool read_known(struct draft_model *m, double budget_ns, struct error *err)
{
    m->sched.budget_ns = budget_ns;
    int n = scheduler_plan(&m->sched, m->items), n_rows = 0;
    bool drafts = false;
    if (!n)
        return true;
    for (int i = 0; i < n; i++) {
        struct step_item *it = &m->items[i];
        m->of[i] = (struct draft_mirror *)m->sched.planned[i];
        const struct draft_wish *w = m->of[i]->wish;
        if (w && w->depth && it->want == LOGITS_LAST)
            it->sampler = m->greedy;
        lay_few(m, it);
        drafts |= it->sampler != NULL;
        n_rows += it->n_tokens;
    }
    int64_t start = clock_ns();
    uint64_t recorded = m->rt->be->n_recorded;
    if (!step_run(m->rt->step, m->items, n, err))
        return false;
    double ns = (double)(clock_ns() - start);
    if (drafts && n_rows <= 2 * n && m->rt->be->n_recorded == recorded)
        learn_pass(m, ns);
    scheduler_commit(&m->sched, (int64_t)ns);
    for (int i = 0; i < n; i++) {
        struct draft_wish *w = m->of[i]->wish;
        if (w && m->items[i].sampler)
            add_draft(m, w, chosen(m, &m->items[i]));
        if (w)
            w->read_ns = ns * m->items[i].n_tokens / n_rows;
    }
    return true;
}

/* Whether the mirror can read another draft. *taken: pages that this step takes. */
static bool can_read(struct draft_model *m, struct draft_mirror *x, int *taken)
{
    struct kvcache *kv = m->sched.kv;
    struct kv_seq *s = &x->seq.kv;
    bool page = s->n_tokens == s->n_pages * kv->page_len;
    if (s->n_tokens + 1 >= m->context || *taken + page > kvcache_available(kv) - m->sched.running.n)
        return false;
    if (kv->states && !s->back)
        kvcache_fork(kv, s);
    *taken += page;
    return !kv->states || s->back;
}

/* Reads the last draft of every wish that is to have another. *n_items: such wishes. */
static bool read_drafts(struct draft_model *m, struct draft_wish *wishes, int n, int pass,
                        int *n_items, struct error *err)
{
    int k = 0, taken = 0;
    for (int i = 0; i < n && k < m->sched.limits.max_seqs; i++) {
        struct draft_wish *w = &wishes[i];
        struct draft_mirror *x = *w->mirror;
        if (!x || w->n != pass || w->n >= w->depth || !can_read(m, x, &taken))
            continue;
        seq_append(&x->seq, draft_vocab_to_draft(m->vocab, w->drafts[w->n - 1]));
        m->of[k] = x;
        m->items[k++] = (struct step_item){.seq = &x->seq.kv,
                                           .tokens = x->seq.tokens + x->seq.kv.n_tokens,
                                           .n_tokens = 1,
                                           .want = LOGITS_LAST,
                                           .sampler = m->greedy,
                                           .token = -1};
    }
    *n_items = k;
    int64_t start = clock_ns();
    uint64_t recorded = m->rt->be->n_recorded;
    if (k && !step_run(m->rt->step, m->items, k, err))
        return false;
    if (k && m->rt->be->n_recorded == recorded)
        learn_pass(m, (double)(clock_ns() - start));
    for (int i = 0; i < k; i++)
        add_draft(m, m->of[i]->wish, m->items[i].token);
    return true;
}

bool draft_model_make(struct draft_model *m, struct draft_wish *wishes, int n, double budget_ns,
                      struct error *err)
{
    for (int i = 0; i < n; i++) {
        wishes[i].n = 0;
        wishes[i].read_ns = 0;
        if (follow(m, &wishes[i]))
            (*wishes[i].mirror)->wish = &wishes[i];
    }
    int more = 1;
    bool ok = read_known(m, budget_ns, err);
    for (int pass = 1; ok && more; pass++)
        ok = read_drafts(m, wishes, n, pass, &more, err);
    for (int i = 0; i < n; i++) {
        struct draft_mirror *x = *wishes[i].mirror;
        wishes[i].waits = !x || !x->seq.running;
        if (x)
            x->wish = NULL;
    }
    return ok || error_prefix(err, "the draft model");
}
