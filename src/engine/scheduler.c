/* The scheduler. See the invariants in scheduler.h. */
#include "engine/reuse.h"
#include "base/mem.h"

#include <string.h>

enum {
    FIRST_READ = 64,  /* the same, before costs are known */
    FORCED_SHARE = 4, /* reading together pays with a forced token for every 4th sequence */
    FORCED_MOST =
        64, /* up to this many forced tokens are read at once; more are read like a prompt */
    CHARGE_FREE = 4, /* masks may take 1 / CHARGE_FREE of a client's time in steps */
    IDLE_FACTOR = 4, /* a step without decodes delays nobody and may take this much longer */
    DRAW_SHARE = 4,  /* see scheduler.h, 10 */
    LATE_SHARE =
        4, /* 1 / LATE_SHARE of a client's prompt tokens is for prompts that miss their target */
};

/* A draw from 151,936 tokens takes 0.04 ms with a small top-k, 0.4 ms without. */
static const double COSTLY_DRAW_NS = 100e3;

/* The automatic budget. With much less, prompt chunks get so small that a mixture of experts runs at half its speed or
 * worse. With much more, inter-token latency of other sequences suffers. */
static const double AUTO_NS = 250e6, AUTO_IDLE_NS = 500e6, AUTO_FACTOR = 3;

/* The fraction of the budget that is planned, because step times vary and the budget should hold. */
static const double TARGET = 0.8;

void scheduler_init(struct scheduler *s, struct kvcache *kv, const struct step_limits *limits,
                    int context, double budget_ms)
{
    *s = (struct scheduler){.kv = kv,
                            .limits = *limits,
                            .context = context,
                            .budget_ns = budget_ms * 1e6,
                            .next_age = 1,
                            .freed = 1};
    size_t n = (size_t)limits->max_seqs;
    s->planned = mem_zalloc(n, sizeof *s->planned);
    s->readers = mem_zalloc(n, sizeof *s->readers);
    s->sorted = mem_zalloc(n, sizeof *s->sorted);
    s->reading = mem_zalloc(n, sizeof *s->reading);
    s->shares = mem_zalloc(n, sizeof *s->shares);
    s->content = mem_zalloc((size_t)kv->page_len, sizeof *s->content);
    s->same.size = 1;
    while (s->same.size < limits->max_seqs)
        s->same.size *= 2;
    s->same.first = mem_zalloc((size_t)s->same.size, sizeof *s->same.first);
    s->same.last = mem_zalloc((size_t)s->same.size, sizeof *s->same.last);
    s->same.next = mem_zalloc(n, sizeof *s->same.next);
}

void scheduler_clear(struct scheduler *s)
{
    CHECK(s->waiting.n == 0 && s->running.n == 0, "sequences are left");
    mem_free(s->planned);
    mem_free(s->readers);
    mem_free(s->sorted);
    mem_free(s->reading);
    mem_free(s->shares);
    mem_free(s->content);
    mem_free(s->same.first);
    mem_free(s->same.last);
    mem_free(s->same.next);
    *s = (struct scheduler){0};
}

static void list_remove(struct seq_list *l, struct seq *q)
{
    *(q->prev ? &q->prev->next : &l->first) = q->next;
    *(q->next ? &q->next->prev : &l->last) = q->prev;
    q->prev = q->next = NULL;
    l->n--;
}

/* Inserts by age. Nearly always q is the youngest, or older than all. */
static void list_insert(struct seq_list *l, struct seq *q)
{
    struct seq *before = l->last;
    if (l->first && l->first->age > q->age)
        before = NULL;
    while (before && before->age > q->age)
        before = before->prev;
    q->prev = before;
    q->next = before ? before->next : l->first;
    *(q->prev ? &q->prev->next : &l->first) = q;
    *(q->next ? &q->next->prev : &l->last) = q;
    l->n++;
}

/* Clients */

static struct seq_client *client_of(struct scheduler *s, uint64_t id)
{
    for (struct seq_client *c = s->clients; c; c = c->next)
        if (c->id == id)
            return c;
    struct seq_client *c = mem_zalloc(1, sizeof *c);
    c->id = id;
    c->let_in = s->entries;
    c->read = s->reads;
    c->next = s->clients;
    if (c->next)
        c->next->prev = c;
    s->clients = c;
    return c;
}

