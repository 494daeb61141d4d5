/* Markdown tables: columns are as wide as their cells, and narrower if the screen is too narrow. */
#include "cli/term/table.h"
#include "base/mem.h"

#include <string.h>

enum { MAX_ROWS = 400, MAX_COLUMNS = 32, LEAST_COLUMN = 5 };

bool table_add(struct markdown_table *t, const char *line, size_t n)
{
    if (t->n == MAX_ROWS)
        return false;
    if (t->n == t->cap) {
        t->cap = t->cap ? 2 * t->cap : 16;
        t->rows = mem_realloc(t->rows, (size_t)t->cap, sizeof *t->rows);
    }
    t->rows[t->n++] = (struct table_row){mem_strndup(line, n), n};
    return true;
}

void table_clear(struct markdown_table *t)
{
    for (int i = 0; i < t->n; i++)
        mem_free(t->rows[i].text);
    mem_free(t->rows);
    *t = (struct markdown_table){0};
}

struct cell {
    const char *p;
    size_t n;
};

/* Splits a row into cells. A bar in code or after a backslash is text. */
static int split(const struct table_row *r, struct cell cells[MAX_COLUMNS])
{
    const char *p = r->text, *end = r->text + r->n;
    int n = 0;
    bool code = false;
    while (p < end && *p == ' ')
        p++;
    p += p < end && *p == '|';
    while (n < MAX_COLUMNS && p < end) {
        const char *from = p, *to;
        for (; p < end && (*p != '|' || code); p++) {
            if (*p == '`')
                code = !code;
            if (*p == '\\' && p + 1 < end)
                p++;
        }
        code = false;
        to = p;
        while (from < to && *from == ' ')
            from++;
        while (to > from && to[-1] == ' ')
            to--;
        cells[n++] = (struct cell){from, (size_t)(to - from)};
        p += p < end;
        if (strspn(p, " ") == (size_t)(end - p))
            break;
    }
    return n;
}

static bool is_dashes(const struct cell *c)
{
    size_t dashes = 0;
    for (size_t i = 0; i < c->n; i++) {
        if (c->p[i] != '-' && !(c->p[i] == ':' && (i == 0 || i + 1 == c->n)))
            return false;
        dashes += c->p[i] == '-';
    }
    return dashes > 0;
}

/* Draws a cell as lines of at most `width` columns, separated by newlines. */
static void draw_cell(const struct table_look *look, const struct cell *c, int width,
                      unsigned style, struct buf *out)
{
    struct flow f = {.out = out, .width = width, .styles = look->styles, .links = look->links};
    look->draw(look->arg, &f, c->p, c->n, style);
    flow_word(&f);
    flow_style(&f, 0);
    flow_clear(&f);
}

/* The width of a line on a terminal; escape sequences have none. */
static int shown_width(const char *p, size_t n)
{
    int width = 0;
    for (size_t used; n; p += used, n -= used) {
        uint32_t c = 0xfffd;
        used = flow_decode(p, n, &c);
        used = used ? used : n;
        if (c == 27 && n > 1 && p[1] == ']') /* a hyperlink; it ends in ESC \ */
            while (used < n && p[used - 1] != '\\')
                used++;
        else if (c == 27)
            while (used < n && p[used - 1] != 'm')
                used++;
        else
            width += flow_char_width(c);
    }
    return width;
}

static int cell_width(const struct table_look *look, const struct cell *c)
{
    struct buf b = {0};
    draw_cell(look, c, 1 << 20, 0, &b);
    int w = shown_width(b.p ? b.p : "", b.len);
    buf_clear(&b);
    return w;
}

static void draw_line(const struct table_look *look, const int *widths, int n, struct buf *out)
{
    if (look->styles)
        buf_adds(out, "\033[0;2m");
    for (int i = 0; i < n; i++) {
        if (i)
            buf_adds(out, look->unicode ? "─┼─" : "-+-");
        for (int k = 0; k < widths[i]; k++)
            buf_adds(out, look->unicode ? "─" : "-");
    }
    if (look->styles)
        buf_adds(out, "\033[0m");
}

/* The k-th line of a text; *n: its length. */
static const char *line_of(const struct buf *b, int k, size_t *n)
{
    const char *p = b->p ? b->p : "", *end = p + b->len;
    for (; k > 0 && p < end; k--) {
        const char *next = memchr(p, '\n', (size_t)(end - p));
        p = next ? next + 1 : end;
    }
    const char *stop = p < end ? memchr(p, '\n', (size_t)(end - p)) : NULL;
    *n = (size_t)((stop ? stop : end) - p);
    return p;
}

static void pad(struct buf *out, int n)
{
    for (int i = 0; i < n; i++)
        buf_addc(out, ' ');
}

static int count_lines(const struct buf *b)
{
    int n = 1;
    for (size_t i = 0; i < b->len; i++)
        n += b->p[i] == '\n';
    return n;
}

