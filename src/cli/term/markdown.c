/*
 * Streaming markdown: see markdown.h. The first characters of a line are held until they determine
 * its kind; the rest of the line streams. Each line of the text is a line on the screen, as in
 * poems and addresses. Tables are held until they end, inline code and links until they close.
 *
 * Invariants:
 * 1. Input is processed one character at a time, so the pieces do not matter.
 * 2. A newline is written when something follows it, so a text ends without blank lines.
 * 3. Every loop over held text is bounded by HELD_MAX.
 */
#include "cli/term/markdown.h"
#include "cli/term/flow.h"
#include "cli/term/highlight.h"
#include "cli/term/table.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
    HELD_MAX = 16384,
    FRAME_WIDTH = 60,
    LEAST_WIDTH = 12,
    LINK_TEXT_MAX = 300,
    LINK_URL_MAX = 2000
};

/* The part of "[text](url)" that is being held. */
enum link_part { LINK_NONE, LINK_TEXT_PART, LINK_BETWEEN, LINK_URL };

enum line_kind {
    LINE_UNKNOWN, /* needs more characters */
    LINE_TEXT,
    LINE_HEADING,
    LINE_LIST,
    LINE_QUOTE,
    LINE_WHOLE, /* a fence, a table row or a rule: decided at the end of the line */
};

struct markdown {
    struct markdown_options opt;
    struct flow flow;
    struct buf out;
    struct buf bytes; /* an incomplete character */
    struct buf head;  /* start of the line, while its kind is unknown */
    bool in_text;     /* the kind is known: characters go to inline_char */
    bool whole;       /* hold the line until its end */
    int newlines;     /* newlines to write before the next text */
    bool begun;       /* something has been written */
    unsigned base;    /* the line's style */
    /* code between fences */
    char fence; /* the fence's character; 0 = not in code */
    int fence_len, fence_indent;
    bool code_line; /* the line is code, not the closing fence: its characters stream */
    int code_column;
    struct highlight highlight; /* of the code's language */
    bool highlighted;           /* the language is known */
    struct markdown_table table;
    /* inside a line */
    unsigned style;
    char opened[2]; /* characters that opened italics, bold */
    uint32_t before;
    char run; /* pending run of * _ ~ */
    int run_len;
    bool escaped;
    int ticks;       /* backticks that opened inline code; 0 = none */
    struct buf code; /* inline code, including its opening backticks */
    int code_run;    /* trailing backticks of code */
    enum link_part link_part;
    struct buf link;   /* the held characters of a link, including its marks */
    size_t link_text;  /* bytes of its text, once that is complete */
    int link_depth;    /* open brackets in the part */
    bool in_link_text; /* a "[" is text */
};

static int line_width(const struct markdown *m)
{
    return m->opt.columns - 1 > LEAST_WIDTH ? m->opt.columns - 1 : LEAST_WIDTH;
}

struct markdown *markdown_new(const struct markdown_options *opt)
{
    struct markdown *m = mem_zalloc(1, sizeof *m);
    m->opt = *opt;
    m->flow = (struct flow){.out = &m->out,
                            .styles = opt->styles,
                            .links = opt->styles && opt->links,
                            .width = line_width(m)};
    m->base = opt->dim ? FLOW_DIM : 0;
    return m;
}

void markdown_free(struct markdown *m)
{
    if (!m)
        return;
    flow_clear(&m->flow);
    table_clear(&m->table);
    buf_clear(&m->out);
    buf_clear(&m->bytes);
    buf_clear(&m->head);
    buf_clear(&m->code);
    buf_clear(&m->link);
    mem_free(m);
}

void markdown_columns(struct markdown *m, int columns)
{
    m->opt.columns = columns;
    m->flow.width = line_width(m);
}

/* Writes pending newlines, so that the cursor is at the start of a line. */
static void begin_output(struct markdown *m)
{
    for (; m->newlines > 0; m->newlines--)
        if (m->begun)
            buf_addc(&m->out, '\n');
    m->newlines = 0;
    m->begun = true;
}

