/* See token_rules.h. */
#include "engine/token_rules.h"
#include "base/mem.h"

#include <stdatomic.h>
#include <string.h>

struct token_rules {
    atomic_int refs;
    const struct tokenizer *t;
    uint32_t *allowed; /* (n_vocab of the tokenizer) bits; NULL = all */
    int n_tokens;
    int32_t *words; /* forbidden sequences, one after the other */
    int *ends;      /* (n_words) where each ends in `words` */
    int n_words;
    bool limited;
    struct think_limit limit; /* with owned texts */
    struct token_list end;
    int32_t barred; /* token that must not follow `end`, or -1 */
};

struct think_limit think_limit_of(const struct chat_marks *marks, bool inside, int tokens)
{
    return (struct think_limit){.tokens = tokens,
                                .open = marks->open,
                                .close = marks->close,
                                .call = marks->call,
                                .inside = inside,
                                .reopens = marks->reopens,
                                .end = tokens ? marks->end : marks->end_at_once,
                                .not_after = marks->not_after};
}

static void add_word(struct token_rules *r, const char *text, int *n)
{
    struct token_list ids = {0};
    struct error err = {0};
    if (tokenizer_encode(r->t, text, strlen(text), 0, &ids, &err) && ids.n &&
        ids.n <= RULES_LONGEST_WORD) {
        r->words = mem_realloc(r->words, (size_t)*n + ids.n, sizeof *r->words);
        memcpy(r->words + *n, ids.ids, ids.n * sizeof *ids.ids);
        *n += (int)ids.n;
        r->ends[r->n_words++] = *n;
    }
    token_list_clear(&ids);
}

/* Each word as it is spelled at the beginning of a text and after a space. */
static void add_words(struct token_rules *r, const char *const *words, int n_words)
{
    int n = 0;
    r->ends = mem_zalloc(2 * (size_t)n_words, sizeof *r->ends);
    for (int i = 0; i < n_words; i++) {
        struct buf spaced = {0};
        const char *word = words[i] + strspn(words[i], " ");
        buf_addf(&spaced, " %s", word);
        add_word(r, *word ? word : words[i], &n);
        add_word(r, spaced.p, &n);
        buf_clear(&spaced);
    }
}

static void add_limit(struct token_rules *r, const struct think_limit *limit)
{
    struct error err = {0};
    struct token_list first = {0};
    r->limit = *limit;
    r->limit.open = mem_strdup(limit->open);
    r->limit.close = mem_strdup(limit->close);
    r->limit.call = limit->call ? mem_strdup(limit->call) : NULL;
    r->limit.end = r->limit.not_after = NULL;
    r->limited =
        tokenizer_encode(r->t, limit->end, strlen(limit->end), TOKENIZE_SPECIAL, &r->end, &err) &&
        r->end.n > 0;
    if (limit->not_after &&
        tokenizer_encode(r->t, limit->not_after, strlen(limit->not_after), TOKENIZE_SPECIAL, &first,
                         &err) &&
        first.n)
        r->barred = first.ids[0];
    token_list_clear(&first);
}

struct token_rules *token_rules_new(const struct tokenizer *t, const struct token_list *allowed,
                                    const char *const *bad_words, int n_bad_words,
                                    const struct think_limit *limit)
{
    struct token_rules *r = mem_zalloc(1, sizeof *r);
    atomic_init(&r->refs, 1);
    r->t = t;
    r->barred = -1;
    for (size_t i = 0; allowed && i < allowed->n; i++)
        r->n_tokens = allowed->ids[i] >= r->n_tokens ? allowed->ids[i] + 1 : r->n_tokens;
    if (allowed && allowed->n)
        r->allowed = mem_zalloc(((size_t)r->n_tokens + 31) / 32, sizeof *r->allowed);
    for (size_t i = 0; allowed && i < allowed->n; i++)
        r->allowed[allowed->ids[i] / 32] |= 1u << allowed->ids[i] % 32;
    if (t && n_bad_words)
        add_words(r, bad_words, n_bad_words);
    if (t && limit)
        add_limit(r, limit);
    return r;
}

