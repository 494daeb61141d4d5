/*
 * Byte-pair encoding. Owns the pair table and the merge loops. Knows nothing of pre-tokenizers,
 * added tokens or files.
 *
 * How a word is encoded:
 *   1. The word is split between any two neighbours that are adjacent in no token. No merge can
 *      cross such a gap, so the parts are independent. This keeps parts short in text without a
 *      pre-tokenizer (SentencePiece).
 *   2. If the part is itself a token, and its own merges build that token, the result is that
 *      token. This takes one look-up. The verdict is computed on first use and cached per token.
 *   3. Otherwise merges run: a linear scan for the lowest rank in a short part, a heap in a long
 *      one. The heap keeps a megabyte of one repeated letter at O(n log n).
 */
#include "text/tokenizer/bpe.h"
#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdio.h>
#include <string.h>

enum {
    SHORT_PART = 48,            /* longest part, in symbols, that is merged by scanning */
    ADJACENT_BITS = 1 << 20,    /* for character symbols; byte-level needs 1 << 16 */
    MAX_DERIVED_KEY = 1024,     /* longest token, in bytes, for which merges are derived */
    MERGES_PER_CHECK = 1 << 14, /* merges in a long part between two budget checks */
};
#define NONE UINT32_MAX /* no rank, no symbol, no neighbour */

enum { WHOLE_UNKNOWN, WHOLE_YES, WHOLE_NO };

/* ------------------------------------------------------------------------------------- tables */

static inline uint64_t pair_key(uint32_t left, uint32_t right)
{
    return ((uint64_t)left << 32 | right) + 1;
}

static inline size_t pair_slot(const struct bpe *b, uint64_t key)
{
    return (size_t)(key * 0x9e3779b97f4a7c15u >> 24) & (b->cap - 1);
}

/* Returns the rank of merging the two symbols, or NONE. *id is the merged symbol. */
static inline uint32_t pair_find(const struct bpe *b, uint32_t left, uint32_t right, uint32_t *id)
{
    uint64_t key = pair_key(left, right);
    for (size_t i = pair_slot(b, key);; i = (i + 1) & (b->cap - 1)) {
        if (!b->pairs[i].key) /* checked before the key: two unknown symbols make a key of 0 */
            return NONE;
        if (b->pairs[i].key == key) {
            *id = b->pairs[i].id;
            return b->pairs[i].rank;
        }
    }
}

static void pair_put(struct bpe *b, uint64_t key, uint32_t rank, uint32_t id)
{
    if ((b->n_pairs + 1) * 3 / 2 > b->cap) {
        struct bpe_pair *old = b->pairs;
        size_t n = b->cap;
        b->cap = n * 2;
        b->pairs = mem_zalloc(b->cap, sizeof *b->pairs);
        for (size_t i = 0; i < n; i++) {
            if (!old[i].key)
                continue;
            size_t k = pair_slot(b, old[i].key);
            while (b->pairs[k].key)
                k = (k + 1) & (b->cap - 1);
            b->pairs[k] = old[i];
        }
        mem_free(old);
    }
    size_t k = pair_slot(b, key);
    while (b->pairs[k].key && b->pairs[k].key != key)
        k = (k + 1) & (b->cap - 1);
    if (b->pairs[k].key) /* a merge listed twice keeps its first rank */
        return;
    b->pairs[k] = (struct bpe_pair){key, rank, id};
    b->n_pairs++;
}

static inline size_t char_slot(const struct bpe *b, uint32_t cp)
{
    return (size_t)(cp * 0x9e3779b1u >> 8) & (b->chars_cap - 1);
}

static uint32_t char_symbol(const struct bpe *b, uint32_t cp)
{
    if (cp < 128)
        return b->ascii[cp];
    for (size_t i = char_slot(b, cp); b->chars[i].cp; i = (i + 1) & (b->chars_cap - 1))
        if (b->chars[i].cp == cp + 1)
            return b->chars[i].symbol;
    return NONE;
}

static void char_put(struct bpe *b, uint32_t cp, uint32_t symbol)
{
    if (cp < 128) {
        b->ascii[cp] = symbol;
        return;
    }
    if ((b->n_chars + 1) * 2 > b->chars_cap) {
        struct bpe_char *old = b->chars;
        size_t n = b->chars_cap;
        b->chars_cap = n * 2;
        b->chars = mem_zalloc(b->chars_cap, sizeof *b->chars);
        for (size_t i = 0; i < n; i++) {
            if (!old[i].cp)
                continue;
            size_t k = char_slot(b, old[i].cp - 1);
            while (b->chars[k].cp)
                k = (k + 1) & (b->chars_cap - 1);
            b->chars[k] = old[i];
        }
        mem_free(old);
    }
    size_t k = char_slot(b, cp);
    while (b->chars[k].cp)
        k = (k + 1) & (b->chars_cap - 1);
    b->chars[k] = (struct bpe_char){cp + 1, symbol};
    b->n_chars++;
}