static void end_line(struct markdown *m)
{
    flow_word(&m->flow);
    flow_style(&m->flow, 0);
    m->flow.column = m->flow.spaces = 0;
    m->newlines++;
}

/* Sets the start of continuation lines: blanks, and the bars of quotes. */
static void set_prefix(struct markdown *m, int bars, int blanks)
{
    struct flow *f = &m->flow;
    int most = f->width / 2;
    bars = bars > most / 2 ? most / 2 : bars;
    blanks = blanks > most - 2 * bars ? most - 2 * bars : blanks;
    buf_reset(&f->prefix);
    if (bars && m->opt.styles)
        buf_adds(&f->prefix, "\033[0;2m");
    for (int i = 0; i < bars; i++)
        buf_adds(&f->prefix, m->opt.unicode ? "│ " : "> ");
    if (bars && m->opt.styles)
        buf_adds(&f->prefix, "\033[0m");
    for (int i = 0; i < blanks; i++)
        buf_addc(&f->prefix, ' ');
    f->prefix_width = 2 * bars + blanks;
}

/* Inside a line */

static bool is_word_char(uint32_t c)
{
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
}

static bool is_blank(uint32_t c)
{
    return !c || c == ' ' || c == '\t' || c == '\n';
}

static void show(struct markdown *m, uint32_t c)
{
    flow_char(&m->flow, c, m->base | m->style);
    m->before = c;
}

static void show_run(struct markdown *m, int n)
{
    for (int i = 0; i < n; i++)
        show(m, (uint32_t)(unsigned char)m->run);
}

/* A run of marks has ended: it opens emphasis, closes it, or is text. `next`: the following
 * character. */
static void resolve_run(struct markdown *m, uint32_t next)
{
    int n = m->run_len;
    m->run_len = 0;
    unsigned bits = m->run == '~' ? (n == 2 ? FLOW_STRIKE : 0)
                                  : (n == 1   ? FLOW_ITALIC
                                     : n == 2 ? FLOW_BOLD
                                     : n == 3 ? FLOW_ITALIC | FLOW_BOLD
                                              : 0);
    bool opens = !is_blank(next) && !is_word_char(m->before);
    bool closes = !is_blank(m->before) && (m->run != '_' || !is_word_char(next));
    bool ours = m->run == '~' || ((!(bits & FLOW_ITALIC) || m->opened[0] == m->run) &&
                                  (!(bits & FLOW_BOLD) || m->opened[1] == m->run));
    if (bits && closes && ours && (m->style & bits) == bits)
        m->style &= ~bits;
    else if (bits && opens && !(m->style & bits)) {
        m->style |= bits;
        if (bits & FLOW_ITALIC)
            m->opened[0] = m->run;
        if (bits & FLOW_BOLD)
            m->opened[1] = m->run;
    } else
        show_run(m, n);
    if (bits)
        m->before = (uint32_t)(unsigned char)m->run;
}

static void inline_char(struct markdown *m, uint32_t c);
static void inline_text(struct markdown *m, const char *p, size_t n);

/* Unclosed backticks are text, and so is what follows them. */
static void release_code(struct markdown *m)
{
    struct buf held = m->code;
    int ticks = m->ticks;
    m->code = (struct buf){0};
    m->ticks = m->code_run = 0;
    for (int i = 0; i < ticks; i++)
        show(m, '`');
    for (size_t at = (size_t)ticks, used; at < held.len; at += used) {
        uint32_t c = 0xfffd;
        used = flow_decode(held.p + at, held.len - at, &c);
        used = used ? used : 1;
        inline_char(m, c);
    }
    buf_clear(&held);
}