static void client_leave(struct scheduler *s, struct seq_client *c)
{
    if (--c->n_seqs)
        return;
    *(c->prev ? &c->prev->next : &s->clients) = c->next;
    if (c->next)
        c->next->prev = c->prev;
    mem_free(c);
}

/* Add to and remove from the lists of waiting sequences. */
static void start_waiting(struct scheduler *s, struct seq *q)
{
    struct seq_client *c = q->of;
    q->ahead = c->first && c->first->age > q->age ? NULL : c->last;
    while (q->ahead && q->ahead->age > q->age)
        q->ahead = q->ahead->ahead;
    q->behind = q->ahead ? q->ahead->behind : c->first;
    *(q->ahead ? &q->ahead->behind : &c->first) = q;
    *(q->behind ? &q->behind->ahead : &c->last) = q;
    c->n_waiting++;
    list_insert(&s->waiting, q);
}

static void stop_waiting(struct scheduler *s, struct seq *q)
{
    struct seq_client *c = q->of;
    *(q->ahead ? &q->ahead->behind : &c->first) = q->behind;
    *(q->behind ? &q->behind->ahead : &c->last) = q->ahead;
    q->ahead = q->behind = NULL;
    c->n_waiting--;
    list_remove(&s->waiting, q);
}

static void stop_running(struct scheduler *s, struct seq *q)
{
    list_remove(&s->running, q);
    q->running = false;
    q->of->n_running--;
}

void seq_append(struct seq *q, int32_t token)
{
    if (q->n_tokens == q->cap) {
        q->cap += q->cap / 2 + 64;
        q->tokens = mem_realloc(q->tokens, (size_t)q->cap, sizeof *q->tokens);
    }
    q->tokens[q->n_tokens++] = token;
    q->n_draft = 0;
}

void seq_draft(struct seq *q, const int32_t *tokens, int n)
{
    while (q->n_tokens + n > q->cap) {
        q->cap += q->cap / 2 + 64;
        q->tokens = mem_realloc(q->tokens, (size_t)q->cap, sizeof *q->tokens);
    }
    if (n)
        memcpy(q->tokens + q->n_tokens, tokens, (size_t)n * sizeof *tokens);
    q->n_draft = n;
}

void seq_clear(struct seq *q)
{
    CHECK(q->kv.n_pages == 0 && !q->running, "the sequence still runs");
    kv_seq_clear(&q->kv);
    mem_free(q->tokens);
    q->tokens = NULL;
}

void scheduler_add(struct scheduler *s, struct seq *q)
{
    q->age = s->next_age++;
    q->chain = q->root;
    q->of = client_of(s, q->client);
    q->of->n_seqs++;
    start_waiting(s, q);
}

/* Releases the pages of a sequence. A last page that is not full is indexed as a tail, which others may continue. */
static void drop_pages(struct scheduler *s, struct seq *q)
{
    int len = s->kv->page_len, rest = q->kv.n_tokens % len;
    if (s->kv->prefix && rest && q->n_indexed == q->kv.n_pages - 1 && !q->no_cache) {
        prefix_add_tail(s->kv->prefix, q->chain, reuse_content(s, q, q->kv.n_tokens - rest, rest),
                        rest, q->kv.pages[q->kv.n_pages - 1]);
        kvcache_named(s->kv, &q->kv, q->kv.n_pages - 1);
    }
    if (s->kv->prefix) /* before the cut, which drops the state of unindexed pages */
        kvcache_retire(s->kv, &q->kv);
    kvcache_cut(s->kv, &q->kv, 0);
    q->chain = q->root;
    q->n_indexed = 0;
    q->n_draft = 0;
    q->resumed = 0;
    q->leader = 0;
    q->awaited = q->forgone = 0;
    s->freed++;
}

void scheduler_remove(struct scheduler *s, struct seq *q)
{
    s->passed = s->passed == q ? NULL : s->passed;
    if (q->running)
        stop_running(s, q);
    else
        stop_waiting(s, q);
    drop_pages(s, q);
    client_leave(s, q->of);
    q->of = NULL;
}