static inline uint32_t adjacent_bit(const struct bpe *b, uint32_t x, uint32_t y)
{
    if (b->byte_level)
        return x << 8 | y;
    return (x * 0x9e3779b1u ^ y * 0x85ebca6bu) >> 12;
}

static inline bool may_join(const struct bpe *b, uint32_t x, uint32_t y)
{
    uint32_t bit = adjacent_bit(b, x, y);
    return b->adjacent[bit / 64] >> (bit % 64) & 1;
}

/* --------------------------------------------------------------------------------- build time */

void bpe_init(struct bpe *b, const struct vocab *v)
{
    b->vocab = v;
    b->cap = 1024;
    while (b->cap < (size_t)v->n * 2) /* about one merge per token */
        b->cap *= 2;
    b->pairs = mem_zalloc(b->cap, sizeof *b->pairs);
    b->n_symbols = (uint32_t)v->n;
    for (int i = 0; i < 128; i++)
        b->ascii[i] = NONE;
    for (int i = 0; i < 256; i++) {
        char name[8] = {(char)i};
        size_t len = 1;
        if (!b->byte_level)
            len = (size_t)snprintf(name, sizeof name, "<0x%02X>", i);
        b->byte_id[i] = vocab_find(v, name, len);
    }
    if (b->byte_level)
        return;
    b->chars_cap = 1024;
    b->chars = mem_zalloc(b->chars_cap, sizeof *b->chars);
    for (int32_t id = 0; id < v->n; id++) {
        size_t len;
        uint32_t cp;
        const char *key = vocab_key(v, id, &len);
        if (len && (size_t)utf8_decode(key, len, &cp) == len)
            char_put(b, cp, (uint32_t)id);
    }
}

bool bpe_add_merge(struct bpe *b, const char *left, size_t n_left, const char *right,
                   size_t n_right, uint32_t rank, struct error *err)
{
    int32_t l = vocab_find(b->vocab, left, n_left), r = vocab_find(b->vocab, right, n_right);
    if (l < 0 || r < 0) {
        const char *p = l < 0 ? left : right;
        size_t n = l < 0 ? n_left : n_right;
        return error_set(err, "\"%.*s\" is not in the vocabulary", (int)(n < 60 ? n : 60), p);
    }
    size_t skip = b->prefix.len;
    if (skip && (n_right < skip || memcmp(right, b->prefix.p, skip)))
        return error_set(err, "the second part lacks the continuing_subword_prefix");
    char small[256], *both = small;
    size_t n = n_left + n_right - skip;
    if (n > sizeof small)
        both = mem_alloc(n);
    memcpy(both, left, n_left);
    memcpy(both + n_left, right + skip, n_right - skip);
    int32_t id = vocab_find(b->vocab, both, n);
    if (id >= 0)
        pair_put(b, pair_key((uint32_t)l, (uint32_t)r), rank, (uint32_t)id);
    else
        error_set(err, "the merged token \"%.*s\" is not in the vocabulary", (int)(n < 60 ? n : 60),
                  both);
    if (both != small)
        mem_free(both);
    return id >= 0;
}

/* True for tokens that text can become. The other kinds are reserved for special tokens. */
static inline bool is_text(const struct bpe *b, int32_t id)
{
    uint8_t k = b->vocab->kind[id];
    return k == TOKEN_NORMAL || k == TOKEN_USER || k == TOKEN_UNUSED;
}

/* Returns the symbol of a part of a token: a token id, or the symbol of a character that occurs in
 * tokens without being one. */
static uint32_t part_symbol(struct bpe *b, const char *p, size_t n)
{
    int32_t id = vocab_find(b->vocab, p, n);
    if (id >= 0 && is_text(b, id))
        return (uint32_t)id;
    uint32_t cp = 0;
    if (b->byte_level || (size_t)utf8_decode(p, n, &cp) != n)
        return NONE;
    uint32_t s = char_symbol(b, cp);
    if (s == NONE)
        char_put(b, cp, s = b->n_symbols++);
    return s;
}