struct token_rules *token_rules_ref(struct token_rules *r)
{
    atomic_fetch_add(&r->refs, 1);
    return r;
}

void token_rules_free(struct token_rules *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) > 1)
        return;
    mem_free(r->allowed);
    mem_free(r->words);
    mem_free(r->ends);
    mem_free((char *)r->limit.open);
    mem_free((char *)r->limit.close);
    mem_free((char *)r->limit.call);
    token_list_clear(&r->end);
    mem_free(r);
}

/* ---- one choice ---- */

enum think_state {
    THINK_BEFORE, /* nothing but blanks so far, or the start of the opening mark */
    THINK_INSIDE,
    THINK_FORCED, /* the end is being written */
    THINK_BARRED, /* it was just written */
    THINK_ANSWER,
};

enum { TAIL = 96 }; /* bytes: more than a mark has */

struct rules_matcher {
    struct token_rules *r;
    struct sample_constraint inner; /* state NULL = none */
    int n_vocab;
    int32_t recent[RULES_LONGEST_WORD]; /* ring of the last tokens */
    int64_t n_seen;
    enum think_state think;
    int n_thought;
    size_t at; /* next token of the forced end */
    struct detok detok;
    char tail[TAIL + 1]; /* the end of the text since the last mark, NUL-terminated */
    size_t n_tail;
    struct buf text; /* scratch */
};

/* Clears the last token of every forbidden sequence whose other tokens were just generated. */
static void clear_words(const struct rules_matcher *m, uint32_t *bits)
{
    const struct token_rules *r = m->r;
    for (int w = 0; w < r->n_words; w++) {
        int first = w ? r->ends[w - 1] : 0, n = r->ends[w] - first - 1, k = 0;
        while (k < n && m->n_seen > k &&
               m->recent[(m->n_seen - 1 - k) % RULES_LONGEST_WORD] == r->words[first + n - 1 - k])
            k++;
        int32_t last = r->words[first + n];
        if (k == n)
            bits[last / 32] &= ~(1u << last % 32);
    }
}

/* Whether the end of thinking must begin now. No character is cut in two. */
static bool at_limit(const struct rules_matcher *m)
{
    return m->think == THINK_INSIDE && m->n_thought >= m->r->limit.tokens && !m->detok.n_pending;
}

static bool rules_mask(void *state, uint32_t *bits, struct error *err)
{
    struct rules_matcher *m = state;
    const struct token_rules *r = m->r;
    size_t n = ((size_t)m->n_vocab + 31) / 32;
    if (m->inner.state && !m->inner.mask(m->inner.state, bits, err))
        return false;
    if (!m->inner.state)
        memset(bits, 0xff, n * sizeof *bits);
    if (at_limit(m)) {
        m->think = THINK_FORCED;
        m->at = 0;
    }
    if (m->think == THINK_FORCED) {
        int32_t token = r->end.ids[m->at];
        if (bits[token / 32] >> token % 32 & 1) {
            memset(bits, 0, n * sizeof *bits);
            bits[token / 32] = 1u << token % 32;
            return true;
        }
        m->think = THINK_ANSWER;
    }
    if (m->think == THINK_BARRED && r->barred >= 0)
        bits[r->barred / 32] &= ~(1u << r->barred % 32);
    for (size_t i = 0; r->allowed && i < n; i++)
        bits[i] &= i < ((size_t)r->n_tokens + 31) / 32 ? r->allowed[i] : 0;
    clear_words(m, bits);
    return true;
}

/* Keeps the end of the text. */
static void add_tail(struct rules_matcher *m)
{
    const char *p = m->text.p;
    size_t n = m->text.len;
    if (n > TAIL) {
        p += n - TAIL;
        n = TAIL;
    }
    size_t keep = m->n_tail + n > TAIL ? TAIL - n : m->n_tail;
    memmove(m->tail, m->tail + m->n_tail - keep, keep);
    if (n)
        memcpy(m->tail + keep, p, n);
    m->n_tail = keep + n;
}