/* Counts prompt tokens found in the cache, each token once. */
static void count_cached(struct scheduler *s, struct seq *q, int before)
{
    int found = (q->kv.n_tokens < q->n_prompt ? q->kv.n_tokens : q->n_prompt) - before;
    if (q->n_preempted == 0 && found > 0) {
        q->n_cached += found;
        s->cache_hits += found;
    }
}

/* Pages that running sequences still need for the tokens they have. */
static int pages_promised(const struct scheduler *s)
{
    int n = 0;
    for (const struct seq *q = s->running.first; q; q = q->next)
        n += scheduler_pages(s, q->n_tokens) - q->kv.n_pages;
    return n;
}

/* *lacking: the number of pages that are missing. */
static bool admit(struct scheduler *s, struct seq *q, int *lacking)
{
    reuse_attach(s, q);
    int need = scheduler_pages(s, q->n_tokens) - q->kv.n_pages;
    *lacking = need + pages_promised(s) + s->running.n - kvcache_available(s->kv);
    if (*lacking > 0) {
        uint64_t freed = s->freed;
        drop_pages(s, q);
        s->freed = freed; /* releasing the pages it had just attached helps nobody */
        return false;
    }
    if (!q->entered) {
        q->entered = true;
        if (s->kv->states)
            states_tick(s->kv->states);
        s->cache_queries += q->n_prompt;
        count_cached(s, q, 0);
    }
    stop_waiting(s, q);
    list_insert(&s->running, q);
    q->running = true;
    q->of->n_running++;
    q->of->let_in = ++s->entries;
    return true;
}

static void preempt(struct scheduler *s, struct seq *q)
{
    stop_running(s, q);
    drop_pages(s, q);
    q->n_preempted++;
    s->n_preempted++;
    start_waiting(s, q);
}

/* Whether a comes before b: fewer running sequences, then least recently admitted, then waiting longer. */
static bool comes_first(const struct seq_client *a, const struct seq_client *b)
{
    if (a->n_running != b->n_running)
        return a->n_running < b->n_running;
    return a->let_in != b->let_in ? a->let_in < b->let_in : a->first->age < b->first->age;
}

/* The client whose sequence is admitted next; NULL = none is waiting and allowed to. */
static struct seq_client *next_client(const struct scheduler *s)
{
    struct seq_client *best = NULL;
    for (struct seq_client *c = s->clients; c; c = c->next)
        if (c->n_waiting && c->round != s->round &&
            (!s->max_per_client || c->n_running < s->max_per_client) &&
            (!best || comes_first(c, best)))
            best = c;
    return best;
}

/* Preempts the youngest sequence of the client with the most running, in favour of a client with at least two fewer.
 * False: there is none, or preempting would not free `pages`. */
static bool take_place(struct scheduler *s, const struct seq_client *c, int pages)
{
    const struct seq_client *most = c;
    for (const struct seq_client *m = s->clients; m; m = m->next)
        most = m->n_running > most->n_running ? m : most;
    int may = most->n_running - c->n_running - 1, n = 0, found = 0;
    struct seq *youngest = NULL;
    for (struct seq *q = s->running.last; q != s->running.first && n < may; q = q->prev)
        if (q->of == most) {
            youngest = n++ ? youngest : q;
            found += scheduler_pages(s, q->n_tokens) + 1;
        }
    if (!n || found < pages)
        return false;
    preempt(s, youngest);
    return true;
}

/* The first sequence of c's queue lacks pages. It waits for them; a limited number of others may overtake it. */
static void hold_back(struct scheduler *s, struct seq_client *c)
{
    c->blocked = c->first;
    c->blocked_at = s->freed;
    c->round = s->round;
    if (!s->passed) {
        s->passed = c->first;
        s->n_passes = 0;
    }
}