bool bpe_derive_merges(struct bpe *b, const uint32_t *rank, struct error *err)
{
    const struct vocab *v = b->vocab;
    for (int32_t id = 0; id < v->n; id++) {
        size_t n;
        const char *key = vocab_key(v, id, &n);
        if (!is_text(b, id))
            continue;
        if (n > MAX_DERIVED_KEY)
            return error_set(err, "token %d has %zu bytes, at most %d are supported", id, n,
                             MAX_DERIVED_KEY);
        for (size_t i = 1; i < n; i++) {
            if (!b->byte_level && ((unsigned char)key[i] & 0xc0) == 0x80)
                continue;
            uint32_t left = part_symbol(b, key, i);
            uint32_t right = left == NONE ? NONE : part_symbol(b, key + i, n - i);
            if (right != NONE)
                pair_put(b, pair_key(left, right), rank[id], (uint32_t)id);
        }
    }
    return true;
}

void bpe_finish(struct bpe *b)
{
    const struct vocab *v = b->vocab;
    b->whole = mem_zalloc((size_t)v->n, sizeof *b->whole);
    b->adjacent = mem_zalloc((b->byte_level ? 1 << 16 : ADJACENT_BITS) / 64, 8);
    for (int32_t id = 0; id < v->n; id++) {
        size_t n;
        const char *key = vocab_key(v, id, &n);
        uint32_t last = NONE;
        for (size_t i = 0; i < n;) {
            uint32_t c = (unsigned char)key[i];
            int len = b->byte_level ? 1 : utf8_decode(key + i, n - i, &c);
            if (last != NONE) {
                uint32_t bit = adjacent_bit(b, last, c);
                b->adjacent[bit / 64] |= (uint64_t)1 << (bit % 64);
            }
            last = c;
            i += len ? (size_t)len : 1;
        }
    }
}

void bpe_clear(struct bpe *b)
{
    buf_clear(&b->prefix);
    buf_clear(&b->suffix);
    mem_free(b->pairs);
    mem_free(b->chars);
    mem_free(b->adjacent);
    mem_free(b->whole);
    *b = (struct bpe){0};
}

void bpe_scratch_clear(struct bpe_scratch *s)
{
    mem_free(s->id);
    mem_free(s->start);
    mem_free(s->next);
    mem_free(s->prev);
    mem_free(s->rank);
    mem_free(s->merged);
    mem_free(s->heap);
    buf_clear(&s->tmp);
    *s = (struct bpe_scratch){0};
}

/* ------------------------------------------------------------------------------------ merging */

static void scratch_reserve(struct bpe_scratch *s, size_t n)
{
    if (n <= s->cap)
        return;
    s->cap = n * 3 / 2 + 64;
    s->id = mem_realloc(s->id, s->cap, 4);
    s->start = mem_realloc(s->start, s->cap, 4);
    s->next = mem_realloc(s->next, s->cap, 4);
    s->prev = mem_realloc(s->prev, s->cap, 4);
    s->rank = mem_realloc(s->rank, s->cap, 4);
    s->merged = mem_realloc(s->merged, s->cap, 4);
}

/* Merges s->id and s->start (n) in place by repeated scans. Returns the number of symbols left. */
static size_t merge_short(const struct bpe *b, struct bpe_scratch *s, size_t n)
{
    uint32_t *id = s->id, *start = s->start, *rank = s->rank, *merged = s->merged;
    for (size_t i = 0; i + 1 < n; i++)
        rank[i] = pair_find(b, id[i], id[i + 1], &merged[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == NONE)
            break;
        id[best] = merged[best];
        for (size_t i = best + 1; i + 1 < n; i++) {
            id[i] = id[i + 1];
            start[i] = start[i + 1];
            rank[i] = rank[i + 1];
            merged[i] = merged[i + 1];
        }
        n--;
        if (best + 1 < n)
            rank[best] = pair_find(b, id[best], id[best + 1], &merged[best]);
        if (best)
            rank[best - 1] = pair_find(b, id[best - 1], id[best], &merged[best - 1]);
    }
    return n;
}

/* A 4-ary heap: fewer cache misses than a binary one on a long word. */
static void heap_down(uint64_t *h, size_t n, size_t i)
{
    uint64_t v = h[i];
    for (;;) {
        size_t c = i * 4 + 1;
        if (c >= n)
            break;
        size_t last = c + 4 < n ? c + 4 : n, least = c;
        for (size_t k = c + 1; k < last; k++)
            if (h[k] < h[least])
                least = k;
        if (h[least] >= v)
            break;
        h[i] = h[least];
        i = least;
    }
    h[i] = v;
}

