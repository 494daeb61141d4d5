/* A table of markdown: its rows as they come in, then all of it within the width of a screen. */
#ifndef STEEL_CLI_TABLE_H
#define STEEL_CLI_TABLE_H

#include "cli/term/flow.h"

struct table_row {
    char *text; /* owned */
    size_t n;
};
struct table {
    struct table_row *rows; /* (n) */
    int n, cap;
};

struct table_look {
    int width;
    bool styles, unicode;
    /* Puts a cell's text into the flow, which is as wide as its column; `style` is added to its own. */
    void (*draw)(void *arg, struct flow *f, const char *text, size_t n, unsigned style);
    void *arg;
};

/* Adds a row, "| a | b |"; false: the table is as large as it may be. */
bool table_add(struct table *t, const char *line, size_t n);
/* Without a newline at the end. Rows without a line of dashes below the first are no table: they come
 * out as they are. */
void table_draw(const struct table *t, const struct table_look *look, struct buf *out);
void table_clear(struct table *t);

#endif
