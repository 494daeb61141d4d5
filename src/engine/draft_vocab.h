/*
 * Token ids of a model in those of its draft model, and back. The two vocabularies may be the same, or differ in size,
 * order and in a few tokens, as those of two releases of a family do: tokens are matched by their spelling.
 */
#ifndef STEEL_ENGINE_DRAFT_VOCAB_H
#define STEEL_ENGINE_DRAFT_VOCAB_H

#include "text/tokenizer/tokenizer.h"

/* A vocabulary: n ids, those of the tokenizer and unused ones. tokenizer NULL: the file has no vocabulary. */
struct draft_words {
    const char *path;
    const struct tokenizer *tokenizer;
    int n;
};

struct draft_vocab {
    int n_target, n_draft;
    int32_t *to_draft;  /* (n_target) -1 = the draft model has no such token; NULL = equal ids */
    int32_t *to_target; /* (n_draft) */
};

/* False: most tokens of the model are none of the draft model's. */
bool draft_vocab_init(struct draft_vocab *v, const struct draft_words *target,
                      const struct draft_words *draft, struct error *err);
void draft_vocab_clear(struct draft_vocab *v);

/* -1 = none. */
static inline int32_t draft_vocab_to_target(const struct draft_vocab *v, int32_t id)
{
    if (id < 0 || id >= v->n_draft)
        return -1;
    return v->to_target ? v->to_target[id] : id < v->n_target ? id : -1;
}

/* The draft model reads token 0 in place of one that it does not have. */
static inline int32_t draft_vocab_to_draft(const struct draft_vocab *v, int32_t id)
{
    int32_t found = v->to_draft ? v->to_draft[id] : id;
    return found >= 0 && found < v->n_draft ? found : 0;
}

#endif
