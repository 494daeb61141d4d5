/* See dry_breakers.h. */
#include "sample/dry_breakers.h"
#include "base/mem.h"

#include <string.h>

const char *const dry_default_breakers[DRY_DEFAULT_BREAKERS] = {"\n", ":", "\"", "*"};

/* A token's text: vocabularies spell bytes in ways of their own. */
static void text_of(const struct tokenizer *t, int32_t token, struct buf *out)
{
    struct detok d = {.started = true};
    buf_reset(out);
    detok_push(&d, t, token, true, out);
    buf_add(out, d.pending, (size_t)d.n_pending);
}

void dry_breakers_find(const struct tokenizer *t, const char *const *texts, int n,
                       struct token_list *out)
{
    struct buf text = {0};
    bool *found = mem_zalloc((size_t)n + 1, sizeof *found);
    for (int token = 0; n > 0 && token < tokenizer_n_vocab(t); token++) {
        bool any = false;
        text_of(t, token, &text);
        for (int i = 0; text.len && i < n; i++)
            if (memmem(text.p, text.len, texts[i], strlen(texts[i])))
                any = found[i] = true;
        if (any)
            token_list_add(out, token);
    }
    for (int i = 0; i < n; i++) {
        struct token_list own = {0};
        struct error err = {0};
        if (!found[i] && tokenizer_encode(t, texts[i], strlen(texts[i]), 0, &own, &err) && own.n)
            token_list_add(out, own.ids[own.n - 1]);
        token_list_clear(&own);
    }
    mem_free(found);
    buf_clear(&text);
}
