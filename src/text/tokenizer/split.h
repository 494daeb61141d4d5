/*
 * Hand-written equivalents of the pre-tokenizer regexes that nearly all models use. They are
 * several times faster than the regex and linear on any text. The regex remains the definition;
 * tests compare the two.
 */
#ifndef STEEL_TEXT_SPLIT_H
#define STEEL_TEXT_SPLIT_H

#include <stddef.h>

enum split_kind {
    SPLIT_NONE,        /* no hand-written form: the regex is used */
    SPLIT_GPT2,        /* GPT-2, and the default of ByteLevel */
    SPLIT_CL100K,      /* GPT-4: numbers of up to three digits (Llama 3) */
    SPLIT_QWEN2,       /* as CL100K, single digits */
    SPLIT_QWEN35,      /* as QWEN2, marks count as letters */
    SPLIT_CL100K_RUNS, /* as CL100K, runs of digits are not split */
    SPLIT_COUNT
};

/* The regex equivalent to `kind`, in Oniguruma syntax. */
const char *split_regex(enum split_kind kind);
/* The kind whose regex has exactly this spelling, or SPLIT_NONE. */
enum split_kind split_find(const char *regex, size_t len);
/* Bytes of the first word of text (valid UTF-8, n > 0): at least 1. */
size_t split_next(enum split_kind kind, const char *text, size_t n);

#endif
