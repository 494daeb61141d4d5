/*
 * Inside a tokenizer: the pipeline that both file formats are loaded into.
 *
 *   text -> added tokens cut out -> normalizer -> pre-tokenizer -> model (BPE, unigram, WordPiece)
 *        -> ids, with the post-processor's tokens before and after
 *
 * tokenizer_json.c and tokenizer_gguf.c build it, tokenizer.c runs it. No other file includes this.
 */
#ifndef STEEL_TEXT_TOKENIZER_IMPL_H
#define STEEL_TEXT_TOKENIZER_IMPL_H

#include "text/tokenizer/bpe.h"
#include "text/tokenizer/normalize.h"
#include "text/tokenizer/pretokenize.h"
#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/trie.h"
#include "text/tokenizer/unigram.h"
#include "text/tokenizer/vocab.h"
#include "text/tokenizer/wordpiece.h"

enum model_kind { MODEL_BPE, MODEL_UNIGRAM, MODEL_WORDPIECE };

/* A token that is matched in the text before the model runs. */
struct added_token {
    int32_t id;
    bool special;        /* matched only if the caller allows special tokens */
    bool lstrip, rstrip; /* also removes the white space on that side */
    bool single_word;    /* not matched inside a word */
    bool normalized;     /* matched after normalisation */
    char *text;          /* (len) */
    size_t len;
};

/* Steps applied to each token's spelling at load time; the results are the vocabulary's pieces. */
enum decode_kind {
    DECODE_REPLACE,   /* replace every `text` with `with` */
    DECODE_BYTELEVEL, /* undo GPT-2's alphabet */
    DECODE_BYTES,     /* <0xXX> becomes a byte */
    DECODE_STRIP,     /* remove up to n copies of `text` at the start of each token, m at its end */
    DECODE_WORDPIECE, /* prepend a space, except to continuations (`text`) */
};
struct decode_step {
    enum decode_kind kind;
    struct buf text, with;
    int n, m;
    bool cleanup; /* DECODE_WORDPIECE */
};

/* One token as a file spells it. */
struct raw_token {
    const char *text; /* (len), NULL for a gap in the numbering */
    uint32_t len;
    uint8_t kind; /* enum token_kind */
    uint8_t flag; /* VOCAB_* */
    float score;
};

struct tokenizer {
    struct vocab vocab;
    enum model_kind model;
    struct bpe bpe;
    struct unigram unigram;
    struct wordpiece wordpiece;
    struct normalizer normalizer;
    struct pretokenizer pretokenizer;
    struct added_token *added; /* (n_added) */
    size_t n_added;
    struct trie trie_raw, trie_normalized; /* into added, by spelling */
    struct decode_step *decode;            /* (n_decode) */
    int n_decode;
    int strip_start;                 /* spaces to drop at the start of a text */
    struct token_list before, after; /* ids added before and after a text (BOS, EOS) */
    int32_t bos, eos, unk;           /* or -1 */
    struct fim_tokens fim;
    bool add_bos, add_eos, add_sep; /* a GGUF file's settings for `before` and `after` */
};

struct tokenizer *tokenizer_new(void);
struct decode_step *tokenizer_add_decode(struct tokenizer *t, enum decode_kind kind);

/*
 * Fills the vocabulary from raw (n) and indexes it. Decode steps and bpe.byte_level (the spelling
 * of keys) must be set. `field` names the list in messages.
 */
bool tokenizer_set_vocab(struct tokenizer *t, const struct raw_token *raw, size_t n,
                         const char *field, struct error *err);
/* Adds a token; empty text is ignored. Call tokenizer_finish after the last one. */
bool tokenizer_add_token(struct tokenizer *t, struct added_token a, const char *text, size_t len,
                         struct error *err);
/* Builds the tries and marks end-of-generation tokens known by name. */
bool tokenizer_finish(struct tokenizer *t, struct error *err);

/* fim.c: completes the declared fill-in-the-middle tokens by name, and marks those that end an output. */
void tokenizer_find_fim(struct tokenizer *t);

/* Marks an id as an end of generation; ids out of range are ignored. */
void tokenizer_mark_end(struct tokenizer *t, int64_t id);

/* Adds the pre-tokenizer of a GGUF name. False with a message if the name is not known. */
bool pretokenizer_named(struct tokenizer *t, const char *name, struct error *err);
/* Row i of the known names, separated by spaces. NULL after the last (for tests). */
const char *pretokenizer_name_at(size_t i);

/* From a parsed tokenizer.json; the other documents may be NULL. */
struct tokenizer *tokenizer_from_json(const json_t *root, const char *name, const json_t *config,
                                      const json_t *generation, const json_t *model,
                                      struct error *err);
struct tokenizer *tokenizer_from_gguf(const struct tensorfile *f, struct error *err);

#endif
