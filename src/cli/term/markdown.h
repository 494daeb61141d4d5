/*
 * Markdown on its way to a terminal: text comes in pieces as a model writes it, goes out word by word,
 * wrapped to the screen, with bold, italics, code in a frame, lists, quotes and tables. However the text
 * is cut into pieces, what comes out is the same. Nothing of the text reaches the terminal as a
 * control character. Owns what is held back: a word, the beginning of a line, the rows of a table.
 * Knows nothing of terminals: the caller says how wide they are and takes the bytes.
 */
#ifndef STEEL_CLI_MARKDOWN_H
#define STEEL_CLI_MARKDOWN_H

#include <stdbool.h>
#include <stddef.h>

struct markdown;

struct markdown_options {
    int columns;  /* of the screen; lines are at most one shorter */
    bool styles;  /* escape sequences; without them marks of emphasis stay as they are */
    bool unicode; /* lines are drawn with box characters, not with - and | */
    bool plain;   /* no markdown: words are wrapped, that is all */
    bool dim;     /* all of it */
    void (*write)(void *arg, const char *p, size_t n);
    void *arg;
};

struct markdown *markdown_new(const struct markdown_options *opt);
void markdown_free(struct markdown *m);
void markdown_columns(struct markdown *m, int columns); /* the screen has changed */
void markdown_feed(struct markdown *m, const char *text, size_t n);
/* Lets go what is held back and closes what is open. Newlines at the end are left to the caller. The
 * next piece begins a new text. */
void markdown_end(struct markdown *m);

/* One text, wrapped: the first line begins with `first`, the others with `hang` blanks. Ends in a
 * newline. */
void markdown_wrap(const struct markdown_options *opt, const char *first, int hang,
                   const char *text);
/* Columns that a text takes on a terminal. */
int markdown_width(const char *text, size_t n);

#endif
