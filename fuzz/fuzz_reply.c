/*
 * libFuzzer entry for constraints on whole replies: the JSON text of a constraint with reasoning,
 * tools and a response (text/chat/chat_grammar.h), checked like the other grammar sources.
 */
#include "fuzz_grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    return fuzz_source(GRAMMAR_REPLY, data, n);
}
