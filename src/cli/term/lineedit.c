/*
 * libedit behind a small interface. Owns the terminal's state while a line is read. Characters are
 * read here and not by libedit, so that Ctrl-C, window size changes and pasted text are noticed.
 * While a line is read the terminal marks pasted text ("bracketed paste"), so newlines in it do not
 * end the message.
 */
#include "cli/term/lineedit.h"
#include "cli/cli.h"
#include "cli/term/flow.h"
#include "cli/term/markdown.h"
#include "base/mem.h"

#include <errno.h>
#include <histedit.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

enum { PASTE_MAX = 4 << 20 }; /* characters */

struct lineedit {
    EditLine *el; /* NULL: input is not a terminal */
    History *history;
    HistEvent event;
    char *history_path;
    const char *prompt;
    int columns; /* the terminal's width when the prompt was drawn */
    char *line;  /* getline's buffer */
    size_t cap;
    lineedit_offer offer;
    void *offer_arg;
};

static char *current_prompt(EditLine *el)
{
    struct lineedit *le;
    el_get(el, EL_CLIENTDATA, &le);
    return (char *)(uintptr_t)le->prompt;
}

static bool dumb_terminal(void)
{
    const char *term = getenv("TERM");
    return !term || !strcmp(term, "dumb");
}

static volatile sig_atomic_t resized;

static void on_resize(int sig)
{
    (void)sig;
    resized = 1;
}

/* Most terminals wrap their lines anew when their width changes. */
static bool wraps_anew(void)
{
    const char *term = getenv("TERM");
    return !getenv("XTERM_VERSION") && !getenv("STY") && term && strcmp(term, "linux") != 0;
}

struct screen_place {
    int row, column; /* below the start of the prompt */
};

/* The place after a text that begins at `at`, on a screen of that width. */
static struct screen_place place_after(struct screen_place at, const char *text, size_t n,
                                       int columns)
{
    for (size_t used; n; text += used, n -= used) {
        uint32_t c = 0xfffd;
        used = flow_decode(text, n, &c);
        used = used ? used : n;
        int width = c < 32 || c == 127 ? 2 : flow_char_width(c);
        if (c == '\n' || at.column + width > columns) {
            at.row++;
            at.column = 0;
        }
        at.column += c == '\n' ? 0 : width;
    }
    return at;
}

/* The same of the cursor, which never waits behind the last column. */
static struct screen_place cursor_after(struct screen_place at, const char *text, size_t n,
                                        int columns)
{
    at = place_after(at, text, n, columns);
    return at.column < columns ? at : (struct screen_place){at.row + 1, 0};
}

static void move_up(int rows)
{
    fputc('\r', stdout);
    if (rows > 0)
        printf("\033[%dA", rows);
}

/* Writes the prompt and the line once more over what libedit has drawn. libedit leaves out a blank
 * at the end of a row and moves to the next one, and such rows are not joined again when the
 * terminal gets wider. */
static void rewrite(const struct lineedit *le, const LineInfo *li, int columns)
{
    size_t n = (size_t)(li->lastchar - li->buffer), before = (size_t)(li->cursor - li->buffer);
    struct screen_place prompt =
        place_after((struct screen_place){0, 0}, le->prompt, strlen(le->prompt), columns);
    struct screen_place end = place_after(prompt, li->buffer, n, columns);
    struct screen_place cursor = cursor_after(prompt, li->buffer, before, columns);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)li->buffer[i] < 32 || li->buffer[i] == 127)
            return;
    if (!end.row)
        return;
    move_up(cursor.row);
    printf("%s%.*s", le->prompt, (int)n, li->buffer);
    if (end.column == columns) { /* the blank makes the terminal wrap */
        fputs(" \r", stdout);
        end = (struct screen_place){end.row + 1, 0};
    }
    move_up(end.row - cursor.row);
    if (cursor.column)
        printf("\033[%dC", cursor.column);
    fflush(stdout);
}

/* Clears the prompt and the line from the screen and draws them at the new width. */
static void redraw(EditLine *el)
{
    struct lineedit *le;
    el_get(el, EL_CLIENTDATA, &le);
    const LineInfo *li = el_line(el);
    int columns = wraps_anew() ? cli_columns() : le->columns;
    struct screen_place at =
        place_after((struct screen_place){0, 0}, le->prompt, strlen(le->prompt), columns);
    at = cursor_after(at, li->buffer, (size_t)(li->cursor - li->buffer), columns);
    move_up(at.row);
    fputs("\033[J", stdout);
    fflush(stdout);
    le->columns = cli_columns();
    el_resize(el);
    el_set(el, EL_REFRESH);
    rewrite(le, el_line(el), le->columns);
}