static void show_code(struct markdown *m)
{
    size_t from = (size_t)m->ticks, to = m->code.len - (size_t)m->ticks;
    unsigned was = m->style;
    if (to - from > 2 && m->code.p[from] == ' ' && m->code.p[to - 1] == ' ') {
        from++;
        to--;
    }
    m->style |= FLOW_CODE;
    for (size_t used; from < to; from += used) {
        uint32_t c = 0xfffd;
        used = flow_decode(m->code.p + from, to - from, &c);
        used = used ? used : 1;
        show(m, c);
    }
    m->style = was;
    m->before = '`';
    buf_reset(&m->code);
    m->ticks = m->code_run = 0;
}

/* Handles a character of inline code or of its backticks. False if c is neither. */
static bool code_char(struct markdown *m, uint32_t c)
{
    bool opening = (size_t)m->ticks == m->code.len;
    if (c == '`') {
        m->ticks += opening;
        m->code_run += !opening;
        buf_addc(&m->code, '`');
        return true;
    }
    if (!opening && m->code_run == m->ticks) {
        show_code(m);
        return false;
    }
    m->code_run = 0;
    flow_encode(&m->code, c);
    if (m->code.len > HELD_MAX)
        release_code(m);
    return true;
}

/* The held characters are no link: they are text. */
static void release_link(struct markdown *m)
{
    struct buf held = m->link;
    bool nested = m->in_link_text;
    m->link = (struct buf){0};
    m->link_part = LINK_NONE;
    m->in_link_text = true;
    inline_text(m, held.p, held.len);
    m->in_link_text = nested;
    buf_clear(&held);
}

/* Copies the address of a link, without its title. Bytes that an escape sequence must not have are
 * percent-encoded. False if it is not an address that a terminal should open. */
static bool link_url(const char *p, size_t n, struct buf *url, bool *opens)
{
    static const char *const schemes[] = {"https://", "http://", "mailto:"};
    while (n && *p == ' ') {
        p++;
        n--;
    }
    if (n > 1 && *p == '<' && memchr(p, '>', n)) {
        n = (size_t)((const char *)memchr(p, '>', n) - p) - 1;
        p++;
    }
    *opens = false;
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++)
        *opens = *opens || (n > strlen(schemes[i]) && !strncmp(p, schemes[i], strlen(schemes[i])));
    for (size_t i = 0; i < n && p[i] != ' '; i++) {
        unsigned char c = (unsigned char)p[i];
        if (c < 32 || c == 127)
            return false;
        if (c > 127 || strchr("\\\"<>^`{|}", c))
            buf_addf(url, "%%%02X", c);
        else
            buf_addc(url, (char)c);
    }
    return url->len > 0;
}

/* Whether a link's text is an address, but not the one it leads to. */
static bool link_deceives(const char *text, size_t n, const char *url)
{
    bool address = memmem(text, n, "://", 3) || (n > 4 && !strncasecmp(text, "www.", 4));
    return address && (strlen(url) < n || strncmp(url, text, n) != 0 ||
                       strspn(url + n, "/") != strlen(url + n));
}

static void inline_settle(struct markdown *m, uint32_t next);

/* A link is complete. The terminal gets it as a hyperlink if it takes those, else as "text (url)". */
static void show_link(struct markdown *m)
{
    struct buf held = m->link, url = {0};
    const char *text = held.p + 1, *address = text + m->link_text + 2;
    size_t n = m->link_text, n_address = held.len - n - 4;
    unsigned was = m->style;
    bool opens = false;
    if (!n || !link_url(address, n_address, &url, &opens)) {
        buf_clear(&url);
        release_link(m);
        return;
    }
    bool hidden = opens && m->flow.links && !link_deceives(text, n, url.p);
    bool same = n == url.len && !memcmp(text, url.p, n);
    m->link = (struct buf){0};
    m->link_part = LINK_NONE;
    m->in_link_text = true;
    flow_link(&m->flow, hidden ? url.p : "");
    m->style |= FLOW_LINK;
    inline_text(m, text, n);
    inline_settle(m, 0);
    m->style = was;
    if (!hidden && !same) {
        show(m, ' ');
        show(m, '(');
        for (size_t i = 0; i < url.len; i++)
            show(m, (uint32_t)(unsigned char)url.p[i]);
        show(m, ')');
    }
    m->in_link_text = false;
    m->before = ')';
    buf_clear(&held);
    buf_clear(&url);
}

