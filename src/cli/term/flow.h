/*
 * Words into lines: characters with a style come in, lines no wider than asked for come out. Breaks at
 * blanks and beside wide characters; a word that is longer than a line is cut. Widths are those of
 * terminals: 2 for East Asian wide characters, 0 for combining ones.
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
};

struct flow {
    struct buf *out;
    int width;         /* columns of a line */
    bool styles;       /* else styles are not written */
    struct buf prefix; /* of lines that go on; may hold escape sequences */
    int prefix_width;
    int column; /* of the cursor */
    struct buf word;
    int word_width, spaces;
    unsigned word_style; /* at the end of the word */
    unsigned shown;      /* of what was written */
    bool word_ends;      /* the word's last character allows a break behind it */
    bool joined;         /* the next character belongs to the last */
};

void flow_clear(struct flow *f);
int flow_char_width(uint32_t c);
/* Adds a character; one that controls terminals is shown, not sent. */
void flow_char(struct flow *f, uint32_t c, unsigned style);
void flow_text(struct flow *f, const char *text, unsigned style); /* UTF-8 */
void flow_word(struct flow *f);                                   /* lets the held word go */
void flow_style(struct flow *f, unsigned style); /* what follows outside of words is so */
/* Ends the line: styles off, a newline. */
void flow_newline(struct flow *f);
/* The next character of UTF-8 text: bytes taken, 0 where it is cut off; a wrong byte is U+FFFD. */
size_t flow_decode(const char *p, size_t n, uint32_t *c);
void flow_encode(struct buf *out, uint32_t c);

#endif
