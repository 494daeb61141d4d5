/* Reads a SentencePiece tokenizer.model: pieces with scores and kinds. Text stays in the file's map. */
#ifndef STEEL_CONVERT_SENTENCEPIECE_H
#define STEEL_CONVERT_SENTENCEPIECE_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

struct piece {
    const char *text; /* (len) in the map */
    size_t len;
    float score;
    int kind; /* SentencePiece's numbers, which are GGUF's too: 1 normal ... 6 byte */
};

struct sentencepiece {
    struct piece *pieces; /* (n) */
    int n;
    bool add_space; /* a space is prepended to the text */
    uint8_t *map;   /* (bytes) */
    size_t bytes;
};

/* Accepts BPE models only, since GGUF's "llama" vocabulary is BPE. */
struct sentencepiece *sentencepiece_open(const char *path, struct error *err);
void sentencepiece_close(struct sentencepiece *s);

#endif
