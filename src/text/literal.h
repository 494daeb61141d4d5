/*
 * Literal bytes: how text that came from data is kept apart from text of a chat template until the prompt is tokenised.
 * A template writes control tokens (<|im_end|>, [INST]) as text. The same text in a message must stay text. So the
 * five characters that such tokens begin and end with are replaced in all data, before the template is rendered, by
 * bytes that UTF-8 never uses. Templates see no difference: the Jinja engine compares, searches and classifies a
 * literal byte as the character it stands for. The tokenizer matches no control token across a literal byte, and
 * encodes the character.
 */
#ifndef STEEL_TEXT_LITERAL_H
#define STEEL_TEXT_LITERAL_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define LITERAL_CHARS "<>[]|"
enum { LITERAL_FIRST = 0xf8, LITERAL_N = sizeof LITERAL_CHARS - 1 };

static inline bool literal_is(unsigned char c)
{
    return c >= LITERAL_FIRST && c < LITERAL_FIRST + LITERAL_N;
}

/* The character that a byte stands for. */
static inline unsigned char literal_plain(unsigned char c)
{
    return literal_is(c) ? (unsigned char)LITERAL_CHARS[c - LITERAL_FIRST] : c;
}

static inline bool literal_needed(const char *s, size_t n)
{
    bool any = false;
    for (size_t i = 0; i < n && !any; i++)
        any = s[i] && strchr(LITERAL_CHARS, s[i]);
    return any;
}

/* Replaces the characters in s by literal bytes. */
static inline void literal_mark(char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const char *at = s[i] ? strchr(LITERAL_CHARS, s[i]) : NULL;
        if (at)
            s[i] = (char)(LITERAL_FIRST + (at - LITERAL_CHARS));
    }
}

/* The reverse. Returns whether there was any. */
static inline bool literal_unmark(char *s, size_t n)
{
    bool any = false;
    for (size_t i = 0; i < n; i++)
        if (literal_is((unsigned char)s[i])) {
            s[i] = (char)literal_plain((unsigned char)s[i]);
            any = true;
        }
    return any;
}

#endif