static void let_in(struct scheduler *s)
{
    int most = scheduler_most_running(s);
    s->round++;
    for (struct seq_client *c; (c = next_client(s));) {
        struct seq *q = c->first;
        int lacking = 0;
        if (s->running.n >= most) {
            if (!take_place(s, c, 0))
                return;
            continue;
        }
        bool known = c->blocked == q && c->blocked_at == s->freed;
        if (!known && admit(s, q, &lacking)) {
            s->n_passes += s->passed && s->passed != q;
            s->passed = s->passed == q ? NULL : s->passed;
        } else if (known || !take_place(s, c, lacking)) {
            hold_back(s, c);
            if (s->n_passes >= s->limits.max_seqs)
                return; /* nobody else may overtake the waiting one */
        }
    }
}

/* Unread tokens that a step may read. */
static int readable(const struct seq *q)
{
    return seq_unread(q) - q->held;
}

static bool is_forced(const struct scheduler *s, const struct seq *q)
{
    return s->singly && seq_unread(q) > 1 && q->kv.n_tokens >= q->n_prompt;
}

/* Whether forced tokens are read one per step, like sampled tokens. Reading them together saves steps, but such a step
 * cannot be recorded. So they are read together only if the backend does not record, if a prompt is read in the same
 * step, or if there are many. */
static bool forced_singly(const struct scheduler *s)
{
    int more = 0;
    for (const struct seq *q = s->running.first; q && s->records; q = q->next) {
        if (seq_unread(q) > 1 && q->kv.n_tokens < q->n_prompt)
            return false;
        more += seq_unread(q) - 1;
    }
    return s->records && more < s->running.n / FORCED_SHARE;
}

/* The number of drafts read after n tokens of q. Drafts use only spare rows, logits and pages, and leave one page for
 * each running sequence. */
static int draft_room(const struct scheduler *s, const struct seq *q, int n, int taken)
{
    int end = q->kv.n_tokens + n, pages = scheduler_pages(s, end);
    int spare = kvcache_available(s->kv) - taken - s->running.n;
    int most[] = {q->n_draft, s->context - end, s->n_spare,
                  s->limits.max_tokens - s->running.n - s->n_forced - s->n_drafted - (n - 1),
                  (pages + (spare > 0 ? spare : 0)) * s->kv->page_len - end};
    int room = n == seq_unread(q) && !q->all_rows ? most[0] : 0;
    for (size_t i = 1; i < sizeof most / sizeof *most; i++)
        room = most[i] < room ? most[i] : room;
    return room > 0 ? room : 0;
}

/* Plans the next n tokens of q, which must fit, and drafts after them. *taken: pages used by this step's plan. */
static void plan_item(struct scheduler *s, struct step_item *items, struct seq *q, int n,
                      int *taken)
{
    *taken += scheduler_pages(s, q->kv.n_tokens + n) - q->kv.n_pages;
    int draft = draft_room(s, q, n, *taken);
    *taken +=
        scheduler_pages(s, q->kv.n_tokens + n + draft) - scheduler_pages(s, q->kv.n_tokens + n);
    s->n_drafted += draft;
    /* a forced token that is read singly gets logits that are not used, so that the step has the shape of decodes */
    bool last = n == seq_unread(q) || is_forced(s, q),
         all = q->all_rows && q->kv.n_tokens + 1 < q->n_prompt;
    s->n_spare -= (all ? n - 1 : 0) + draft;
    s->planned[s->n_planned] = q;
    items[s->n_planned++] = (struct step_item){.seq = &q->kv,
                                               .tokens = q->tokens + q->kv.n_tokens,
                                               .n_tokens = n + draft,
                                               .rows = q->rows,
                                               .n_draft = draft,
                                               .want = all    ? LOGITS_ALL
                                                       : last ? LOGITS_LAST
                                                              : LOGITS_NONE,
                                               .save_at = reuse_save_in(s, q, n),
                                               .loras = q->loras,
                                               .n_loras = q->n_loras,
                                               .token = -1};
}

static bool decodes(const struct seq *q)
{
    return readable(q) && seq_unread(q) == 1;
}

bool seq_draws_much(const struct seq *q)
{
    return q->draw_ns > COSTLY_DRAW_NS;
}

