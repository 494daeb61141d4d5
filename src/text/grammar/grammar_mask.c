/*
 * Masks and the matcher's interface: computing a mask, accepting tokens, rollback, free text.
 *
 * A mask is computed by walking the vocabulary's tries through the threads of the current point.
 * Two shortcuts make this fast. A group of tokens that cannot kill a thread's automaton is added as
 * a whole. Inside an unrestricted string, tokens that close the string are walked by the text after
 * the quote.
 */
#include "text/grammar/grammar_term.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <string.h>

/* Finds the token of each tag in the grammar. */
static void find_tags(struct grammar_matcher *m)
{
    const struct tokenizer *tok = m->v->tok;
    m->tag_token = mem_alloc(m->g->n_terms * sizeof *m->tag_token);
    for (uint32_t i = 0; i < m->g->n_terms; i++) {
        const char *tag = m->g->terms[i].tag;
        int32_t id = tag ? tokenizer_find(tok, tag, strlen(tag)) : -1;
        enum token_kind kind = id >= 0 ? tokenizer_kind(tok, id) : TOKEN_UNKNOWN;
        bool is_tag = (kind == TOKEN_CONTROL || kind == TOKEN_USER) && !tokenizer_is_end(tok, id);
        m->tag_token[i] = is_tag ? id : -1;
    }
}

/* Finds the special tokens that may be written as their spelling. Other special tokens are never
 * part of a text. */
static void find_spelled(struct grammar_matcher *m)
{
    for (const char *const *p = m->g->spelled; p && *p; p++) {
        int32_t id = tokenizer_find(m->v->tok, *p, strlen(*p));
        if (id < 0 || vocab_usable(m->v->tok, id) || tokenizer_is_end(m->v->tok, id))
            continue;
        CHECK(m->n_spelled < sizeof m->spelled / sizeof *m->spelled, "spelled tokens");
        m->spelled[m->n_spelled++] = id;
    }
}

/* Whether a thread is in a terminal that may contain such tokens. */
static bool may_spell_here(const struct grammar_matcher *m)
{
    for (uint32_t i = 0; m->n_spelled && i < m->now.n_threads; i++)
        if (m->g->terms[m->threads[m->now.threads + i].term].spells)
            return true;
    return false;
}

static bool is_spelled(const struct grammar_matcher *m, int32_t id)
{
    for (uint32_t i = 0; i < m->n_spelled; i++)
        if (m->spelled[i] == id)
            return may_spell_here(m);
    return false;
}

struct grammar_matcher *grammar_matcher_new(struct grammar *g, const struct grammar_vocab *v)
{
    struct grammar_matcher *m = mem_zalloc(1, sizeof *m);
    m->g = grammar_ref(g);
    m->v = v;
    m->cap_threads = 64;
    m->threads = mem_alloc(m->cap_threads * sizeof *m->threads);
    m->cap_rows = m->cap_waiters = 64;
    m->rows = mem_alloc(m->cap_rows * sizeof *m->rows);
    m->waiters = mem_alloc(m->cap_waiters * sizeof *m->waiters);
    m->cap_data = 256;
    m->data = mem_alloc(m->cap_data * sizeof *m->data);
    m->cap_todo = 64;
    m->todo = mem_alloc(m->cap_todo * sizeof *m->todo);
    m->todo_next = mem_alloc(m->cap_todo * sizeof *m->todo_next);
    m->cap_nulls = 16;
    m->nulls = mem_alloc(m->cap_nulls * sizeof *m->nulls);
    m->levels = mem_alloc((VOCAB_TOKEN_MAX + 2) * sizeof *m->levels);
    m->work_max = GRAMMAR_MASK_WORK;
    if (g->tags)
        find_tags(m);
    find_spelled(m);
    match_begin_work(m);
    match_begin(m);
    return m;
}

void grammar_matcher_free(struct grammar_matcher *m)
{
    if (!m)
        return;
    grammar_free(m->g);
    mem_free(m->threads);
    mem_free(m->rows);
    mem_free(m->waiters);
    mem_free(m->data);
    mem_free(m->todo);
    mem_free(m->todo_next);
    mem_free(m->nulls);
    mem_free(m->chain);
    mem_free(m->levels);
    mem_free(m->scratch);
    mem_free(m->history);
    mem_free(m->tag_token);
    mem_free(m->stop_tokens);
    mem_free(m);
}

