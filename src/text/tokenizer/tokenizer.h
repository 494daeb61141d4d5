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

/* Opens the tokenizer of a .gguf file, a Hugging Face folder (weights not needed) or a
 * tokenizer.json. */
struct tokenizer *tokenizer_open(const char *path, struct error *err);
/* A file without a vocabulary ("no_vocab") is an error that says so. */
struct tokenizer *tokenizer_load(const struct tensorfile *f, struct error *err);
struct tokenizer *tokenizer_load_json(const char *tokenizer_json, size_t bytes, const char *name,
                                      const json_t *tokenizer_config, struct error *err);
void tokenizer_free(struct tokenizer *t);

int tokenizer_n_vocab(const struct tokenizer *t);
/* Ids of special tokens; -1 if the file declares none. */
int32_t tokenizer_bos(const struct tokenizer *t);
int32_t tokenizer_eos(const struct tokenizer *t);
/* True for tokens that end a generation: EOS, end-of-turn, and other ends the file declares. */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
enum token_kind tokenizer_kind(const struct tokenizer *t, int32_t id);
/* Id of the token with exactly this spelling (special or not), or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t len);
/* Fill-in-the-middle tokens. Optional ones are -1. */
struct fim_tokens {
    int32_t prefix, suffix;
    int32_t middle;          /* optional if suffix_first */
    int32_t pad, repo, file; /* optional: padding, repository name, start of a file */
    bool suffix_first;       /* the prompt is suffix, prefix; else prefix, suffix, middle */
    bool usable;
};
const struct fim_tokens *tokenizer_fim(const struct tokenizer *t); /* NULL: the model has none */
/* The token's spelling as bytes (not NUL-terminated). A special token's spelling is its name. */
const char *tokenizer_piece(const struct tokenizer *t, int32_t id, size_t *len);

enum {
    TOKENIZE_SPECIAL = 1, /* parse special tokens found in the text */
    TOKENIZE_BOS = 2,     /* add BOS/EOS as the file says, never twice */
};
/* Like tokenizer_encode_within with TOKENIZE_SPECIAL, for a prompt with literal bytes (literal.h). No special token is
 * matched across a literal byte, nor is another added token whose spelling occurs in `marks`, the chat template (NULL =
 * none): such tokens are marks of turns and calls, too. Its literal bytes are replaced: text is plain afterwards. */
bool tokenizer_encode_prompt(const struct tokenizer *t, char *text, size_t len, const char *marks,
                             struct budget *budget, struct token_list *out, struct error *err);
/* Appends ids to out. Any bytes are accepted; invalid UTF-8 is encoded byte by byte where possible.
 * Growth of the text by normalizers is bounded, and so is the work if there is a budget. */
bool tokenizer_encode_within(const struct tokenizer *t, const char *text, size_t len, int flags,
                             struct budget *budget, struct token_list *out, struct error *err);
bool tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                      struct token_list *out, struct error *err);
/* Appends the text of ids; skips control tokens unless `special`. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool special,
                      struct buf *out);

/* Streaming decoder: never emits part of a UTF-8 character. Zero-initialise; needs no cleanup. */
struct detok {
    char pending[8]; /* bytes of an incomplete character */
    int n_pending;
    bool started; /* SentencePiece drops the leading space of the first token. Set this to keep the
                   * space where the tokens continue a text. */
};
void detok_push(struct detok *d, const struct tokenizer *t, int32_t id, bool special,
                struct buf *out);
void detok_flush(struct detok *d, struct buf *out); /* emits U+FFFD for a cut character */

#endif