/* Handles a character of a held link. False if c is not part of one; then the held characters
 * have become text. */
static bool link_char(struct markdown *m, uint32_t c)
{
    if (m->link_part == LINK_BETWEEN && c != '(') {
        release_link(m);
        return false;
    }
    flow_encode(&m->link, c);
    if (m->link_part == LINK_BETWEEN) {
        m->link_part = LINK_URL;
        m->link_depth = 1;
        return true;
    }
    bool url = m->link_part == LINK_URL;
    m->link_depth += c == (url ? '(' : '[');
    m->link_depth -= c == (url ? ')' : ']');
    if (!m->link_depth && url) {
        show_link(m);
    } else if (!m->link_depth) {
        m->link_part = LINK_BETWEEN;
        m->link_text = m->link.len - 2;
    } else if (m->link.len > (size_t)(url ? LINK_URL_MAX : LINK_TEXT_MAX))
        release_link(m);
    return true;
}

static void inline_char(struct markdown *m, uint32_t c)
{
    if (m->link_part && link_char(m, c))
        return;
    if (m->ticks && code_char(m, c))
        return;
    if (m->escaped) {
        m->escaped = false;
        if (c >= 128 || !strchr("*_`~|#", (int)c))
            show(m, '\\');
        show(m, c);
        return;
    }
    if (m->run_len && c == (uint32_t)(unsigned char)m->run && m->run_len < HELD_MAX) {
        m->run_len++;
        return;
    }
    if (m->run_len)
        resolve_run(m, c);
    if (m->opt.plain || !m->opt.styles)
        show(m, c);
    else if (c == '*' || c == '_' || c == '~') {
        m->run = (char)c;
        m->run_len = 1;
    } else if (c == '`') {
        m->ticks = 1;
        buf_addc(&m->code, '`');
    } else if (c == '[' && !m->in_link_text) {
        m->link_part = LINK_TEXT_PART;
        m->link_depth = 1;
        flow_encode(&m->link, c);
    } else if (c == '\\')
        m->escaped = true;
    else
        show(m, c);
}

/* Writes what is pending, as if `next` followed. */
static void inline_settle(struct markdown *m, uint32_t next)
{
    if (m->link_part)
        release_link(m);
    if (m->ticks && m->code_run == m->ticks && m->code.len > (size_t)m->ticks)
        show_code(m);
    while (m->ticks)
        release_code(m);
    if (m->run_len)
        resolve_run(m, next);
    if (m->escaped)
        show(m, '\\');
    m->escaped = false;
}

static void inline_end(struct markdown *m)
{
    inline_settle(m, 0);
    m->style = 0;
    m->before = 0;
}

static void inline_text(struct markdown *m, const char *p, size_t n)
{
    for (size_t used; n; p += used, n -= used) {
        uint32_t c = 0xfffd;
        used = flow_decode(p, n, &c);
        used = used ? used : 1;
        inline_char(m, c);
    }
}

/* Tables */

static void draw_cell(void *arg, struct flow *f, const char *text, size_t n, unsigned style)
{
    struct markdown *m = arg;
    struct flow own = m->flow;
    unsigned base = m->base;
    m->flow = *f;
    m->base |= style;
    inline_text(m, text, n);
    inline_end(m);
    flow_word(&m->flow);
    *f = m->flow;
    m->flow = own;
    m->base = base;
}

static void end_table(struct markdown *m)
{
    struct table_look look = {.width = m->flow.width,
                              .styles = m->opt.styles,
                              .links = m->flow.links,
                              .unicode = m->opt.unicode,
                              .draw = draw_cell,
                              .arg = m};
    if (!m->table.n)
        return;
    begin_output(m);
    table_draw(&m->table, &look, &m->out);
    table_clear(&m->table);
    m->newlines++;
}

