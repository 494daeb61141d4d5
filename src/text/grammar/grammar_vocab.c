/*
 * The vocabulary prepared for masks: tokens in byte tries, divided into groups of tokens with
 * similar characters (dfa_group_has), each with precomputed masks. Immutable once built.
 *
 * Left out, so never allowed inside a constraint: control, unknown and unused tokens, added tokens
 * that do not look like text ("<tool_call>"), empty tokens, and tokens of over 255 bytes.
 */
#include "text/grammar/grammar_int.h"

#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

struct vocab_entry {
    const char *p;
    uint32_t n;
    int32_t id;
};

static int vocab_entry_cmp(const void *a, const void *b)
{
    const struct vocab_entry *x = a, *y = b;
    uint32_t n = x->n < y->n ? x->n : y->n;
    int c = memcmp(x->p, y->p, n);
    if (c)
        return c;
    if (x->n != y->n)
        return x->n < y->n ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Finishes the node at the end of path[0..depth]. */
static void trie_close(struct vocab_trie *t, const uint32_t *path, uint32_t depth)
{
    struct trie_node *n = &t->nodes[path[depth]];
    n->skip = t->n;
    if (depth && t->nodes[path[depth - 1]].height < n->height + 1)
        t->nodes[path[depth - 1]].height = (uint8_t)(n->height + 1);
}

/* Builds a trie of sorted entries. Of equal texts the first owns the node, and `twin` links the
 * rest. */
static void trie_make(struct vocab_trie *t, const struct vocab_entry *e, size_t n, int32_t *twin)
{
    size_t cap = 1;
    for (size_t i = 0; i < n; i++)
        cap += e[i].n;
    t->nodes = mem_alloc(cap * sizeof *t->nodes);
    t->n = 0;
    uint32_t path[VOCAB_TOKEN_MAX + 1];
    uint32_t depth = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t same = 0;
        if (i) {
            uint32_t m = e[i].n < e[i - 1].n ? e[i].n : e[i - 1].n;
            while (same < m && e[i].p[same] == e[i - 1].p[same])
                same++;
        }
        while (depth > same)
            trie_close(t, path, --depth);
        if (i && same == e[i].n && e[i - 1].n == same) {
            if (twin)
                twin[e[i - 1].id] = e[i].id;
            continue;
        }
        for (; depth < e[i].n; depth++) {
            path[depth] = t->n;
            t->nodes[t->n++] = (struct trie_node){
                .byte = (uint8_t)e[i].p[depth], .depth = (uint8_t)(depth + 1), .token = -1};
        }
        t->nodes[t->n - 1].token = e[i].id;
    }
    while (depth)
        trie_close(t, path, --depth);
    t->nodes = mem_realloc(t->nodes, t->n + 1, sizeof *t->nodes);
}

/* The first group that contains all characters of the token, or DFA_GROUPS. */
static int group_of(const char *p, size_t n, size_t *n_chars)
{
    unsigned in = (1u << DFA_GROUPS) - 1;
    size_t chars = 0;
    for (size_t i = 0; i < n && in; chars++) {
        uint32_t cp;
        int k = utf8_decode(p + i, n - i, &cp);
        if (!k)
            return DFA_GROUPS;
        for (int g = 0; g < DFA_GROUPS; g++)
            if (!dfa_group_has(g, cp))
                in &= ~(1u << g);
        i += (size_t)k;
    }
    *n_chars = chars;
    if (!in || chars > DFA_SAFE_MAX)
        return DFA_GROUPS;
    return __builtin_ctz(in);
}

bool vocab_usable(const struct tokenizer *t, int32_t id)
{
    size_t n;
    const char *p = tokenizer_piece(t, id, &n);
    enum token_kind k = tokenizer_kind(t, id);
    if (!n || n > VOCAB_TOKEN_MAX || tokenizer_is_end(t, id))
        return false;
    if (k == TOKEN_NORMAL || k == TOKEN_BYTE)
        return true;
    if (k != TOKEN_USER)
        return false;
    for (size_t i = 0; i < n; i++) /* among added tokens, only white space */
        if (!strchr(" \t\r\n", p[i]) || !p[i])
            return false;
    return true;
}