static void heap_push(struct bpe_scratch *s, uint64_t v)
{
    if (s->n_heap == s->heap_cap) {
        s->heap_cap = s->heap_cap ? s->heap_cap * 2 : 256;
        s->heap = mem_realloc(s->heap, s->heap_cap, sizeof *s->heap);
    }
    uint64_t *h = s->heap;
    size_t i = s->n_heap++;
    while (i && h[(i - 1) / 4] > v) {
        h[i] = h[(i - 1) / 4];
        i = (i - 1) / 4;
    }
    h[i] = v;
}

static void pair_update(const struct bpe *b, struct bpe_scratch *s, uint32_t i)
{
    s->rank[i] =
        s->next[i] == NONE ? NONE : pair_find(b, s->id[i], s->id[s->next[i]], &s->merged[i]);
    if (s->rank[i] != NONE)
        heap_push(s, (uint64_t)s->rank[i] << 32 | i);
}

static size_t merge_long(const struct bpe *b, struct bpe_scratch *s, size_t n)
{
    s->n_heap = 0;
    for (uint32_t i = 0; i < n; i++) {
        s->prev[i] = i - 1; /* NONE for the first */
        s->next[i] = i + 1 < n ? i + 1 : NONE;
    }
    for (uint32_t i = 0; i < n; i++)
        pair_update(b, s, i);
    for (uint32_t turn = 1; s->n_heap; turn++) {
        if (turn % MERGES_PER_CHECK == 0 && !budget_spend(s->budget, 2 * MERGES_PER_CHECK))
            break;
        uint64_t top = s->heap[0];
        s->heap[0] = s->heap[--s->n_heap];
        if (s->n_heap)
            heap_down(s->heap, s->n_heap, 0);
        uint32_t i = (uint32_t)top;
        if (s->rank[i] != (uint32_t)(top >> 32)) /* stale: merged or changed since */
            continue;
        uint32_t j = s->next[i];
        s->id[i] = s->merged[i];
        s->rank[j] = NONE;
        s->next[i] = s->next[j];
        if (s->next[j] != NONE)
            s->prev[s->next[j]] = i;
        pair_update(b, s, i);
        if (s->prev[i] != NONE)
            pair_update(b, s, s->prev[i]);
    }
    size_t m = 0;
    for (uint32_t i = 0; i != NONE; i = s->next[i]) {
        s->id[m] = s->id[i];
        s->start[m++] = s->start[i];
    }
    return m;
}

/* ----------------------------------------------------------------------------------- encoding */

struct bpe_word {
    const char *p;
    size_t n;
    bool last_unk; /* the last token out of this word was <unk> */
};

static void emit_unknown(const struct bpe *b, struct bpe_word *w, size_t from, size_t to,
                         struct token_list *out)
{
    bool have = b->byte_fallback || b->byte_level;
    for (size_t i = from; have && i < to; i++)
        have = b->byte_id[(unsigned char)w->p[i]] >= 0;
    if (have) {
        for (size_t i = from; i < to; i++)
            token_list_add(out, b->byte_id[(unsigned char)w->p[i]]);
        w->last_unk = false;
    } else if (b->unk >= 0) {
        if (!(b->fuse_unk && w->last_unk))
            token_list_add(out, b->unk);
        w->last_unk = true;
    }
}

/* Merges the n symbols in s, which cover w->p up to `end`, and appends the resulting tokens. */
static void merge_emit(const struct bpe *b, struct bpe_scratch *s, struct bpe_word *w, size_t n,
                       size_t end, struct token_list *out)
{
    n = n <= SHORT_PART ? merge_short(b, s, n) : merge_long(b, s, n);
    for (size_t i = 0; i < n; i++) {
        if (s->id[i] < (uint32_t)b->vocab->n) {
            token_list_add(out, (int32_t)s->id[i]);
            w->last_unk = false;
        } else {
            emit_unknown(b, w, s->start[i], i + 1 < n ? s->start[i + 1] : end, out);
        }
    }
}