size_t grammar_matcher_bytes(const struct grammar_matcher *m)
{
    return sizeof *m + m->cap_threads * sizeof *m->threads + m->cap_rows * sizeof *m->rows +
           m->cap_waiters * sizeof *m->waiters + m->cap_data * sizeof *m->data +
           m->cap_history * sizeof *m->history + m->cap_todo * 20 +
           (VOCAB_TOKEN_MAX + 2) * sizeof *m->levels;
}

size_t grammar_mask_work(const struct grammar_matcher *m)
{
    return m->work;
}

/* ---- walking ---- */

static void mask_set(const struct grammar_vocab *v, uint32_t *bits, int32_t id)
{
    for (; id >= 0; id = v->twin[id])
        bits[id / 32] |= 1u << id % 32;
}

static void bits_or(uint32_t *to, const uint32_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] |= from[i];
}

/* Parameters of a walk. */
struct walk {
    struct grammar_matcher *m;
    uint32_t *bits;
    int group;           /* group of the trie's tokens; DFA_GROUPS: none */
    bool exits;          /* the trie's tokens are string exits, that is, lists of tokens */
    const uint8_t *open; /* (256) 0 for a first byte that no thread accepts; or NULL */
};

static void walk_add_token(const struct walk *w, int32_t token)
{
    const struct grammar_vocab *v = w->m->v;
    if (!w->exits) {
        mask_set(v, w->bits, token);
        return;
    }
    for (uint32_t i = v->exit_at[token]; i < v->exit_at[token + 1]; i++)
        mask_set(v, w->bits, v->exit_token[i]);
}

/* Whether thread t survives every token of a group's subtree of this height. */
static bool thread_safe(const struct grammar_matcher *m, const struct thread *t, int group,
                        uint32_t height)
{
    return !t->sub && t->q && m->g->terms[t->term].dfa->safe[t->q][group] >= height;
}

/* Adds all tokens of nodes lo .. hi - 1. */
static void walk_take(const struct walk *w, const struct vocab_trie *trie, uint32_t lo, uint32_t hi)
{
    w->m->work += (hi - lo) / 8;
    for (uint32_t i = lo; i < hi; i++)
        if (trie->nodes[i].token >= 0)
            mask_set(w->m->v, w->bits, trie->nodes[i].token);
}

/* Walks nodes lo .. hi - 1 of a trie from point `from`. */
static void walk_range(const struct walk *w, const struct vocab_trie *trie, uint32_t lo,
                       uint32_t hi, const struct point *from)
{
    struct grammar_matcher *m = w->m;
    if (lo >= hi)
        return;
    uint32_t base_depth = trie->nodes[lo].depth, base = m->n_threads;
    struct point *levels = m->levels;
    levels[base_depth - 1] = *from;
    for (uint32_t i = lo; i < hi && !m->error;) {
        const struct trie_node *n = &trie->nodes[i];
        const struct point *src = &levels[n->depth - 1];
        if (n->depth == 1 && w->open && !w->open[n->byte]) {
            i = n->skip;
            continue;
        }
        match_pop(m, src, n->depth == base_depth ? base : src->threads + src->n_threads);
        if (!match_step(m, src, n->byte, &levels[n->depth])) {
            i = n->skip;
            continue;
        }
        if (n->token >= 0)
            walk_add_token(w, n->token);
        i++;
        if (w->group == DFA_GROUPS || i == n->skip)
            continue;
        const struct point *p = &levels[n->depth];
        for (uint32_t k = 0; k < p->n_threads; k++)
            if (thread_safe(m, &m->threads[p->threads + k], w->group, n->height)) {
                walk_take(w, trie, i, n->skip);
                i = n->skip;
                break;
            }
    }
    match_pop(m, from, base);
}

/* Walks with a single thread inside a string or another terminal: the automaton alone decides until
 * the terminal ends. All ends of a string lead to the same point (those of a name: if its label is
 * the same), which is computed once. */
