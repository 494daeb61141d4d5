/* What sequences share: see reuse.h. */
#include "engine/reuse.h"

#include <string.h>

enum {
    SAVE_EVERY = 256, /* distance of saved states within a prompt */
    CUT_CHUNKS = 16, /* steps are not cut below this many of the backend's smallest useful chunks */
    /* Tools and system prompt are the first message. Many prompts share a part of it, so that even a short one is cut into
     * this many steps, with a saved state after each. */
    FIRST_CUTS = 8,
    TURN_GAP = 64,     /* ends of messages that are closer together count as one */
    LEAST_SHARED = 64, /* fewer common tokens are not worth a saved state */
    /* The end of a prompt that the next one may not share: it opens the answer, and its first tokens may differ. */
    PROMPT_END = 8,
    WAIT_FACTOR = 2, /* a leader may be slower than the sequence that waits by this factor */
    WAIT_STEPS = 4,  /* and by this many of its shares of a step */
};

void seq_turn(struct seq *q, int at)
{
    int n = q->n_turns;
    if (n && at < q->turns[n - 1] + TURN_GAP)
        return;
    if (n == SEQ_TURNS)
        memmove(q->turns + 1, q->turns + 2, (size_t)(--n - 1) * sizeof *q->turns);
    q->turns[n++] = at;
    q->n_turns = n;
}

uint64_t seq_content(const struct seq *q, int i)
{
    const struct prompt_rows *r = q->rows;
    return r && i < r->n ? r->content[i] : prefix_text(q->tokens[i], r ? r->rope_delta : 0);
}

const uint64_t *reuse_content(struct scheduler *s, const struct seq *q, int at, int n)
{
    for (int i = 0; i < n && i < s->kv->page_len; i++)
        s->content[i] = seq_content(q, at + i);
    return s->content;
}

static bool same_content(const struct seq *a, const struct seq *b, int at, int n)
{
    if (!a->rows && !b->rows)
        return !memcmp(a->tokens + at, b->tokens + at, (size_t)n * sizeof *a->tokens);
    for (int i = at; i < at + n; i++)
        if (seq_content(a, i) != seq_content(b, i))
            return false;
    return true;
}

/* The last page boundary of the prompt of q that a longer prompt is likely to share. */
static int last_save(const struct seq *q, int page_len)
{
    int n = q->n_prompt - PROMPT_END;
    return n > 0 ? n / page_len * page_len : 0;
}

static void attach_page(struct scheduler *s, struct seq *q, int32_t page)
{
    kvcache_attach(s->kv, &q->kv, page, s->kv->page_len);
    q->chain = prefix_serial(s->kv->prefix, page);
    q->n_indexed++;
}

/* Attaches cached pages for a network with recurrent states: up to the last page, or tail, with a saved state. */
static void attach_states(struct scheduler *s, struct seq *q)
{
    const struct prefix *p = s->kv->prefix;
    struct states *states = s->kv->states;
    int len = s->kv->page_len, at = q->kv.n_tokens, best = at, n;
    uint64_t chain = q->chain;
    int32_t tail = -1, up = -1;
    /* Pinned slots must leave one for every running sequence. */
    bool pin = states_n_pinned(states) < s->kv->n_states - s->limits.max_seqs;
    for (;; at += len) {
        int left = q->n_tokens - 1 - at;
        const uint64_t *content = reuse_content(s, q, at, left);
        int32_t end = prefix_find_tail(p, chain, content, left, &n);
        if (end >= 0 && states_of(states, end) >= 0) {
            best = at + n;
            tail = end;
        }
        int32_t page = at + len < q->n_tokens ? prefix_find(p, chain, content) : -1;
        if (page < 0)
            break;
        chain = prefix_serial(p, page);
        if (pin && states_of(states, page) >= 0) {
            best = at + len;
            tail = -1;
        }
        if (states_of(states, page) >= 0 && (up >= 0 || !q->kv.n_tokens)) {
            states_pass(states, states_of(states, page), up, q->n_tokens);
            up = states_of(states, page);
        }
    }
    q->branch = at;
    if (best == q->kv.n_tokens)
        return;
    while (q->kv.n_tokens + len <= best)
        attach_page(s, q, prefix_find(p, q->chain, reuse_content(s, q, q->kv.n_tokens, len)));
    if (tail >= 0)
        kvcache_attach(s->kv, &q->kv, tail, best - q->kv.n_tokens);
    kvcache_resume(s->kv, &q->kv);
    q->resumed = best;
}

