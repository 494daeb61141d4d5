/* Draft tokens from earlier text: see draft_text.h. */
#include "engine/draft_text.h"
#include "base/error.h"
#include "base/mem.h"

#include <string.h>

enum { LEAST_BITS = 10, MOST_BITS = 17, LONG_MATCH = 16 };

void draft_index_clear(struct draft_index *ix)
{
    mem_free(ix->head);
    mem_free(ix->prev);
    *ix = (struct draft_index){0};
}

/* The chain of the position after text[DRAFT_KEY]. */
static uint32_t chain_of(const struct draft_index *ix, const int32_t *text)
{
    uint32_t h = 0;
    for (int i = 0; i < DRAFT_KEY; i++)
        h = (h ^ (uint32_t)text[i]) * 0x9e3779b1u;
    return h >> (32 - ix->bits);
}

static bool index_grow(struct draft_index *ix, int n, int expected)
{
    if (!ix->head) {
        ix->bits = LEAST_BITS;
        while (ix->bits < MOST_BITS && 1 << ix->bits < expected)
            ix->bits++;
        size_t bytes = sizeof *ix->head << ix->bits;
        ix->head = mem_ask(bytes);
        if (!ix->head)
            return false;
        memset(ix->head, 0, bytes);
    }
    if (n < ix->cap)
        return true;
    int cap = n + n / 2 + 256;
    cap = cap < expected + 1 ? expected + 1 : cap;
    int32_t *prev = mem_ask_again(ix->prev, (size_t)cap * sizeof *prev);
    if (!prev)
        return false;
    ix->prev = prev;
    ix->cap = cap;
    return true;
}

bool draft_index_add(struct draft_index *ix, const int32_t *text, int n, int expected)
{
    if (!index_grow(ix, n, expected))
        return false;
    for (int p = ix->n + 1; p <= n; p++) {
        if (p < DRAFT_KEY)
            continue;
        int32_t *head = &ix->head[chain_of(ix, text + p - DRAFT_KEY)];
        ix->prev[p] = *head;
        *head = p;
    }
    ix->n = n;
    return true;
}

int draft_index_find(const struct draft_index *ix, const int32_t *text, const int32_t *past, int n,
                     int *len)
{
    int best = 0, walk = DRAFT_WALK;
    *len = 0;
    if (n < DRAFT_KEY || !ix->head)
        return 0;
    for (int p = ix->head[chain_of(ix, past + n - DRAFT_KEY)]; p && walk; p = ix->prev[p]) {
        if (text == past && p >= n)
            continue; /* the end itself */
        walk--;
        int most = p < n ? p : n, k = 0;
        most = most < DRAFT_PAST ? most : DRAFT_PAST;
        while (k < most && text[p - 1 - k] == past[n - 1 - k])
            k++;
        if (k < DRAFT_KEY || k <= *len)
            continue;
        *len = k;
        best = p;
        if (k == DRAFT_PAST)
            break;
    }
    return best;
}

void draft_history_clear(struct draft_history *h)
{
    for (int i = 0; i < DRAFT_CLIENTS; i++) {
        draft_index_clear(&h->clients[i].index);
        mem_free(h->clients[i].tokens);
    }
    *h = (struct draft_history){0};
}

const struct draft_recent *draft_history_of(const struct draft_history *h, uint64_t client,
                                            uint64_t root)
{
    for (int i = 0; i < DRAFT_CLIENTS; i++) {
        const struct draft_recent *r = &h->clients[i];
        if (r->used && r->client == client && r->root == root)
            return r;
    }
    return NULL;
}

/* The client's entry, or an emptied one: the least recently used. */
static struct draft_recent *place_of(struct draft_history *h, uint64_t client, uint64_t root)
{
    struct draft_recent *oldest = &h->clients[0];
    for (int i = 0; i < DRAFT_CLIENTS; i++) {
        struct draft_recent *r = &h->clients[i];
        if (r->used && r->client == client && r->root == root)
            return r;
        oldest = r->used < oldest->used ? r : oldest;
    }
    draft_index_clear(&oldest->index);
    mem_free(oldest->tokens);
    *oldest = (struct draft_recent){.client = client, .root = root};
    return oldest;
}

