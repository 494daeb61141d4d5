/* Shared by the grammar fuzzers: a small vocabulary, and a walk that checks the guarantees of
 * grammar.h. */
#ifndef STEEL_FUZZ_GRAMMAR_H
#define STEEL_FUZZ_GRAMMAR_H

#include "base/buf.h"
#include "base/mem.h"
#include "text/grammar/grammar_int.h"

#include <stdlib.h>
#include <string.h>

/* All bytes, some longer tokens and an end token. If `tagged`, also the tags of calls as special
 * tokens. */
static struct tokenizer *fuzz_tokenizer(bool tagged)
{
    static const char *const tags[] = {
        "<tool_call>",  "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<|tool_call>", "<tool_call|>", "<|\\\"|>",  "<|channel>", "<channel|>",  "[TOOL_CALLS]",
        "<|channel|>",  "<|message|>",  "<think>",   "</think>"};
    static const char *const more[] = {"\\\":", "{\\\"", "\\\",", "\\\"}", "\\\\n", "ab",    "true",
                                       "null",  "12",    "abc",   "},",    "]]",    "\\\\u0"};
    struct buf b = {0};
    buf_adds(&b, "{\"added_tokens\":[{\"id\":0,\"content\":\"<end>\",\"special\":true}");
    for (size_t i = 0; tagged && i < sizeof tags / sizeof *tags; i++)
        buf_addf(&b, ",{\"id\":%zu,\"content\":\"%s\",\"special\":%s}",
                 257 + sizeof more / sizeof *more + i, tags[i], i % 2 ? "true" : "false");
    buf_adds(&b, "],\"decoder\":{\"type\":\"ByteLevel\"},"
                 "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
                 "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{\"<end>\":0");
    int id = 1, next = 256;
    for (int c = 0; c < 256; c++) { /* GPT-2's alphabet */
        bool same = (c >= '!' && c <= '~') || (c >= 0xa1 && c <= 0xac) || c >= 0xae;
        buf_addf(&b, ",\"\\u%04x\":%d", same ? c : next++, id++);
    }
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        buf_addf(&b, ",\"%s\":%d", more[i], id++);
    buf_adds(&b, "}}}");
    struct error err = {0};
    json_t *config = json_pack("{s:s}", "eos_token", "<end>");
    struct tokenizer *t = tokenizer_load_json(b.p, b.len, "fuzz", config, &err);
    if (!t)
        abort();
    json_decref(config);
    buf_clear(&b);
    return t;
}

static int fuzz_source(enum grammar_kind kind, const uint8_t *data, size_t n)
{
    static struct tokenizer *toks[2];
    static struct grammar_vocab *vocabs[2];
    for (int i = 0; i < 2 && !toks[i]; i++) {
        toks[i] = fuzz_tokenizer(i);
        vocabs[i] = grammar_vocab_new(toks[i]);
    }
    struct tokenizer *tok = toks[n % 2];
    struct grammar_vocab *vocab = vocabs[n % 2];
    struct error err = {0};
    struct grammar_source src = {kind, n ? data[0] % 4 : 0, (const char *)data, n};
    struct grammar *g = grammar_compile(&src, &err);
    if (!g) {
        if (!err.msg[0])
            abort();
        return 0;
    }
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    grammar_set_budget(m, n > 1 ? data[1] / 2 : 0);                /* some with a tight budget */
    struct grammar_matcher *fresh = grammar_matcher_new(g, vocab); /* without cached masks */
    fresh->no_cache = true;
    grammar_set_budget(fresh, n > 1 ? data[1] / 2 : 0);
    uint32_t bits[32], again[32];
    int n_vocab = tokenizer_n_vocab(tok);
    size_t words = grammar_mask_words(n_vocab);
    if (words > 32)
        abort();
    for (size_t i = 0; i < 64 && i < n; i++) {
        if (!grammar_mask(m, bits, &err))
            break; /* over a limit, with an error */
        if (!grammar_mask(fresh, again, &err) || memcmp(bits, again, words * 4) != 0)
            abort(); /* a cached mask of another state */
        uint32_t some = 0, k = data[n - 1 - i] * 2u + (unsigned)i;
        for (size_t w = 0; w < words; w++)
            some += (uint32_t)__builtin_popcount(bits[w]);
        if (!some)
            abort(); /* a dead end */
        int32_t id = -1;
        for (k %= some;; k--) {
            do
                id++;
            while (!(bits[id / 32] >> id % 32 & 1));
            if (!k)
                break;
        }
        if (!grammar_accept(m, id, &err)) {
            if (!strstr(err.msg, "over"))
                abort(); /* allowed by the mask but not accepted */
            break;
        }
        if (i % 8 == 3) { /* roll back and repeat */
            grammar_rollback(m, 1);
            bool same = grammar_mask(m, again, &err) && !memcmp(bits, again, words * 4);
            if ((!same && !(n > 1 && data[1] / 2)) || !grammar_accept(m, id, &err))
                abort(); /* (frugal mode persists until the tokens are rolled back) */
            grammar_accept(fresh, id, &err);
            grammar_rollback(fresh, 1);
            grammar_mask(fresh, again, &err);
        }
        if (!grammar_accept(fresh, id, &err))
            abort();
        if (tokenizer_is_end(tok, id))
            break;
    }
    grammar_matcher_free(fresh);
    grammar_matcher_free(m);
    grammar_free(g);
    return 0;
}

#endif
