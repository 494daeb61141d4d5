/*
 * Hand-written equivalents of the pre-tokenizer regexes that nearly all models use: several times
 * faster than the regex and linear on any text. The regex stays the definition; tests compare.
 */
#ifndef STEEL_TEXT_SPLIT_H
#define STEEL_TEXT_SPLIT_H

#include <stddef.h>

enum split_kind {
    SPLIT_NONE,        /* no hand-written form: use the regex */
    SPLIT_GPT2,        /* GPT-2, and the default of ByteLevel */
    SPLIT_CL100K,      /* GPT-4's: numbers by up to three digits (Llama 3) */
    SPLIT_QWEN2,       /* the same, numbers by single digits */
    SPLIT_QWEN35,      /* the same, marks count as letters */
    SPLIT_CL100K_RUNS, /* the same, runs of digits stay whole */
    SPLIT_COUNT
};

/* The regex that `kind` stands for, in Oniguruma syntax. */
const char *split_regex(enum split_kind kind);
/* The kind for a regex spelled exactly so, or SPLIT_NONE. */
enum split_kind split_find(const char *regex, size_t len);
/* Bytes of the first word of text (valid UTF-8, n > 0): at least 1. */
size_t split_next(enum split_kind kind, const char *text, size_t n);

#endif
