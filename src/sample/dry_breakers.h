/* The tokens that end a repetition for DRY. */
#ifndef STEEL_SAMPLE_DRY_BREAKERS_H
#define STEEL_SAMPLE_DRY_BREAKERS_H

#include "text/tokenizer/tokenizer.h"

enum { DRY_DEFAULT_BREAKERS = 4 };
extern const char *const dry_default_breakers[DRY_DEFAULT_BREAKERS];

/* Appends the tokens whose text contains one of `texts` (n). Of a text that is in no token, the last
 * token of its usual spelling. */
void dry_breakers_find(const struct tokenizer *t, const char *const *texts, int n,
                       struct token_list *out);

#endif