/* Chooses the sequences that sit this step out because of their draws, in turn from the one after s->drew. */
static void plan_rests(struct scheduler *s)
{
    double room = s->net_ns / DRAW_SHARE, all = 0, taken = 0;
    bool others = false;
    for (struct seq *q = s->running.first; q; q = q->next)
        q->rests = q->of->draws = false;
    for (struct seq *q = s->running.first; q; q = q->next)
        if (decodes(q) && seq_draws_much(q)) {
            q->of->draws = true;
            all += q->draw_ns * s->draw_scale;
        }
    for (const struct seq *q = s->running.first; q && !others; q = q->next)
        others = decodes(q) && !q->of->draws;
    if (!others || all <= room)
        return;
    uint64_t after = s->drew;
    bool full = false;
    for (int pass = 0; pass < 2; pass++)
        for (struct seq *q = s->running.first; q; q = q->next) {
            if (!decodes(q) || !seq_draws_much(q) || (q->age > after) != (pass == 0))
                continue;
            double ns = q->draw_ns * s->draw_scale;
            full = full || (taken > 0 && taken + ns > room);
            q->rests = full;
            if (!full) {
                taken += ns;
                s->drew = q->age;
            }
        }
}

void scheduler_drew(struct scheduler *s, double ns, double wall_ns, double sum_ns)
{
    enum { MEAN_OF = 8 };
    double net = ns > wall_ns ? ns - wall_ns : 0, scale = sum_ns > wall_ns ? wall_ns / sum_ns : 1;
    s->net_ns = s->net_ns > 0 ? s->net_ns + (net - s->net_ns) / MEAN_OF : net;
    s->draw_scale += ((sum_ns > 0 ? scale : 0) - s->draw_scale) / MEAN_OF;
}

/* Plans every decode. If one needs a page and none is free, the youngest sequence is preempted. */
static int plan_decodes(struct scheduler *s, struct step_item *items)
{
    int taken = 0;
    for (struct seq *q = s->running.first, *next; q; q = next) {
        if (!q->rests && (decodes(q) || is_forced(s, q))) {
            bool need = q->kv.n_tokens == q->kv.n_pages * s->kv->page_len;
            while (need && taken + 1 > kvcache_available(s->kv) && s->running.last != q)
                preempt(s, s->running.last); /* younger than q: not planned yet */
            if (need && taken + 1 > kvcache_available(s->kv)) {
                CHECK(q != s->running.first, "one sequence outgrew the KV cache");
                preempt(s, q);
                break;
            }
            plan_item(s, items, q, 1, &taken);
        }
        next = q->next;
    }
    s->n_decode = s->n_planned;
    return taken;
}

/* Whether q has missed the target of its first token, or will even if it is read alone from now on. */
static bool is_late(const struct scheduler *s, const struct seq *q)
{
    return s->now_ns + readable(q) * s->cost.read_ns > q->arrived_ns + s->ttft_ns;
}

/* Adds up to `budget` tokens to readers that are late, or not, from the oldest on. Returns what is left. */
static int give_in_order(struct scheduler *s, const struct seq_client *c, bool late, int budget)
{
    for (int i = c->at; i < c->at + c->n_readers && budget > 0; i++) {
        int left = readable(s->readers[i]) - s->shares[i], give = left < budget ? left : budget;
        if (is_late(s, s->readers[i]) != late)
            continue;
        s->shares[i] += give;
        budget -= give;
    }
    return budget;
}

/* With a target of the first token, one prompt after another is read, which is sooner for most than all at once. */
static void share_in_order(struct scheduler *s, const struct seq_client *c, int budget)
{
    int late = (budget + LATE_SHARE - 1) / LATE_SHARE;
    late -= give_in_order(s, c, true, late);
    budget = give_in_order(s, c, false, budget - late);
    give_in_order(s, c, true, budget);
}

/* Splits `budget` tokens among the n readers of one client, starting with its turn. Shares are equal; the unused part
 * of a share goes to the others. */
