/* WordPiece: the longest token at the start of a word, then the longest continuations. */
#ifndef STEEL_TEXT_WORDPIECE_H
#define STEEL_TEXT_WORDPIECE_H

#include "text/tokenizer/tokenizer.h"
#include "text/tokenizer/vocab.h"

struct wordpiece {
    const struct vocab *vocab;
    struct buf prefix; /* of a continuation, "##" */
    size_t max_chars;  /* longer words become one unknown token */
    int32_t unk;       /* or -1 */
};

void wordpiece_clear(struct wordpiece *w);
/* Returns false if the budget (may be NULL) runs out. */
bool wordpiece_encode(const struct wordpiece *w, struct buf *scratch, const char *word, size_t n,
                      struct budget *budget, struct token_list *out);

#endif
