/* Unigram: the segmentation of a word with the highest total score (Viterbi). */
#ifndef STEEL_TEXT_UNIGRAM_H
#define STEEL_TEXT_UNIGRAM_H

#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/trie.h"
#include "text/tokenizer/vocab.h"

struct unigram {
    const struct vocab *vocab;
    struct trie trie; /* keys to ids */
    int32_t unk;      /* or -1 */
    double unk_score;
    bool byte_fallback;
    int32_t byte_id[256]; /* token <0xXX> of each byte, or -1 */
};

/* Work space of one thread; zero-initialise. */
struct unigram_scratch {
    struct unigram_node *nodes; /* (cap) */
    size_t cap;
};
void unigram_scratch_clear(struct unigram_scratch *s);

/* Builds the tables. `unk` and `byte_fallback` must be set. */
void unigram_init(struct unigram *u, const struct vocab *v);
void unigram_clear(struct unigram *u);
/* Returns false if the budget (may be NULL) runs out. */
bool unigram_encode(const struct unigram *u, struct unigram_scratch *s, const char *word, size_t n,
                    struct budget *budget, struct token_list *out);

#endif
