/*
 * libFuzzer entry for Lark grammars, of a whole reply and of a string in JSON (x-lark). A grammar that compiles
 * is walked, with the input's bytes as the choice of tokens, on a vocabulary of single bytes and some longer
 * tokens. A mask must never be empty (every prefix can be completed), and every token it allows must be
 * accepted.
 */
#include "fuzz_grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    fuzz_source(GRAMMAR_LARK, data, n);
    json_t *schema = json_pack("{s:s,s:s%}", "type", "string", "x-lark", (const char *)data, n);
    char *text = schema ? json_dumps(schema, JSON_COMPACT) : NULL; /* NULL: not UTF-8 */
    if (text)
        fuzz_source(GRAMMAR_SCHEMA, (const uint8_t *)text, strlen(text));
    free(text);
    json_decref(schema);
    return 0;
}