static void walk_single(const struct walk *w, const struct vocab_trie *trie,
                        const struct point *from)
{
    struct grammar_matcher *m = w->m;
    const struct thread start = m->threads[from->threads];
    const struct term *tm = &m->g->terms[start.term];
    struct thread level[VOCAB_TOKEN_MAX + 2];
    struct point after;
    bool alive = false;
    uint32_t base = m->n_threads, made = NO_LIMIT;
    level[0] = start;
    for (uint32_t i = 0; i < trie->n && !m->error;) {
        const struct trie_node *n = &trie->nodes[i];
        struct thread *t = &level[n->depth];
        if (n->depth == 1 && w->open && !w->open[n->byte]) {
            i = n->skip;
            continue;
        }
        *t = level[n->depth - 1];
        m->work++;
        if (!match_goes_on(m))
            break;
        if (!term_step(m, t, n->byte)) {
            i = n->skip;
            continue;
        }
        if (!term_ends(m, t)) {
            if (n->token >= 0)
                mask_set(m->v, w->bits, n->token);
            i++;
            if (w->group < DFA_GROUPS && i < n->skip && thread_safe(m, t, w->group, n->height)) {
                walk_take(w, trie, i, n->skip);
                i = n->skip;
            }
            continue;
        }
        uint32_t label = tm->kind == TERM_KEY ? key_label(m, tm, t) : 0;
        bool leaf = n->skip == i + 1; /* the point after an undeclared name depends on its hash */
        if (made != label || term_is_open(tm) || (tm->kind == TERM_KEY && !leaf)) {
            match_pop(m, from, base);
            alive = match_end_term(m, t, &after);
            made = label;
            if (term_is_open(tm) && tm->dfa->moves[t->q]) /* the terminal may also continue */
                alive = match_add_thread(m, t, &after);
        }
        if (alive) {
            if (n->token >= 0)
                mask_set(m->v, w->bits, n->token);
            walk_range(w, trie, i + 1, n->skip, &after);
        }
        i = n->skip;
    }
    match_pop(m, from, base);
    if (m->work > m->work_max)
        match_over_limit(m, "a mask takes over 8388608 steps");
}

/* The number of arbitrary characters of a group that are safe for some thread. *most: the longest
 * text any thread accepts, if all threads are between characters of a string (which the group
 * cannot end). */
static uint32_t group_safe(const struct grammar_matcher *m, int group, uint32_t *most)
{
    uint32_t safe = 0;
    *most = 0;
    for (uint32_t i = 0; i < m->now.n_threads; i++) {
        const struct thread *t = &m->threads[m->now.threads + i];
        const struct term *tm = &m->g->terms[t->term];
        if (t->sub || tm->kind != TERM_STR)
            *most = 255;
        else if (*most < tm->dfa->reach[t->q])
            *most = tm->dfa->reach[t->q];
        if (!t->sub && t->q && safe < tm->dfa->safe[t->q][group])
            safe = tm->dfa->safe[t->q][group];
    }
    return safe;
}

/* Tokens that complete a declared name were added as undeclared names. Replaces their verdict: `p`
 * (n bytes) is the rest of the name, `node` its end. */
static void mask_name(const struct walk *w, const struct thread *t, uint32_t node, const char *p,
                      size_t n)
{
    struct grammar_matcher *m = w->m;
    const struct vocab_trie *trie = &m->v->trie[DFA_GROUPS];
    uint32_t lo = 0, hi = trie->n, hit = NO_LIMIT;
    for (size_t at = 0; at <= n; at++) {
        uint8_t byte = at < n ? (uint8_t)p[at] : '"';
        hit = NO_LIMIT;
        for (uint32_t i = lo; i < hi && hit == NO_LIMIT; i = trie->nodes[i].skip)
            if (trie->nodes[i].byte == byte)
                hit = i;
        if (hit == NO_LIMIT)
            return;
        lo = hit + 1;
        hi = trie->nodes[hit].skip;
    }
    for (uint32_t i = hit; i < hi; i++)
        for (int32_t id = trie->nodes[i].token; id >= 0; id = m->v->twin[id])
            w->bits[id / 32] &= ~(1u << id % 32);
    struct thread end = *t;
    struct point after;
    uint32_t base = m->n_threads;
    end.name = node + 1;
    if (!key_label(m, &m->g->terms[t->term], &end))
        return;
    end.sub = SUB(SUB_DONE, 0, 0);
    if (match_end_term(m, &end, &after)) {
        if (trie->nodes[hit].token >= 0)
            mask_set(m->v, w->bits, trie->nodes[hit].token);
        walk_range(w, trie, lo, hi, &after);
    }
    match_pop(m, &m->now, base);
}

