/*
 * Inside a tokenizer: the pipeline that both kinds of files are turned into.
 *
 *   text -> added tokens cut out -> normalizer -> pre-tokenizer -> model (BPE, unigram, WordPiece)
 *        -> ids, with what the post-processor puts around them
 *
 * tokenizer_json.c and tokenizer_gguf.c fill it in, tokenizer.c runs it. Nobody else includes this.
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

/* A token that is found in the text before the model runs. */
struct added {
    int32_t id;
    bool special;        /* only found when the caller asks for special tokens */
    bool lstrip, rstrip; /* takes the white space around it along */
    bool single_word;    /* not inside a word */
    bool normalized;     /* looked for after normalisation */
    char *text;          /* (len) */
    size_t len;
};

/* What decoding does to each token's spelling; the results are the vocabulary's pieces. */
enum decode_kind {
    DECODE_REPLACE,   /* every `text` by `with` */
    DECODE_BYTELEVEL, /* GPT-2's alphabet undone */
    DECODE_BYTES,     /* <0xXX> is a byte */
    DECODE_STRIP,     /* up to n times `text` off the start of each token, m off its end */
    DECODE_WORDPIECE, /* a space before all but continuations (`text`) */
};
struct decode_step {
    enum decode_kind kind;
    struct buf text, with;
    int n, m;
    bool cleanup; /* DECODE_WORDPIECE */
};

/* One token as a file gives it. */
struct raw_token {
    const char *text; /* (len), NULL for a hole in the numbering */
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
    struct added *added; /* (n_added) */
    size_t n_added;
    struct trie trie_raw, trie_normalized; /* into added, by spelling */
    struct decode_step *decode;            /* (n_decode) */
    int n_decode;
    int strip_start;                 /* spaces to drop at the very start of a text */
    struct token_list before, after; /* what goes around a text (BOS, EOS) */
    int32_t bos, eos, unk;           /* or -1 */
    bool add_bos, add_eos, add_sep;  /* what a GGUF file wants around a text */
};

struct tokenizer *tokenizer_new(void);
struct decode_step *tokenizer_add_decode(struct tokenizer *t, enum decode_kind kind);

/*
 * Fills the vocabulary from raw (n) and indexes it. The decode steps are there already, and so is
 * bpe.byte_level, which says how keys are spelled. `field` names the list in messages.
 */
bool tokenizer_set_vocab(struct tokenizer *t, const struct raw_token *raw, size_t n,
                         const char *field, struct error *err);
/* Adds one; content that is there already is ignored. Call tokenizer_finish after the last. */
bool tokenizer_add_token(struct tokenizer *t, struct added a, const char *text, size_t len,
                         struct error *err);
/* The tries, the ends of generation known by name, and what depends on all of the above. */
bool tokenizer_finish(struct tokenizer *t, struct error *err);

/* Marks an id as an end of generation (out of range: ignored). */
void tokenizer_mark_end(struct tokenizer *t, int64_t id);

/* The pre-tokenizer a GGUF file names; false with a message when it is not known. */
bool pretokenizer_named(struct tokenizer *t, const char *name, struct error *err);
/* Row i of the known names, separated by spaces; NULL at the end (for tests). */
const char *pretokenizer_name_at(size_t i);

/* tokenizer.json already read; the other documents may be NULL. */
struct tokenizer *tokenizer_from_json(const json_t *root, const char *name, const json_t *config,
                                      const json_t *generation, const json_t *model,
                                      struct error *err);
struct tokenizer *tokenizer_from_gguf(const struct tensorfile *f, struct error *err);

#endif