void reuse_attach(struct scheduler *s, struct seq *q)
{
    struct prefix *p = s->kv->prefix;
    int len = s->kv->page_len, before = q->kv.n_tokens;
    if (!p || q->no_cache || before % len || q->n_indexed != q->kv.n_pages)
        return;
    if (s->kv->states) {
        attach_states(s, q);
        return;
    }
    while (q->kv.n_tokens + len < q->n_tokens) {
        int32_t page = prefix_find(p, q->chain, reuse_content(s, q, q->kv.n_tokens, len));
        if (page < 0)
            break;
        attach_page(s, q, page);
    }
    int n, left = q->n_tokens - 1 - q->kv.n_tokens;
    int32_t tail =
        prefix_find_tail(p, q->chain, reuse_content(s, q, q->kv.n_tokens, left), left, &n);
    if (tail >= 0)
        kvcache_attach(s->kv, &q->kv, tail, n);
}

/* SAVE_EVERY in whole pages. */
static int save_every(const struct scheduler *s)
{
    return scheduler_pages(s, SAVE_EVERY) * s->kv->page_len;
}

/* The next number of tokens above `at` after which the state of q is saved wherever steps end; 0 = none. */
static int next_save(const struct scheduler *s, const struct seq *q, int at)
{
    int len = s->kv->page_len, last = last_save(q, len), next = 0;
    if (!s->kv->states || !s->kv->prefix)
        return 0;
    int places[SEQ_TURNS + 3] = {last, q->branch < last ? q->branch : 0, q->wanted}, n = 3;
    for (int i = 0; i < q->n_turns; i++) {
        int turn = q->turns[i] / len * len;
        places[n++] = turn < last && turn >= q->resumed + TURN_GAP ? turn : 0;
    }
    for (int i = 0; i < n; i++)
        if (places[i] > at && (!next || places[i] < next))
            next = places[i];
    return next;
}

int reuse_save_in(const struct scheduler *s, const struct seq *q, int n)
{
    int every = save_every(s), at = q->kv.n_tokens, save = next_save(s, q, at);
    if (save && save <= at + n)
        return save - at;
    int end = (at + n) / every * every;
    return save && end > at ? end - at : 0;
}

int reuse_cut(const struct scheduler *s, const struct seq *q, int n)
{
    int every = save_every(s), at = q->kv.n_tokens, save = next_save(s, q, at);
    if (!save)
        return n;
    int least = CUT_CHUNKS * (s->limits.read_chunk > MIN_READ ? s->limits.read_chunk : MIN_READ);
    if (q->n_turns && at < q->turns[0] && least > q->turns[0] / FIRST_CUTS)
        least = q->turns[0] / FIRST_CUTS;
    int end = (at + (least > every ? least : every)) / every * every;
    if (save < end && next_save(s, q, save))
        end = save;
    return end < at + n ? end - at : n;
}

/* Whether a state at this position of q is where other prompts are likely to start. */
static bool is_turn(const struct scheduler *s, const struct seq *q, int at)
{
    bool turn = at == q->branch || at == q->wanted || at == last_save(q, s->kv->page_len);
    for (int i = 0; i < q->n_turns; i++)
        turn |= at == q->turns[i] / s->kv->page_len * s->kv->page_len;
    return turn;
}

/* Indexes the pages that are full now. If the same content is indexed already, the sequence uses that page instead, so
 * that there is one copy of every prefix. */
void reuse_index(struct scheduler *s, struct seq *q)
{
    struct prefix *p = s->kv->prefix;
    int len = s->kv->page_len;
    while (p && (q->n_indexed + 1) * len <= q->kv.n_tokens) {
        int i = q->n_indexed++;
        const uint64_t *content = reuse_content(s, q, i * len, len);
        int32_t known = prefix_find(p, q->chain, content);
        if (known >= 0) {
            kvcache_replace(s->kv, &q->kv, i, known);
            q->chain = prefix_serial(p, known);
            s->freed++;
        } else {
            q->chain = prefix_add(p, q->chain, content, q->kv.pages[i]);
            kvcache_named(s->kv, &q->kv, i);
        }
        if (s->kv->states)
            kvcache_keep(s->kv, &q->kv, i, q->n_tokens, is_turn(s, q, (i + 1) * len));
    }
}

/* The number of tokens that a and b have in common; at most n, the first `known` of which are. */
static int common(const struct seq *a, const struct seq *b, int known, int n)
{
    while (known < n && seq_content(a, known) == seq_content(b, known))
        known++;
    return known;
}

