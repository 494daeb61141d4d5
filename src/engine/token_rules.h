/*
 * Rules about the tokens of an answer: a list of allowed tokens, sequences that must not appear, and
 * a limit on thinking. They act through the sampler's constraint, around a grammar if there is one,
 * so they need no code in a backend. Rules are constant and shared; a matcher is one choice's state.
 *
 * A limit on thinking counts the tokens between the marks. At the limit it forces a text that ends
 * the thinking. Where the grammar does not allow that text, thinking continues.
 */
#ifndef STEEL_ENGINE_TOKEN_RULES_H
#define STEEL_ENGINE_TOKEN_RULES_H

#include "sample/sampler.h"
#include "text/chat/chat_marks.h"
#include "text/tokenizer/tokenizer.h"

enum { RULES_LONGEST_WORD = 64 }; /* tokens of a forbidden sequence */

struct think_limit {
    int tokens;               /* most tokens of thinking */
    const char *open, *close; /* marks; `open` counts at the beginning only */
    const char *call;         /* a call inside of thinking also ends it; NULL = none */
    bool inside;              /* the prompt ends inside of it */
    bool reopens;             /* `open` counts anywhere */
    const char *end;          /* the forced text; the model's tags in it become special tokens */
    const char *not_after;    /* its first token must not follow `end`; NULL = none */
};

/* The limit for thinking between these marks. inside: the prompt ends inside of thinking. */
struct think_limit think_limit_of(const struct chat_marks *marks, bool inside, int tokens);

struct token_rules;
/* Everything is copied. All arguments may be NULL or 0. */
struct token_rules *token_rules_new(const struct tokenizer *t, const struct token_list *allowed,
                                    const char *const *bad_words, int n_bad_words,
                                    const struct think_limit *limit);
struct token_rules *token_rules_ref(struct token_rules *r);
void token_rules_free(struct token_rules *r); /* drops a reference; NULL is allowed */

/* The constraint of one choice. `inner` is a grammar's constraint, owned from now on; its state is
 * NULL if there is none. */
struct sample_constraint token_rules_match(struct token_rules *r, struct sample_constraint inner,
                                           int n_vocab);

#endif
