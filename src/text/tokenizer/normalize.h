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
    NORM_FORM,          /* NFC, NFD, NFKC or NFKD */
    NORM_LOWER,         /* lower case */
    NORM_STRIP_ACCENTS, /* remove combining marks */
    NORM_REPLACE,       /* replace matches of re, or of the literal text, with `with` */
    NORM_PREPEND,       /* prepend text unless the input is empty */
    NORM_STRIP,         /* trim white space at the ends */
    NORM_BERT,          /* BERT's clean-up */
    NORM_BYTELEVEL,     /* spell bytes in GPT-2's alphabet */
    NORM_CHARSMAP,      /* SentencePiece's compiled table */
    NORM_SQUEEZE,       /* SentencePiece: no leading, trailing or repeated spaces */
};

struct norm_step {
    enum norm_kind kind;
    enum normal_form form;
    struct regex *re;                    /* NORM_REPLACE, or NULL for a literal */
    struct buf text, with;               /* pattern or prefix; replacement */
    bool left, right;                    /* NORM_STRIP */
    bool clean, chinese, accents, lower; /* NORM_BERT */
    uint32_t *units;                     /* (n_units) NORM_CHARSMAP: double-array trie */
    size_t n_units;                      /* replacements are in `text`, each NUL-terminated */
};

struct normalizer {
    struct norm_step *steps; /* (n) */
    int n;
};

/* Steps may make a text longer, up to norm_limit. */
enum { NORM_GROWTH = 16, NORM_EXTRA = 1 << 20 };
#define NORM_MAX_BYTES ((size_t)512 << 20)

/* Work space of one thread; zero-initialise. */
struct norm_scratch {
    struct buf bufs[2];
    struct budget *budget; /* or NULL */
};
/* Upper limit on the normalised size of n bytes: 16n + 1 MB, at most 512 MB. Above 128 MB the limit
 * is 4n. */
static inline size_t norm_limit(size_t n)
{
    size_t most = n < NORM_MAX_BYTES / 4 ? NORM_MAX_BYTES : n * 4;
    return n < NORM_MAX_BYTES / NORM_GROWTH && n * NORM_GROWTH + NORM_EXTRA < most
               ? n * NORM_GROWTH + NORM_EXTRA
               : most;
}
void norm_scratch_clear(struct norm_scratch *s);

struct norm_step *normalizer_add(struct normalizer *nz, enum norm_kind kind);
void normalizer_clear(struct normalizer *nz);
/* Loads SentencePiece's precompiled_charsmap (raw bytes) into `step`. */
bool charsmap_load(struct norm_step *step, const uint8_t *data, size_t n, struct error *err);

/*
 * Normalises text into *out, *n_out. The output is `text` itself if nothing changes, else memory of
 * the scratch that is valid until the next call. `joined` means that invalid UTF-8 precedes the
 * text, so no prefix is added. A text that would exceed norm_limit is an error, reported before
 * memory is allocated.
 */
bool normalizer_run(const struct normalizer *nz, struct norm_scratch *s, struct regex_scratch *re,
                    const char *text, size_t n, bool joined, const char **out, size_t *n_out,
                    struct error *err);

#endif
