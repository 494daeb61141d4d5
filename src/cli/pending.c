/* Temporary: weak stand-ins until the tokenizer and the CPU backend land. */
#include "cli/cli.h"
#pragma weak tokenizer_load
struct tokenizer *tokenizer_load(const struct tensorfile *f, struct error *err)
{
    (void)f;
    error_set(err, "no tokenizer yet");
    return NULL;
}
#pragma weak tokenizer_free
void tokenizer_free(struct tokenizer *t)
{
    (void)t;
}
#pragma weak tokenizer_n_vocab
int tokenizer_n_vocab(const struct tokenizer *t)
{
    (void)t;
    return 0;
}
#pragma weak tokenizer_bos
int32_t tokenizer_bos(const struct tokenizer *t)
{
    (void)t;
    return -1;
}
#pragma weak tokenizer_is_end
bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    (void)t;
    (void)id;
    return false;
}
#pragma weak tokenizer_encode
bool tokenizer_encode(const struct tokenizer *t, const char *s, size_t n, int f,
                      struct token_list *o, struct error *err)
{
    (void)t;
    (void)s;
    (void)n;
    (void)f;
    (void)o;
    return error_set(err, "no tokenizer yet");
}
#pragma weak token_list_add
void token_list_add(struct token_list *l, int32_t id)
{
    (void)l;
    (void)id;
}
#pragma weak token_list_clear
void token_list_clear(struct token_list *l)
{
    (void)l;
}
#pragma weak detok_push
void detok_push(struct detok *d, const struct tokenizer *t, int32_t id, bool sp, struct buf *out)
{
    (void)d;
    (void)t;
    (void)id;
    (void)sp;
    (void)out;
}
#pragma weak detok_flush
void detok_flush(struct detok *d, struct buf *out)
{
    (void)d;
    (void)out;
}
#pragma weak profile_print
void profile_print(const struct profile *p, FILE *out)
{
    (void)p;
    (void)out;
}
