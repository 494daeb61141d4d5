/*
 * Fill-in-the-middle tokens: ids that a GGUF file declares, and well-known names for all others. Families
 * spell them differently and some put the suffix first.
 */
#include "text/tokenizer/tokenizer_impl.h"

#include <string.h>

/* Names of one family. Optional ones may be NULL. */
struct fim_names {
    const char *prefix, *suffix, *middle;
    const char *pad, *repo, *file; /* optional */
    bool suffix_first;
};

static const struct fim_names families[] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>",
     "<|file_sep|>", false}, /* Qwen, CodeGemma */
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>",
     false}, /* StarCoder */
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>", NULL, NULL, false},
    {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", NULL, NULL, NULL, false}, /* DeepSeek */
    {"<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", NULL, NULL, NULL, false}, /* GLM */
    {"▁<PRE>", "▁<SUF>", "▁<MID>", NULL, NULL, NULL, false}, /* Code Llama */
    {"<PRE>", "<SUF>", "<MID>", NULL, NULL, NULL, false},
    {"[PREFIX]", "[SUFFIX]", NULL, NULL, NULL, NULL, true},                         /* Codestral */
    {"<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", NULL, NULL, NULL, true}, /* Seed-Coder */
};

/* The id of a token with this name that ordinary text cannot produce, or -1. */
static int32_t named(const struct tokenizer *t, const char *name)
{
    int32_t id = name ? tokenizer_find(t, name, strlen(name)) : -1;
    enum token_kind kind = tokenizer_kind(t, id);
    return kind == TOKEN_CONTROL || kind == TOKEN_USER ? id : -1;
}

void tokenizer_find_fim(struct tokenizer *t)
{
    struct fim_tokens *f = &t->fim;
    bool declared = f->prefix >= 0 && f->suffix >= 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const struct fim_names *n = &families[i];
        int32_t prefix = named(t, n->prefix), suffix = named(t, n->suffix);
        int32_t middle = named(t, n->middle);
        if (declared ? prefix != f->prefix || suffix != f->suffix
                     : prefix < 0 || suffix < 0 || (n->middle && middle < 0))
            continue;
        f->prefix = prefix;
        f->suffix = suffix;
        f->middle = f->middle >= 0 ? f->middle : middle;
        f->pad = f->pad >= 0 ? f->pad : named(t, n->pad);
        f->repo = f->repo >= 0 ? f->repo : named(t, n->repo);
        f->file = f->file >= 0 ? f->file : named(t, n->file);
        f->suffix_first = n->suffix_first;
        break;
    }
    f->usable = f->prefix >= 0 && f->suffix >= 0 && (f->middle >= 0 || f->suffix_first);
    if (!f->usable)
        return;
    /* After the middle part some models continue with another file. */
    tokenizer_mark_end(t, f->pad);
    tokenizer_mark_end(t, f->repo);
    tokenizer_mark_end(t, f->file);
}

const struct fim_tokens *tokenizer_fim(const struct tokenizer *t)
{
    return t->fim.usable ? &t->fim : NULL;
}