static void share(struct scheduler *s, struct seq_client *c, int budget, int chunk)
{
    struct seq **readers = s->readers + c->at;
    int *shares = s->shares + c->at, n = c->n_readers, first = c->turn % n;
    int served = budget / chunk < n ? budget / chunk : n;
    served = served ? served : 1;
    for (int hungry = served; hungry > 0 && budget > 0;) {
        int each = budget / hungry ? budget / hungry : 1;
        hungry = 0;
        for (int i = 0; i < served && budget > 0; i++) {
            int r = (first + i) % n, left = readable(readers[r]) - shares[r];
            int give = left < each ? left : each;
            give = give < budget ? give : budget;
            shares[r] += give;
            budget -= give;
            hungry += left > give;
        }
    }
    for (int i = 0; i < served; i++) { /* removes readers that are done */
        int r = (first + i) % n;
        c->turn += shares[r] < readable(readers[r]);
    }
}

/* Groups the n readers by client. Returns the number of clients. */
static int sort_readers(struct scheduler *s, int n)
{
    int n_clients = 0, at = 0;
    for (int i = 0; i < n; i++)
        s->readers[i]->of->n_readers = 0;
    for (int i = 0; i < n; i++) {
        struct seq_client *c = s->readers[i]->of;
        if (c->n_readers++ == 0) {
            s->reading[n_clients++] = c;
            c->need = c->share = 0;
        }
        c->need += readable(s->readers[i]);
    }
    for (int i = 0; i < n_clients; i++) {
        s->reading[i]->at = at;
        at += s->reading[i]->n_readers;
        s->reading[i]->n_readers = 0;
    }
    for (int i = 0; i < n; i++) {
        struct seq_client *c = s->readers[i]->of;
        s->sorted[c->at + c->n_readers++] = s->readers[i];
    }
    struct seq **swap = s->readers;
    s->readers = s->sorted;
    s->sorted = swap;
    return n_clients;
}

static double debt_of(const struct scheduler *s, const struct seq_client *c)
{
    double debt = c->debt_ns - (s->elapsed_ns - c->debt_at) / CHARGE_FREE;
    return debt > 0 ? debt : 0;
}

void scheduler_charge(struct scheduler *s, struct seq *q, int64_t ns)
{
    struct seq_client *c = q->of;
    c->debt_ns = debt_of(s, c) + (double)ns;
    c->debt_at = s->elapsed_ns;
}

double scheduler_debt_ns(const struct scheduler *s, const struct seq *q)
{
    return debt_of(s, q->of);
}

/* A client's debt as tokens of its share, of which it keeps at least `chunk`. Returns the rest. */
static int repay(struct scheduler *s, struct seq_client *c, int tokens, int chunk)
{
    double debt = debt_of(s, c), most = tokens > chunk ? (double)(tokens - chunk) : 0;
    if (debt <= 0 || s->cost.read_ns <= 0)
        return tokens;
    double paid = debt / s->cost.read_ns < most ? debt / s->cost.read_ns : most;
    c->debt_ns = debt - paid * s->cost.read_ns;
    c->debt_at = s->elapsed_ns;
    return tokens - (int)paid;
}

/* Splits `budget` tokens among clients with prompts to read. If it is too small for all, clients that waited longest
 * are served. Shares are equal, less debts; the unused part of a share goes to the others. */
static void share_among_clients(struct scheduler *s, int n_readers, int budget)
{
    int chunk = s->limits.read_chunk > MIN_READ ? s->limits.read_chunk : MIN_READ;
    int n = sort_readers(s, n_readers);
    int served = budget / chunk < n ? budget / chunk : n;
    served = served ? served : 1;
    for (int i = 0; i < served; i++) /* moves the longest waiting to the front */
        for (int k = i + 1; k < n; k++)
            if (s->reading[k]->read < s->reading[i]->read) {
                struct seq_client *swap = s->reading[i];
                s->reading[i] = s->reading[k];
                s->reading[k] = swap;
            }
    for (int hungry = served, pass = 0; hungry > 0 && budget > 0; pass++) {
        int each = budget / hungry ? budget / hungry : 1;
        hungry = 0;
        for (int i = 0; i < served && budget > 0; i++) {
            struct seq_client *c = s->reading[i];
            int64_t left = c->need - c->share;
            int give = left < each ? (int)left : each;
            give = give < budget ? give : budget;
            if (pass == 0 && served > 1)
                give = repay(s, c, give, chunk);
            else if (debt_of(s, c) > 0)
                give = 0;
            c->share += give;
            budget -= give;
            hungry += left > give && debt_of(s, c) <= 0;
        }
    }
    for (int i = 0; i < served && budget > 0; i++) { /* nobody else wants it: those in debt may */
        struct seq_client *c = s->reading[i];
        int64_t left = c->need - c->share;
        int give = left < budget ? (int)left : budget;
        c->share += give;
        budget -= give;
    }
    for (int i = 0; i < n_readers; i++)
        s->shares[i] = 0;
    for (int i = 0; i < served; i++) {
        if (s->reading[i]->share)
            s->ttft_ns > 0 ? share_in_order(s, s->reading[i], s->reading[i]->share)
                           : share(s, s->reading[i], s->reading[i]->share, chunk);
        s->reading[i]->read = ++s->reads;
    }
}