/* Code between fences */

enum frame { FRAME_TOP, FRAME_BOTTOM, FRAME_RULE };

/* Draws the line above or below code, with the language name, or a rule. */
static void draw_frame(struct markdown *m, enum frame kind, const char *info, size_t n)
{
    static const char *const corners[][2] = {
        [FRAME_TOP] = {"+-", "╭─"}, [FRAME_BOTTOM] = {"+-", "╰─"}, [FRAME_RULE] = {"--", "──"}};
    const char *line = m->opt.unicode ? "─" : "-";
    int width = m->flow.width < FRAME_WIDTH ? m->flow.width : FRAME_WIDTH, at = 2;
    begin_output(m);
    flow_style(&m->flow, FLOW_DIM);
    buf_adds(&m->out, corners[kind][m->opt.unicode]);
    n = n < 20 ? n : 20;
    if (n && at + (int)n + 2 < width) {
        buf_addc(&m->out, ' ');
        for (size_t i = 0; i < n; i++)
            buf_addc(&m->out,
                     (unsigned char)info[i] > 32 && (unsigned char)info[i] < 127 ? info[i] : '?');
        buf_addc(&m->out, ' ');
        at += (int)n + 2;
    }
    for (; at < width; at++)
        buf_adds(&m->out, line);
    flow_style(&m->flow, 0);
    m->newlines++;
}

/* Parses a fence such as "```python": its mark, length, indentation and language. */
static bool read_fence(const char *line, size_t n, char *mark, int *len, int *indent,
                       const char **info, size_t *n_info)
{
    size_t i = 0, run = 0;
    while (i < n && line[i] == ' ')
        i++;
    *indent = (int)i;
    *mark = i < n ? line[i] : 0;
    while (i + run < n && line[i + run] == *mark)
        run++;
    if (run < 3 || (*mark != '`' && *mark != '~'))
        return false;
    *len = (int)run;
    i += run;
    while (i < n && line[i] == ' ')
        i++;
    *info = line + i;
    *n_info = 0;
    while (i + *n_info < n && (*info)[*n_info] != ' ')
        (*n_info)++;
    return *mark != '`' || !memchr(line + i, '`', n - i);
}

/* Writes a character of code in the style of its kind. */
static void write_code_char(void *arg, uint32_t c, enum highlight_kind kind)
{
    static const unsigned styles[] = {[HIGHLIGHT_PLAIN] = 0,
                                      [HIGHLIGHT_COMMENT] = FLOW_DIM,
                                      [HIGHLIGHT_STRING] = FLOW_STRING,
                                      [HIGHLIGHT_NUMBER] = FLOW_NUMBER,
                                      [HIGHLIGHT_KEYWORD] = FLOW_KEYWORD};
    struct markdown *m = arg;
    flow_style(&m->flow, m->highlighted ? styles[kind] : FLOW_CODE);
    if (c == '\t')
        do
            buf_addc(&m->out, ' ');
        while (++m->code_column % 4);
    else if (c < 32 || (c >= 127 && c < 160)) {
        buf_addc(&m->out, '^');
        buf_addc(&m->out, c < 32 ? (char)(c + 64) : '?');
        m->code_column += 2;
    } else {
        flow_encode(&m->out, c);
        m->code_column += flow_char_width(c);
    }
}

static void show_code_char(struct markdown *m, uint32_t c)
{
    if (m->highlighted)
        highlight_char(&m->highlight, c);
    else
        write_code_char(m, c, HIGHLIGHT_PLAIN);
}