/* Visits the declared names below a node of their trie, spelling them out in p. */
static void mask_names(const struct walk *w, const struct thread *t, uint32_t node, char *p,
                       size_t n)
{
    const struct names *names = w->m->g->terms[t->term].names;
    if (names->nodes[node].name)
        mask_name(w, t, node, p, n);
    w->m->work += 4;
    for (uint32_t c = names->nodes[node].child; c && match_goes_on(w->m);
         c = names->nodes[c].sibling) {
        if (n + 4 > VOCAB_TOKEN_MAX) /* longer than any token */
            return;
        mask_names(w, t, c, p, n + (size_t)utf8_encode(names->nodes[c].cp, p + n));
    }
}

/* Inside an unrestricted string everything is precomputed, except the text after the closing quote.
 * Inside an unrestricted name, declared names are handled afterwards. */
static void mask_any_string(struct grammar_matcher *m, const struct thread *at, uint32_t *bits)
{
    const struct grammar_vocab *v = m->v;
    struct point after;
    struct thread t = *at, end = *at;
    struct walk w = {.m = m, .bits = bits, .exits = true, .group = DFA_GROUPS};
    uint32_t base = m->n_threads;
    if (t.name) { /* tokens will be removed again, but not those of other threads */
        if (!m->scratch)
            m->scratch = mem_alloc(v->n_words * sizeof *m->scratch);
        memset(m->scratch, 0, v->n_words * sizeof *m->scratch);
        w.bits = m->scratch;
    }
    for (int g = 0; g < DFA_GROUPS; g++)
        bits_or(w.bits, v->mask[g][DFA_SAFE_MAX], v->n_words);
    bits_or(w.bits, v->inside, v->n_words);
    end.sub = SUB(SUB_DONE, 0, 0);
    end.name = 0;
    if (match_end_term(m, &end, &after)) {
        walk_add_token(&w, 0);
        walk_range(&w, &v->after, 0, v->after.n, &after);
    }
    match_pop(m, &m->now, base);
    if (t.name) {
        char spelling[VOCAB_TOKEN_MAX + 8];
        w.exits = false;
        mask_names(&w, &t, t.name - 1, spelling, 0);
        bits_or(bits, m->scratch, v->n_words);
    }
}

static bool in_any_string(const struct grammar_matcher *m, const struct thread *t)
{
    const struct term *tm = &m->g->terms[t->term];
    if (t->sub || term_is_open(tm) || tm->bare || !t->q || !tm->dfa->any)
        return false;
    if (tm->kind == TERM_STR)
        return true;
    /* In a name: no used name may collide with it, and no declared name may contain escapes. */
    return !m->data[t->then.data + SET_CHAIN] && !(t->name && tm->names->escapes);
}

/* The bytes that some thread accepts next. */
static void first_bytes(struct grammar_matcher *m, uint8_t open[256])
{
    memset(open, 0, 256);
    for (uint32_t i = 0; i < m->now.n_threads; i++)
        for (uint32_t b = 0; b < 256; b++)
            if (!open[b]) {
                struct thread t = m->threads[m->now.threads + i];
                open[b] = term_step(m, &t, (uint8_t)b);
            }
    m->work += 256;
}

/* Computes the mask of the current threads by walking the tries. */
static void mask_walk(struct grammar_matcher *m, uint32_t *bits)
{
    const struct grammar_vocab *v = m->v;
    uint8_t open[256];
    struct walk w = {.m = m, .bits = bits, .open = open};
    if (!m->now.n_threads)
        return;
    first_bytes(m, open);
    for (int g = 0; g <= DFA_GROUPS && !m->error; g++) {
        if (g < DFA_GROUPS) {
            uint32_t most, safe = group_safe(m, g, &most);
            bool whole = safe >= DFA_SAFE_MAX || safe >= most;
            if (safe)
                bits_or(bits, v->mask[g][safe], v->n_words);
            if (whole)
                continue;
        }
        w.group = g;
        if (m->now.n_threads == 1)
            walk_single(&w, &v->trie[g], &m->now);
        else
            walk_range(&w, &v->trie[g], 0, v->trie[g].n, &m->now);
    }
}

