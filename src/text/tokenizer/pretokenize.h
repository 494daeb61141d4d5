/*
 * The pre-tokenizer: cuts normalised text into the words that the model sees. An ordered list of
 * steps; each cuts every word of the step before it. Works on valid UTF-8. Immutable once built.
 */
#ifndef STEEL_TEXT_PRETOKENIZE_H
#define STEEL_TEXT_PRETOKENIZE_H

#include "base/buf.h"
#include "base/error.h"
#include "text/tokenizer/regex.h"
#include "text/tokenizer/split.h"

#include <stdint.h>

/* What becomes of the matches (delimiters) of a cut. */
enum cut_behavior {
    CUT_REMOVED,
    CUT_ISOLATED,
    CUT_MERGED_WITH_PREVIOUS,
    CUT_MERGED_WITH_NEXT,
    CUT_CONTIGUOUS
};

enum pre_kind {
    PRE_REGEX,     /* cut by a regex, hand-written where `split` says so */
    PRE_CHARS,     /* cut at characters of `set`, ASCII punctuation, or equal to `cp` */
    PRE_PREFIX,    /* a space in front of each word that has none */
    PRE_METASPACE, /* spaces become `text`, which may also be put in front */
    PRE_BYTES,     /* from here on later steps see the bytes in GPT-2's alphabet */
    PRE_SPELL,     /* the words themselves are spelled in GPT-2's alphabet */
};

enum metaspace_scheme { METASPACE_NEVER, METASPACE_FIRST, METASPACE_ALWAYS };

struct pre_step {
    enum pre_kind kind;
    enum cut_behavior behavior;
    bool invert;
    struct regex *re;      /* PRE_REGEX */
    enum split_kind split; /* PRE_REGEX: the hand-written form, or SPLIT_NONE */
    uint32_t set;          /* PRE_CHARS: categories */
    bool ascii_punct;      /* PRE_CHARS: also all of ASCII punctuation */
    uint32_t cp;           /* PRE_CHARS: also this character; UINT32_MAX = none */
    struct buf text;       /* PRE_METASPACE */
    enum metaspace_scheme scheme;
};

struct pretokenizer {
    struct pre_step *steps; /* (n) */
    int n;
    enum split_kind only; /* all it does is this split (and PRE_BYTES): no word list is needed */
};

struct pre_word {
    size_t at, len; /* into words.text */
    bool first;     /* starts at the start of the whole input */
    bool joined;    /* goes on after bytes that are no UTF-8: nothing is put in front of it */
};

/* The words of one text, and the work space behind them; zero-initialise. */
struct pre_words {
    const char *text;
    struct pre_word *list; /* (n) */
    size_t n, cap;
    struct pre_word *next; /* (next_cap) the list being built */
    size_t n_next, next_cap;
    struct buf bufs[2];    /* text that a step had to change */
    struct buf spelled;    /* one word in GPT-2's alphabet */
    struct budget *budget; /* or NULL */
};
void pre_words_clear(struct pre_words *w);

struct pre_step *pretokenizer_add(struct pretokenizer *pt, enum pre_kind kind);
void pretokenizer_finish(struct pretokenizer *pt); /* after the last step */
void pretokenizer_clear(struct pretokenizer *pt);

/* Cuts text into w, which may make it longer up to norm_limit; `first` and `joined` are those of its first word. */
bool pretokenizer_run(const struct pretokenizer *pt, struct pre_words *w, struct regex_scratch *re,
                      const char *text, size_t n, bool first, bool joined, struct error *err);

#endif