/* Tokens of q that fit the free pages, less `taken`, and the spare logits rows. */
static int room_for(const struct scheduler *s, const struct seq *q, int taken)
{
    int room =
        (q->kv.n_pages + kvcache_available(s->kv) - taken) * s->kv->page_len - q->kv.n_tokens;
    return q->all_rows && room > s->n_spare + 1 ? s->n_spare + 1 : room;
}

/* The tokens that q reads at once at least: the rest of a span, else one. */
static int least_read(const struct seq *q)
{
    return rows_whole(q->rows, q->kv.n_tokens, 1);
}

int scheduler_most_whole(const struct scheduler *s)
{
    return s->limits.max_tokens - s->limits.max_seqs + 1;
}

/* Up to FORCED_MOST forced tokens are read at once, before prompts: they are cheap, and their answer waits for them. */
static bool plan_forced(struct scheduler *s, struct step_item *items, struct seq *q, int *taken)
{
    int n = readable(q);
    if (q->kv.n_tokens < q->n_prompt || n > FORCED_MOST || n > room_for(s, q, *taken) ||
        n > s->limits.max_tokens - s->running.n - s->n_forced - s->n_drafted)
        return false;
    plan_item(s, items, q, n, taken);
    s->n_forced += n;
    return true;
}

/* Whether the next n tokens of q have embeddings. */
static bool sees(const struct seq *q, int n)
{
    const struct prompt_rows *r = q->rows;
    for (int i = q->kv.n_tokens; r && r->embeds && i < q->kv.n_tokens + n && i < r->n; i++)
        if (r->embeds[i])
            return true;
    return false;
}

/* Limits the shares of prompts with images (scheduler.h, 11). */
static void limit_images(struct scheduler *s, int n_readers)
{
    double decode = scheduler_decode_ns(s, s->n_decode);
    if (s->budget_ns > 0 || s->n_decode == 0 || decode <= 0 || s->cost.read_ns <= 0)
        return;
    int left = step_cost_reads_in(&s->cost, (AUTO_FACTOR - 1) * decode, s->limits.max_tokens);
    left = left < MIN_READ ? MIN_READ : left;
    for (int i = 0; i < n_readers; i++) {
        if (!sees(s->readers[i], s->shares[i]))
            continue;
        s->shares[i] = s->shares[i] < left ? s->shares[i] : left;
        left -= s->shares[i];
    }
}

