/*
 * Streaming markdown for terminals. Text arrives in pieces as a model generates it and is written
 * word by word, wrapped to the screen, with bold, italics, links, lists, quotes, tables, and framed
 * code with coloured words.
 * The output does not depend on how the text is cut into pieces. Control characters in the text
 * never reach the terminal. Pending output (a word, the start of a line, the rows of a table) is
 * owned here. Does not access the terminal: the caller gives the width and receives the bytes.
 */
#ifndef STEEL_CLI_MARKDOWN_H
#define STEEL_CLI_MARKDOWN_H

#include <stdbool.h>
#include <stddef.h>

struct markdown;

struct markdown_options {
    int columns;  /* width of the screen; lines have at most one column less */
    bool styles;  /* use escape sequences; otherwise marks of emphasis are printed */
    bool unicode; /* draw with box characters, not - and | */
    bool plain;   /* no markdown, only word wrapping */
    bool links;   /* with styles: the terminal takes hyperlinks (OSC 8) */
    bool dim;     /* dim style for everything */
    void (*write)(void *arg, const char *p, size_t n);
    void *arg;
};

struct markdown *markdown_new(const struct markdown_options *opt);
void markdown_free(struct markdown *m);
void markdown_columns(struct markdown *m, int columns); /* new width of the screen */
void markdown_feed(struct markdown *m, const char *text, size_t n);
/* Writes pending output and closes open elements. Trailing newlines are left to the caller. The
 * next piece starts a new text. */
void markdown_end(struct markdown *m);

/* Prints one wrapped text: the first line starts with `first`, the others with `hang` blanks.
 * Ends in a newline. */
void markdown_wrap(const struct markdown_options *opt, const char *first, int hang,
                   const char *text);
/* The width of a text in terminal columns. */
int markdown_width(const char *text, size_t n);

#endif
