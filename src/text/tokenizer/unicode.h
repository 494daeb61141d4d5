/*
 * Code points: UTF-8 decoding and encoding, general categories, normal forms (UAX #15) and lower
 * case. Categories come from PCRE2's tables, normal forms and case from utf8proc. Tables are filled
 * lazily, 256 code points at a time, so start-up builds nothing. Safe from any thread.
 */
#ifndef STEEL_TEXT_UNICODE_H
#define STEEL_TEXT_UNICODE_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* General categories, plus UC_SPACE_CTRL for the controls that are White_Space (TAB..CR, NEL). */
enum unicode_category {
    UC_CN,
    UC_LU,
    UC_LL,
    UC_LT,
    UC_LM,
    UC_LO,
    UC_MN,
    UC_MC,
    UC_ME,
    UC_ND,
    UC_NL,
    UC_NO,
    UC_PC,
    UC_PD,
    UC_PS,
    UC_PE,
    UC_PI,
    UC_PF,
    UC_PO,
    UC_SM,
    UC_SC,
    UC_SK,
    UC_SO,
    UC_ZS,
    UC_ZL,
    UC_ZP,
    UC_CC,
    UC_CF,
    UC_CS,
    UC_CO,
    UC_SPACE_CTRL,
    UC_COUNT
};

/* Sets of categories, for unicode_is(cp, set). */
#define UC_SET(c) (1u << (c))
enum {
    UC_LETTER = UC_SET(UC_LU) | UC_SET(UC_LL) | UC_SET(UC_LT) | UC_SET(UC_LM) | UC_SET(UC_LO),
    UC_MARK = UC_SET(UC_MN) | UC_SET(UC_MC) | UC_SET(UC_ME),
    UC_NUMBER = UC_SET(UC_ND) | UC_SET(UC_NL) | UC_SET(UC_NO),
    UC_PUNCT = UC_SET(UC_PC) | UC_SET(UC_PD) | UC_SET(UC_PS) | UC_SET(UC_PE) | UC_SET(UC_PI) |
               UC_SET(UC_PF) | UC_SET(UC_PO),
    UC_SYMBOL = UC_SET(UC_SM) | UC_SET(UC_SC) | UC_SET(UC_SK) | UC_SET(UC_SO),
    UC_SPACE = UC_SET(UC_ZS) | UC_SET(UC_ZL) | UC_SET(UC_ZP) | UC_SET(UC_SPACE_CTRL),
    /* assigned "other": control, format, surrogate, private use */
    UC_OTHER =
        UC_SET(UC_CC) | UC_SET(UC_CF) | UC_SET(UC_CS) | UC_SET(UC_CO) | UC_SET(UC_SPACE_CTRL),
    /* \w of Unicode regular expressions */
    UC_WORD = UC_LETTER | UC_MARK | UC_SET(UC_ND) | UC_SET(UC_PC),
};

extern const uint8_t unicode_ascii[128]; /* category of each ASCII character */

const uint8_t *unicode_page(uint32_t page); /* (256) categories from page << 8 */

static inline unsigned unicode_category(uint32_t cp)
{
    if (cp < 128)
        return unicode_ascii[cp];
    return cp < 0x110000 ? unicode_page(cp >> 8)[cp & 255] : UC_CN;
}

static inline bool unicode_is(uint32_t cp, uint32_t set)
{
    return set >> unicode_category(cp) & 1;
}

/* Decodes one character of at most n bytes. Returns its length, or 0 for invalid UTF-8. */
int utf8_decode(const char *p, size_t n, uint32_t *cp);
/* Like utf8_decode, for text known to be valid. */
static inline int utf8_next(const char *s, uint32_t *cp)
{
    const unsigned char *p = (const unsigned char *)s;
    if (p[0] < 0x80) {
        *cp = p[0];
        return 1;
    }
    if (p[0] < 0xe0) {
        *cp = (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
        return 2;
    }
    if (p[0] < 0xf0) {
        *cp = (p[0] & 0xfu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        return 3;
    }
    *cp = (p[0] & 7u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
    return 4;
}
/* Start of the character before s (valid text, s not at its start). */
static inline const char *utf8_prev(const char *s)
{
    do
        s--;
    while (((unsigned char)*s & 0xc0) == 0x80);
    return s;
}
/* Length of the character that starts with this lead byte (valid text). */
static inline int utf8_len(char c)
{
    unsigned char b = (unsigned char)c;
    return b < 0x80 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : 4;
}
int utf8_encode(uint32_t cp, char out[4]); /* returns the number of bytes */
/* Length of the longest valid prefix of p. */
size_t utf8_valid(const char *p, size_t n);

/* Appends the lower case of cp (U+0130 gives two code points, everything else one). */
void unicode_add_lower(uint32_t cp, struct buf *out);

enum normal_form { NORMAL_NFC, NORMAL_NFD, NORMAL_NFKC, NORMAL_NFKD };
/* True if the text is certainly in this form. A quick check: false negatives are possible. */
bool unicode_is_normal(enum normal_form form, const char *p, size_t n);
/* Appends the normal form of valid UTF-8. Takes O(n log n) for any text. */
void unicode_normalize(enum normal_form form, const char *p, size_t n, struct buf *out);

#endif
