/*
 * libFuzzer entry for whole answers: the words of a constraint with thinking, tools and a response
 * (text/chat/chat_grammar.h), walked like the others' sources.
 */
#include "fuzz_grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    return fuzz_source(GRAMMAR_ANSWER, data, n);
}