/* Reads one byte. Returns 1; 0 at the end of input; -1 after Ctrl-C. */
static int read_byte(EditLine *el, char *out)
{
    for (;;) {
        struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
        int ready = poll(&in, 1, -1);
        if (cli_interrupted())
            return -1;
        if (resized) {
            resized = 0;
            redraw(el);
        }
        if (ready <= 0)
            continue;
        ssize_t n = read(STDIN_FILENO, out, 1);
        if (n >= 0 || errno != EINTR)
            return n > 0 ? 1 : 0;
    }
}

static int read_wide(EditLine *el, wchar_t *out)
{
    char bytes[4];
    size_t n = 0;
    uint32_t c = 0;
    do {
        int got = read_byte(el, bytes + n);
        if (got <= 0)
            return got;
        n++;
    } while (!flow_decode(bytes, n, &c) && n < sizeof bytes);
    *out = (wchar_t)c;
    return 1;
}

/* Inserts the text between "\e[200~" and "\e[201~" into the line. */
static unsigned char take_paste(EditLine *el, wint_t key)
{
    static const wchar_t end[] = L"\033[201~";
    enum { END = sizeof end / sizeof *end - 1 };
    size_t n = 0, cap = 256, matched = 0;
    wchar_t *text = mem_alloc(cap * sizeof *text), c;
    (void)key;
    while (matched < END && el_wgetc(el, &c) == 1) {
        matched = c == end[matched] ? matched + 1 : c == end[0];
        if (c == L'\r')
            c = L'\n'; /* terminals send CR for a newline */
        if (n + 1 == cap)
            text = mem_realloc(text, cap *= 2, sizeof *text);
        if (n < PASTE_MAX) /* the rest is discarded */
            text[n++] = c;
    }
    if (matched == END && n < PASTE_MAX)
        n -= END;
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (text[i] == L'\n' || text[i] == L'\t' || (text[i] >= 32 && text[i] != 127))
            text[kept++] = text[i] == L'\t' ? L' ' : text[i];
    text[kept] = 0;
    if (kept)
        el_winsertstr(el, text);
    mem_free(text);
    return CC_REFRESH;
}

/* The length of the lines' common prefix; *n: the number of lines. */
static size_t common_start(const struct buf *list, int *n)
{
    size_t common = 0;
    *n = 0;
    for (const char *p = list->p; p && *p; p += strcspn(p, "\n") + 1) {
        size_t len = strcspn(p, "\n"), k = 0;
        while (k < len && k < common && p[k] == list->p[k])
            k++;
        common = (*n)++ ? k : len;
    }
    while (common && ((unsigned char)list->p[common] & 0xc0) == 0x80)
        common--; /* do not split a character */
    return common;
}

/* Prints the completions below the line, in columns. */
static void show_choices(const struct buf *list, size_t skip)
{
    int widest = 1, columns = cli_columns(), at = 0;
    for (const char *p = list->p; *p; p += strcspn(p, "\n") + 1) {
        int w = markdown_width(p + skip, strcspn(p + skip, "\n"));
        widest = w > widest ? w : widest;
    }
    int each = widest + 2, in_row = columns / each > 0 ? columns / each : 1;
    for (const char *p = list->p; *p; p += strcspn(p, "\n") + 1) {
        size_t n = strcspn(p + skip, "\n");
        printf("%s%.*s", at % in_row ? "" : "\n", (int)n, p + skip);
        if (++at % in_row)
            printf("%*s", each - markdown_width(p + skip, n), "");
    }
    printf("\n");
    fflush(stdout);
}

static unsigned char complete_word(EditLine *el, wint_t key)
{
    struct lineedit *le;
    struct buf list = {0}, before = {0};
    (void)key;
    el_get(el, EL_CLIENTDATA, &le);
    const LineInfo *li = el_line(el);
    buf_add(&before, li->buffer, (size_t)(li->cursor - li->buffer));
    buf_addc(&before, 0);
    size_t from = le->offer ? le->offer(le->offer_arg, before.p, &list) : 0;
    int n = 0;
    unsigned char result = CC_ERROR;
    if (list.len) {
        size_t have = before.len - 1 - from, common = common_start(&list, &n);
        bool whole = n == 1 && common && list.p[common - 1] != '/';
        char *more = mem_strndup(list.p, common);
        if (common > have || whole) {
            el_insertstr(el, more + (have < common ? have : common));
            if (whole)
                el_insertstr(el, " ");
            result = CC_REFRESH;
        } else {
            const char *word = before.p + from, *slash = strrchr(word, '/');
            show_choices(&list, slash && slash > before.p ? (size_t)(slash + 1 - word) : 0);
            result = CC_REDISPLAY;
        }
        mem_free(more);
    }
    buf_clear(&list);
    buf_clear(&before);
    return result;
}