void draft_history_add(struct draft_history *h, uint64_t client, uint64_t root,
                       const int32_t *answer, int n)
{
    int most = DRAFT_RECENT / 2 - 1;
    if (n <= DRAFT_KEY)
        return;
    answer += n > most ? n - most : 0; /* the end of a long one */
    n = n > most ? most : n;
    struct draft_recent *r = place_of(h, client, root);
    r->used = ++h->turn;
    if (r->n + n + 1 > DRAFT_RECENT) { /* the older half goes */
        int drop = r->n - DRAFT_RECENT / 2 > 0 ? r->n - DRAFT_RECENT / 2 : 0;
        drop = r->n + n + 1 - drop > DRAFT_RECENT ? r->n : drop;
        memmove(r->tokens, r->tokens + drop, (size_t)(r->n - drop) * sizeof *r->tokens);
        r->n -= drop;
        draft_index_clear(&r->index);
    }
    if (r->n + n + 1 > r->cap) {
        int cap = r->cap + r->n + n + 1;
        cap = cap < DRAFT_RECENT ? cap : DRAFT_RECENT;
        int32_t *tokens = mem_ask_again(r->tokens, (size_t)cap * sizeof *tokens);
        if (!tokens)
            return;
        r->tokens = tokens;
        r->cap = cap;
    }
    memcpy(r->tokens + r->n, answer, (size_t)n * sizeof *answer);
    r->n += n;
    r->tokens[r->n++] = -1;
    if (!draft_index_add(&r->index, r->tokens, r->n, DRAFT_RECENT / 4)) {
        draft_index_clear(&r->index);
        r->n = 0;
    }
}

void draft_match_clear(struct draft_match *m)
{
    draft_index_clear(&m->index);
    *m = (struct draft_match){0};
}

/* The text that contains the match. */
static const int32_t *text_of(const struct draft_match *m, const int32_t *tokens, int n,
                              int *n_text)
{
    *n_text = m->recent ? m->in->n : n;
    return m->recent ? m->in->tokens : tokens;
}

/* Moves the match over the sequence's new tokens, as long as they are the ones expected; then as a bridge. */
static void advance(struct draft_match *m, const int32_t *tokens, int n)
{
    int n_text;
    if (m->recent && (!m->in || m->in->used != m->turn))
        m->len = m->bridge = 0;
    for (; m->seen < n && (m->len || m->bridge); m->seen++) {
        const int32_t *text = text_of(m, tokens, n, &n_text);
        bool same = m->at < n_text && text[m->at] == tokens[m->seen];
        if (m->len && !same)
            m->bridge = DRAFT_BRIDGE;
        else if (!same)
            m->bridge--;
        m->len = m->len && same ? m->len + 1 : 0;
        m->at++;
    }
    m->seen = n;
}

/* Moves a bridge to the closest place after the sequence's last token; places after its last two come first. */
static void settle(struct draft_match *m, const int32_t *tokens, int n)
{
    int n_text, best = m->at, common = 0;
    const int32_t *text = text_of(m, tokens, n, &n_text);
    for (int k = 0; k <= 2 * DRAFT_SHIFT && common < 2; k++) { /* 0 1 -1 2 -2 */
        int p = m->at + (k & 1 ? (k + 1) / 2 : -k / 2);
        if (p < 2 || p > n_text || (!m->recent && p >= n) || text[p - 1] != tokens[n - 1])
            continue;
        int same = text[p - 2] == tokens[n - 2] ? 2 : 1;
        if (same > common)
            best = p, common = same;
    }
    m->at = best;
    m->near = common > 0;
}

bool draft_match_follow(struct draft_match *m, const int32_t *tokens, int n,
                        const struct draft_recent *recent, int expected)
{
    int end = m->index.n + DRAFT_FEED < n ? m->index.n + DRAFT_FEED : n, len;
    if (!draft_index_add(&m->index, tokens, end, expected) || end < n) {
        m->len = m->bridge = 0;
        return false;
    }
    advance(m, tokens, n);
    if (m->len >= LONG_MATCH)
        return true;
    int at = draft_index_find(&m->index, tokens, tokens, n, &len);
    if (len > m->len)
        m->at = at, m->len = len, m->recent = false;
    if (recent && (at = draft_index_find(&recent->index, recent->tokens, tokens, n, &len)) &&
        len > m->len) {
        m->at = at, m->len = len, m->recent = true;
        m->in = recent;
        m->turn = recent->used;
    }
    if (m->len)
        m->bridge = 0;
    if (m->bridge && n > 1)
        settle(m, tokens, n);
    return true;
}

int draft_match_write(const struct draft_match *m, const int32_t *tokens, int n, int32_t *drafts,
                      int most)
{
    int n_text, k = 0;
    if ((!m->len && !m->bridge) || m->seen != n)
        return 0;
    const int32_t *text = text_of(m, tokens, n, &n_text);
    for (; k < most; k++) {
        int p = m->at + k;
        /* text that repeats itself continues with its own drafts */
        int32_t token = p < n_text ? text[p] : m->recent ? -1 : drafts[p - n_text];
        if (token < 0)
            break;
        drafts[k] = token;
    }
    return k;
}
