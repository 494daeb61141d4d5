/*
 * Word wrapping: styled characters in, lines of at most `width` columns out. Breaks at blanks and
 * next to wide characters; a word longer than a line is cut. Widths are a terminal's: 2 for East
 * Asian wide characters, 0 for combining ones.
 */
#ifndef STEEL_CLI_FLOW_H
#define STEEL_CLI_FLOW_H

#include "base/buf.h"

#include <stdbool.h>
#include <stdint.h>

enum flow_style {
    FLOW_BOLD = 1,
    FLOW_DIM = 2,
    FLOW_ITALIC = 4,
    FLOW_STRIKE = 8,
    FLOW_CODE = 16,
    FLOW_LINK = 32, /* underlined; leads to the link of flow_link */
    FLOW_KEYWORD = 64,
    FLOW_STRING = 128,
    FLOW_NUMBER = 256,
};

struct flow {
    struct buf *out;
    int width;         /* columns per line */
    bool styles;       /* write styles */
    bool links;        /* the terminal takes hyperlinks (OSC 8) */
    struct buf link;   /* where FLOW_LINK leads to; empty = nowhere */
    struct buf prefix; /* start of continuation lines; may contain escape sequences */
    int prefix_width;
    int column; /* the cursor's column */
    struct buf word;
    int word_width, spaces;
    unsigned word_style; /* style at the end of the word */
    unsigned shown;      /* style written last */
    bool word_ends;      /* a break is allowed after the word's last character */
    bool joined;         /* the next character joins the last one */
};

void flow_clear(struct flow *f);
int flow_char_width(uint32_t c);
/* Adds a character. Control characters are shown as ^X, not sent. */
void flow_char(struct flow *f, uint32_t c, unsigned style);
void flow_text(struct flow *f, const char *text, unsigned style); /* UTF-8 */
void flow_word(struct flow *f);                                   /* writes the pending word */
/* From now on FLOW_LINK leads to this address. It must be of printable ASCII characters. */
void flow_link(struct flow *f, const char *url);
void flow_style(struct flow *f, unsigned style); /* sets the style outside of words */
/* Ends the line: resets the style and writes a newline. */
void flow_newline(struct flow *f);
/* Decodes the next character of UTF-8 text. Returns the bytes used, 0 if it is incomplete. An
 * invalid byte gives U+FFFD. */
size_t flow_decode(const char *p, size_t n, uint32_t *c);
void flow_encode(struct buf *out, uint32_t c);

#endif
