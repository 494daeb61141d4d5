/*
 * The pre-tokenizer: cuts normalised text into words for the model. It is an ordered list of steps;
 * each step cuts every word of the previous step. Works on valid UTF-8. Immutable once built.
 */
#ifndef STEEL_TEXT_PRETOKENIZE_H
#define STEEL_TEXT_PRETOKENIZE_H

#include "base/buf.h"
#include "base/error.h"
#include "text/tokenizer/regex.h"
#include "text/tokenizer/split.h"

#include <stdint.h>

/* What happens to the delimiters (the matches) of a cut. */
enum cut_behavior {
    CUT_REMOVED,
    CUT_ISOLATED,
    CUT_MERGED_WITH_PREVIOUS,
    CUT_MERGED_WITH_NEXT,
    CUT_CONTIGUOUS
};

enum pre_kind {
    PRE_REGEX,     /* cut by a regex, or by `split` if that is set */
    PRE_CHARS,     /* cut at characters in `set`, at ASCII punctuation, or at `cp` */
    PRE_PREFIX,    /* prepend a space to each word without one */
    PRE_METASPACE, /* replace spaces with `text`, which may also be prepended */
    PRE_BYTES,     /* later steps see the bytes spelled in GPT-2's alphabet */
    PRE_SPELL,     /* the words themselves become spelled in GPT-2's alphabet */
};

enum metaspace_scheme { METASPACE_NEVER, METASPACE_FIRST, METASPACE_ALWAYS };

struct pre_step {
    enum pre_kind kind;
    enum cut_behavior behavior;
    bool invert;
    struct regex *re;      /* PRE_REGEX */
    enum split_kind split; /* PRE_REGEX: the hand-written splitter, or SPLIT_NONE */
    uint32_t set;          /* PRE_CHARS: categories */
    bool ascii_punct;      /* PRE_CHARS: include all ASCII punctuation */
    uint32_t cp;           /* PRE_CHARS: include this character; UINT32_MAX = none */
    struct buf text;       /* PRE_METASPACE */
    enum metaspace_scheme scheme;
};

struct pretokenizer {
    struct pre_step *steps; /* (n) */
    int n;
    enum split_kind only; /* set if this split (and PRE_BYTES) is all: no word list */
};

struct pre_word {
    size_t at, len; /* into words.text */
    bool first;     /* starts at the start of the input */
    bool joined;    /* follows invalid UTF-8: nothing is prepended */
};

/* The words of one text and the work space of the steps; zero-initialise. */
struct pre_words {
    const char *text;
    struct pre_word *list; /* (n) */
    size_t n, cap;
    struct pre_word *next; /* (next_cap) the list being built */
    size_t n_next, next_cap;
    struct buf bufs[2];    /* text rewritten by a step */
    struct buf spelled;    /* one word in GPT-2's alphabet */
    struct budget *budget; /* or NULL */
};
void pre_words_clear(struct pre_words *w);

struct pre_step *pretokenizer_add(struct pretokenizer *pt, enum pre_kind kind);
void pretokenizer_finish(struct pretokenizer *pt); /* after the last step */
void pretokenizer_clear(struct pretokenizer *pt);

/* Cuts text into w. Steps may make it longer, up to norm_limit. `first` and `joined` apply to the
 * first word. */
bool pretokenizer_run(const struct pretokenizer *pt, struct pre_words *w, struct regex_scratch *re,
                      const char *text, size_t n, bool first, bool joined, struct error *err);

#endif
