/*
 * Text to token ids and back, from GGUF metadata or a Hugging Face tokenizer.json: byte-level BPE,
 * SentencePiece (unigram-score BPE with byte fallback) and WordPiece. Immutable once loaded: any
 * number of threads may encode and decode at the same time.
 */
#ifndef STEEL_TEXT_TOKENIZER_H
#define STEEL_TEXT_TOKENIZER_H

#include "base/buf.h"
#include "base/error.h"
#include "base/budget.h"
#include "file/tensorfile.h"

#include <stdint.h>

struct tokenizer;

enum token_kind {
    TOKEN_NORMAL,
    TOKEN_UNKNOWN,
    TOKEN_CONTROL,
    TOKEN_USER,
    TOKEN_UNUSED,
    TOKEN_BYTE
};

struct token_list {
    int32_t *ids; /* (n) */
    size_t n, cap;
};
void token_list_add(struct token_list *l, int32_t id);
void token_list_clear(struct token_list *l);

/* From a model on disk: a .gguf, a Hugging Face folder (weights not needed) or a tokenizer.json. */
struct tokenizer *tokenizer_open(const char *path, struct error *err);
/* A file without a vocabulary ("no_vocab") gives an error that says so. */
struct tokenizer *tokenizer_load(const struct tensorfile *f, struct error *err);
struct tokenizer *tokenizer_load_json(const char *tokenizer_json, size_t bytes, const char *name,
                                      const json_t *tokenizer_config, struct error *err);
void tokenizer_free(struct tokenizer *t);

int tokenizer_n_vocab(const struct tokenizer *t);
/* Special ids; -1 where the file names none. */
int32_t tokenizer_bos(const struct tokenizer *t);
int32_t tokenizer_eos(const struct tokenizer *t);
/* Ends a generation: EOS, end-of-turn, and the other ends the file declares. */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
enum token_kind tokenizer_kind(const struct tokenizer *t, int32_t id);
/* Id of the token spelled exactly so (special or not), or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len);
/* The token's spelling as bytes (not NUL-terminated); special tokens spell their own name. */
const char *tokenizer_piece(const struct tokenizer *t, int32_t id, size_t *len);

enum {
    TOKENIZE_SPECIAL = 1, /* parse special tokens found in the text */
    TOKENIZE_BOS = 2,     /* add BOS/EOS the way the file says (never doubled) */
};
/* Appends to out. Any bytes are accepted: invalid UTF-8 is encoded byte by byte where possible. What
 * the file makes of the text (normalizers that multiply it) is bounded; so is the work where there is
 * a budget. */
bool tokenizer_encode_within(const struct tokenizer *t, const char *text, size_t len, int flags,
                             struct budget *budget, struct token_list *out, struct error *err);
bool tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                      struct token_list *out, struct error *err);
/* Appends the text of ids; skips control tokens unless `special`. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool special,
                      struct buf *out);

/* Streaming decoder: never emits half a UTF-8 character. Zero-initialise, no cleanup needed. */
struct detok {
    char pending[8]; /* bytes of an unfinished character */
    int n_pending;
    bool started; /* SentencePiece drops the leading space of a text's first token; set it to
                        keep that space where the tokens continue a text */
};
void detok_push(struct detok *d, const struct tokenizer *t, int32_t id, bool special,
                struct buf *out);
void detok_flush(struct detok *d, struct buf *out); /* emits U+FFFD for a cut character */

#endif