/* Encodes w->p[from, to), whose n symbols are in s->id and s->start. */
static void encode_part(const struct bpe *b, struct bpe_scratch *s, struct bpe_word *w, size_t from,
                        size_t to, size_t n, struct token_list *out)
{
    int32_t id = n > 1 ? vocab_find(b->vocab, w->p + from, to - from) : -1;
    if (id < 0 || !is_text(b, id)) {
        merge_emit(b, s, w, n, to, out);
        return;
    }
    uint8_t whole = atomic_load_explicit(&b->whole[id], memory_order_relaxed);
    if (whole == WHOLE_YES) {
        token_list_add(out, id);
        w->last_unk = false;
        return;
    }
    size_t before = out->n;
    merge_emit(b, s, w, n, to, out);
    if (whole == WHOLE_UNKNOWN && budget_spend(s->budget, 0)) {
        bool yes = out->n == before + 1 && out->ids[before] == id;
        atomic_store_explicit(&b->whole[id], yes ? WHOLE_YES : WHOLE_NO, memory_order_relaxed);
    }
}

static void encode_bytes(const struct bpe *b, struct bpe_scratch *s, struct bpe_word *w,
                         struct token_list *out)
{
    size_t from = 0;
    while (from < w->n) {
        size_t to = w->n;
        if (to - from > SHORT_PART) {
            to = from + 1;
            while (to < w->n && may_join(b, (unsigned char)w->p[to - 1], (unsigned char)w->p[to]))
                to++;
        }
        size_t n = to - from;
        /* Fast path: a known whole token needs no symbols. */
        int32_t id = n > 1 ? vocab_find(b->vocab, w->p + from, n) : -1;
        if (id >= 0 && atomic_load_explicit(&b->whole[id], memory_order_relaxed) == WHOLE_YES) {
            token_list_add(out, id);
            w->last_unk = false;
        } else {
            scratch_reserve(s, n);
            for (size_t i = 0; i < n; i++) {
                s->id[i] = (uint32_t)b->byte_id[(unsigned char)w->p[from + i]];
                s->start[i] = (uint32_t)(from + i);
            }
            encode_part(b, s, w, from, to, n, out);
        }
        from = to;
    }
}

static void encode_chars(const struct bpe *b, struct bpe_scratch *s, struct bpe_word *w,
                         struct token_list *out)
{
    size_t from = 0, n = 0;
    uint32_t last = 0;
    for (size_t i = 0; i < w->n;) {
        uint32_t cp = 0;
        int len = utf8_decode(w->p + i, w->n - i, &cp);
        uint32_t symbol = len ? char_symbol(b, cp) : NONE;
        if (n && (!len || !may_join(b, last, cp))) {
            encode_part(b, s, w, from, i, n, out);
            from = i;
            n = 0;
        }
        scratch_reserve(s, n + 1);
        s->id[n] = symbol;
        s->start[n++] = (uint32_t)i;
        last = cp;
        i += len ? (size_t)len : 1;
    }
    if (n)
        encode_part(b, s, w, from, w->n, n, out);
}

/* With a continuing_subword_prefix or end_of_word_suffix, a character's spelling depends on its
 * position. */
static void encode_affixed(const struct bpe *b, struct bpe_scratch *s, struct bpe_word *w,
                           struct token_list *out)
{
    size_t n = 0;
    for (size_t i = 0; i < w->n;) {
        uint32_t cp;
        int len = utf8_decode(w->p + i, w->n - i, &cp);
        len = len ? len : 1;
        buf_reset(&s->tmp);
        if (!budget_spend(s->budget, b->prefix.len / 16))
            return;
        if (i)
            buf_add(&s->tmp, b->prefix.p, b->prefix.len);
        buf_add(&s->tmp, w->p + i, (size_t)len);
        if (i + (size_t)len == w->n)
            buf_add(&s->tmp, b->suffix.p, b->suffix.len);
        scratch_reserve(s, n + 1);
        s->id[n] = (uint32_t)vocab_find(b->vocab, s->tmp.p, s->tmp.len);
        s->start[n++] = (uint32_t)i;
        i += (size_t)len;
    }
    merge_emit(b, s, w, n, w->n, out);
}

bool bpe_encode(const struct bpe *b, struct bpe_scratch *s, const char *word, size_t n,
                struct token_list *out)
{
    if (!n)
        return true;
    CHECK(n < NONE, "a word of %zu bytes", n);
    struct bpe_word w = {word, n, false};
    if (b->ignore_merges) {
        int32_t id = vocab_find(b->vocab, word, n);
        if (id >= 0 && is_text(b, id)) {
            token_list_add(out, id);
            return true;
        }
    }
    if (b->prefix.len || b->suffix.len)
        encode_affixed(b, s, &w, out);
    else if (b->byte_level)
        encode_bytes(b, s, &w, out);
    else
        encode_chars(b, s, &w, out);
    return budget_spend(s->budget, 0);
}
