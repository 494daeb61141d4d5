/*
 * Constrained decoding: computes which tokens may come next so that the text satisfies a JSON
 * Schema, a regular expression, a GBNF grammar or a list of choices.
 *
 * A source is compiled once into a `struct grammar`, which is immutable, reference-counted and
 * shared by sequences and threads. A `struct grammar_vocab` is a tokenizer's vocabulary prepared
 * for masks, one per model. A `struct grammar_matcher` is the small state of one sequence.
 *
 * How it works. Terminals (strings, numbers, literals, regular rules) are deterministic automata
 * over characters, built completely at compile time. Nothing is lazy, so no locks are needed. Above
 * them runs an Earley parser. Its rules are small graphs, and its items can carry counts and sets
 * (the number of array items, the properties an object has). A mask is computed by walking the
 * vocabulary's trie through both. Groups of tokens that are all safe inside a string are added as
 * precomputed masks.
 *
 * Guarantees:
 * 1. A text is accepted only if it satisfies the source. A keyword that cannot be enforced is a
 *    compile error with the keyword's path.
 * 2. Every allowed prefix can be completed.
 * 3. Control tokens are never allowed inside the constraint, except as the tag of a tool call.
 *    Ending tokens are allowed exactly where the text is complete.
 * 4. Work that hostile input can cause is counted and limited: see the limits below and in
 *    grammar_re.h.
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
    GRAMMAR_REGEX,       /* text: a regular expression that the whole reply matches */
    GRAMMAR_GBNF,        /* text: a grammar in llama.cpp's syntax; starts at `root` */
    GRAMMAR_CHOICE,      /* text: a JSON list of strings; the reply is one of them */
    GRAMMAR_REPLY,       /* text: a whole reply with reasoning and tool calls: see chat_grammar.h */
    GRAMMAR_LARK,        /* text: a grammar in Lark's syntax; starts at `start` */
};

enum {
    GRAMMAR_SCHEMA_ORDER = 1, /* object properties appear in schema order */
    GRAMMAR_COMPACT = 2,      /* JSON without white space between tokens */
};

struct grammar_source {
    enum grammar_kind kind;
    int flags;
    const char *text; /* (len) */
    size_t len;
};

enum {
    GRAMMAR_TEXT_MAX = 1 << 20,  /* bytes of a source */
    GRAMMAR_MASK_WORK = 8 << 20, /* automaton and parser steps per mask, 5 ns each */
    GRAMMAR_PIECE = 1 << 14,     /* steps between two calls of go_on: see grammar_set_pace */
};

/* NULL with err set if the source is invalid, cannot be enforced, or exceeds a limit. */
struct grammar *grammar_compile(const struct grammar_source *src, struct error *err);
struct grammar *grammar_ref(struct grammar *g);
void grammar_free(struct grammar *g); /* drops one reference; NULL is allowed */
size_t grammar_bytes(const struct grammar *g);

/* Cache of compiled grammars by source: keeps the `cap` most recently used. Thread-safe. */
struct grammar_cache;
struct grammar_cache *grammar_cache_new(int cap);
void grammar_cache_free(struct grammar_cache *c);
/* Returns a reference to the compiled source, compiling it on a miss. `hit` may be NULL. */
struct grammar *grammar_cache_get(struct grammar_cache *c, const struct grammar_source *src,
                                  bool *hit, struct error *err);

/* The tokenizer must outlive the vocabulary. */
struct grammar_vocab *grammar_vocab_new(const struct tokenizer *t);
void grammar_vocab_free(struct grammar_vocab *v);
static inline size_t grammar_mask_words(int n_vocab)
{
    return ((size_t)n_vocab + 31) / 32;
}

/* Takes a reference to g. v must outlive the matcher. */
struct grammar_matcher *grammar_matcher_new(struct grammar *g, const struct grammar_vocab *v);
/* Limits the whole reply to this many tokens, including the ending token (0 = no limit). When the
 * budget runs low, only the shortest completion is allowed, so the reply ends in time if the budget
 * suffices for any valid reply. Free text in which the reply may end is not limited. Call before
 * the first token; 0 at any time. */
void grammar_set_budget(struct grammar_matcher *m, int tokens);
void grammar_matcher_free(struct grammar_matcher *m);
/* Bit i of bits (grammar_mask_words words): token i may come next. False if this sequence exceeded
 * a limit; it cannot continue. */
bool grammar_mask(struct grammar_matcher *m, uint32_t *bits, struct error *err);
/* Accepts a token. If it does not fit (or a limit is exceeded, see err), returns false and changes
 * nothing. */
bool grammar_accept(struct grammar_matcher *m, int32_t token, struct error *err);
/* Lets long masks be paused or given up. `go_on` is called about every GRAMMAR_PIECE steps of grammar_mask and
 * grammar_accept, and may wait. If it returns false they return false without an error, and change nothing: they
 * may be called again. NULL: they run to the end. */
void grammar_set_pace(struct grammar_matcher *m, bool (*go_on)(void *arg), void *arg);
/* Undoes the last n accepted tokens (at most all of them). */
void grammar_rollback(struct grammar_matcher *m, size_t n);
/* The only token that may come next, or -1. Cheap when there are many choices. */
int32_t grammar_forced(struct grammar_matcher *m);
/* Cuts tokens (n) to those that may come next one after the other, and appends tokens that are forced after them, up to
 * `most` in all. Returns their number. The matcher stays as it is. It stops where grammar_set_pace says so. */
int grammar_foresee(struct grammar_matcher *m, int32_t *tokens, int n, int most);
/* Whether the reply may end here. */
bool grammar_is_accepting(const struct grammar_matcher *m);
/* Steps taken by the last mask; GRAMMAR_MASK_WORK is the limit. */
size_t grammar_mask_work(const struct grammar_matcher *m);
size_t grammar_matcher_bytes(const struct grammar_matcher *m);

#endif
