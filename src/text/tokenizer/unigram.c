/*
 * Unigram segmentation. Owns the trie over the vocabulary. One pass over the word keeps, for every
 * end position, the best score and the start of its last token. Walking back from the end gives the
 * tokens.
 */
#include "text/tokenizer/unigram.h"
#include "base/mem.h"
#include "text/tokenizer/unicode.h"

#include <stdio.h>
#include <string.h>

/* Score of an unknown character relative to the worst token. */
static const double unk_penalty = 10.0;

enum { TRIE_STEPS = 8 }; /* trie steps per unit of work */

struct unigram_node {
    double score;
    uint32_t from; /* start of the token that ends here; UINT32_MAX = not reached */
    int32_t id;    /* -1 = unknown */
};

void unigram_scratch_clear(struct unigram_scratch *s)
{
    mem_free(s->nodes);
    *s = (struct unigram_scratch){0};
}

void unigram_init(struct unigram *u, const struct vocab *v)
{
    u->vocab = v;
    double least = 0;
    bool any = false;
    for (int32_t id = 0; id < v->n; id++) {
        size_t len;
        const char *key = vocab_key(v, id, &len);
        uint8_t k = v->kind[id];
        if (!len || (k != TOKEN_NORMAL && k != TOKEN_USER && k != TOKEN_UNUSED))
            continue;
        trie_add(&u->trie, key, len, id);
        if (!any || v->score[id] < least)
            least = v->score[id];
        any = true;
    }
    u->unk_score = least - unk_penalty;
    for (int i = 0; i < 256; i++) {
        char name[8];
        size_t len = (size_t)snprintf(name, sizeof name, "<0x%02X>", i);
        u->byte_id[i] = vocab_find(v, name, len);
    }
}

void unigram_clear(struct unigram *u)
{
    trie_clear(&u->trie);
    *u = (struct unigram){0};
}

static void emit_unknown(const struct unigram *u, const char *p, size_t n, struct token_list *out)
{
    bool have = u->byte_fallback;
    for (size_t i = 0; have && i < n; i++)
        have = u->byte_id[(unsigned char)p[i]] >= 0;
    if (have) {
        for (size_t i = 0; i < n; i++)
            token_list_add(out, u->byte_id[(unsigned char)p[i]]);
    } else if (u->unk >= 0) {
        token_list_add(out, u->unk);
    }
}

bool unigram_encode(const struct unigram *u, struct unigram_scratch *s, const char *word, size_t n,
                    struct budget *budget, struct token_list *out)
{
    if (!n)
        return true;
    CHECK(n < UINT32_MAX, "a word of %zu bytes", n);
    if (n + 1 > s->cap) {
        s->cap = n * 3 / 2 + 64;
        s->nodes = mem_realloc(s->nodes, s->cap, sizeof *s->nodes);
    }
    struct unigram_node *best = s->nodes;
    for (size_t i = 0; i <= n; i++)
        best[i].from = UINT32_MAX;
    best[0] = (struct unigram_node){0, 0, -1};
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(word + i, n - i, &cp);
        size_t one = len ? (size_t)len : 1;
        bool have_one = false;
        uint32_t node = 0;
        size_t k = i;
        for (; k < n; k++) {
            node = trie_step(&u->trie, node, (unsigned char)word[k]);
            if (!node)
                break;
            int32_t id = u->trie.value[node];
            if (id < 0)
                continue;
            /* user-defined tokens always win over a split */
            double score =
                best[i].score + (u->vocab->kind[id] == TOKEN_USER ? 0.0 : u->vocab->score[id]);
            struct unigram_node *b = &best[k + 1];
            if (b->from == UINT32_MAX || score > b->score)
                *b = (struct unigram_node){score, (uint32_t)i, id};
            have_one |= k + 1 - i == one;
        }
        if (k - i > TRIE_STEPS && !budget_spend(budget, (k - i) / TRIE_STEPS))
            return false;
        if (!have_one) {
            double score = best[i].score + u->unk_score;
            struct unigram_node *b = &best[i + one];
            if (b->from == UINT32_MAX || score > b->score)
                *b = (struct unigram_node){score, (uint32_t)i, -1};
        }
        i += one;
    }
    /* Walk back, replacing each link with the end of the next token; then emit forward. */
    size_t at = n, next = n;
    while (at) {
        size_t from = best[at].from;
        best[at].from = (uint32_t)next;
        next = at;
        at = from;
    }
    best[0].from = (uint32_t)next;
    for (at = 0; at < n;) {
        size_t end = best[at].from;
        if (best[end].id >= 0) {
            token_list_add(out, best[end].id);
        } else { /* adjacent unknown characters become one unknown token */
            size_t from = at;
            while (end < n && best[best[end].from].id < 0)
                end = best[end].from;
            emit_unknown(u, word + from, end - from, out);
        }
        at = end;
    }
    return true;
}