/* Draws one row, with as many lines as its tallest cell. right: bit mask of right-aligned
 * columns. */
static void draw_row(const struct table_look *look, const struct cell *cells, int n,
                     const int *widths, int columns, uint32_t right, unsigned style,
                     struct buf *out)
{
    struct buf drawn[MAX_COLUMNS] = {{0}};
    int tall = 1;
    for (int i = 0; i < columns && i < n; i++) {
        draw_cell(look, &cells[i], widths[i], style, &drawn[i]);
        int lines = count_lines(&drawn[i]);
        tall = lines > tall ? lines : tall;
    }
    for (int k = 0; k < tall; k++) {
        if (k)
            buf_addc(out, '\n');
        for (int i = 0; i < columns; i++) {
            size_t len;
            const char *p = line_of(&drawn[i], k, &len);
            int blanks = widths[i] - shown_width(p, len);
            if (i) {
                buf_adds(out, look->styles ? "\033[0;2m" : "");
                buf_adds(out, look->unicode ? " │ " : " | ");
                buf_adds(out, look->styles ? "\033[0m" : "");
            }
            if (right & (1u << i))
                pad(out, blanks);
            buf_add(out, p, len);
            if (!(right & (1u << i)) && i + 1 < columns)
                pad(out, blanks);
        }
    }
    for (int i = 0; i < columns; i++)
        buf_clear(&drawn[i]);
}

/* Used when columns would be too narrow to read: one line per cell. */
static void draw_list(const struct markdown_table *t, const struct table_look *look,
                      struct buf *out)
{
    struct cell names[MAX_COLUMNS], cells[MAX_COLUMNS];
    int columns = split(&t->rows[0], names);
    for (int r = 2; r < t->n; r++) {
        int n = split(&t->rows[r], cells);
        for (int i = 0; i < n && i < columns; i++) {
            struct flow f = {
                .out = out, .width = look->width, .styles = look->styles, .links = look->links};
            if (r > 2 || i)
                buf_addc(out, '\n');
            if (r > 2 && !i)
                buf_addc(out, '\n');
            f.prefix_width = 2;
            buf_adds(&f.prefix, "  ");
            look->draw(look->arg, &f, names[i].p, names[i].n, FLOW_BOLD);
            flow_text(&f, ": ", 0);
            look->draw(look->arg, &f, cells[i].p, cells[i].n, 0);
            flow_word(&f);
            flow_style(&f, 0);
            flow_clear(&f);
        }
    }
}

void table_draw(const struct markdown_table *t, const struct table_look *look, struct buf *out)
{
    struct cell cells[MAX_COLUMNS];
    int widths[MAX_COLUMNS] = {0}, columns = split(&t->rows[0], cells), total;
    uint32_t right = 0;
    int n = t->n > 1 ? split(&t->rows[1], cells) : 0;
    bool table = n == columns && n > 0;
    for (int i = 0; i < n; i++) {
        table = table && is_dashes(&cells[i]);
        if (cells[i].n > 1 && cells[i].p[cells[i].n - 1] == ':' && cells[i].p[0] != ':')
            right |= 1u << i;
    }
    for (int r = 0; r < t->n && !table; r++) {
        struct flow f = {
            .out = out, .width = look->width, .styles = look->styles, .links = look->links};
        if (r)
            buf_addc(out, '\n');
        look->draw(look->arg, &f, t->rows[r].text, t->rows[r].n, 0);
        flow_word(&f);
        flow_style(&f, 0);
        flow_clear(&f);
    }
    if (!table)
        return;
    for (int r = 0; r < t->n; r++) {
        n = r == 1 ? 0 : split(&t->rows[r], cells);
        for (int i = 0; i < n && i < columns; i++) {
            int w = cell_width(look, &cells[i]);
            widths[i] = w > widths[i] ? w : widths[i];
        }
    }
    for (;;) {
        int widest = 0;
        total = 3 * (columns - 1);
        for (int i = 0; i < columns; i++) {
            total += widths[i];
            widest = widths[i] > widths[widest] ? i : widest;
        }
        if (total <= look->width || widths[widest] <= LEAST_COLUMN)
            break;
        int over = total - look->width, step = widths[widest] - LEAST_COLUMN;
        widths[widest] -= over > 8 && step > 8 ? over / 8 < step ? over / 8 : step : 1;
    }
    if (total > look->width) {
        draw_list(t, look, out);
        return;
    }
    for (int r = 0; r < t->n; r++) {
        if (r)
            buf_addc(out, '\n');
        n = r == 1 ? 0 : split(&t->rows[r], cells);
        if (r == 1)
            draw_line(look, widths, columns, out);
        else
            draw_row(look, cells, n, widths, columns, right, r ? 0 : FLOW_BOLD, out);
    }
}