static void plan_reads(struct scheduler *s, struct step_item *items, int taken)
{
    int n = 0, budget = scheduler_read_tokens(s, s->n_decode);
    reuse_begin(s, budget < s->limits.max_tokens ? budget : s->limits.max_tokens);
    for (struct seq *q = s->running.first; q; q = q->next)
        if (seq_unread(q) > 1 && !is_forced(s, q) && !plan_forced(s, items, q, &taken) &&
            !reuse_waits(s, q)) {
            s->readers[n] = q;
            reuse_reads(s, n++);
        }
    if (n == 0)
        return;
    int rows = s->limits.max_tokens - s->n_decode - s->n_forced - s->n_drafted;
    share_among_clients(s, n, budget < rows ? budget : rows);
    limit_images(s, n);
    for (int i = 0; i < n; i++) {
        struct seq *q = s->readers[i];
        int room = room_for(s, q, taken), want = s->shares[i] < room ? s->shares[i] : room;
        if (want <= 0)
            continue;
        want = rows_whole(q->rows, q->kv.n_tokens, reuse_cut(s, q, want));
        if (want > room || want > rows - s->n_read)
            continue;   /* a span that does not fit waits */
        q->n_draft = 0; /* its rows are taken already */
        plan_item(s, items, q, want, &taken);
        s->n_read += want;
    }
    if (s->n_planned)
        return;
    /* Nothing could be planned for lack of pages: the youngest are preempted in favour of the oldest that can read. */
    struct seq *q = s->running.first;
    while (!readable(q))
        q = q->next;
    while (room_for(s, q, 0) < least_read(q) && s->running.last != q)
        preempt(s, s->running.last);
    if (room_for(s, q, 0) < least_read(q)) {
        CHECK(q != s->running.first, "one sequence outgrew the KV cache");
        return; /* it waits for the pages of an older one */
    }
    int room = room_for(s, q, 0), want = readable(q) < MIN_READ ? readable(q) : MIN_READ;
    q->n_draft = 0;
    s->n_read = rows_whole(q->rows, q->kv.n_tokens, want < room ? want : room);
    plan_item(s, items, q, s->n_read, &taken);
}

int scheduler_plan(struct scheduler *s, struct step_item *items)
{
    s->n_planned = s->n_decode = s->n_forced = s->n_read = s->n_drafted = 0;
    let_in(s);
    for (struct seq *q = s->running.first; q; q = q->next) {
        int before = q->kv.n_tokens;
        if (seq_unread(q) > 1)
            reuse_attach(s, q);
        count_cached(s, q, before);
    }
    plan_rests(s);
    s->singly = forced_singly(s);
    s->n_spare = s->limits.max_out - s->running.n;
    int taken = plan_decodes(s, items);
    plan_reads(s, items, taken);
    return s->n_planned;
}

void scheduler_index(struct scheduler *s, struct seq *q)
{
    reuse_index(s, q);
}

double scheduler_decode_ns(const struct scheduler *s, int n_decode)
{
    return step_cost_decode(&s->cost, n_decode);
}

int scheduler_most_running(const struct scheduler *s)
{
    double room = TARGET * s->itl_ns - s->host_ns;
    if (s->itl_ns <= 0)
        return s->limits.max_seqs;
    int n = step_cost_decodes_in(&s->cost, room, s->limits.max_seqs);
    return n ? n : s->limits.max_seqs;
}

double scheduler_budget_ns(const struct scheduler *s, int n_decode)
{
    if (s->budget_ns > 0)
        return n_decode ? s->budget_ns : IDLE_FACTOR * s->budget_ns;
    double decode = scheduler_decode_ns(s, n_decode);
    if (n_decode == 0)
        return AUTO_IDLE_NS;
    return AUTO_FACTOR * decode > AUTO_NS ? AUTO_FACTOR * decode : AUTO_NS;
}

int scheduler_read_tokens(const struct scheduler *s, int n_decode)
{
    double decode = scheduler_decode_ns(s, n_decode), budget = scheduler_budget_ns(s, n_decode);
    if (s->cost.read_ns <= 0)
        return FIRST_READ;
    int most = 2 * s->cost.most_read + MIN_READ; /* costs of much larger chunks are unknown */
    int fits = step_cost_reads_in(
        &s->cost, TARGET * budget - decode - s->mask_ns - (n_decode ? s->host_ns : 0), most);
    return fits < MIN_READ ? MIN_READ : fits;
}

void scheduler_commit(struct scheduler *s, int64_t ns)
{
    bool forced = s->n_forced > 0;
    scheduler_commit_step(s, s->planned, s->n_planned, forced ? 0 : s->n_decode,
                          forced ? 0 : s->n_read, ns);
}

void scheduler_commit_step(struct scheduler *s, struct seq *const *seqs, int n, int n_decode,
                           int n_read, int64_t ns)
{
    for (int i = 0; i < n; i++)
        if (seqs[i])
            reuse_index(s, seqs[i]);
    s->elapsed_ns += (double)ns;
    step_cost_learn(&s->cost, n_decode, n_read, (double)ns);
}