/* The constraint's mask at the current point, without ending tokens. */
static void mask_constraint(struct grammar_matcher *m, uint32_t *bits)
{
    /* Every thread adds its own tokens. Threads in unrestricted strings use the precomputed
     * masks. */
    struct point all = m->now;
    uint32_t base = m->n_threads;
    for (uint32_t i = 0; i < all.n_threads; i++) {
        struct thread t = m->threads[all.threads + i];
        if (in_any_string(m, &t))
            mask_any_string(m, &t, bits);
    }
    m->now.threads = base;
    m->now.n_threads = 0;
    for (uint32_t i = 0; i < all.n_threads; i++) {
        struct thread t = m->threads[all.threads + i];
        if (!in_any_string(m, &t))
            match_add_thread(m, &t, &m->now);
    }
    mask_walk(m, bits);
    m->now = all;
    m->n_threads = base;
}

/* ---- free text ---- */

static void set_all(const struct grammar_vocab *v, uint32_t *bits)
{
    memset(bits, 0xff, v->n_words * sizeof *bits);
    if (v->n_vocab % 32)
        bits[v->n_words - 1] = (1u << v->n_vocab % 32) - 1;
}

/* Whether these bytes may come next, tried on the real state. */
static bool token_fits(struct grammar_matcher *m, int32_t id)
{
    size_t n;
    const char *p = tokenizer_piece(m->v->tok, id, &n);
    struct point now = m->now;
    uint32_t n_threads = m->n_threads;
    struct point heights = {.n_rows = m->n_rows, .n_waiters = m->n_waiters, .n_data = m->n_data};
    bool ok = match_bytes(m, p, n);
    m->now = now;
    match_pop(m, &heights, n_threads);
    return ok;
}

/* Whether the token completes a stop, starting in state q. */
static bool free_token_stops(const struct grammar_matcher *m, const struct dfa *d, uint32_t q,
                             int32_t id)
{
    size_t n;
    const char *p = tokenizer_piece(m->v->tok, id, &n);
    for (size_t i = 0; i < n; i++) {
        q = dfa_step(d, q, (uint8_t)p[i]);
        if (d->label[q])
            return true;
    }
    return false;
}

static void find_stop_tokens(struct grammar_matcher *m, uint32_t term)
{
    const struct dfa *d = m->g->terms[term].dfa;
    m->stop_tokens = mem_realloc(m->stop_tokens, m->v->n_marked + 1, sizeof *m->stop_tokens);
    m->n_stop_tokens = 0;
    m->stop_tokens_term = term + 1;
    for (uint32_t i = 0; i < m->v->n_marked; i++)
        if (free_token_stops(m, d, m->g->terms[term].free->idle, m->v->marked[i]))
            m->stop_tokens[m->n_stop_tokens++] = m->v->marked[i];
}

/* Removes the token if its text after the stop does not fit what follows the free text. */
static void check_free_token(struct grammar_matcher *m, uint32_t *bits, int32_t id)
{
    if (!token_fits(m, id))
        bits[id / 32] &= ~(1u << id % 32);
}

/* With a partial stop: checks the tokens that complete it. */
static void mask_begun_stop(struct grammar_matcher *m, const struct thread *t, uint32_t *bits)
{
    const struct dfa *d = m->g->terms[t->term].dfa;
    uint32_t idle = m->g->terms[t->term].free->idle, q[VOCAB_TOKEN_MAX + 2];
    q[0] = t->q;
    for (int g = 0; g <= DFA_GROUPS; g++) {
        const struct vocab_trie *trie = &m->v->trie[g];
        for (uint32_t i = 0; i < trie->n;) {
            const struct trie_node *n = &trie->nodes[i];
            q[n->depth] = dfa_step(d, q[n->depth - 1], n->byte);
            m->work++;
            if (!match_goes_on(m))
                return;
            if (!d->label[q[n->depth]]) {
                i = q[n->depth] == idle ? n->skip : i + 1;
                continue;
            }
            for (; i < n->skip; i++)
                for (int32_t id = trie->nodes[i].token; id >= 0; id = m->v->twin[id])
                    check_free_token(m, bits, id);
        }
    }
}

