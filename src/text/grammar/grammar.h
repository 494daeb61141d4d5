/*
 * Constrained decoding: which tokens may come next so that the text fits a JSON Schema, a regular
 * expression, a GBNF grammar or a list of choices.
 *
 * A source is compiled once into a `struct grammar`: immutable, counted, shared by any number of
 * sequences and threads. A `struct grammar_vocab` is the vocabulary of a tokenizer made ready for
 * masks, one per model. A `struct grammar_matcher` is the small state of one sequence.
 *
 * How it works. Terminals (strings, numbers, literals, regular rules) are deterministic automata over
 * characters, built whole at compile time; nothing is lazy, so nothing is locked. Above them runs an
 * Earley parser over rules that are small graphs, whose items can carry counts and sets (how many
 * items an array has, which properties an object has). A mask is a walk of the vocabulary's trie
 * through both; groups of tokens that are all safe inside a string are taken as ready-made masks.
 *
 * Promises. A text is accepted only if it fits the source: what cannot be enforced is refused when
 * compiling, with the path of the keyword. Every allowed prefix can be completed. Control tokens are
 * never allowed inside the constraint, but where a tag of a tool call is asked for; ending tokens exactly where the text is complete. Everything a
 * stranger can make expensive is counted and bounded: see the limits below and in grammar_re.h.
 *
 * Must not know the sampler, the engine or any API.
 */
#ifndef STEEL_TEXT_GRAMMAR_H
#define STEEL_TEXT_GRAMMAR_H

#include "base/error.h"
#include "text/tokenizer/tokenizer.h"

#include <stddef.h>
#include <stdint.h>

struct grammar;
struct grammar_vocab;
struct grammar_matcher;

enum grammar_kind {
    GRAMMAR_SCHEMA,      /* text: a JSON Schema */
    GRAMMAR_JSON_OBJECT, /* any JSON object; no text */
    GRAMMAR_REGEX,       /* text: a regular expression that the whole answer matches */
    GRAMMAR_GBNF,        /* text: a grammar as llama.cpp has them; it begins at `root` */
    GRAMMAR_CHOICE,      /* text: a JSON list of strings, one of which is the answer */
    GRAMMAR_REPLY,       /* text: a whole answer with thinking and tool calls: see chat_grammar.h */
};

enum {
    GRAMMAR_SCHEMA_ORDER = 1, /* objects have their properties in the order of the schema */
    GRAMMAR_COMPACT = 2,      /* JSON without any white space between its tokens */
};

struct grammar_source {
    enum grammar_kind kind;
    int flags;
    const char *text; /* (len) */
    size_t len;
};

enum {
    GRAMMAR_TEXT_MAX = 1 << 20,  /* bytes of a source */
    GRAMMAR_MASK_WORK = 8 << 20, /* steps of automata and parser that one mask may take */
};

/* NULL with err set: not valid, not enforceable, or over a limit. */
struct grammar *grammar_compile(const struct grammar_source *src, struct error *err);
struct grammar *grammar_ref(struct grammar *g);
void grammar_free(struct grammar *g); /* gives back one reference; NULL is fine */
size_t grammar_bytes(const struct grammar *g);

/* Compiled grammars by their source: the newest `cap` that are not in use are kept. Thread-safe. */
struct grammar_cache;
struct grammar_cache *grammar_cache_new(int cap);
void grammar_cache_free(struct grammar_cache *c);
/* A reference to the compiled source, compiled now if it is not there. `hit` may be NULL. */
struct grammar *grammar_cache_get(struct grammar_cache *c, const struct grammar_source *src,
                                  bool *hit, struct error *err);

/* The tokenizer must outlive it. */
struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t);
void grammar_vocab_free(struct grammar_vocab *v);
static inline size_t grammar_mask_words(int n_vocab)
{
    return ((size_t)n_vocab + 31) / 32;
}

/* References g; v must outlive the matcher. */
struct grammar_matcher *grammar_matcher_new(struct grammar *g, const struct grammar_vocab *v);
/* The whole answer may have so many tokens, the ending one included (0 = any number). When they run
 * low, only what ends it soonest is allowed; so it ends, if that many are enough for any answer. Free
 * text in which the answer may end is never hurried. Before the first token; 0 at any time. */
void grammar_set_budget(struct grammar_matcher *m, int tokens);
void grammar_matcher_free(struct grammar_matcher *m);
/* Bit i of bits (grammar_mask_words of them): token i may come next. False: this sequence went over
 * a limit, and cannot go on. */
bool grammar_mask(struct grammar_matcher *m, uint32_t *bits, struct error *err);
/* Takes a token. False, and nothing changed, if it does not fit (or over a limit: err says). */
bool grammar_accept(struct grammar_matcher *m, int32_t token, struct error *err);
/* Undoes the last n accepted tokens (at most all of them). */
void grammar_rollback(struct grammar_matcher *m, size_t n);
/* The token that is the only choice, or -1. Cheap where there are many. */
int32_t grammar_forced(struct grammar_matcher *m);
/* May the answer end here? */
bool grammar_is_accepting(const struct grammar_matcher *m);
/* Does the constraint hold for the next token (or is the text free)? */
bool grammar_is_active(const struct grammar_matcher *m);
/* Steps that the last mask took: what GRAMMAR_MASK_WORK bounds. */
size_t grammar_mask_work(const struct grammar_matcher *m);
size_t grammar_matcher_bytes(const struct grammar_matcher *m);

#endif
