/* libedit behind a small interface; owns the terminal's state while a line is read. */
#include "cli/lineedit.h"
#include "cli/cli.h"
#include "base/mem.h"

#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct lineedit {
    EditLine *el; /* NULL: input is not a terminal */
    History *history;
    HistEvent event;
    char *history_path;
    const char *prompt;
    char *line; /* getline's buffer */
    size_t cap;
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

struct lineedit *lineedit_open(const char *history_path)
{
    struct lineedit *le = mem_zalloc(1, sizeof *le);
    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO) || dumb_terminal())
        return le;
    setlocale(LC_CTYPE, "");
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
    el_set(le->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    el_set(le->el, EL_BIND, "\\e[1~", "ed-move-to-beg", NULL);
    el_set(le->el, EL_BIND, "\\e[4~", "ed-move-to-end", NULL);
    el_set(le->el, EL_BIND, "\\e[3~", "ed-delete-next-char", NULL);
    el_source(le->el, NULL); /* the user's own ~/.editrc */
    return le;
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

/* One physical line without its newline, NULL at the end or an interrupt. */
static const char *read_line(struct lineedit *le, const char *prompt, size_t *len)
{
    const char *line;
    if (le->el) {
        int n = 0;
        le->prompt = prompt;
        line = el_gets(le->el, &n);
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
         bare_quote = false; /* bare: nothing behind the opening mark */
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
        if (len && line[len - 1] == '\\') {
            buf_add(out, line, len - 1);
            continue;
        }
        buf_add(out, line, len);
        return LINE_OK;
    }
}
