/* Markdown tables: collects the rows, then draws the table within the screen's width. */
#ifndef STEEL_CLI_TABLE_H
#define STEEL_CLI_TABLE_H

#include "cli/term/flow.h"

struct table_row {
    char *text; /* owned */
    size_t n;
};
struct markdown_table {
    struct table_row *rows; /* (n) */
    int n, cap;
};

struct table_look {
    int width;
    bool styles, links, unicode;
    /* Writes a cell's text to the flow, whose width is the column's. `style` is added to the
     * text's own. */
    void (*draw)(void *arg, struct flow *f, const char *text, size_t n, unsigned style);
    void *arg;
};

/* Adds a row, "| a | b |". False if the table has reached its maximal size. */
bool table_add(struct markdown_table *t, const char *line, size_t n);
/* Draws the table, without a trailing newline. Rows without a line of dashes after the first are
 * not a table and are printed unchanged. */
void table_draw(const struct markdown_table *t, const struct table_look *look, struct buf *out);
void table_clear(struct markdown_table *t);

#endif
