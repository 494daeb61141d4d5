/*
 * The vocabulary: each id's spelling, decoded text, kind and score, and an index from spelling to
 * id. Filled by a loader, then immutable. Knows no algorithm.
 *
 * Each id has two spellings. `key` is the input of the model's algorithm: raw bytes for byte-level
 * BPE (the GPT-2 alphabet is undone at load), else UTF-8 as in the file. `piece` is the text that
 * decoding emits and users see.
 */
#ifndef STEEL_TEXT_VOCAB_H
#define STEEL_TEXT_VOCAB_H

#include "base/buf.h"
#include "base/error.h"

#include <stdint.h>

struct vocab_slot {
    uint32_t hash;
    int32_t id; /* id + 1; 0 = empty slot */
};

struct vocab {
    int n;
    uint8_t *kind; /* (n) enum token_kind */
    uint8_t *flag; /* (n) VOCAB_* */
    float *score;  /* (n) or NULL */
    struct buf keys, pieces;
    uint32_t *key_at, *piece_at; /* (n + 1) offsets into keys, pieces */
    struct vocab_slot *slots;    /* (cap) */
    size_t cap;
    size_t max_key; /* bytes of the longest key */
};

enum {
    VOCAB_END = 1,   /* ends a generation */
    VOCAB_ADDED = 2, /* matched in the text before the model runs; has no key */
};

void vocab_clear(struct vocab *v);

static inline const char *vocab_key(const struct vocab *v, int32_t id, size_t *len)
{
    *len = v->key_at[id + 1] - v->key_at[id];
    return v->keys.p + v->key_at[id];
}

static inline const char *vocab_piece(const struct vocab *v, int32_t id, size_t *len)
{
    *len = v->piece_at[id + 1] - v->piece_at[id];
    return v->pieces.p + v->piece_at[id];
}

/* Builds the index over all non-empty keys. On a duplicate, returns false and sets the two ids. */
bool vocab_index(struct vocab *v, int32_t dup[2]);
/* Id of the token with exactly this key, or -1. */
int32_t vocab_find(const struct vocab *v, const char *key, size_t len);

/* Decodes GPT-2's alphabet: appends the raw bytes of `s`. False, with out unchanged, on other
 * characters. */
bool bytelevel_decode(const char *s, size_t n, struct buf *out);
/* Appends the spelling of raw bytes in GPT-2's alphabet. */
void bytelevel_encode(const char *s, size_t n, struct buf *out);

#endif