/* The held start of a line is code, not a fence. Removes as much indentation as the fence has. */
static void start_code_line(struct markdown *m)
{
    size_t at = 0;
    begin_output(m);
    if (!m->highlighted)
        flow_style(&m->flow, FLOW_CODE);
    m->code_line = true;
    m->code_column = 0;
    while (at < m->head.len && (int)at < m->fence_indent && m->head.p[at] == ' ')
        at++;
    for (size_t used; at < m->head.len; at += used) {
        uint32_t c = 0xfffd;
        used = flow_decode(m->head.p + at, m->head.len - at, &c);
        used = used ? used : 1;
        show_code_char(m, c);
    }
    buf_reset(&m->head);
}

/* True if the held line may still become the closing fence: blanks, marks, blanks. */
static bool may_close(const struct markdown *m, bool *closes)
{
    size_t i = 0, run = 0;
    while (i < m->head.len && m->head.p[i] == ' ')
        i++;
    while (i + run < m->head.len && m->head.p[i + run] == m->fence)
        run++;
    i += run;
    while (run && i < m->head.len && m->head.p[i] == ' ')
        i++;
    *closes = (int)run >= m->fence_len && i == m->head.len;
    return i == m->head.len && m->head.len < 200;
}

static void fenced_char(struct markdown *m, uint32_t c)
{
    bool closes = false;
    if (c == '\n') {
        if (!m->code_line)
            may_close(m, &closes);
        if (closes) {
            m->fence = 0;
            buf_reset(&m->head);
            draw_frame(m, FRAME_BOTTOM, "", 0);
            return;
        }
        if (!m->code_line)
            start_code_line(m);
        if (m->highlighted)
            highlight_newline(&m->highlight);
        flow_style(&m->flow, 0);
        m->code_line = false;
        m->newlines++;
        return;
    }
    if (m->code_line) {
        show_code_char(m, c);
        return;
    }
    flow_encode(&m->head, c);
    if (!may_close(m, &closes))
        start_code_line(m);
}

/* Lines */

/* The kind of a line, from its start. *blanks: leading blanks; *used: bytes up to the end of its
 * marks. */
static enum line_kind classify(const char *p, size_t n, size_t *blanks, size_t *used)
{
    size_t i = 0, run = 0;
    while (i < n && p[i] == ' ')
        i++;
    *blanks = *used = i;
    if (i == n)
        return n < 200 ? LINE_UNKNOWN : LINE_TEXT;
    char c = p[i];
    while (i + run < n && p[i + run] == c)
        run++;
    size_t after = i + run; /* index after the first run */
    if (c == '|')
        return LINE_WHOLE;
    if (c == '`' || c == '~')
        return run >= 3 ? LINE_WHOLE : after == n ? LINE_UNKNOWN : LINE_TEXT;
    if (c == '#') {
        *used = after + 1;
        return run > 6           ? LINE_TEXT
               : after == n      ? LINE_UNKNOWN
               : p[after] == ' ' ? LINE_HEADING
                                 : LINE_TEXT;
    }
    if (c == '>') {
        *used = i + 1 + (i + 1 < n && p[i + 1] == ' ');
        return i + 1 == n ? LINE_UNKNOWN : LINE_QUOTE;
    }
    if (c == '-' || c == '*' || c == '_' || c == '+') {
        if (run == 1 && after < n && p[after] == ' ' && c != '_') {
            *used = i + 2;
            return LINE_LIST;
        }
        return after == n && n < 200 ? LINE_UNKNOWN
                                     : LINE_TEXT; /* a rule is decided at the end of the line */
    }
    size_t digits = i;
    while (digits < n && p[digits] >= '0' && p[digits] <= '9')
        digits++;
    if (digits > i && digits - i <= 9) {
        *used = digits + 2;
        if (digits == n || (digits + 1 == n && (p[digits] == '.' || p[digits] == ')')))
            return LINE_UNKNOWN;
        if ((p[digits] == '.' || p[digits] == ')') && p[digits + 1] == ' ')
            return LINE_LIST;
    }
    *used = i;
    return LINE_TEXT;
}

/* The line's kind is known: writes what precedes its text. The text streams from here. `bars`:
 * level of quotes. */
