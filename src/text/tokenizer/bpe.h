/*
 * Byte-pair encoding of one word: byte-level (GPT-2 and most models since) and by characters with
 * byte fallback (SentencePiece models, where the order of merges follows from the scores).
 * Immutable after bpe_finish but for a cache of single bytes updated atomically: any number of
 * threads may encode, each with its own scratch.
 */
#ifndef STEEL_TEXT_BPE_H
#define STEEL_TEXT_BPE_H

#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/vocab.h"

#include <stdatomic.h>

struct bpe_pair {
    uint64_t key; /* left << 32 | right, plus 1 (0 = empty slot) */
    uint32_t rank;
    uint32_t id; /* what the two become */
};

struct bpe {
    const struct vocab *vocab;
    bool byte_level;    /* symbols are bytes, else characters */
    bool ignore_merges; /* a word that is a token is that token */
    bool byte_fallback; /* characters outside the vocabulary become <0xXX> tokens */
    bool fuse_unk;
    int32_t unk;            /* or -1 */
    struct buf prefix;      /* continuing_subword_prefix */
    struct buf suffix;      /* end_of_word_suffix */
    int32_t byte_id[256];   /* byte-level: symbol of a byte; else the token <0xXX>; or -1 */
    struct bpe_pair *pairs; /* (cap) open addressing */
    size_t cap, n_pairs;
    uint32_t ascii[128];       /* by characters: symbol of an ASCII character */
    struct bpe_char *chars;    /* (chars_cap) open addressing: the other characters */
    size_t chars_cap, n_chars; /* symbols >= vocab->n are characters that are no token */
    uint32_t n_symbols;        /* vocab->n + characters that occur in tokens but are none */
    uint64_t *adjacent;        /* (ADJACENT_BITS / 64) neighbours that occur inside a token */
    _Atomic(uint8_t) *whole;   /* (vocab->n) does encoding the token's key give the token? */
};

struct bpe_char {
    uint32_t cp; /* + 1; 0 = empty */
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

/* After the fields above n_pairs' are set: the symbols. Then merges, then bpe_finish. */
void bpe_init(struct bpe *b, const struct vocab *v);
/* One merge of two keys; the error says which of the three tokens is not in the vocabulary. */
bool bpe_add_merge(struct bpe *b, const char *left, size_t n_left, const char *right,
                   size_t n_right, uint32_t rank, struct error *err);
/*
 * The merges that a vocabulary implies: any two symbols whose concatenation is a token become it,
 * in the order of rank (vocab->n), lowest first. This is SentencePiece's BPE (ranks from scores) and
 * tiktoken's (rank = id).
 */
bool bpe_derive_merges(struct bpe *b, const uint32_t *rank, struct error *err);
void bpe_finish(struct bpe *b);
void bpe_clear(struct bpe *b);

/* Appends the tokens of one word (any bytes). False where the scratch's budget ends first: what was
 * appended is no result then. */
bool bpe_encode(const struct bpe *b, struct bpe_scratch *s, const char *word, size_t n,
                struct token_list *out);

#endif
