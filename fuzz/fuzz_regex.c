/*
 * libFuzzer entry for regular expressions. An expression that compiles is walked, with the input's
 * bytes as the choice of tokens, on a vocabulary of single bytes and some longer tokens. A mask
 * must never be empty (every prefix can be completed), and every token it allows must be accepted.
 */
#include "fuzz_grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    return fuzz_source(GRAMMAR_REGEX, data, n);
}