static void begin_text(struct markdown *m, enum line_kind kind, int bars, size_t blanks,
                       const char *marks, size_t n_marks)
{
    struct flow *f = &m->flow;
    end_table(m);
    begin_output(m);
    f->width = line_width(m);
    set_prefix(m, bars, (int)blanks);
    buf_add(&m->out, f->prefix.p ? f->prefix.p : "", f->prefix.len);
    f->column = f->prefix_width;
    m->base = m->opt.dim ? FLOW_DIM : 0;
    if (kind == LINE_HEADING && m->opt.styles)
        m->base |= FLOW_BOLD;
    else if (kind == LINE_HEADING || kind == LINE_LIST) {
        bool bullet = kind == LINE_LIST && n_marks == 2 && m->opt.styles && m->opt.unicode;
        if (bullet)
            flow_char(f, 0x2022, m->base);
        else
            for (size_t i = 0; i + 1 < n_marks; i++)
                flow_char(f, (uint32_t)(unsigned char)marks[i], m->base);
        flow_char(f, ' ', m->base);
        set_prefix(m, bars, (int)(blanks + n_marks));
    }
    m->in_text = true;
    m->before = 0;
}

/* The level of quotes at the start of the held line; *used: the bytes of their marks. */
static int count_quotes(const struct markdown *m, size_t *used)
{
    int bars = 0;
    size_t blanks, marks;
    *used = 0;
    while (bars < 8 &&
           classify(m->head.p + *used, m->head.len - *used, &blanks, &marks) == LINE_QUOTE) {
        *used += marks;
        bars++;
    }
    return bars;
}

/* Decides the kind of the held line if possible. `over`: the line is complete. */
static void resolve_head(struct markdown *m, bool over)
{
    size_t quoted, blanks = 0, used = 0;
    int bars = m->opt.plain ? 0 : count_quotes(m, &quoted);
    if (m->opt.plain)
        quoted = 0;
    const char *p = m->head.p + quoted;
    size_t n = m->head.len - quoted;
    enum line_kind kind = n ? classify(p, n, &blanks, &used) : LINE_UNKNOWN;
    if (m->opt.plain && n) {
        kind = blanks == n ? LINE_UNKNOWN : LINE_TEXT;
        used = blanks;
    }
    if (kind == LINE_WHOLE && bars)
        kind = LINE_TEXT; /* tables and code in quotes are printed unchanged */
    if (!over && (kind == LINE_UNKNOWN || kind == LINE_WHOLE)) {
        m->whole = kind == LINE_WHOLE;
        if (m->head.len < HELD_MAX)
            return;
    }
    if (kind == LINE_UNKNOWN || kind == LINE_WHOLE) {
        kind = LINE_TEXT;
        used = blanks;
    }
    if (kind == LINE_TEXT)
        used = blanks;
    struct buf head = m->head;
    m->head = (struct buf){0};
    begin_text(m, kind, bars, blanks, head.p + quoted + blanks, used - blanks);
    inline_text(m, head.p + quoted + used, head.len - quoted - used);
    buf_clear(&head);
}

static bool is_rule(const char *p, size_t n)
{
    char mark = 0;
    int count = 0;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == ' ')
            continue;
        if (!strchr("-*_", p[i]) || (mark && p[i] != mark))
            return false;
        mark = p[i];
        count++;
    }
    return count >= 3;
}

