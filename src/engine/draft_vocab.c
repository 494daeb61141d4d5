/* Matches two vocabularies: see draft_vocab.h. */
#include "engine/draft_vocab.h"
#include "base/mem.h"

#include <string.h>

/* The share of the model's own tokens that a draft model must have. */
#define LEAST_SHARE 0.9

static bool same_piece(const struct tokenizer *a, const struct tokenizer *b, int32_t id)
{
    size_t n, m;
    if (id >= tokenizer_n_vocab(a) || id >= tokenizer_n_vocab(b))
        return false;
    const char *p = tokenizer_piece(a, id, &n), *q = tokenizer_piece(b, id, &m);
    return n == m && !memcmp(p, q, n);
}

/* The id in `to` of token id of `from`, or -1. */
static int32_t find(const struct tokenizer *from, const struct tokenizer *to, int32_t id)
{
    size_t n;
    if (same_piece(from, to, id))
        return id;
    const char *p = tokenizer_piece(from, id, &n);
    return n ? tokenizer_find(to, p, n) : -1;
}

static int32_t *match(const struct tokenizer *from, int n, const struct tokenizer *to)
{
    int32_t *ids = mem_alloc((size_t)n * sizeof *ids);
    for (int i = 0; i < n; i++)
        ids[i] = i < tokenizer_n_vocab(from) ? find(from, to, i) : -1;
    return ids;
}

bool draft_vocab_init(struct draft_vocab *v, const struct draft_words *target,
                      const struct draft_words *draft, struct error *err)
{
    const struct tokenizer *t = target->tokenizer, *d = draft->tokenizer;
    *v = (struct draft_vocab){.n_target = target->n, .n_draft = draft->n};
    if (!t != !d)
        return error_set(err, "%s: the vocabulary cannot be compared with the model's: %s has none",
                         draft->path, t ? draft->path : target->path);
    if (!t && target->n != draft->n)
        return error_set(err, "%s: a vocabulary of %d tokens; the model's has %d", draft->path,
                         draft->n, target->n);
    if (!t)
        return true;
    int n = tokenizer_n_vocab(t), n_words = 0, n_found = 0, n_equal = 0;
    v->to_draft = match(t, target->n, d);
    for (int i = 0; i < n; i++) {
        bool word = tokenizer_kind(t, i) != TOKEN_UNUSED;
        n_words += word;
        n_found += word && v->to_draft[i] >= 0;
        n_equal += v->to_draft[i] == i;
    }
    if (n_found < LEAST_SHARE * n_words) {
        draft_vocab_clear(v);
        return error_set(err,
                         "%s: it has %d of the model's %d tokens. A draft model needs at least "
                         "%.0f %% of them",
                         draft->path, n_found, n_words, LEAST_SHARE * 100);
    }
    if (n_equal == n && n == tokenizer_n_vocab(d)) {
        draft_vocab_clear(v);
        v->n_target = v->n_draft = n;
        return true;
    }
    v->to_target = match(d, draft->n, t);
    return true;
}

void draft_vocab_clear(struct draft_vocab *v)
{
    mem_free(v->to_draft);
    mem_free(v->to_target);
    *v = (struct draft_vocab){0};
}