struct lineedit *lineedit_open(const char *history_path)
{
    struct lineedit *le = mem_zalloc(1, sizeof *le);
    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO) || dumb_terminal())
        return le;
    le->el = el_init("steel", stdin, stdout, stderr);
    if (!le->el)
        return le;
    le->history = history_init();
    history(le->history, &le->event, H_SETSIZE, 1000);
    history(le->history, &le->event, H_SETUNIQUE, 1);
    if (history_path) {
        le->history_path = mem_strdup(history_path);
        history(le->history, &le->event, H_LOAD, history_path);
    }
    el_set(le->el, EL_CLIENTDATA, le);
    el_set(le->el, EL_PROMPT, current_prompt);
    el_set(le->el, EL_EDITOR, "emacs");
    el_set(le->el, EL_HIST, history, le->history);
    el_wset(le->el, EL_GETCFN, read_wide);
    el_wset(le->el, EL_ADDFN, L"steel-paste", L"takes what is pasted", take_paste);
    el_wset(le->el, EL_ADDFN, L"steel-complete", L"completes a word", complete_word);
    el_set(le->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(le->el, EL_BIND, "^I", "steel-complete", NULL);
    el_set(le->el, EL_BIND, "\\e[1~", "ed-move-to-beg", NULL);
    el_set(le->el, EL_BIND, "\\e[4~", "ed-move-to-end", NULL);
    el_set(le->el, EL_BIND, "\\e[3~", "ed-delete-next-char", NULL);
    el_source(le->el, NULL); /* the user's own ~/.editrc */
    el_set(le->el, EL_BIND, "\\e[200~", "steel-paste", NULL);
    struct sigaction sa = {.sa_handler = on_resize};
    sigaction(SIGWINCH, &sa, NULL);
    return le;
}

void lineedit_complete(struct lineedit *le, lineedit_offer offer, void *arg)
{
    le->offer = offer;
    le->offer_arg = arg;
}

void lineedit_close(struct lineedit *le)
{
    if (!le)
        return;
    if (le->history_path)
        history(le->history, &le->event, H_SAVE, le->history_path);
    if (le->history)
        history_end(le->history);
    if (le->el)
        el_end(le->el);
    mem_free(le->history_path);
    free(le->line);
    mem_free(le);
}

void lineedit_remember(struct lineedit *le, const char *line)
{
    if (le->history && *line)
        history(le->history, &le->event, H_ENTER, line);
}

/* Reads one physical line without its newline. NULL at the end or after Ctrl-C. */
static const char *read_line(struct lineedit *le, const char *prompt, size_t *len)
{
    const char *line;
    if (le->el) {
        int n = 0;
        le->prompt = prompt;
        if (resized)
            el_resize(le->el);
        resized = 0;
        le->columns = cli_columns();
        fputs("\033[?2004h", stdout); /* mark pasted text */
        fflush(stdout);
        line = el_gets(le->el, &n);
        fputs("\033[?2004l", stdout);
        fflush(stdout);
        if (!line || n <= 0)
            return NULL;
        *len = (size_t)n;
    } else {
        if (isatty(STDIN_FILENO)) {
            fputs(prompt, stdout);
            fflush(stdout);
        }
        ssize_t n = getline(&le->line, &le->cap, stdin);
        if (n < 0)
            return NULL;
        line = le->line;
        *len = (size_t)n;
    }
    while (*len && (line[*len - 1] == '\n' || line[*len - 1] == '\r'))
        (*len)--;
    return line;
}

enum line_result lineedit_read(struct lineedit *le, const char *prompt, const char *more_prompt,
                               struct buf *out)
{
    bool quoted = false, first = true,
         bare_quote = false; /* bare: the opening mark is alone on its line */
    buf_reset(out);
    for (;; first = false) {
        size_t len = 0;
        cli_clear_interrupt();
        const char *line = read_line(le, first ? prompt : more_prompt, &len);
        if (!line) {
            if (cli_interrupted()) {
                cli_clear_interrupt();
                clearerr(stdin);
                fputc('\n', stdout);
                return LINE_INTERRUPTED;
            }
            return first || !out->len ? LINE_END : LINE_OK;
        }
        if (!first && !bare_quote)
            buf_addc(out, '\n');
        bare_quote = false;
        if (first && len >= 3 && !memcmp(line, "\"\"\"", 3)) {
            quoted = true;
            line += 3;
            len -= 3;
            bare_quote = len == 0;
        }
        if (quoted && len >= 3 && !memcmp(line + len - 3, "\"\"\"", 3)) {
            buf_add(out, line, len - 3);
            if (out->len && out->p[out->len - 1] == '\n')
                out->p[--out->len] = 0;
            return LINE_OK;
        }
        if (quoted) {
            buf_add(out, line, len);
            continue;
        }
        bool pasted = memchr(line, '\n', len) != NULL; /* a complete message */
        if (len && line[len - 1] == '\\' && !pasted) {
            buf_add(out, line, len - 1);
            continue;
        }
        buf_add(out, line, len);
        return LINE_OK;
    }
}
