/* WordPiece by greedy longest match; a word that cannot be covered becomes one unknown token. */
#include "text/tokenizer/wordpiece.h"
#include "text/tokenizer/unicode.h"

void wordpiece_clear(struct wordpiece *w)
{
    buf_clear(&w->prefix);
    *w = (struct wordpiece){0};
}

bool wordpiece_encode(const struct wordpiece *w, struct buf *scratch, const char *word, size_t n,
                      struct budget *budget, struct token_list *out)
{
    size_t before = out->n, chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)word[i] & 0xc0) != 0x80;
    bool known = chars <= w->max_chars;
    /* prefix + word, built once */
    buf_reset(scratch);
    buf_add(scratch, w->prefix.p, w->prefix.len);
    buf_add(scratch, word, n);
    for (size_t at = 0; known && at < n;) {
        size_t skip = at ? w->prefix.len : 0;
        size_t room = w->vocab->max_key > skip ? w->vocab->max_key - skip : 0;
        size_t end = n - at < room ? n : at + room;
        int32_t id = -1;
        if (at) /* move the prefix to just before the rest; the bytes it overwrites are consumed */
            for (size_t k = 0; k < skip; k++)
                scratch->p[at + k] = w->prefix.p[k];
        for (; end > at; end--) {
            if (end < n && ((unsigned char)word[end] & 0xc0) == 0x80)
                continue;
            if (!budget_spend(budget, (end - at) / 16)) /* each look-up reads the whole piece */
                return false;
            if (at)
                id = vocab_find(w->vocab, scratch->p + at, skip + end - at);
            else
                id = vocab_find(w->vocab, word, end);
            if (id >= 0 && w->vocab->kind[id] != TOKEN_CONTROL)
                break;
            id = -1;
        }
        known = id >= 0;
        if (known)
            token_list_add(out, id);
        at = end;
    }
    if (known)
        return true;
    out->n = before;
    if (w->unk >= 0)
        token_list_add(out, w->unk);
    return true;
}