static void mask_set(uint32_t *bits, int32_t id)
{
    bits[id / 32] |= 1u << id % 32;
}

/*
 * Scans a token as a continuation of an unrestricted string. True if it stays inside (*quote = n)
 * or leaves it at a closing quote (*quote).
 */
static bool scan_string(const char *p, size_t n, size_t *quote)
{
    bool spelled = false; /* a \uXXXX was seen: it might spell a declared name */
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)p[i];
        uint32_t cp;
        if (c == '"') {
            *quote = i;
            return !spelled;
        }
        if (c < ' ')
            return false;
        if (c == '\\') {
            if (++i == n)
                break;
            if (p[i] == 'u') {
                size_t k = 1;
                uint32_t v = 0;
                for (; k <= 4 && i + k < n; k++) {
                    int d = p[i + k] >= '0' && p[i + k] <= '9' ? p[i + k] - '0'
                            : (p[i + k] | 32) >= 'a' && (p[i + k] | 32) <= 'f'
                                ? (p[i + k] | 32) - 'a' + 10
                                : -1;
                    if (d < 0)
                        return false;
                    v = v << 4 | (uint32_t)d;
                }
                /* Surrogates are left to the walk: no token contains a whole pair. */
                if (k == 5 && v >= 0xd800 && v <= 0xdfff)
                    return false;
                if (k > 2 && k < 5 && (v << 4 * (5 - k)) >> 11 == 0x1b)
                    return false;
                i += k;
                spelled = true;
                continue;
            }
            if (!strchr("\"\\/bfnrt", p[i]) || !p[i])
                return false;
            i++;
            continue;
        }
        int k = utf8_decode(p + i, n - i, &cp);
        if (!k) { /* the start of a character, truncated by the token's end? */
            size_t left = n - i;
            char tail[4] = {0};
            static const unsigned char low[] = {0x80, 0x90, 0xa0, 0x8f, 0xbf};
            if (left > 3 || c < 0xc2)
                return false;
            memcpy(tail, p + i, left);
            size_t want = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
            if (left >= want)
                return false;
            bool some = false;
            for (size_t j = 0; j < sizeof low && !some; j++) {
                memset(tail + left, 0x80, want - left);
                tail[left] = (char)low[j];
                some = utf8_decode(tail, want, &cp) == (int)want;
            }
            if (!some)
                return false;
            break;
        }
        i += (size_t)k;
    }
    *quote = n;
    return true;
}

static void vocab_scan_rest(struct grammar_vocab *v, const struct vocab_entry *e, size_t n)
{
    v->inside = mem_zalloc(v->n_words, sizeof *v->inside);
    struct vocab_entry *out = mem_alloc((n + 1) * sizeof *out);
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        size_t quote;
        if (!scan_string(e[i].p, e[i].n, &quote))
            continue;
        if (quote == e[i].n)
            mask_set(v->inside, e[i].id);
        else
            out[k++] =
                (struct vocab_entry){e[i].p + quote + 1, e[i].n - (uint32_t)quote - 1, e[i].id};
    }
    qsort(out, k, sizeof *out, vocab_entry_cmp);
    /* Entries with equal text become one exit with a list of tokens. Exit 0 is the empty text. */
    v->exit_at = mem_zalloc(k + 3, sizeof *v->exit_at);
    v->exit_token = mem_alloc((k + 1) * sizeof *v->exit_token);
    struct vocab_entry *texts = mem_alloc((k + 1) * sizeof *texts);
    size_t n_texts = 0, n_exits = 1, at = 0;
    for (; at < k && !out[at].n; at++)
        v->exit_token[at] = out[at].id;
    v->exit_at[1] = (uint32_t)at;
    for (; at < k; at++) {
        if (!n_texts || out[at].n != texts[n_texts - 1].n ||
            memcmp(out[at].p, texts[n_texts - 1].p, out[at].n)) {
            texts[n_texts++] = (struct vocab_entry){out[at].p, out[at].n, (int32_t)n_exits++};
        }
        v->exit_token[at] = out[at].id;
        v->exit_at[n_exits] = (uint32_t)at + 1;
    }
    v->n_exits = (uint32_t)n_exits;
    trie_make(&v->after, texts, n_texts, NULL);
    mem_free(out);
    mem_free(texts);
}

struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t)
{
    struct grammar_vocab *v = mem_zalloc(1, sizeof *v);
    v->tok = t;
    v->n_vocab = tokenizer_n_vocab(t);
    v->n_words = grammar_mask_words(v->n_vocab);
    v->ends = mem_zalloc(v->n_words + 1, sizeof *v->ends);
    v->twin = mem_alloc(((size_t)v->n_vocab + 1) * sizeof *v->twin);
    memset(v->twin, -1, ((size_t)v->n_vocab + 1) * sizeof *v->twin);
    v->marked = mem_alloc(((size_t)v->n_vocab + 1) * sizeof *v->marked);
    struct vocab_entry *all = mem_alloc(((size_t)v->n_vocab + 1) * sizeof *all), *part;
    part = mem_alloc(((size_t)v->n_vocab + 1) * sizeof *part);
    uint8_t *group = mem_zalloc((size_t)v->n_vocab + 1, 1);
    uint8_t *n_chars = mem_zalloc((size_t)v->n_vocab + 1, 1);
    size_t n = 0;
    for (int32_t id = 0; id < v->n_vocab; id++) {
        size_t len;
        const char *p = tokenizer_piece(t, id, &len);
        if (tokenizer_is_end(t, id))
            mask_set(v->ends, id);
        else
            for (size_t i = 0; i < len; i++)
                if (p[i] && strchr(VOCAB_MARKS, p[i])) {
                    v->marked[v->n_marked++] = id;
                    break;
                }
        if (!vocab_usable(t, id))
            continue;
        all[n++] = (struct vocab_entry){p, (uint32_t)len, id};
        size_t chars = 0;
        group[id] = (uint8_t)group_of(p, len, &chars);
        n_chars[id] = (uint8_t)(chars < 255 ? chars : 255);
    }
    qsort(all, n, sizeof *all, vocab_entry_cmp);
    for (int g = 0; g <= DFA_GROUPS; g++) {
        size_t k = 0;
        for (int len = 0; g < DFA_GROUPS && len <= DFA_SAFE_MAX; len++)
            v->mask[g][len] = mem_zalloc(v->n_words + 1, sizeof *v->mask[g][len]);
        for (size_t i = 0; i < n; i++)
            if (group[all[i].id] == g) {
                part[k++] = all[i];
                for (int len = n_chars[all[i].id]; g < DFA_GROUPS && len <= DFA_SAFE_MAX; len++)
                    mask_set(v->mask[g][len], all[i].id);
            }
        trie_make(&v->trie[g], part, k, v->twin);
        if (g == DFA_GROUPS)
            vocab_scan_rest(v, part, k);
    }
    v->marked = mem_realloc(v->marked, v->n_marked + 1, sizeof *v->marked);
    mem_free(all);
    mem_free(part);
    mem_free(group);
    mem_free(n_chars);
    v->memo = memo_new(v->n_words);
    return v;
}

void grammar_vocab_free(struct grammar_vocab *v)
{
    if (!v)
        return;
    for (int g = 0; g <= DFA_GROUPS; g++) {
        for (int len = 0; g < DFA_GROUPS && len <= DFA_SAFE_MAX; len++)
            mem_free(v->mask[g][len]);
        mem_free(v->trie[g].nodes);
    }
    mem_free(v->twin);
    mem_free(v->ends);
    mem_free(v->inside);
    mem_free(v->after.nodes);
    mem_free(v->exit_at);
    mem_free(v->exit_token);
    mem_free(v->marked);
    memo_free(v->memo);
    mem_free(v);
}