/* Whether r will compute what q lacks, if it has the next `shared` tokens of q in common. */
static bool computes(const struct scheduler *s, const struct seq *r, const struct seq *q,
                     int shared)
{
    int at = q->kv.n_tokens, len = s->kv->page_len;
    if (s->kv->states)
        return r->kv.n_tokens < shared && at < shared;
    return at % len == 0 && at + len <= shared && r->chain == q->chain &&
           r->n_indexed == q->n_indexed;
}

/* Whole pages of tokens that q can take from r; 0 = q does not wait for r. */
static int shared_with(const struct scheduler *s, const struct seq *r, const struct seq *q)
{
    int len = s->kv->page_len, at = q->kv.n_tokens, n = q->n_tokens - 1;
    n = n < r->n_tokens ? n : r->n_tokens;
    n = s->kv->states && n > r->n_prompt ? r->n_prompt : n; /* states are saved in prompts */
    if (r->root != q->root || at + len > n || !computes(s, r, q, n / len * len) ||
        !same_content(r, q, at, len) || (s->kv->states && !same_content(r, q, 0, at)))
        return 0;
    n = common(r, q, at + len, n) / len * len;
    return computes(s, r, q, n) && (!s->kv->states || at + LEAST_SHARED <= n) ? n : 0;
}

/* The bucket of sequences that q may wait for, or that may wait for it: they have the same page of content, the next one,
 * or the first where states decide. -1 = none. With a thousand prompts, comparing each with each would take
 * milliseconds of every step. */
static int bucket_of(const struct scheduler *s, const struct seq *q)
{
    int len = s->kv->page_len, at = s->kv->states ? 0 : q->n_indexed * len;
    uint64_t hash = s->kv->states ? q->root : q->chain;
    if (q->n_tokens - at < len)
        return -1;
    for (int i = at; i < at + len; i++) {
        hash = (hash ^ seq_content(q, i)) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return (int)(hash & (uint64_t)(s->same.size - 1));
}

void reuse_reads(struct scheduler *s, int i)
{
    struct reader_table *t = &s->same;
    int b = s->kv->prefix ? bucket_of(s, s->readers[i]) : -1;
    if (b < 0)
        return;
    *(t->first[b] ? &t->next[t->last[b] - 1] : &t->first[b]) = i + 1;
    t->last[b] = i + 1;
    t->next[i] = 0;
}

/* The sequence in `readers` that q waits for; NULL = none. */
static struct seq *find_leader(const struct scheduler *s, struct seq *q)
{
    int b = bucket_of(s, q), first = b < 0 ? 0 : s->same.first[b];
    for (int i = q->leader ? first : 0; i; i = s->same.next[i - 1]) {
        struct seq *r = s->readers[i - 1];
        if (r->age == q->leader && computes(s, r, q, q->shared))
            return r;
    }
    q->leader = 0;
    for (int i = first; i; i = s->same.next[i - 1]) {
        struct seq *r = s->readers[i - 1];
        int shared = shared_with(s, r, q);
        if (!shared)
            continue;
        q->leader = r->age;
        q->shared = shared;
        return r;
    }
    return NULL;
}

void reuse_begin(struct scheduler *s, int budget)
{
    int n = 0;
    for (const struct seq_client *c = s->clients; c; c = c->next)
        n += c->n_running > 0;
    for (struct seq *q = s->running.first; q; q = q->next)
        q->wanted = 0;
    s->client_share = budget / (n ? n : 1);
    memset(s->same.first, 0, (size_t)s->same.size * sizeof *s->same.first);
}

bool reuse_waits(struct scheduler *s, struct seq *q)
{
    struct seq *r;
    uint64_t before = q->leader;
    if (!s->kv->prefix || q->no_cache || q->impatient || !(r = find_leader(s, q)))
        return false;
    int share = s->client_share / q->of->n_running + 1;
    if (r->age == before && r->kv.n_tokens > q->leader_at)
        q->awaited += r->kv.n_tokens - q->leader_at;
    q->leader_at = r->kv.n_tokens;
    q->forgone += share;
    if (q->forgone > WAIT_FACTOR * q->awaited + WAIT_STEPS * share) {
        q->impatient = true;
        return false;
    }
    if (s->kv->states && (!r->wanted || q->shared < r->wanted))
        r->wanted = q->shared;
    return true;
}