static bool tail_has(const struct rules_matcher *m, const char *mark)
{
    return m->n_tail && memmem(m->tail, m->n_tail, mark, strlen(mark));
}

/* Before thinking: blanks, then the opening mark. */
static void look_for_open(struct rules_matcher *m)
{
    const char *open = m->r->limit.open;
    size_t i = 0, n = strlen(open);
    while (i < m->n_tail && memchr(" \t\r\n", m->tail[i], 4))
        i++;
    size_t have = m->n_tail - i < n ? m->n_tail - i : n;
    if (memcmp(m->tail + i, open, have))
        m->think = THINK_ANSWER;
    else if (have == n)
        m->think = THINK_INSIDE;
    if (m->think != THINK_BEFORE || i == m->n_tail)
        m->n_tail = 0; /* blanks need not be kept */
}

static void follow_thinking(struct rules_matcher *m, int32_t token)
{
    const struct think_limit *limit = &m->r->limit;
    if (m->think == THINK_ANSWER && !limit->reopens)
        return;
    buf_reset(&m->text);
    m->detok.started = true;
    detok_push(&m->detok, m->r->t, token, true, &m->text);
    if (m->think == THINK_FORCED) {
        if (++m->at == m->r->end.n)
            m->think = THINK_BARRED;
        m->n_tail = 0;
        return;
    }
    if (m->think == THINK_BARRED)
        m->think = THINK_ANSWER;
    add_tail(m);
    if (m->think == THINK_BEFORE) {
        look_for_open(m);
    } else if (m->think == THINK_INSIDE) {
        m->n_thought++;
        if (tail_has(m, limit->close) || (limit->call && tail_has(m, limit->call))) {
            m->think = THINK_ANSWER;
            m->n_tail = 0;
        }
    } else if (tail_has(m, limit->open)) {
        m->think = THINK_INSIDE;
        m->n_tail = 0;
    }
}

static bool rules_accept(void *state, int32_t token, struct error *err)
{
    struct rules_matcher *m = state;
    if (m->inner.state && !m->inner.accept(m->inner.state, token, err))
        return false; /* perhaps given up: then it is called again */
    m->recent[m->n_seen++ % RULES_LONGEST_WORD] = token;
    if (m->r->limited)
        follow_thinking(m, token);
    return true;
}

static void rules_pace(void *state, bool (*go_on)(void *arg), void *arg)
{
    struct rules_matcher *m = state;
    if (m->inner.state && m->inner.pace)
        m->inner.pace(m->inner.state, go_on, arg);
}

static void rules_relax(void *state)
{
    struct rules_matcher *m = state;
    if (m->inner.state && m->inner.relax)
        m->inner.relax(m->inner.state);
}

/* Thinking is over, and nothing else limits the rest. */
static bool rules_done(void *state)
{
    const struct rules_matcher *m = state;
    return !m->inner.state && !m->r->allowed && !m->r->n_words &&
           (!m->r->limited || (m->think == THINK_ANSWER && !m->r->limit.reopens));
}

static void rules_free(void *state)
{
    struct rules_matcher *m = state;
    if (m->inner.state)
        m->inner.free(m->inner.state);
    token_rules_free(m->r);
    buf_clear(&m->text);
    mem_free(m);
}

struct sample_constraint token_rules_match(struct token_rules *r, struct sample_constraint inner,
                                           int n_vocab)
{
    struct rules_matcher *m = mem_zalloc(1, sizeof *m);
    m->r = token_rules_ref(r);
    m->inner = inner;
    m->n_vocab = n_vocab > inner.n_tokens ? n_vocab : inner.n_tokens;
    m->think = r->limited && r->limit.inside ? THINK_INSIDE : THINK_BEFORE;
    return (struct sample_constraint){.mask = rules_mask,
                                      .accept = rules_accept,
                                      .relax = rules_relax,
                                      .pace = rules_pace,
                                      .done = rules_done,
                                      .free = rules_free,
                                      .state = m,
                                      .n_tokens = m->n_vocab};
}