/* Ends a line that was held to its end. */
static void end_head(struct markdown *m)
{
    const char *info;
    size_t n_info, n = m->head.len;
    int len, indent;
    char mark;
    while (n && (m->head.p[n - 1] == ' ' || m->head.p[n - 1] == '\r'))
        n--;
    if (!n) { /* blank line */
        end_table(m);
        m->newlines += m->begun;
    } else if (m->opt.plain) {
        resolve_head(m, true);
        inline_end(m);
        end_line(m);
    } else if (read_fence(m->head.p, n, &mark, &len, &indent, &info, &n_info)) {
        end_table(m);
        m->fence = mark;
        m->fence_len = len;
        m->fence_indent = indent;
        m->highlight = (struct highlight){.write = write_code_char, .arg = m};
        m->highlighted = m->opt.styles && highlight_begin(&m->highlight, info, n_info);
        draw_frame(m, FRAME_TOP, info, n_info);
    } else if (m->head.p[strspn(m->head.p, " ")] == '|' && table_add(&m->table, m->head.p, n)) {
        /* the table continues */
    } else if (is_rule(m->head.p, n)) {
        end_table(m);
        draw_frame(m, FRAME_RULE, "", 0);
    } else {
        resolve_head(m, true);
        inline_end(m);
        end_line(m);
    }
    buf_reset(&m->head);
    m->in_text = m->whole = false;
}

static void take(struct markdown *m, uint32_t c)
{
    if (c == '\r')
        return;
    if (m->fence) {
        fenced_char(m, c);
    } else if (c == '\n' && m->in_text) {
        inline_end(m);
        end_line(m);
        m->in_text = false;
    } else if (c == '\n') {
        end_head(m);
    } else if (m->in_text) {
        inline_char(m, c);
    } else {
        if (c == '\t')
            buf_adds(&m->head, "    ");
        else
            flow_encode(&m->head, c);
        if (!m->whole || m->head.len >= HELD_MAX)
            resolve_head(m, false);
    }
}

static void send(struct markdown *m)
{
    if (m->out.len)
        m->opt.write(m->opt.arg, m->out.p, m->out.len);
    buf_reset(&m->out);
}

void markdown_feed(struct markdown *m, const char *text, size_t n)
{
    buf_add(&m->bytes, text, n);
    size_t at = 0;
    for (size_t used; at < m->bytes.len; at += used) {
        uint32_t c;
        used = flow_decode(m->bytes.p + at, m->bytes.len - at, &c);
        if (!used)
            break;
        take(m, c);
    }
    if (m->bytes.len)
        memmove(m->bytes.p, m->bytes.p + at, m->bytes.len - at);
    m->bytes.len -= at;
    send(m);
}

void markdown_end(struct markdown *m)
{
    if (m->bytes.len)
        take(m, 0xfffd);
    buf_reset(&m->bytes);
    if (m->fence) {
        if (m->head.len || m->code_line)
            fenced_char(m, '\n');
        if (m->fence)
            draw_frame(m, FRAME_BOTTOM, "", 0);
        m->fence = 0;
    } else if (m->in_text) {
        inline_end(m);
        end_line(m);
    } else if (m->head.len)
        end_head(m);
    end_table(m);
    buf_reset(&m->head);
    m->in_text = m->whole = m->code_line = m->begun = false;
    m->newlines = 0;
    send(m);
}

void markdown_wrap(const struct markdown_options *opt, const char *first, int hang,
                   const char *text)
{
    struct buf out = {0};
    struct flow f = {.out = &out, .styles = opt->styles};
    f.width = opt->columns - 1 > LEAST_WIDTH ? opt->columns - 1 : LEAST_WIDTH;
    f.prefix_width = hang < f.width / 2 ? hang : f.width / 2;
    for (int i = 0; i < f.prefix_width; i++)
        buf_addc(&f.prefix, ' ');
    flow_text(&f, first, FLOW_BOLD);
    flow_word(&f);
    for (; f.column + f.spaces < hang; f.spaces++)
        ;
    flow_text(&f, text, opt->dim ? FLOW_DIM : 0);
    flow_newline(&f);
    opt->write(opt->arg, out.p, out.len);
    flow_clear(&f);
    buf_clear(&out);
}

int markdown_width(const char *text, size_t n)
{
    int width = 0;
    for (size_t used; n; text += used, n -= used) {
        uint32_t c = 0xfffd;
        used = flow_decode(text, n, &c);
        used = used ? used : n;
        width += flow_char_width(c);
    }
    return width;
}
