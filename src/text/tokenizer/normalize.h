/*
 * The normalizer of a tokenizer: an ordered list of steps that rewrite the text before it is split.
 * Works on valid UTF-8. Immutable once built.
 */
#ifndef STEEL_TEXT_NORMALIZE_H
#define STEEL_TEXT_NORMALIZE_H

#include "base/buf.h"
#include "base/error.h"
#include "text/tokenizer/regex.h"
#include "text/tokenizer/unicode.h"

enum norm_kind {
    NORM_FORM,          /* NFC and its like */
    NORM_LOWER,         /* lower case */
    NORM_STRIP_ACCENTS, /* drop marks */
    NORM_REPLACE,       /* every match of re, or of the literal text, by `with` */
    NORM_PREPEND,       /* text in front of anything not empty */
    NORM_STRIP,         /* white space off the ends */
    NORM_BERT,          /* BERT's cleaning */
    NORM_BYTELEVEL,     /* the bytes spelled in GPT-2's alphabet */
    NORM_CHARSMAP,      /* SentencePiece's compiled table */
    NORM_SQUEEZE,       /* SentencePiece: no leading, trailing or repeated spaces */
};

struct norm_step {
    enum norm_kind kind;
    enum normal_form form;
    struct regex *re;                    /* NORM_REPLACE, or NULL for a literal */
    struct buf text, with;               /* what to find or prepend; what to put instead */
    bool left, right;                    /* NORM_STRIP */
    bool clean, chinese, accents, lower; /* NORM_BERT */
    uint32_t *units;                     /* (n_units) NORM_CHARSMAP: double-array trie */
    size_t n_units;                      /* its replacements, NUL-terminated each, are in `text` */
};

struct normalizer {
    struct norm_step *steps; /* (n) */
    int n;
};

/* Steps may make a text longer, but not without end. */
enum { NORM_GROWTH = 16, NORM_EXTRA = 1 << 20 };
#define NORM_MOST ((size_t)512 << 20)

/* Work space of one thread; zero-initialise. */
struct norm_scratch {
    struct buf bufs[2];
    struct budget *budget; /* or NULL */
};
/* The most bytes that n of a text may become: 16 times and a little, with an end at 512 MB, or four
 * times a text that is longer than a quarter of that. */
static inline size_t norm_limit(size_t n)
{
    size_t most = n < NORM_MOST / 4 ? NORM_MOST : n * 4;
    return n < NORM_MOST / NORM_GROWTH && n * NORM_GROWTH + NORM_EXTRA < most
               ? n * NORM_GROWTH + NORM_EXTRA
               : most;
}
void norm_scratch_clear(struct norm_scratch *s);

struct norm_step *normalizer_add(struct normalizer *nz, enum norm_kind kind);
void normalizer_clear(struct normalizer *nz);
/* SentencePiece's precompiled_charsmap as bytes into `step`. */
bool charsmap_load(struct norm_step *step, const uint8_t *data, size_t n, struct error *err);

/*
 * *out, *n_out become the normalised text: `text` itself where nothing changes, else memory of the
 * scratch that lives until the next call. `joined`: the text goes on after bytes that are no UTF-8,
 * so nothing is put in front of it. A text that the steps would make longer than norm_limit is an
 * error, before it is made.
 */
bool normalizer_run(const struct normalizer *nz, struct norm_scratch *s, struct regex_scratch *re,
                    const char *text, size_t n, bool joined, const char **out, size_t *n_out,
                    struct error *err);

#endif
