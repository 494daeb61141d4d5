/*
 * Colours for code in a terminal: comments, strings, numbers and keywords of common languages. The
 * code streams: only an unfinished word or mark is held back, and nothing is drawn twice. The
 * languages are a table in highlight.c. Knows styles, not escape sequences.
 */
#ifndef STEEL_CLI_HIGHLIGHT_H
#define STEEL_CLI_HIGHLIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum highlight_kind {
    HIGHLIGHT_PLAIN,
    HIGHLIGHT_COMMENT,
    HIGHLIGHT_STRING,
    HIGHLIGHT_NUMBER,
    HIGHLIGHT_KEYWORD
};

enum { HIGHLIGHT_HELD = 40 };

struct highlight_language;

struct highlight {
    const struct highlight_language *language; /* NULL: the language is unknown */
    /* inside a comment or a string */
    const char *closer; /* NULL = in code; "\n" = until the end of the line */
    enum highlight_kind inside;
    bool spans_lines, escaped;
    size_t matched;                /* characters of closer that the text ends with */
    uint32_t held[HIGHLIGHT_HELD]; /* (n_held) an unfinished word or mark */
    int n_held;
    uint32_t before; /* the character before the held ones; 0 at the start of a line */
    /* receives every character once, in order */
    void (*write)(void *arg, uint32_t c, enum highlight_kind kind);
    void *arg;
};

/* Begins code in a language named as in a Markdown fence ("c++", "python"). False: unknown. */
bool highlight_begin(struct highlight *h, const char *name, size_t n);
void highlight_char(struct highlight *h, uint32_t c); /* any character but a newline */
/* Writes the held characters and ends the line. */
void highlight_newline(struct highlight *h);

#endif
