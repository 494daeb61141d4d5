/*
 * Byte-pair encoding of one word. Two variants: byte-level (GPT-2 and most models since), and by
 * characters with byte fallback (SentencePiece models, whose merge order follows from the scores).
 * Immutable after bpe_finish, except for a cache of single bytes that is updated atomically. Any
 * number of threads may encode, each with its own scratch.
 */
#ifndef STEEL_TEXT_BPE_H
#define STEEL_TEXT_BPE_H

#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/vocab.h"

#include <stdatomic.h>

struct bpe_pair {
    uint64_t key; /* left << 32 | right, plus 1 (0 = empty slot) */
    uint32_t rank;
    uint32_t id; /* the merged symbol */
};

struct bpe {
    const struct vocab *vocab;
    bool byte_level;    /* symbols are bytes, else characters */
    bool ignore_merges; /* a word that is a token skips the merges */
    bool byte_fallback; /* characters outside the vocabulary become <0xXX> tokens */
    bool fuse_unk;
    int32_t unk;            /* or -1 */
    struct buf prefix;      /* continuing_subword_prefix */
    struct buf suffix;      /* end_of_word_suffix */
    int32_t byte_id[256];   /* byte-level: symbol of a byte; else the token <0xXX>; or -1 */
    struct bpe_pair *pairs; /* (cap) open addressing */
    size_t cap, n_pairs;
    uint32_t ascii[128];       /* character symbols: symbol of an ASCII character */
    struct bpe_char *chars;    /* (chars_cap) open addressing: the non-ASCII characters */
    size_t chars_cap, n_chars; /* symbols >= vocab->n are characters without a token */
    uint32_t n_symbols;        /* vocab->n + characters that occur in tokens but have none */
    uint64_t *adjacent;        /* (ADJACENT_BITS / 64) pairs of neighbours inside tokens */
    _Atomic(uint8_t) *whole;   /* (vocab->n) WHOLE_*: does the key encode to this token? */
};

struct bpe_char {
    uint32_t cp; /* code point + 1; 0 = empty slot */
    uint32_t symbol;
};

/* Work space of one thread; zero-initialise. */
struct bpe_scratch {
    uint32_t *id, *start, *next, *prev, *rank, *merged; /* (cap) */
    size_t cap;
    uint64_t *heap; /* (heap_cap) rank << 32 | symbol */
    size_t n_heap, heap_cap;
    struct buf tmp;
    struct budget *budget; /* or NULL */
};
void bpe_scratch_clear(struct bpe_scratch *s);

/* Builds the symbols. The fields before byte_id must be set. Merges follow, then bpe_finish. */
void bpe_init(struct bpe *b, const struct vocab *v);
/* Adds one merge of two keys. The error names the token that is not in the vocabulary. */
bool bpe_add_merge(struct bpe *b, const char *left, size_t n_left, const char *right,
                   size_t n_right, uint32_t rank, struct error *err);
/*
 * Derives the merges a vocabulary implies: any two symbols whose concatenation is a token merge
 * into it, in the order of rank (vocab->n), lowest first. SentencePiece's BPE takes the ranks from
 * scores; tiktoken takes rank = id.
 */
bool bpe_derive_merges(struct bpe *b, const uint32_t *rank, struct error *err);
void bpe_finish(struct bpe *b);
void bpe_clear(struct bpe *b);

/* Appends the tokens of one word (any bytes). Returns false if the scratch's budget runs out; the
 * tokens appended so far are then no valid encoding. */
bool bpe_encode(const struct bpe *b, struct bpe_scratch *s, const char *word, size_t n,
                struct token_list *out);

#endif