/* All tokens, except those that end the free text and continue in a way the constraint forbids. */
static void mask_free(struct grammar_matcher *m, const struct thread *now, uint32_t *bits)
{
    const struct thread t = *now;
    const struct term *tm = &m->g->terms[t.term];
    set_all(m->v, bits);
    if (!m->now.accepts)
        for (size_t i = 0; i < m->v->n_words; i++)
            bits[i] &= ~m->v->ends[i];
    if (t.q == tm->free->idle) {
        if (m->stop_tokens_term != t.term + 1)
            find_stop_tokens(m, t.term);
        for (uint32_t i = 0; i < m->n_stop_tokens; i++)
            check_free_token(m, bits, m->stop_tokens[i]);
        return;
    }
    for (uint32_t i = 0; i < m->v->n_marked; i++)
        if (free_token_stops(m, tm->dfa, t.q, m->v->marked[i]))
            check_free_token(m, bits, m->v->marked[i]);
    mask_begun_stop(m, &t, bits);
}

/* ---- interface ---- */

/* Computes the mask of constrained text. */
static void mask_make(struct grammar_matcher *m, uint32_t *bits)
{
    const struct grammar_vocab *v = m->v;
    memset(bits, 0, v->n_words * sizeof *bits);
    mask_constraint(m, bits);
    for (uint32_t i = 0; m->tag_token && i < m->now.n_threads; i++) {
        const struct thread *t = &m->threads[m->now.threads + i];
        if (!t->q && m->g->terms[t->term].tag)
            bits[m->tag_token[t->term] / 32] |= 1u << m->tag_token[t->term] % 32;
    }
    for (uint32_t i = 0; i < m->n_spelled && may_spell_here(m); i++)
        if (token_fits(m, m->spelled[i]))
            bits[m->spelled[i] / 32] |= 1u << m->spelled[i] % 32;
    if (m->now.accepts)
        bits_or(bits, v->ends, v->n_words);
}

/* Like mask_make, but uses the cache. */
enum { MIN_CACHED_WORK = 256 }; /* minimum cost of a mask worth caching, in steps */
static void mask_cached(struct grammar_matcher *m, uint32_t *bits)
{
    struct memo_key key;
    bool known = !m->no_cache && memo_key(m, &key);
    if (known && memo_find(m->v->memo, &key, bits))
        return;
    mask_make(m, bits);
    if (known && !m->error && m->work >= MIN_CACHED_WORK)
        memo_add(m->v->memo, &key, bits);
}

void grammar_set_pace(struct grammar_matcher *m, bool (*go_on)(void *arg), void *arg)
{
    m->go_on = go_on;
    m->go_on_arg = arg;
}

/* The end of a mask or a token: false if it was given up, or a limit was exceeded. */
static bool work_done(struct grammar_matcher *m, struct error *err)
{
    bool ok = !m->error;
    if (match_given_up(m))
        m->error = NULL;
    else if (!ok)
        error_set(err, "%s", m->error);
    return ok;
}

bool grammar_mask(struct grammar_matcher *m, uint32_t *bits, struct error *err)
{
    const struct grammar_vocab *v = m->v;
    if (m->error)
        return error_set(err, "%s", m->error);
    match_begin_work(m);
    int32_t only;
    bool hurry = match_must_end(m, &only);
    const struct thread *free_text = match_free(m, &m->now);
    if (m->error) {
        /* given up */
    } else if (hurry) {
        memset(bits, 0, v->n_words * sizeof *bits);
        if (only < 0)
            bits_or(bits, v->ends, v->n_words);
        for (; only >= 0; only = v->twin[only])
            bits[only / 32] |= 1u << only % 32;
    } else if (free_text) {
        mask_free(m, free_text, bits);
    } else {
        mask_cached(m, bits);
    }
    return work_done(m, err);
}

bool grammar_accept(struct grammar_matcher *m, int32_t token, struct error *err)
{
    if (m->error)
        return error_set(err, "%s", m->error);
    if (token < 0 || token >= m->v->n_vocab)
        return error_set(err, "token %d is not in the vocabulary", (int)token);
    if (m->n_history == m->cap_history) {
        m->cap_history = m->cap_history ? 2 * m->cap_history : 64;
        m->history = mem_realloc(m->history, m->cap_history, sizeof *m->history);
    }
    struct accept_record r = {.point = m->now, .n_threads_all = m->n_threads};
    r.point.n_rows = m->n_rows;
    r.point.n_waiters = m->n_waiters;
    r.point.n_data = m->n_data;
    match_begin_work(m);
    bool ok;
    size_t n;
    const char *p = tokenizer_piece(m->v->tok, token, &n);
    if (tokenizer_is_end(m->v->tok, token)) {
        ok = m->now.accepts;
        m->now = (struct point){.threads = m->n_threads, .accepts = true}; /* nothing follows */
    } else if (match_free(m, &m->now)) {
        ok = match_bytes(m, p, n);
    } else if (vocab_usable(m->v->tok, token)) {
        ok = match_bytes(m, p, n);
    } else {
        ok = match_tag(m, token) || (is_spelled(m, token) && match_bytes(m, p, n));
    }
    if (!ok) {
        m->now = r.point;
        match_pop(m, &r.point, r.n_threads_all);
        return m->error ? work_done(m, err)
                        : error_set(err, "the token does not fit the constraint");
    }
    m->history[m->n_history++] = r;
    return true;
}

void grammar_rollback(struct grammar_matcher *m, size_t n)
{
    if (n > m->n_history)
        n = m->n_history;
    if (!n)
        return;
    m->n_history -= n;
    const struct accept_record *r = &m->history[m->n_history];
    m->now = r->point;
    match_pop(m, &r->point, r->n_threads_all);
    m->error = NULL; /* the step over the limit is undone */
    m->next_check = 0;
    m->frugal = false;
}

bool grammar_is_accepting(const struct grammar_matcher *m)
{
    return m->now.accepts;
}

/* Two possible bytes mostly mean two possible tokens, so the mask is computed only if one byte is
 * possible. */
int32_t grammar_forced(struct grammar_matcher *m)
{
    if (match_free(m, &m->now) || m->error)
        return -1;
    uint32_t base = m->n_threads;
    int choices = m->now.accepts ? 2 : 0;
    for (uint32_t i = 0; m->tag_token && i < m->now.n_threads; i++)
        choices += m->g->terms[m->threads[m->now.threads + i].term].tag ? 1 : 0;
    struct point to;
    match_begin_work(m);
    for (uint32_t b = 0; b < 256 && choices < 2; b++) {
        choices += match_step(m, &m->now, (uint8_t)b, &to);
        match_pop(m, &m->now, base);
    }
    if (choices != 1 || m->error)
        return -1;
    uint32_t *bits = mem_alloc(m->v->n_words * sizeof *bits);
    int32_t only = -1;
    if (grammar_mask(m, bits, NULL)) {
        int n = 0;
        for (size_t i = 0; i < m->v->n_words && n < 2; i++) {
            n += __builtin_popcount(bits[i]);
            if (bits[i])
                only = (int32_t)(i * 32) + __builtin_ctz(bits[i]);
        }
        only = n == 1 ? only : -1;
    }
    mem_free(bits);
    return only;
}

int grammar_foresee(struct grammar_matcher *m, int32_t *tokens, int n, int most)
{
    size_t at = m->n_history, next_check = m->next_check;
    bool frugal = m->frugal;
    int k = 0;
    if (m->error)
        return 0;
    while (k < n && grammar_accept(m, tokens[k], NULL))
        k++;
    for (int32_t t; k < most && !m->error && (t = grammar_forced(m)) >= 0;) {
        if (!grammar_accept(m, t, NULL))
            break;
        tokens[k++] = t;
    }
    grammar_rollback(m, m->n_history - at);
    m->error = NULL; /* of what was foreseen */
    m->next_check = next_check;
    m->frugal = frugal;
    return k;
}
